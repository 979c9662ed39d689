"""The gateway's end of the engine's socket. asyncio and the standard library only.

An EngineClient keeps one connection to one engine process and makes a new one, with back-off, whenever it is lost. Many
requests share the connection; each is a Stream. The engine says what one step produced in one frame, so a busy
connection costs one read per step and not one per token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from engine.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Answer,
    Batch,
    Cancel,
    Decoder,
    Delta,
    EngineError,
    Finished,
    Hello,
    Message,
    Probe,
    ProbeResult,
    ProtocolError,
    Query,
    Stop,
    Submit,
    encode,
)
from engine.stream import Stream

__all__ = ["Engine", "EngineClient", "EngineUnavailable", "QueryFailed", "Stream"]

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 0.5
MAX_UNREAD_TOKENS = 65_536
MAX_UNSENT_BYTES = 64 * 1024 * 1024

log = logging.getLogger(__name__)


class EngineUnavailable(Exception):
    """The engine is away: starting, restarting, or not reading. Try again after a moment."""


class QueryFailed(Exception):
    """The engine could not answer an operator's question; the message is the engine's."""


class Engine(Protocol):
    """What the gateway needs of an engine."""

    @property
    def hello(self) -> Hello | None: ...
    def submit(self, submit: Submit) -> Stream: ...
    async def probe(self, owner: str, prompt_ids: bytes, salt: str = "") -> int: ...
    async def query(self, kind: str, argument: dict[str, Any] | None = None) -> dict[str, Any]: ...
    async def close(self) -> None: ...


class EngineClient:
    """An Engine behind a Unix socket.

    `on_death` is called with the requests that were in flight whenever the connection is lost, before any new one can
    be submitted: whoever sees the same request twice may refuse it a third time.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        *,
        on_death: Callable[[list[Submit]], None] | None = None,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self.socket_path = os.fspath(socket_path)
        self.last_error: str | None = None
        """Why the last attempt to connect failed, or why the connection was lost; None while connected."""
        self._on_death = on_death
        self._max_unread_tokens = max_unread_tokens
        self._max_unsent_bytes = max_unsent_bytes
        self._hello: Hello | None = None
        self._link: _Link | None = None
        self._streams: dict[str, Stream] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._next_question_id = 0
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def hello(self) -> Hello | None:
        """The engine's introduction, or None while it is away."""
        return self._hello

    @property
    def in_flight(self) -> int:
        """Requests submitted and not yet finished."""
        return len(self._streams)

    def start(self) -> None:
        """Begin to connect, and keep connected until close(). Needs a running event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._stay_connected(), name=f"engine client {self.socket_path}")

    async def __aenter__(self) -> EngineClient:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def wait_ready(self, timeout_s: float) -> Hello:
        """The engine's Hello, as soon as it is there. Raises EngineUnavailable after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._hello is None:
                    await self._ready.wait()
        except TimeoutError:
            raise EngineUnavailable(f"no engine at {self.socket_path} after {timeout_s} s: {self.last_error}") from None
        return self._hello

    def submit(self, submit: Submit) -> Stream:
        """Send a request. Raises EngineUnavailable, and ValueError when its id is in use."""
        if submit.request_id in self._streams:
            raise ValueError(f"request id {submit.request_id!r} is in use")
        link = self._connected()
        stream = Stream(submit, self._send, max_unread_tokens=self._max_unread_tokens)
        self._streams[submit.request_id] = stream
        link.send(submit)
        return stream

    async def probe(self, owner: str, prompt_ids: bytes, salt: str = "", *, timeout_s: float = 5.0) -> int:
        """Tokens of this prompt that are resident for this owner. Raises EngineUnavailable."""
        question_id = self._question_id()
        result: ProbeResult = await self._ask(question_id, Probe(question_id, owner, prompt_ids, salt), timeout_s)
        return result.cached_tokens

    async def query(
        self, kind: str, argument: dict[str, Any] | None = None, *, timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Ask for `stats`, `invariants` or `flush`. Raises EngineUnavailable and QueryFailed."""
        question_id = self._question_id()
        answer: Answer = await self._ask(question_id, Query(question_id, kind, argument or {}), timeout_s)
        if answer.error is not None:
            raise QueryFailed(answer.error)
        return answer.value

    async def close(self) -> None:
        """Leave. The engine cancels what this client had in flight; open streams end with `engine_died`."""
        self._on_death = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._link is not None:
            self._link.abort()
            self._link = None
        self._lose("the client was closed")

    # --- connection ---------------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        retry_s = FIRST_RETRY_S
        while True:
            link = _Link(self)
            try:
                await loop.create_unix_connection(lambda link=link: link, self.socket_path)  # type: ignore[misc]
            except OSError as error:
                self.last_error = str(error)
            else:
                self._link = link
                reason = await link.lost
                self._link = None
                if self._hello is not None:
                    retry_s = FIRST_RETRY_S
                self._lose(reason)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(retry_s * 2, LAST_RETRY_S)

    def _connected(self) -> _Link:
        if self._link is None or self._hello is None:
            raise EngineUnavailable(f"the engine at {self.socket_path} is away: {self.last_error or 'connecting'}")
        if self._link.unsent_bytes > self._max_unsent_bytes:
            raise EngineUnavailable(f"the engine at {self.socket_path} does not read its socket")
        return self._link

    def _send(self, message: Stop | Cancel) -> None:
        if self._link is not None:
            self._link.send(message)

    def _lose(self, reason: str) -> None:
        """The connection is gone, and with it every request and question that was on it."""
        self._hello, self.last_error = None, reason
        self._ready.clear()
        streams, self._streams = list(self._streams.values()), {}
        questions, self._questions = list(self._questions.values()), {}
        if streams and self._on_death is not None:
            self._on_death([stream.submit for stream in streams])
        for stream in streams:
            stream.fail(EngineError("engine_died", f"the engine was lost while it served this request: {reason}"))
        for question in questions:
            if not question.done():
                question.set_exception(EngineUnavailable(f"the engine was lost: {reason}"))

    # --- what the engine says -----------------------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._greet(message)
        elif self._hello is None:
            raise ProtocolError(f"{type(message).__name__} came before Hello")
        elif isinstance(message, Batch):
            self._deliver(message.messages)
        elif isinstance(message, Accepted | Delta | Finished):
            self._deliver((message,))
        elif isinstance(message, ProbeResult):
            self._answer(message.probe_id, message)
        elif isinstance(message, Answer):
            self._answer(message.query_id, message)
        else:
            raise ProtocolError(f"an engine does not send {type(message).__name__}")

    def _greet(self, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the engine speaks protocol {hello.protocol_version} and this gateway {PROTOCOL_VERSION}: "
                "run both from one installation"
            )
        self._hello, self.last_error = hello, None
        self._ready.set()

    def _deliver(self, messages: Sequence[Accepted | Delta | Finished]) -> None:
        for message in messages:
            stream = self._streams.get(message.request_id)
            if stream is None:
                continue
            if isinstance(message, Finished):
                del self._streams[message.request_id]
            stream.receive(message)

    # --- questions ----------------------------------------------------------------------------------------------------

    def _question_id(self) -> int:
        self._next_question_id += 1
        return self._next_question_id

    async def _ask(self, question_id: int, message: Probe | Query, timeout_s: float) -> Any:
        link = self._connected()
        answer = self._questions[question_id] = asyncio.get_running_loop().create_future()
        try:
            link.send(message)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise EngineUnavailable(f"the engine did not answer within {timeout_s} s") from None
        finally:
            self._questions.pop(question_id, None)

    def _answer(self, question_id: int, message: ProbeResult | Answer) -> None:
        question = self._questions.get(question_id)
        if question is not None and not question.done():
            question.set_result(message)


class _Link(asyncio.Protocol):
    """One connection: bytes to messages and back. `lost` resolves with the reason when it ends."""

    def __init__(self, client: EngineClient) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._client = client
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._fault: str | None = None

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: Message) -> None:
        if self._transport is not None:
            self._transport.write(encode(message))

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass of it

    def data_received(self, data: bytes) -> None:
        if self.lost.done():
            return
        try:
            for message in self._decoder.feed(data):
                self._client._receive(message)
        except ProtocolError as error:
            log.error("engine at %s: %s", self._client.socket_path, error)
            self._fault = str(error)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(self._fault or (str(error) if error else "it closed the connection"))
