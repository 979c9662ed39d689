"""From the spools to Redis: each finished request becomes one Lua call, sent until it is answered.

Sending again is harmless: Redis keeps, per tenant and spool, the sequence it applied last, and books nothing up to it.
An event whose predecessor Redis does not have is refused; then this Redis went back in time or lost its data, and
the shipper goes back in the spool to what Redis has. The same check runs after every lost connection and every CHECK_S
seconds, so that an idle spool is refilled too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from tenants import records, store
from tenants.model import LedgerEvent, StoreUnavailable
from tenants.segments import START, Position, bytes_between, end_of, read

BATCH_EVENTS = 256
CHECK_S = 5.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 5.0
SEEN_TTL_S = 24 * 3600

_MISSES_EARLIER, _BOOKED_ELSEWHERE = -1, 2
_log = logging.getLogger(__name__)


class Shipment(NamedTuple):
    """An event on its way. `previous` is the sequence of the tenant's event before it in the spool, as read."""

    event: LedgerEvent
    previous: int
    payload: bytes


class Source:
    """One spool being shipped.

    Args:
        path: the spool's directory.
        durable: the end of what may be shipped.
        last: tenant id -> sequence that Redis should have. Empty: ship from the start. Else the spool counts as shipped
            until a check finds that Redis has less.
    """

    def __init__(self, path: Path, durable: Callable[[], Position], last: dict[str, int]) -> None:
        self.path = path
        self.spool_id = path.name
        self.durable = durable
        self.last = dict(last)
        self.position = durable() if last else START
        self.batch: list[Shipment] = []
        """Read, not yet confirmed."""
        self._batch_end = self.position
        self._read: dict[str, int] = {}
        """Tenant id -> last sequence read since the start of the spool."""
        self._applied: dict[str, int] = {}
        """What Redis had at the last rewind: passed over when it is read again."""

    @classmethod
    def sealed(cls, path: Path, last: dict[str, int]) -> Source:
        """A spool that grows no more; `last` is its seal."""
        end = end_of(path)
        return cls(path, lambda: end, last)

    @property
    def is_shipped(self) -> bool:
        return not self.batch and self.position == self.durable()

    def fill(self) -> None:
        """Read the next events into an empty batch. Passes over what Redis has and what is no event."""
        if self.batch:
            return
        chunk = read(self.path, self.position, self.durable())
        for fault in chunk.faults:
            _log.error("events may be lost: %s", fault)
        for frame in chunk.frames:
            if records.is_close(frame.payload):
                self._take(frame.payload)
        self._batch_end = chunk.position
        self.confirm(0)

    def confirm(self, n_events: int) -> None:
        """Redis has the first n events of the batch."""
        for shipment in self.batch[:n_events]:
            self.last[shipment.event.tenant_id] = shipment.event.sequence
        del self.batch[:n_events]
        if not self.batch:
            self.position = self._batch_end

    def rewind(self, applied: dict[str, int]) -> None:
        """Start over, past what Redis has."""
        self._applied = applied
        self._read.clear()
        self.batch.clear()
        self.last = dict(applied)
        self.position = self._batch_end = START

    def _take(self, payload: bytes) -> None:
        event = records.decode(payload)
        assert isinstance(event, LedgerEvent)
        previous = self._read.get(event.tenant_id, 0)
        if event.sequence <= previous:
            return  # written again after a failed fsync
        self._read[event.tenant_id] = event.sequence
        if event.sequence != previous + 1:
            _log.error("%s: events %d to %d of tenant %s are missing", self.path, previous + 1, event.sequence - 1,
                       event.tenant_id)  # fmt: skip
        if event.sequence > self._applied.get(event.tenant_id, 0):
            self.batch.append(Shipment(event, previous, payload[1:]))


class ShippingLag(NamedTuple):
    unshipped_bytes: int
    oldest_age_s: float
    last_error: str | None


class Shipper:
    """Ships any number of sources, one batch of each in turn. Runs as a task of the event loop."""

    def __init__(
        self,
        redis: Redis,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        check_s: float = CHECK_S,
    ) -> None:
        self.wake = asyncio.Event()
        self._redis = redis
        self._clock = clock
        self._monotonic = monotonic
        self._check_s = check_s
        self._sources: list[Source] = []
        self._script = redis.register_script(store.lua("apply_event"))
        self._epoch: str | None = None
        self._checked_at = float("-inf")
        self._last_error: str | None = None
        self._caught_up: list[asyncio.Event] = []
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def add(self, source: Source) -> None:
        self._sources.append(source)
        self._checked_at = float("-inf")
        self.wake.set()

    def start(self) -> None:
        self._stopping = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name="shipper")

    async def stop(self) -> None:
        """Returns when the task has ended, at the latest when Redis answers or times out."""
        if self._task is not None:
            self._stopping = True
            self.wake.set()
            self._task.cancel()  # not enough alone: a library below may swallow it
            await asyncio.wait([self._task])

    @property
    def lag(self) -> ShippingLag:
        n_bytes, oldest = 0, float("inf")
        for source in self._sources:
            if not source.is_shipped:
                n_bytes += bytes_between(source.path, source.position, source.durable())
                oldest = min([oldest, *(shipment.event.finished_at for shipment in source.batch)])
        age_s = max(0.0, self._clock() - oldest) if oldest < float("inf") else 0.0
        return ShippingLag(n_bytes, age_s, self._last_error)

    async def caught_up(self, timeout_s: float) -> bool:
        """Wait until Redis has confirmed everything that is durable now; False when it took longer."""
        event = asyncio.Event()
        self._caught_up.append(event)
        self._checked_at = float("-inf")
        self.wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            self._caught_up.remove(event)
        return True

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping:
            self.wake.clear()
            try:
                for source in self._sources:
                    source.fill()
                await self._check_if_due()
                for source in self._sources:
                    await self._ship_batch(source)
            except Exception as error:  # whatever it is, the events are safe in the spool and shipping must go on
                self._report(error)
                self._checked_at = float("-inf")
                if not self._stopping:
                    await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            self._last_error, backoff_s = None, FIRST_BACKOFF_S
            if all(source.is_shipped for source in self._sources):
                for event in self._caught_up:
                    event.set()
                await self._idle()

    async def _idle(self) -> None:
        """Until there may be something to do."""
        if self._stopping:
            return
        try:
            async with asyncio.timeout(self._check_s):
                await self.wake.wait()
        except TimeoutError:
            self._checked_at = float("-inf")

    async def _check_if_due(self) -> None:
        """Is this still the Redis that applied what we sent? If it lost events, go back to what it has."""
        if self._monotonic() - self._checked_at < self._check_s:
            return
        epoch = await store.open_schema(self._redis)
        for source in self._sources:
            await self._check(source)
        if self._epoch not in (None, epoch):
            _log.warning("Redis lost its data (epoch %s, before %s); refilled from the spools", epoch, self._epoch)
        self._epoch, self._checked_at = epoch, self._monotonic()

    async def _check(self, source: Source) -> None:
        tenants = list(source.last)
        if not tenants:
            return
        async with self._redis.pipeline(transaction=False) as pipe:
            for tenant_id in tenants:
                pipe.hget(store.applied(tenant_id), source.spool_id)
            found = await pipe.execute()
        applied = {tenant_id: int(store.text(reply) or 0) for tenant_id, reply in zip(tenants, found, strict=True)}
        if any(applied[tenant_id] < source.last[tenant_id] for tenant_id in tenants):
            source.rewind(applied)

    async def _ship_batch(self, source: Source) -> None:
        if source.is_shipped:
            return
        source.fill()
        batch = source.batch[:BATCH_EVENTS]
        if not batch:
            await asyncio.sleep(0)
            return
        replies = await self._send(source.spool_id, batch)
        for n_confirmed, (shipment, reply) in enumerate(zip(batch, replies, strict=True)):
            if isinstance(reply, BaseException):
                source.confirm(n_confirmed)
                raise reply
            if int(reply) == _MISSES_EARLIER:
                source.confirm(n_confirmed)
                source.last[shipment.event.tenant_id] = shipment.previous
                self._checked_at = float("-inf")
                return
            if int(reply) == _BOOKED_ELSEWHERE:
                _log.error("request %s was booked from another spool; not booked again", shipment.event.request_id)
        source.confirm(len(batch))

    async def _send(self, spool_id: str, batch: list[Shipment]) -> list[int | BaseException]:
        """One pipeline, one reply per event; an error reply stands in its place."""
        for _ in range(2):
            async with self._redis.pipeline(transaction=False) as pipe:
                for shipment in batch:
                    pipe.execute_command("EVALSHA", self._script.sha, 5, *_arguments(spool_id, shipment))
                replies: list[int | BaseException] = await pipe.execute(raise_on_error=False)
            if not any(isinstance(reply, NoScriptError) for reply in replies):
                break
            await self._redis.script_load(self._script.script)
        return replies

    def _report(self, error: Exception) -> None:
        if self._last_error is None:
            level = (
                logging.WARNING if isinstance(error, StoreUnavailable) or store.is_unavailable(error) else logging.ERROR
            )
            _log.log(level, "events stay in the spool: %s: %s", type(error).__name__, error)
        self._last_error = f"{type(error).__name__}: {error}"


def _arguments(spool_id: str, shipment: Shipment) -> list[str | int | bytes]:
    event = shipment.event
    tenant_id, finished_s = event.tenant_id, int(event.finished_at)
    minute = finished_s // 60
    increments = [("requests", 1), *event.usage.classes(), ("cost_nano_usd", event.cost_nano_usd)]
    increments.append(("errors", int(event.status.is_error)))
    return [
        store.applied(tenant_id),
        store.ledger(tenant_id),
        store.minute_usage(tenant_id, minute),
        store.minutes(tenant_id),
        store.seen_requests(tenant_id, finished_s // 3600),
        spool_id,
        shipment.previous,
        event.sequence,
        event.request_id,
        minute,
        SEEN_TTL_S,
        shipment.payload,
        f"|{event.key_id}|{event.model}",
        " ".join(f"{name} {amount}" for name, amount in increments if amount),
    ]
