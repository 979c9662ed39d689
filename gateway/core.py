"""The one way in and out of the engines: an internal request, and the stream of events that answers it.

Every API is a translation to a GenerationRequest and from the events. A Generation joins three things: the engine's
stream, the texts of the outputs, and the bill. Whatever happens to the client, the bill is closed from the engine's own
totals, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from engine.client import EngineUnavailable, Stream
from engine.protocol import Accepted, Breakpoint, Delta, EngineError, Finished, Sampling, Submit
from gateway.accounting import Accounting, Bill, Usage
from gateway.errors import ApiError, unavailable
from gateway.events import Completed as Completed
from gateway.events import Event as Event
from gateway.events import OutputFinished as OutputFinished
from gateway.events import ReasoningDelta as ReasoningDelta
from gateway.events import Started as Started
from gateway.events import TextDelta as TextDelta
from gateway.events import ToolCallDelta as ToolCallDelta
from gateway.events import ToolCallStarted as ToolCallStarted
from gateway.metrics import Metrics
from gateway.output_format import PLAIN, OutputFormat
from gateway.outputs import Output
from gateway.prompts import Prompts
from gateway.prompts import check_length as check_length
from gateway.quarantine import Quarantine
from gateway.served import ServedModel
from tenants.model import Principal, Status

log = logging.getLogger("radixgate.gateway")

# A logit bias that leaves a token no chance.
_NEVER = -100.0


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
    breakpoints: tuple[Breakpoint, ...] = ()
    output_format: OutputFormat = PLAIN
    sampling: Sampling
    n: int = 1
    stops: tuple[str, ...] = ()
    salt: str = ""
    use_cache: bool = True

    def submit(self) -> Submit:
        return Submit(
            self.id,
            self.principal.tenant_id,
            self.prompt_ids,
            self._sampling(),
            self.n,
            self.salt,
            self.use_cache,
            breakpoints=self.breakpoints,
        )

    def _sampling(self) -> Sampling:
        forbidden = self.output_format.forbidden_ids
        if not forbidden:
            return self.sampling
        bias = dict(self.sampling.logit_bias) | dict.fromkeys(forbidden, _NEVER)
        return replace(self.sampling, logit_bias=tuple(sorted(bias.items())))


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


class Generation:
    """One request being served. Iterate for its events; a failure raises ApiError out of the iteration."""

    def __init__(self, core: Core, request: GenerationRequest, stream: Stream, bill: Bill) -> None:
        self.request = request
        self._core = core
        self._stream = stream
        self._bill = bill
        tokenizer, min_tokens = request.prompts.tokenizer, request.sampling.min_tokens
        self._outputs = [
            Output(index, tokenizer, request.output_format, request.stops, min_tokens) for index in range(request.n)
        ]
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
                    yield Completed(usage, sum(output.reasoning_tokens for output in self._outputs))

    def _on_delta(self, delta: Delta) -> list[Event]:
        output = self._outputs[delta.output_index]
        if output.finished:
            return []
        self._bill.first_token()
        change = output.push(delta)
        if change.stopped_at is not None:
            self._stream.stop(delta.output_index, change.stopped_at)
        return change.events

    def _unfinished(self, finished: Finished) -> list[Event]:
        """Outputs that ended without a last Delta."""
        events: list[Event] = []
        for index, output in enumerate(self._outputs):
            if not output.finished:
                reasons = finished.finish_reasons
                events += output.end(reasons[index] if index < len(reasons) else "stop")
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
