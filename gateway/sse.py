"""Server-sent events to one client: written in order, kept alive while nothing comes, given up when nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive, Send

KEEP_ALIVE_S = 10.0
MAX_STALL_S = 60.0
# A comment: the official clients skip it anywhere but after an event with an id, which we never send.
_COMMENT = b": keep-alive\n\n"


def event(data: bytes, name: str | None = None) -> bytes:
    """One event. `data` must hold no line break, which JSON does not."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"


class ClientStalled(Exception):
    """The client took nothing for the time allowed."""


class EventStream:
    """The answer's body. The status line goes out with the first write, or with the first sign of life: after
    KEEP_ALIVE_S without a write a comment is sent.
    """

    def __init__(
        self,
        send: Send,
        headers: list[tuple[bytes, bytes]] | None = None,
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
        max_stall_s: float = MAX_STALL_S,
    ) -> None:
        self.opened = False
        self._send = send
        self._headers = headers or []
        self._keep_alive_s = keep_alive_s
        self._max_stall_s = max_stall_s
        self._loop = asyncio.get_running_loop()
        self._wrote_at = self._loop.time()
        self._turn = asyncio.Lock()
        self._comment: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(keep_alive_s, self._tick)

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    async def write(self, data: bytes) -> None:
        """Hand bytes to the client's socket; waits while its buffer is full. Raises ClientStalled."""
        await self._put(data, more=True)

    async def end(self, data: bytes = b"") -> None:
        """The last bytes, and the end of the answer. Raises ClientStalled."""
        self._timer.cancel()
        if self._comment is not None:
            await asyncio.wait((self._comment,))
        await self._put(data, more=False)

    async def _put(self, data: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._max_stall_s), self._turn:
                if not self.opened:
                    self.opened = True
                    headers = [*_HEADERS, *self._headers]
                    await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientStalled(f"the client read nothing for {self._max_stall_s} s") from None
        self._wrote_at = self._loop.time()

    def _tick(self) -> None:
        quiet_s = self._loop.time() - self._wrote_at
        if quiet_s >= self._keep_alive_s and not self._turn.locked():
            self._comment = self._loop.create_task(self._say_nothing())
            quiet_s = 0.0
        self._timer = self._loop.call_later(max(0.01, self._keep_alive_s - quiet_s), self._tick)

    async def _say_nothing(self) -> None:
        with contextlib.suppress(ClientStalled):  # the next write will say so
            await self._put(_COMMENT, more=True)


_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Reverse proxies would otherwise collect the events.
    (b"x-accel-buffering", b"no"),
]


class ClientWatch:
    """Calls `on_leave` when the client disconnects while the block runs. The request's body must have been read."""

    def __init__(self, receive: Receive, on_leave: Callable[[], None]) -> None:
        self._receive = receive
        self._on_leave = on_leave
        self.left = False

    async def __aenter__(self) -> ClientWatch:
        self._task = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self._on_leave()
