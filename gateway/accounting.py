"""A request's bill: opened before work starts, moved as tokens reach the client, closed from the engine's totals.

The gateway counts no tokens of its own: a bill is what the engine's Finished says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.protocol import Finished, PromptRecord
from gateway.errors import ApiError, unavailable
from tenants.ledger import Entry, Ledger, OpenEvent
from tenants.model import CloseEvent, Principal, Status, StoreUnavailable, Timings, TokenUsage, UnknownPrice
from tenants.pricing import PriceBook
from tenants.spool import SpoolFailed, SpoolFull

log = logging.getLogger("radixgate.gateway")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a client is told it used, and what was booked: the same frozen numbers."""

    tokens: TokenUsage
    cost_nano_usd: int

    def __add__(self, other: Usage) -> Usage:
        return Usage(_sum(self.tokens, other.tokens), self.cost_nano_usd + other.cost_nano_usd)


class Accounting:
    def __init__(self, prices: PriceBook, ledger: Ledger, clock: Callable[[], float] = time.time) -> None:
        self._prices = prices
        self._ledger = ledger
        self._clock = clock

    async def open(
        self, request_id: str, x_request_id: str, principal: Principal, model: str, engine_boot_id: str
    ) -> Bill:
        """A bill whose OPEN is durable, at the price of this moment. Raises ApiError, and then nothing is booked."""
        started_at = self._clock()
        try:
            price = await self._prices.at(model, principal.plan_id, started_at)
            entry = await self._ledger.open(
                OpenEvent(
                    request_id=request_id,
                    x_request_id=x_request_id,
                    tenant_id=principal.tenant_id,
                    key_id=principal.key_id,
                    model=model,
                    price=price,
                    engine_boot_id=engine_boot_id,
                    started_at=started_at,
                )
            )
        except UnknownPrice as error:
            raise ApiError(403, "no_price", f"Your plan has no price for the model {model}.", param="model") from error
        except StoreUnavailable as error:
            raise unavailable(
                "The price list cannot be read at the moment; try again shortly.", "store_unavailable", 2
            ) from error
        except (SpoolFull, SpoolFailed) as error:
            log.error("no request can be booked: %s", error)
            raise unavailable(
                "The ledger cannot be written at the moment; try again shortly.", "ledger_unavailable", 5
            ) from error
        return Bill(entry, self._clock)


class Bill:
    """One request's entry in the ledger."""

    def __init__(self, entry: Entry, clock: Callable[[], float]) -> None:
        self._entry = entry
        self._clock = clock
        self._started_at = entry.request.started_at
        self.first_token_s: float | None = None
        """Seconds from OPEN to the first token."""
        self._handed_tokens: int | None = None

    def admitted(self, prompt: PromptRecord) -> None:
        """The engine has frozen the prompt's record."""
        self._entry.admitted(token_usage(prompt))

    def first_token(self) -> None:
        """The first text is there."""
        if self.first_token_s is None:
            self.first_token_s = max(0.0, self._clock() - self._started_at)

    def progress(self, output_tokens: int) -> None:
        """So many output tokens in all were handed to the client's socket."""
        if output_tokens != self._handed_tokens:
            self._handed_tokens = output_tokens
            self._entry.progress(output_tokens)

    async def close(self, finished: Finished | None, status: Status) -> Usage:
        """Book the end; returns when that is durable, or queued in memory when the disk refuses it.

        The engine's totals are booked whatever happened, so that its counters and the ledger agree. A client that left
        pays for what was computed and generated; a request that failed before anything of it reached the client is
        waived.
        """
        usage = TokenUsage()
        if finished is not None:
            try:
                usage = token_usage(finished.prompt, sum(finished.output_tokens))
            except ValueError as error:
                log.error("the engine's numbers for %s cannot be booked: %s", self._entry.request.request_id, error)
                status = Status.FAILED
        waived = status is Status.FAILED and self._handed_tokens is None
        event = CloseEvent(usage, status, _reason(finished), self._timings(finished), waived=waived)
        try:
            await self._entry.close(event)
        except (SpoolFull, SpoolFailed) as error:
            log.error("a finished request waits in memory for the ledger: %s", error)
        booked = self._entry.event
        assert booked is not None
        return Usage(booked.usage, booked.cost_nano_usd)

    def _timings(self, finished: Finished | None) -> Timings:
        total_s = max(0.0, self._clock() - self._started_at)
        if finished is None:
            return Timings(total_s=total_s)
        return Timings(finished.queue_s, finished.prefill_s, finished.decode_s, self.first_token_s, total_s)


def token_usage(prompt: PromptRecord, output_tokens: int = 0) -> TokenUsage:
    """The engine's record as the ledger's classes."""
    return TokenUsage(
        cached_private=prompt.cached_private,
        cached_public=prompt.cached_public,
        written_unleased=prompt.written_unleased,
        written_leased=prompt.written_leased,
        uncached=prompt.uncached,
        output=output_tokens,
    )


def _reason(finished: Finished | None) -> str:
    if finished is None:
        return "unavailable"
    if finished.error is not None:
        return finished.error.code
    return ",".join(dict.fromkeys(finished.finish_reasons))


def _sum(left: TokenUsage, right: TokenUsage) -> TokenUsage:
    leased = dict(left.written_leased)
    for ttl_s, tokens in right.written_leased:
        leased[ttl_s] = leased.get(ttl_s, 0) + tokens
    return replace(
        left,
        cached_private=left.cached_private + right.cached_private,
        cached_public=left.cached_public + right.cached_public,
        written_unleased=left.written_unleased + right.written_unleased,
        written_leased=tuple(sorted(leased.items())),
        uncached=left.uncached + right.uncached,
        output=left.output + right.output,
    )
