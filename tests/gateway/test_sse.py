"""Keep-alives, clients that stop reading, clients that leave."""

from __future__ import annotations

import asyncio

import pytest

from gateway.sse import ClientStalled, ClientWatch, EventStream, event


class Sink:
    """A client's end: what it was sent; it reads while `reading` is set."""

    def __init__(self) -> None:
        self.messages: list[dict] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.got = asyncio.Event()

    async def __call__(self, message: dict) -> None:
        await self.reading.wait()
        self.messages.append(message)
        self.got.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def test_an_event_is_one_data_line():
    assert event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert event(b"{}", "ping") == b"event: ping\ndata: {}\n\n"


def test_a_quiet_stream_is_opened_and_kept_alive_by_comments(run):
    async def main():
        sink = Sink()
        async with EventStream(sink, keep_alive_s=0.02) as stream:
            while sink.body.count(b": keep-alive\n\n") < 2:
                sink.got.clear()
                await sink.got.wait()
            await stream.end(event(b"1"))
        return sink

    sink = run(main)
    assert [m["type"] for m in sink.messages].count("http.response.start") == 1
    assert sink.messages[0]["status"] == 200
    assert sink.body.endswith(b": keep-alive\n\ndata: 1\n\n")
    assert sink.messages[-1]["more_body"] is False


def test_a_busy_stream_has_no_comments(run):
    async def main():
        sink = Sink()
        async with EventStream(sink, keep_alive_s=30) as stream:
            for _ in range(3):
                await stream.write(event(b"1"))
            await stream.end()
        return sink.body

    assert run(main) == b"data: 1\n\n" * 3


def test_a_client_that_reads_nothing_is_given_up(run):
    async def main():
        sink = Sink()
        sink.reading.clear()
        async with EventStream(sink, max_stall_s=0.02) as stream:
            with pytest.raises(ClientStalled):
                await stream.write(event(b"1"))

    run(main)


def test_leaving_is_noticed_once_and_only_while_watched(run):
    async def main():
        left, calls = asyncio.Event(), []

        async def receive():
            await left.wait()
            return {"type": "http.disconnect"}

        async with ClientWatch(receive, lambda: calls.append(1)) as watch:
            assert not watch.left
            left.set()
            while not watch.left:
                await asyncio.sleep(0)
        async with ClientWatch(asyncio.Event().wait, lambda: calls.append(2)):
            pass
        return calls

    assert run(main) == [1]
