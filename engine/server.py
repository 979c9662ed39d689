"""The engine's sockets: a thread of its own, apart from the step loop.

Gateway workers connect; each connection carries many requests. What a step says goes out in one frame per connection,
sent by the step's own thread without ever blocking: what the kernel does not take at once waits in the connection's
backlog, where it is merged and bounded, and the socket thread sends it when the peer reads again.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from engine.backlog import StreamMessage
from engine.connection import Connection
from engine.listener import peer_uid
from engine.protocol import (
    Answer,
    Cancel,
    EngineError,
    Finished,
    Hello,
    Message,
    Probe,
    ProbeResult,
    PromptRecord,
    ProtocolError,
    Query,
    Stop,
    Submit,
)

READ_BYTES = 256 * 1024
MAX_UNSENT_TOKENS = 4096
MAX_OUTPUTS = 1024
"""An answer to a request for more outputs than this names none of them."""
ACCEPT_PAUSE_S = 0.1

log = logging.getLogger(__name__)


class Handler(Protocol):
    """What the server asks of the engine, from the socket thread. None of these may wait for a step to end."""

    def submit(self, submit: Submit) -> EngineError | None:
        """Take the request, or say why not."""

    def stop(self, stop: Stop) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def probe(self, probe: Probe) -> ProbeResult: ...
    def query(self, query: Query, reply: Callable[[Answer], None]) -> None:
        """Answer now, or later from another thread."""


class Server:
    """Accepts connections and carries messages. `run` is the socket thread; `deliver` and `wake` are for any thread."""

    def __init__(
        self, listener: socket.socket, hello: Hello, handler: Handler, *, max_unsent_tokens: int = MAX_UNSENT_TOKENS
    ) -> None:
        self._listener: socket.socket | None = listener
        self._hello = hello
        self._handler = handler
        self._max_unsent_tokens = max_unsent_tokens
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._routes: dict[str, Connection] = {}
        self._blocked: deque[Connection] = deque()
        self._doomed: deque[Connection] = deque()
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._wakee.setblocking(False)
        self._stopping = False
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakee, selectors.EVENT_READ, self._drain_wakes)

    @property
    def wake_fd(self) -> int:
        """Bytes written here wake the socket thread: for signal.set_wakeup_fd."""
        return self._waker.fileno()

    @property
    def n_connections(self) -> int:
        return len(self._connections)

    def live(self) -> list[str]:
        """Requests that have not finished, those of lost connections included."""
        return list(self._routes)

    # --- any thread ---------------------------------------------------------------------------------------------------

    def deliver(self, messages: Iterable[StreamMessage]) -> list[str]:
        """Send what one step said, one frame per connection. Never blocks. Returns requests to cancel: slow readers."""
        by_connection: dict[Connection, list[StreamMessage]] = {}
        for message in messages:
            connection = self._routes.get(message.request_id)
            if connection is None:
                continue
            if isinstance(message, Finished):
                self._routes.pop(message.request_id, None)
                connection.live.discard(message.request_id)
            by_connection.setdefault(connection, []).append(message)
        too_slow: list[str] = []
        for connection, group in by_connection.items():
            too_slow += connection.post(group)
        return too_slow

    def wake(self) -> None:
        """Make the socket thread look around."""
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            pass  # as many wakes as the pipe holds are under way
        except OSError:
            pass  # stopped

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping = True
        self.wake()

    def stop_listening(self) -> None:
        """Accept no more connections. Socket thread only."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    # --- socket thread ------------------------------------------------------------------------------------------------

    def run(self, on_wake: Callable[[], None] = lambda: None) -> None:
        """Serve until stop(). `on_wake` is called whenever something woke the thread."""
        while not self._stopping:
            for key, events in self._selector.select():
                key.data(key.fileobj, events)
            on_wake()
            self._attend()

    def close(self, flush_s: float) -> None:
        """Give peers up to `flush_s` to read what waits for them, then close everything. After `run` returned."""
        self.stop_listening()
        for connection in list(self._connections):
            connection.sock.settimeout(flush_s)
            connection.flush()
            self._close(connection)
        self._selector.close()
        self._waker.close()
        self._wakee.close()

    def _attend(self) -> None:
        while self._blocked:
            connection = self._blocked.popleft()
            if connection in self._connections:
                self._watch(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while self._doomed:
            self._close(self._doomed.popleft())

    def _note_blocked(self, connection: Connection) -> None:
        self._blocked.append(connection)
        self.wake()

    def _watch(self, connection: Connection, events: int) -> None:
        self._selector.modify(connection.sock, events, partial(self._serve, connection))

    def _drain_wakes(self, _: object, __: int) -> None:
        try:
            while self._wakee.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _accept(self, _: object, __: int) -> None:
        assert self._listener is not None
        try:
            sock, _address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("cannot accept a connection: %s", error)
            time.sleep(ACCEPT_PAUSE_S)  # out of descriptors, most likely: the listener stays readable
            return
        if not _is_ours(sock):
            sock.close()
            return
        sock.setblocking(False)
        connection = Connection(sock, self._note_blocked, self._max_unsent_tokens)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._serve, connection))
        connection.answer(self._hello)

    def _serve(self, connection: Connection, _: object, events: int) -> None:
        if events & selectors.EVENT_WRITE and connection.flush():
            self._watch(connection, selectors.EVENT_READ)
        if events & selectors.EVENT_READ:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        try:
            for message in connection.decoder.feed(data):
                self._handle(connection, message)
        except ProtocolError as error:
            log.error("closing a connection: %s", error)
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        """Drop a connection, and cancel everything it had asked for."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.close()
        for request_id in list(connection.live):
            self._handler.cancel(request_id)

    def _handle(self, connection: Connection, message: Message) -> None:
        match message:
            case Submit():
                self._submit(connection, message)
            case Stop():
                if self._routes.get(message.request_id, connection) is connection:
                    self._handler.stop(message)  # also when it crossed the request's Finished: the totals must agree
            case Cancel():
                if message.request_id in connection.live:
                    self._handler.cancel(message.request_id)
            case Probe():
                self._answer(connection, self._handler.probe(message))
            case Query():
                self._handler.query(message, lambda answer: self._answer(connection, answer))
            case _:
                raise ProtocolError(f"a gateway does not send {type(message).__name__}")

    def _submit(self, connection: Connection, submit: Submit) -> None:
        if submit.request_id in connection.live:
            raise ProtocolError(f"request id {submit.request_id!r} is in use on this connection")
        if submit.request_id in self._routes:
            error = EngineError("invalid_request", "the request id is in use on another connection")
            connection.post([rejection(submit, error)])
            return
        self._routes[submit.request_id] = connection
        connection.live.add(submit.request_id)
        refused = self._handler.submit(submit)
        if refused is not None:
            self.deliver([rejection(submit, refused)])

    def _answer(self, connection: Connection, message: Message) -> None:
        if not connection.answer(message):
            log.error("closing a connection that does not read its answers")
            self._doomed.append(connection)
            self.wake()


def _is_ours(sock: socket.socket) -> bool:
    """Whether the process at the other end runs under our own user id."""
    try:
        uid = peer_uid(sock)
    except OSError as error:
        log.error("a connection without credentials: %s", error)
        return False
    if uid != os.geteuid():
        log.error("refused a connection of user %d", uid)
        return False
    return True


def rejection(submit: Submit, error: EngineError) -> Finished:
    """The one answer to a request that never ran."""
    n = submit.n if 0 < submit.n <= MAX_OUTPUTS else 0
    return Finished(submit.request_id, PromptRecord(), (0,) * n, ("error",) * n, error=error)
