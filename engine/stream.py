"""One request as the gateway sees it: an asynchronous iterator of what the engine says about it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from engine.backlog import Backlog, StreamMessage
from engine.protocol import Accepted, Cancel, Delta, EngineError, Finished, PromptRecord, Stop, Submit

Send = Callable[[Stop | Cancel], None]


class Stream:
    """Yields Accepted, Deltas and at last Finished, and ends. For one consumer.

    A consumer that lags finds the Deltas of each output merged into one. When more than `max_unread_tokens` token ids
    wait for it, the request is cancelled and its Finished carries the error `slow_client`.
    """

    def __init__(self, submit: Submit, send: Send, *, max_unread_tokens: int) -> None:
        self.submit = submit
        self.prompt = PromptRecord()
        """The prompt's bill as last heard: all zero until Accepted."""
        self._queue_s = 0.0
        self._output_tokens = [0] * submit.n
        self._finish_reasons: list[str | None] = [None] * submit.n
        self._stops: dict[int, int] = {}
        self._send = send
        self._max_unread_tokens = max_unread_tokens
        self._backlog = Backlog()
        self._taken: deque[StreamMessage] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._overflowed = False
        self.finished = False
        """The engine has said its last word on this request; the consumer may still have messages to read."""

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def output_tokens(self) -> tuple[int, ...]:
        """Tokens per output as last heard from the engine."""
        return tuple(self._output_tokens)

    def stop(self, output_index: int, n_tokens: int) -> None:
        """End this output after its first `n_tokens` tokens. Deltas that were under way may still come, but Finished
        bills no further, even when the engine had said it before it heard of the stop."""
        if not 0 <= output_index < self.submit.n:
            raise ValueError(f"output {output_index} of a request with {self.submit.n}")
        self._stops[output_index] = n_tokens
        self._send(Stop(self.request_id, output_index, n_tokens))

    def cancel(self) -> None:
        """Free the request's blocks. Keep iterating: Finished still comes, with the totals. Harmless when repeated."""
        if not self.finished:
            self._send(Cancel(self.request_id))

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StreamMessage:
        if not self._taken:
            while not self._backlog:
                if self.finished:
                    raise StopAsyncIteration
                await self._wait()
            self._taken.extend(self._backlog.take())
        message = self._taken.popleft()
        return self._truncated(message) if self._stops and isinstance(message, Finished) else message

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError(f"request {self.request_id} has a consumer already")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def receive(self, message: StreamMessage) -> None:
        """The engine's side: what it said. Nothing may follow Finished."""
        if self.finished:
            return
        if isinstance(message, Delta):
            self._note_delta(message)
        elif isinstance(message, Accepted):
            self.prompt, self._queue_s = message.prompt, message.queue_s
        else:
            self.finished = True
            self.prompt = message.prompt
            if self._overflowed and message.error is None:
                message = replace(message, error=self._slow_client())
        unread = self._backlog.put(message)
        if unread > self._max_unread_tokens and not (self._overflowed or self.finished):
            self._overflowed = True
            self._send(Cancel(self.request_id))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: EngineError) -> None:
        """The engine's side: it is gone. Finished carries what was last heard, so that what was delivered is billed."""
        reasons = tuple(
            reason or ("stop" if i in self._stops else "error") for i, reason in enumerate(self._finish_reasons)
        )
        self.receive(
            Finished(self.request_id, self.prompt, self.output_tokens, reasons, queue_s=self._queue_s, error=error)
        )

    def _note_delta(self, delta: Delta) -> None:
        if 0 <= delta.output_index < self.submit.n:
            self._output_tokens[delta.output_index] = delta.n_tokens
            self._finish_reasons[delta.output_index] = delta.finish_reason

    def _truncated(self, finished: Finished) -> Finished:
        counts, reasons = list(finished.output_tokens), list(finished.finish_reasons)
        for output, limit in self._stops.items():
            if reasons[output] in ("stop", "length"):
                counts[output], reasons[output] = min(counts[output], limit), "stop"
        return replace(finished, output_tokens=tuple(counts), finish_reasons=tuple(reasons))

    def _slow_client(self) -> EngineError:
        return EngineError("slow_client", f"more than {self._max_unread_tokens} tokens waited to be read; read faster")
