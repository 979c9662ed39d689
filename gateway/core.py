"""The one way in and out of the engines: an internal request, and the stream of events that answers it.

Every API is a translation to a GenerationRequest and from the events. A Generation joins three things: the engine's
stream, the texts of the outputs, and the bill. Whatever happens to the client, the bill is closed from the engine's own
totals, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from engine.client import EngineUnavailable, Stream
from engine.protocol import Accepted, Delta, EngineError, Finished, PromptRecord, Sampling, Submit
from gateway.accounting import Accounting, Bill, Usage
from gateway.errors import ApiError, unavailable
from gateway.metrics import Metrics
from gateway.prompts import Prompts
from gateway.quarantine import Quarantine
from gateway.served import ServedModel
from gateway.streams import OutputText, ShownLogprob
from tenants.model import Principal, Status

log = logging.getLogger("radixgate.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a client asked for, in no API's words."""

    id: str
    """Unique: the engine's and the ledger's name for it."""
    x_request_id: str
    """The client's name for the call, or one given to it."""
    principal: Principal
    model: ServedModel
    prompts: Prompts
    prompt_ids: bytes
    """Little-endian int32."""
    sampling: Sampling
    n: int = 1
    stops: tuple[str, ...] = ()
    salt: str = ""
    use_cache: bool = True

    def submit(self) -> Submit:
        return Submit(
            self.id, self.principal.tenant_id, self.prompt_ids, self.sampling, self.n, self.salt, self.use_cache
        )


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has admitted the request: its prompt's record is final."""

    prompt: PromptRecord


@dataclass(frozen=True, slots=True)
class TextDelta:
    output_index: int
    text: str
    logprobs: tuple[ShownLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputFinished:
    output_index: int
    finish_reason: str
    """stop or length."""
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """The last event of a request that was served."""

    usage: Usage


Event = Started | TextDelta | OutputFinished | Completed


# --- core -------------------------------------------------------------------------------------------------------------


class Core:
    def __init__(self, accounting: Accounting, quarantine: Quarantine, metrics: Metrics) -> None:
        self._accounting = accounting
        self._quarantine = quarantine
        self.metrics = metrics
        self._settling: set[asyncio.Task[object]] = set()
        self._stopping = False

    async def begin(self, request: GenerationRequest) -> Generation:
        """Open the request's bill and hand it to its engine. Raises ApiError, and then nothing is billed.

        Use the result as a context manager: leaving it settles the bill.
        """
        hello = request.model.hello
        submit = request.submit()
        self._quarantine.note_boot(request.model.name, hello.boot_id)
        await self._quarantine.check(submit)
        bill = await self._accounting.open(
            request.id, request.x_request_id, request.principal, request.model.name, hello.boot_id
        )
        try:
            stream = request.model.engine.submit(submit)
        except EngineUnavailable:
            await self.shielded(bill.close(None, Status.FAILED))
            message = f"The model {request.model.name} is not ready: {request.model.stage()}."
            raise unavailable(message, "model_not_ready") from None
        except BaseException:
            await self.shielded(bill.close(None, Status.FAILED))
            raise
        return Generation(self, request, stream, bill)

    async def shielded(self, work: Coroutine[Any, Any, object]) -> None:
        """Run to its end even when the caller is cancelled meanwhile."""
        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        await asyncio.shield(task)

    async def note_death(self, submit: Submit) -> None:
        """The engine was lost with this request in flight."""
        if not self._stopping:
            await self._quarantine.note_death(submit)

    def stop(self) -> None:
        """From now on the loss of an engine is our own doing."""
        self._stopping = True

    async def settled(self) -> None:
        """Wait for every bill that is still being closed: the last act before the ledger closes."""
        while self._settling:
            await asyncio.gather(*self._settling, return_exceptions=True)


def check_length(n_prompt: int, max_model_len: int, param: str) -> None:
    """Raises ApiError unless the prompt has a token and leaves room for one."""
    if n_prompt + 1 > max_model_len:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {max_model_len} tokens, and the prompt has {n_prompt} tokens; "
            "it must leave room for at least one more. Shorten the prompt.",
            param=param,
        )
    if n_prompt == 0:
        raise ApiError(400, "invalid_value", "The prompt is empty: it needs at least one token.", param)


class Generation:
    """One request being served. Iterate for its events; a failure raises ApiError out of the iteration."""

    def __init__(self, core: Core, request: GenerationRequest, stream: Stream, bill: Bill) -> None:
        self.request = request
        self._core = core
        self._stream = stream
        self._bill = bill
        self._outputs = [_Output(request) for _ in range(request.n)]
        self._settled = False
        self._outcome: Status | None = None

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._settled:
            if self._outcome is None:
                self._outcome = Status.FAILED if isinstance(error, Exception) else Status.CANCELLED
            self._stream.cancel()
            await self._core.shielded(self._drain())

    def cancel(self) -> None:
        """The client left: the iteration soon ends, without a Completed event."""
        self._outcome = self._outcome or Status.CANCELLED
        self._stream.cancel()

    def delivered(self) -> None:
        """All text of the events so far was handed to the client's socket."""
        n_tokens = sum(output.n_tokens for output in self._outputs)
        if n_tokens:
            self._bill.progress(n_tokens)

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for message in self._stream:
            if isinstance(message, Delta):
                for event in self._on_delta(message):
                    yield event
            elif isinstance(message, Accepted):
                self._bill.admitted(message.prompt)
                yield Started(message.prompt)
            else:
                if message.error is None and self._outcome is None:
                    for event in self._unfinished(message):
                        yield event
                usage = await self._settle(message)
                if message.error is not None:
                    raise engine_failure(message.error)
                if self._outcome is None:
                    yield Completed(usage)

    def _on_delta(self, delta: Delta) -> list[Event]:
        output = self._outputs[delta.output_index]
        if output.finished:
            return []
        ids, logprobs = delta.token_ids, delta.logprobs
        if delta.stop_token_id is not None:
            ids, logprobs = ids[:-1], logprobs[: len(ids) - 1]
        last = delta.finish_reason is not None
        # A stop token is counted, though it has no text.
        piece = output.text.push(ids, delta.n_tokens - (len(delta.token_ids) - len(ids)), logprobs, last=last)
        events: list[Event] = []
        self._bill.first_token()
        if piece.text or piece.logprobs:
            events.append(TextDelta(delta.output_index, piece.text, piece.logprobs))
        if piece.stopped_at is not None:
            output.n_tokens = piece.stopped_at
            self._stream.stop(delta.output_index, piece.stopped_at)
            events.append(output.finish(delta.output_index, "stop", output.text.stop_sequence))
        else:
            output.n_tokens = delta.n_tokens
            if delta.finish_reason in ("stop", "length"):
                events.append(output.finish(delta.output_index, delta.finish_reason))
            # Of an output that failed or was cancelled, Finished tells why.
            output.finished = delta.finish_reason is not None
        return events

    def _unfinished(self, finished: Finished) -> list[Event]:
        """Outputs that ended without a last Delta: show what their texts still hold."""
        events: list[Event] = []
        for index, output in enumerate(self._outputs):
            if output.finished:
                continue
            piece = output.text.push((), output.n_tokens, last=True)
            if piece.text or piece.logprobs:
                events.append(TextDelta(index, piece.text, piece.logprobs))
            reason = finished.finish_reasons[index] if index < len(finished.finish_reasons) else "stop"
            events.append(output.finish(index, reason))
        return events

    async def _drain(self) -> None:
        async for message in self._stream:
            if isinstance(message, Accepted):
                self._bill.admitted(message.prompt)
            elif isinstance(message, Finished):
                await self._settle(message)

    async def _settle(self, finished: Finished) -> Usage:
        """Close the bill from the engine's totals."""
        self._settled = True
        if finished.error is not None and self._outcome is None:
            self._outcome = Status.CANCELLED if finished.error.code == "slow_client" else Status.FAILED
        outcome = self._outcome or Status.COMPLETED
        done: list[Usage] = []

        async def close() -> None:
            if finished.error is not None and finished.error.code == "engine_died":
                await self._core.note_death(self._stream.submit)
            usage = await self._bill.close(finished, outcome)
            self._core.metrics.settled(self.request.model.name, outcome, usage, self._bill.first_token_s)
            done.append(usage)

        await self._core.shielded(close())
        return done[0]


@dataclass(slots=True)
class _Output:
    request: GenerationRequest = field(repr=False)
    n_tokens: int = 0
    finished: bool = False
    text: OutputText = field(init=False)

    def __post_init__(self) -> None:
        tokenizer = self.request.prompts.tokenizer
        self.text = OutputText(tokenizer.detokenizer(), self.request.stops, self.request.sampling.min_tokens)

    def finish(self, index: int, reason: str, stop_sequence: str | None = None) -> OutputFinished:
        self.finished = True
        return OutputFinished(index, "length" if reason == "length" else "stop", stop_sequence)


def engine_failure(error: EngineError) -> ApiError:
    """What a client is told. The engine's own words are shown only where they speak of the request."""
    match error.code:
        case "context_length_exceeded" | "prompt_exceeds_pool":
            return ApiError(400, "context_length_exceeded", error.message, "messages")
        case "invalid_request":
            return ApiError(400, "invalid_request", error.message)
        case "queue_full" | "queue_timeout":
            return unavailable("The server is overloaded; try again shortly.", "overloaded", 1)
        case "draining":
            return unavailable("The server is stopping; try again shortly.", "draining", 5)
        case "engine_died":
            return unavailable("The engine was lost while it served this request; try again.", "engine_died", 5)
        case "quarantined":
            return ApiError(400, "request_quarantined", error.message, headers={"x-should-retry": "false"})
        case "slow_client":
            return ApiError(408, "slow_client", "The client read its stream too slowly; the request was ended.")
        case _:
            return ApiError(500, "engine_error", "The engine failed to process this request.")
