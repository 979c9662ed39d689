"""EngineClient against an engine that a test plays by hand on a real socket."""

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from engine import protocol as p
from engine.client import EngineClient, EngineUnavailable, QueryFailed
from engine.null import null_hello

pytestmark = pytest.mark.anyio
IDS = array("i", [5, 6, 7]).tobytes()
RECORD = p.PromptRecord(cached_private=1, written_unleased=2)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def socket_path():
    with tempfile.TemporaryDirectory(prefix="rg-") as folder:
        yield Path(folder) / "engine.sock"


class PlayedEngine:
    """The test speaks for it: `say` sends messages, `hear` returns the next one that came in."""

    def __init__(self, path, hello=None):
        self.path, self.hello = path, hello or null_hello()
        self.heard = asyncio.Queue()
        self.connections = []

    async def __aenter__(self):
        self.server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_):
        self.server.close()
        self.hang_up()

    def hang_up(self):
        for writer in self.connections:
            writer.transport.abort()
        self.connections.clear()

    async def _serve(self, reader, writer):
        self.connections.append(writer)
        decoder = p.Decoder()
        self.say(self.hello)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                for message in decoder.feed(data):
                    self.heard.put_nowait(message)

    def say(self, *messages):
        self.connections[-1].write(b"".join(map(p.encode, messages)))

    async def hear(self):
        return await asyncio.wait_for(self.heard.get(), 10)


def submit(request_id="r", n=1, **changes):
    return replace(p.Submit(request_id, "acme", IDS, p.Sampling(max_tokens=100), n), **changes)


async def collect(stream):
    return [message async for message in stream]


async def test_a_stream_yields_what_the_engine_says_and_ends_after_finished(socket_path):
    async with PlayedEngine(socket_path) as engine, EngineClient(socket_path) as client:
        assert await client.wait_ready(10) == engine.hello
        stream = client.submit(submit())
        assert await engine.hear() == submit()
        accepted = p.Accepted("r", RECORD, 0.25)
        engine.say(p.Batch((accepted,)))
        assert await anext(stream) == accepted
        engine.say(p.Batch((p.Delta("r", 0, (8,), 1),)))
        assert await anext(stream) == p.Delta("r", 0, (8,), 1)
        finished = p.Finished("r", RECORD, (2,), ("stop",))
        engine.say(p.Batch((p.Delta("r", 0, (9,), 2, "stop"), finished)))
        assert await collect(stream) == [p.Delta("r", 0, (9,), 2, "stop"), finished]
        assert client.in_flight == 0


async def test_messages_for_unknown_requests_are_ignored(socket_path):
    async with PlayedEngine(socket_path) as engine, EngineClient(socket_path) as client:
        await client.wait_ready(10)
        stream = client.submit(submit())
        await engine.hear()
        finished = p.Finished("r", RECORD, (0,), ("stop",))
        engine.say(p.Batch((p.Delta("other", 0, (1,), 1), finished)))
        assert await collect(stream) == [finished]


async def test_stop_and_cancel_reach_the_engine(socket_path):
    async with PlayedEngine(socket_path) as engine, EngineClient(socket_path) as client:
        await client.wait_ready(10)
        stream = client.submit(submit(n=2))
        await engine.hear()
        stream.stop(1, 7)
        assert await engine.hear() == p.Stop("r", 1, 7)
        stream.cancel()
        assert await engine.hear() == p.Cancel("r")
        engine.say(p.Finished("r", RECORD, (0, 7), ("cancelled", "stop")))
        await collect(stream)
        stream.cancel()
        client.submit(submit("next"))
        assert await engine.hear() == submit("next")
        with pytest.raises(ValueError, match="output 2 of a request with 2"):
            stream.stop(2, 1)


@pytest.mark.parametrize(("reason", "expected"), [("length", (2, "stop")), ("error", (5, "error"))])
async def test_a_stop_that_crosses_finished_truncates_the_bill_all_the_same(socket_path, reason, expected):
    async with PlayedEngine(socket_path) as engine, EngineClient(socket_path) as client:
        await client.wait_ready(10)
        stream = client.submit(submit())
        await engine.hear()
        delta, finished = p.Delta("r", 0, (1, 2, 3, 4, 5), 5, "length"), p.Finished("r", RECORD, (5,), (reason,))
        engine.say(p.Batch((delta, finished)))
        assert await anext(stream) == delta
        stream.stop(0, 2)
        assert await engine.hear() == p.Stop("r", 0, 2)
        (last,) = await collect(stream)
        assert (last.output_tokens[0], last.finish_reasons[0]) == expected


async def test_a_request_id_in_use_is_refused(socket_path):
    async with PlayedEngine(socket_path), EngineClient(socket_path) as client:
        await client.wait_ready(10)
        client.submit(submit())
        with pytest.raises(ValueError, match="'r' is in use"):
            client.submit(submit())


async def test_no_engine_is_unavailable_at_once(socket_path):
    async with EngineClient(socket_path) as client:
        with pytest.raises(EngineUnavailable):
            client.submit(submit())
        with pytest.raises(EngineUnavailable):
            await client.probe("acme", IDS)
        with pytest.raises(EngineUnavailable, match="no engine at"):
            await client.wait_ready(0.05)
        assert client.hello is None


async def test_the_engines_death_ends_every_stream_with_what_was_delivered(socket_path):
    deaths = []
    async with PlayedEngine(socket_path) as engine, EngineClient(socket_path, on_death=deaths.append) as client:
        await client.wait_ready(10)
        told, silent, done = (client.submit(submit(name, n)) for name, n in (("told", 2), ("silent", 1), ("done", 1)))
        engine.say(
            p.Finished("done", RECORD, (0,), ("stop",)),
            p.Batch(
                (p.Accepted("told", RECORD, 0.5), p.Delta("told", 0, (1, 2), 2), p.Delta("told", 1, (3,), 1, "stop"))
            ),
        )
        await anext(told)
        engine.hang_up()
        *_, last = await collect(told)
        assert (last.prompt, last.output_tokens, last.finish_reasons) == (RECORD, (2, 1), ("error", "stop"))
        assert (last.queue_s, last.error.code) == (0.5, "engine_died")
        (last,) = await collect(silent)
        assert (last.prompt, last.output_tokens, last.error.code) == (p.PromptRecord(), (0,), "engine_died")
        assert (await collect(done))[-1].error is None
        assert deaths == [[submit("told", 2), submit("silent")]]


async def test_a_death_after_stop_bills_no_further_than_stop(socket_path):
    async with PlayedEngine(socket_path) as engine, EngineClient(socket_path) as client:
        await client.wait_ready(10)
        stream = client.submit(submit())
        engine.say(p.Batch((p.Accepted("r", RECORD, 0.0), p.Delta("r", 0, (1, 2, 3), 3))))
        await anext(stream)
        stream.stop(0, 2)
        engine.hang_up()
        last = (await collect(stream))[-1]
        assert (last.output_tokens, last.finish_reasons) == ((2,), ("stop",))


async def test_the_client_comes_back_by_itself(socket_path):
    async with EngineClient(socket_path) as client:
        for boot_id in ("first", "second"):
            async with PlayedEngine(socket_path, null_hello(boot_id=boot_id)) as engine:
                assert (await client.wait_ready(10)).boot_id == boot_id
                question = asyncio.create_task(client.query("stats"))
                await engine.hear()
                engine.hang_up()
                with pytest.raises(EngineUnavailable, match="the engine was lost"):
                    await question
                assert client.hello is None


async def test_another_protocol_version_is_refused(socket_path):
    async with PlayedEngine(socket_path, null_hello(protocol_version=999)), EngineClient(socket_path) as client:
        with pytest.raises(EngineUnavailable, match="the engine speaks protocol 999 and this gateway 1"):
            await client.wait_ready(0.5)


async def test_junk_from_the_engine_is_a_loss_of_the_engine(socket_path):
    async with PlayedEngine(socket_path) as engine, EngineClient(socket_path) as client:
        await client.wait_ready(10)
        stream = client.submit(submit())
        engine.connections[-1].write(b"\xff" * 64)
        (last,) = await collect(stream)
        assert last.error.code == "engine_died"


async def test_questions_find_their_answers(socket_path):
    async with PlayedEngine(socket_path) as engine, EngineClient(socket_path) as client:
        await client.wait_ready(10)
        asked = [
            asyncio.create_task(client.probe("acme", IDS, "salt")),
            asyncio.create_task(client.query("stats")),
            asyncio.create_task(client.query("nonsense", {"a": 1})),
        ]
        probe, stats, nonsense = [await engine.hear() for _ in asked]
        assert (probe.owner, probe.prompt_ids, probe.salt, nonsense.argument) == ("acme", IDS, "salt", {"a": 1})
        engine.say(
            p.Answer(nonsense.query_id, {}, "no such kind"),
            p.Answer(stats.query_id, {"steps": 3}),
            p.ProbeResult(probe.probe_id, 2),
        )
        assert (await asked[0], await asked[1]) == (2, {"steps": 3})
        with pytest.raises(QueryFailed, match="no such kind"):
            await asked[2]


async def test_an_engine_that_does_not_answer_is_unavailable(socket_path):
    async with PlayedEngine(socket_path), EngineClient(socket_path) as client:
        await client.wait_ready(10)
        with pytest.raises(EngineUnavailable, match=r"did not answer within 0\.05 s"):
            await client.query("stats", timeout_s=0.05)


async def test_an_engine_that_does_not_read_is_unavailable(socket_path):
    async with PlayedEngine(socket_path) as engine, EngineClient(socket_path, max_unsent_bytes=1_000_000) as client:
        await client.wait_ready(10)
        engine.connections[-1].transport.pause_reading()
        big = array("i", [1]) * 1_000_000
        client.submit(submit("big", prompt_ids=big.tobytes()))
        with pytest.raises(EngineUnavailable, match="does not read"):
            client.submit(submit("next"))


async def test_a_slow_consumer_finds_deltas_merged_and_is_cut_off_at_its_bound(socket_path):
    async with PlayedEngine(socket_path) as engine, EngineClient(socket_path, max_unread_tokens=100) as client:
        await client.wait_ready(10)
        slow, quick = client.submit(submit("slow")), client.submit(submit("quick"))
        for _ in range(2):
            await engine.hear()
        for i in range(150):
            engine.say(p.Batch((p.Delta("slow", 0, (i,), i + 1), p.Delta("quick", 0, (i,), i + 1))))
            assert await anext(quick) == p.Delta("quick", 0, (i,), i + 1)
        assert await engine.hear() == p.Cancel("slow")
        engine.say(p.Finished("slow", RECORD, (150,), ("cancelled",)), p.Finished("quick", RECORD, (150,), ("length",)))
        assert (await collect(quick))[-1].error is None
        delta, finished = await collect(slow)
        assert (delta.token_ids, delta.n_tokens) == (tuple(range(150)), 150)
        assert (finished.output_tokens, finished.error.code) == ((150,), "slow_client")


async def test_closing_ends_open_streams_and_reports_no_death(socket_path):
    deaths = []
    async with PlayedEngine(socket_path), EngineClient(socket_path, on_death=deaths.append) as client:
        await client.wait_ready(10)
        stream = client.submit(submit())
        await client.close()
        assert (await collect(stream))[-1].error.code == "engine_died"
        assert deaths == []


def test_the_client_brings_neither_torch_nor_numpy():
    code = (
        "import sys, engine.client, engine.null\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'radix_cache', 'kernels'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
