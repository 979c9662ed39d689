"""One gateway worker's connection, and what waits to be sent on it."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.backlog import Backlog, StreamMessage
from engine.protocol import Batch, Decoder, EngineError, Finished, Message, encode

MAX_UNSENT_ANSWERS = 1024


class Connection:
    """The step thread posts, the socket thread reads and flushes; `_lock` guards what they share."""

    def __init__(self, sock: socket.socket, on_blocked: Callable[[Connection], None], max_unsent_tokens: int) -> None:
        self.sock = sock
        self.decoder = Decoder()
        self.live: set[str] = set()
        """Request ids that this connection submitted and that have not finished."""
        self._lock = threading.Lock()
        self._on_blocked = on_blocked
        self._max_unsent_tokens = max_unsent_tokens
        self._unsent = memoryview(b"")
        self._backlog = Backlog()
        self._answers: deque[bytes] = deque()
        self._slow: set[str] = set()
        self._closed = False

    def post(self, messages: Sequence[StreamMessage]) -> list[str]:
        """Send, or keep, what a step said. Returns requests whose reader is too slow: the caller cancels them."""
        with self._lock:
            if self._closed:
                return []
            if self._slow:
                messages = [self._explained(message) for message in messages]
            if not self._waits():
                self._send(encode(Batch(tuple(messages))))
                return []
            too_slow = []
            for message in messages:
                waiting = self._backlog.put(message)
                if waiting <= self._max_unsent_tokens or message.request_id in self._slow:
                    continue
                if not isinstance(message, Finished):
                    self._slow.add(message.request_id)
                    too_slow.append(message.request_id)
            return too_slow

    def answer(self, message: Message) -> bool:
        """Send, or keep, an answer. False: the peer does not read its answers and should be dropped."""
        with self._lock:
            if self._closed:
                return True
            if self._waits():
                self._answers.append(encode(message))
                return len(self._answers) <= MAX_UNSENT_ANSWERS
            self._send(encode(message))
            return True

    def flush(self) -> bool:
        """Send what waits. True when nothing is left."""
        with self._lock:
            while not self._closed:
                if not self._unsent and self._answers:
                    self._unsent = memoryview(self._answers.popleft())
                elif not self._unsent and self._backlog:
                    self._unsent = memoryview(encode(Batch(tuple(self._backlog.take()))))
                if not self._unsent:
                    return True
                if not self._push():
                    return False
            return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._backlog.take()
            self._answers.clear()
            self._unsent = memoryview(b"")
        self.sock.close()

    def _send(self, frame: bytes) -> None:
        self._unsent = memoryview(frame)
        if not self._push():
            self._on_blocked(self)

    def _push(self) -> bool:
        """Give the kernel what it takes of `_unsent`. True when all went, or when the peer is gone."""
        try:
            sent = self.sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            sent = len(self._unsent)  # the socket thread sees the same and closes the connection
        self._unsent = self._unsent[sent:]
        return not self._unsent

    def _waits(self) -> bool:
        return bool(self._unsent or self._backlog or self._answers)

    def _explained(self, message: StreamMessage) -> StreamMessage:
        """A request that was cancelled because its reader is slow says so when it finishes."""
        if not isinstance(message, Finished) or message.request_id not in self._slow:
            return message
        self._slow.discard(message.request_id)
        why = EngineError("slow_client", f"more than {self._max_unsent_tokens} tokens waited for the gateway to read")
        return replace(message, error=message.error or why)
