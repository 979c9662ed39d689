"""A client that leaves, an engine that dies: one ledger event with exact numbers, and the truth told."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from pathlib import Path

import httpx
import openai
import pytest

from engine.null import NullEngine
from engine.protocol import PromptRecord
from gateway.app import application
from gateway.served import Models, ServedModel
from gateway.services import Services
from gateway.sse import EventStream
from tenants import store
from tests.gateway.support import PROMPT, LiveGateway, live_gateway

REPLY = [5] * 200


@pytest.fixture
def slow(tmp_path: Path, redis_url: str):
    """An engine that takes 5 ms per token of 200."""
    bill = PromptRecord(cached_private=8, written_unleased=10, uncached=5)
    with live_gateway(tmp_path, redis_url, reply=REPLY, delay_s=0.005, bill=bill) as live:
        yield live


def raw_chat(live: LiveGateway, **parameters) -> socket.socket:
    """A chat sent over a bare socket."""
    body = json.dumps({"model": "tiny", "messages": PROMPT, **parameters}).encode()
    host, port = live.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {live.key}\r\n"
    sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return sock


def read_until(sock: socket.socket, n_chunks: int) -> bytes:
    data = b""
    while data.count(b"data: ") < n_chunks:
        data += sock.recv(65536)
    return data


def only_event(live: LiveGateway) -> dict:
    """The one ledger event, once the request has been settled."""
    settled = threading.Event()
    while live.services.ledger.lag.open_requests:
        settled.wait(0.01)
    events = live.booked()
    assert len(events) == 1
    return events[0]


@pytest.mark.parametrize("how", ["orderly", "reset"])
def test_a_client_that_leaves_a_stream_pays_for_what_was_computed(slow: LiveGateway, how: str):
    sock = raw_chat(slow, stream=True)
    read_until(sock, 20)
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    event = only_event(slow)
    usage = event["usage"]
    assert event["status"] == "cancelled"
    assert (usage["cached_private"], usage["written_unleased"], usage["uncached"]) == (8, 10, 5)
    assert 19 <= usage["output"] < 200
    assert event["cost_nano_usd"] == 15 * 150 + 8 * 15 + usage["output"] * 600
    assert slow.engine._running == {}


def test_a_client_that_leaves_before_an_unstreamed_answer_stops_the_engine(slow: LiveGateway):
    sock = raw_chat(slow)
    waiting = threading.Event()
    while not slow.engine.submitted:
        waiting.wait(0.005)
    sock.close()
    event = only_event(slow)
    assert event["status"] == "cancelled" and event["usage"]["output"] < 200


def test_a_client_that_stays_pays_the_whole(slow: LiveGateway):
    usage = slow.chat().json()["usage"]
    event = only_event(slow)
    assert event["status"] == "completed" and event["finish_reason"] == "stop"
    assert usage["completion_tokens"] == event["usage"]["output"] == 200
    assert usage["cost_nano_usd"] == event["cost_nano_usd"]


def test_the_ledger_knows_the_clients_request_id_and_its_own(slow: LiveGateway):
    slow.reply("quick")
    answer = slow.post({"model": "tiny", "messages": PROMPT}, x_request_id="theirs-1")
    event = only_event(slow)
    assert (event["request_id"], event["x_request_id"]) == (answer.json()["id"], "theirs-1")


def test_equal_request_ids_of_clients_are_two_requests(slow: LiveGateway):
    slow.reply("quick")
    for _ in range(2):
        assert slow.post({"model": "tiny", "messages": PROMPT}, x_request_id="same").status_code == 200
    assert len(slow.booked()) == 2


def test_an_engine_that_dies_ends_the_stream_with_an_error_event(slow: LiveGateway):
    stream = slow.client().chat.completions.create(model="tiny", messages=PROMPT, stream=True)
    with pytest.raises(openai.APIError) as failure:
        for position, _ in enumerate(stream):
            if position == 20:
                slow.loop.call_soon_threadsafe(slow.engine.die)
    assert failure.value.code == "engine_died"
    event = only_event(slow)
    assert event["status"] == "failed" and event["finish_reason"] == "engine_died"
    assert 19 <= event["usage"]["output"] < 200


def test_an_unstreamed_request_that_fails_is_booked_and_costs_nothing(slow: LiveGateway):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(slow.chat()))
    thread.start()
    waiting = threading.Event()
    while not any(running.stream.output_tokens[0] > 3 for running in list(slow.engine._running.values())):
        waiting.wait(0.005)
    slow.loop.call_soon_threadsafe(slow.engine.die)
    thread.join()
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "engine_died"
    assert answers[0].headers["retry-after"]
    event = only_event(slow)
    assert (event["status"], event["cost_nano_usd"]) == ("failed", 0)
    assert event["usage"]["output"] > 3 and event["usage"]["written_unleased"] == 10


def test_while_the_engine_is_away_the_answer_is_503_and_nothing_is_booked(slow: LiveGateway):
    slow.engine.hello = None
    answer = slow.chat()
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_not_ready"
    assert int(answer.headers["retry-after"]) > 0
    with httpx.Client(base_url=slow.url) as client:
        ready = client.get("/readyz")
    assert ready.status_code == 503 and ready.headers["retry-after"] and "tiny" in ready.json()["message"]
    assert slow.booked() == []


def test_a_request_in_flight_at_two_deaths_is_refused_and_others_are_not(slow: LiveGateway):
    hello = slow.engine.hello
    for _ in range(2):
        slow.engine.hello = hello
        with pytest.raises(openai.APIError):
            for position, _ in enumerate(
                slow.client().chat.completions.create(model="tiny", messages=PROMPT, stream=True)
            ):
                if position == 3:
                    slow.loop.call_soon_threadsafe(slow.engine.die)
    slow.engine.hello = hello
    refused = slow.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "request_quarantined")
    assert refused.headers["x-should-retry"] == "false"
    slow.reply("quick")
    assert slow.chat(temperature=0.1).status_code == 200
    with slow.http(slow.other_key) as client:
        assert client.post("/v1/chat/completions", json={"model": "tiny", "messages": PROMPT}).status_code == 200
    (key,) = slow.redis.keys("radixgate:quarantine:*")
    assert 0 < slow.redis.ttl(key) <= 600
    slow.redis.delete(key)
    assert slow.chat().status_code == 200


def test_engine_ledger_rollup_and_clients_agree(slow: LiveGateway):
    """Eight clients at once, some of which leave."""
    slow.engine._delay_s = 0.0
    told: list[int] = []

    def use(number: int) -> None:
        if number % 4 == 3:
            sock = raw_chat(slow, stream=True)
            read_until(sock, 2)
            sock.close()
        else:
            told.append(slow.chat(n=1 + number % 2, max_tokens=20 + number).json()["usage"]["cost_nano_usd"])

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    waiting = threading.Event()
    while slow.services.ledger.lag.open_requests:
        waiting.wait(0.01)
    events = slow.booked()
    assert len(events) == 8
    completed = sorted(event["cost_nano_usd"] for event in events if event["status"] == "completed")
    assert [cost for cost in sorted(told) if cost in completed] == sorted(told)
    assert slow.engine._running == {}


def test_a_client_that_stops_reading_is_given_up_and_billed(slow: LiveGateway, monkeypatch):
    monkeypatch.setitem(EventStream.__init__.__kwdefaults__, "max_stall_s", 0.05)
    body = json.dumps({"model": "tiny", "messages": PROMPT, "stream": True}).encode()
    headers = [(b"authorization", f"Bearer {slow.key}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    sent = []

    async def main() -> None:
        never = asyncio.Event()
        incoming = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict:
            return next(incoming, None) or await never.wait()

        async def send(message: dict) -> None:
            if len(sent) > 10:
                await never.wait()
            sent.append(message)

        await slow.app(scope, receive, send)

    slow.run(main())
    assert len(sent) == 11 and sent[-1]["more_body"]
    event = only_event(slow)
    assert event["status"] == "cancelled" and 8 <= event["usage"]["output"] < 200


def test_without_redis_keys_cannot_be_checked_and_the_answer_says_try_again(tmp_path: Path, run):
    async def main() -> httpx.Response:
        services = Services(tmp_path, store.connect("redis://127.0.0.1:1"), Models([ServedModel("m", NullEngine())]))
        transport = httpx.ASGITransport(application(services))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/v1/models", headers={"x-api-key": "rg-whatever"})

    answer = run(main)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "store_unavailable"
