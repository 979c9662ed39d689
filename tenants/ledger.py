"""The ledger of one gateway process: OPEN before work starts, PROGRESS while it runs, CLOSE at its end.

open() returns when OPEN is on the disk. progress() only notes a number; every PROGRESS_TOKENS tokens or PROGRESS_S
seconds it becomes a record. close() queues CLOSE before it first waits, so a cancelled caller loses nothing. A process
that dies leaves OPENs behind; whoever starts next on the same data directory closes them as aborted.

A request id must be minted by the gateway: the ledger books one event per id.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

from redis.asyncio import Redis

from tenants import records, recovery
from tenants.model import CloseEvent, LedgerEvent, Status, TokenUsage
from tenants.pricing import PriceVersion
from tenants.records import OpenRecord, ProgressRecord
from tenants.segments import SEGMENT_BYTES, SpoolFiles
from tenants.shipper import Shipper, Source
from tenants.spool import Spool

PROGRESS_TOKENS = 16
PROGRESS_S = 0.25
MIN_FREE_BYTES = 1 << 20
"""With less than this on the disk, requests are about to be refused."""

_log = logging.getLogger(__name__)
_NOTHING = TokenUsage()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEvent:
    """A request as the gateway opens it."""

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    price: PriceVersion
    x_request_id: str = ""
    """The client's own id, for its eyes only."""
    engine_boot_id: str = ""
    started_at: float | None = None
    """Seconds since 1970; None takes the ledger's clock."""


class Lag(NamedTuple):
    """How far Redis is behind this process's spools."""

    unshipped_bytes: int
    oldest_age_s: float
    open_requests: int
    unwritten: int
    """Finished requests that wait in memory for room on the disk."""
    last_error: str | None
    """Why shipping waits; None while Redis answers."""


class Entry:
    """One open request. Not thread-safe; lives on the ledger's event loop."""

    __slots__ = ("_closing", "_handed_tokens", "_ledger", "_noted_at", "_noted_tokens", "_prompt", "event", "request")

    def __init__(self, ledger: Ledger, request: OpenRecord) -> None:
        self._ledger = ledger
        self.request = request
        self._prompt: TokenUsage | None = None
        self._handed_tokens: int | None = None
        self._noted_tokens = 0
        self._noted_at = 0.0
        self._closing: asyncio.Future[None] | None = None
        self.event: LedgerEvent | None = None
        """What was booked; None while the request is open."""

    def admitted(self, prompt: TokenUsage) -> None:
        """The frozen bill of the prompt, from the engine's Accepted (output 0). Call it once, before progress()."""
        self._prompt = prompt

    def progress(self, output_tokens: int) -> None:
        """`output_tokens` in all have been handed to the client; 0 says that the prompt has been computed.

        Cheap. After a crash the bill is at most PROGRESS_TOKENS tokens or PROGRESS_S seconds behind. Does nothing after
        close().
        """
        if self._prompt is None:
            raise RuntimeError("progress() before admitted(): the prompt's bill is not known yet")
        if self._closing is not None:
            return
        now = self._ledger.monotonic()
        is_first, self._handed_tokens = self._handed_tokens is None, output_tokens
        if is_first or output_tokens - self._noted_tokens >= PROGRESS_TOKENS or now - self._noted_at >= PROGRESS_S:
            self._noted_tokens, self._noted_at = output_tokens, now
            self._ledger.note(self.request.request_id, replace(self._prompt, output=output_tokens))

    async def close(self, close: CloseEvent) -> LedgerEvent:
        """Book the request's end; returns when that is durable. A second call books nothing and returns that event.

        The event is queued before this first waits, and waiting may be cancelled without losing it. Raises SpoolFull
        or SpoolFailed when the disk refuses it; it then stays queued in memory and is tried again.
        """
        closing = self.start_close(close)
        await asyncio.shield(closing)
        assert self.event is not None
        return self.event

    def start_close(self, close: CloseEvent) -> asyncio.Future[None]:
        """close() without waiting; the future ends when the event is durable."""
        if self._closing is None:
            self._closing = self._ledger.finish(self, close)
        return self._closing

    @property
    def usage_so_far(self) -> TokenUsage:
        """What the client is known to have been handed: nothing before the first progress()."""
        if self._prompt is None or self._handed_tokens is None:
            return _NOTHING
        return replace(self._prompt, output=self._handed_tokens)


class Ledger:
    """Made by start(); one per process and event loop."""

    def __init__(
        self,
        spool: Spool,
        shipper: Shipper,
        adopted: list[recovery.Adopted],
        *,
        instance: str,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._spool = spool
        self._shipper = shipper
        self._adopted = adopted
        self._instance = instance
        self._clock = clock
        self.monotonic = monotonic
        self._open: dict[str, Entry] = {}
        self._last: dict[str, int] = {}
        self._closing: set[asyncio.Future[None]] = set()

    @classmethod
    async def start(
        cls,
        data_dir: Path,
        redis: Redis,
        *,
        instance: str = "",
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> Self:
        """Take over orphan spools in `<data_dir>/spool`, begin a new one and ship all of them to Redis, which need not
        answer yet. Raises OSError when the directory cannot be written.
        """
        root = data_dir / "spool"
        adopted = await asyncio.to_thread(recovery.adopt_orphans, root)
        files = await asyncio.to_thread(lambda: SpoolFiles.create(root, segment_bytes=segment_bytes))
        aborted = sum(orphan.aborted for orphan in adopted)
        if aborted:
            _log.warning("closed %d requests that were open when their process ended", aborted)
        spool = Spool(files)
        shipper = Shipper(redis, clock=clock, monotonic=monotonic)
        spool.notify(shipper.wake)
        shipper.add(Source(files.path, lambda: spool.durable, {}))
        for orphan in adopted:
            shipper.add(Source.sealed(orphan.files.path, orphan.last))
        shipper.start()
        return cls(spool, shipper, adopted, instance=instance or socket.gethostname(), clock=clock, monotonic=monotonic)

    async def open(self, request: OpenEvent) -> Entry:
        """A new entry, durable on the disk. Raises SpoolFull or SpoolFailed; then nothing is booked.

        When the caller is cancelled while it waits, the request is booked as cancelled with no usage.
        """
        if not request.tenant_id or not request.key_id:
            raise ValueError("a ledger entry needs a tenant and a key")
        if request.request_id in self._open:
            raise ValueError(f"request {request.request_id} is open already")
        record = OpenRecord(
            request_id=request.request_id,
            x_request_id=request.x_request_id,
            tenant_id=request.tenant_id,
            key_id=request.key_id,
            model=request.model,
            instance=self._instance,
            engine_boot_id=request.engine_boot_id,
            price=request.price,
            started_at=self._clock() if request.started_at is None else request.started_at,
        )
        entry = Entry(self, record)
        self._open[record.request_id] = entry
        written = self._spool.append(records.encode(record))
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            written.add_done_callback(lambda done: self._abandon(entry, done))
            raise
        except Exception:
            del self._open[record.request_id]
            raise
        return entry

    @property
    def lag(self) -> Lag:
        shipping = self._shipper.lag
        return Lag(
            shipping.unshipped_bytes,
            shipping.oldest_age_s,
            len(self._open),
            self._spool.unwritten,
            shipping.last_error,
        )

    async def shipped(self, timeout_s: float) -> bool:
        """Wait until Redis has the event of every request that has finished; False when it took longer."""
        try:
            async with asyncio.timeout(timeout_s):
                if self._closing:
                    await asyncio.wait(self._closing)
                return await self._shipper.caught_up(timeout_s)
        except TimeoutError:
            return False

    @property
    def has_room(self) -> bool:
        """Whether the disk under the spool takes new requests."""
        return shutil.disk_usage(self._spool.files.path).free >= MIN_FREE_BYTES

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Close what is still open as aborted, write everything, ship for up to timeout_s, and release the spools.

        Events that Redis did not take stay in the spool for the next start. Raises SpoolFailed when finished requests
        could not be written to the disk.
        """
        for entry in list(self._open.values()):
            entry.start_close(CloseEvent(entry.usage_so_far, Status.ABORTED, "aborted"))
        if self._closing:
            await asyncio.wait(self._closing)
        try:
            await self.shipped(timeout_s)
        finally:
            await self._shipper.stop()
            try:
                await self._spool.close(lambda files: recovery.seal(files, self._last))
            finally:
                for orphan in self._adopted:
                    orphan.files.close()

    def note(self, request_id: str, usage: TokenUsage) -> None:
        """For Entry: a PROGRESS record with the next group."""
        record = ProgressRecord(request_id=request_id, usage=usage, time_s=self._clock())
        self._spool.put_latest(request_id, records.encode(record))

    def finish(self, entry: Entry, close: CloseEvent) -> asyncio.Future[None]:
        """For Entry: number, price and queue its event, all before anyone can be cancelled."""
        request = entry.request
        previous = self._last.get(request.tenant_id, 0)
        entry.event = records.close_event(
            request,
            close.usage,
            close.status,
            finish_reason=close.finish_reason,
            timings=close.timings,
            finished_at=self._clock() if close.finished_at is None else close.finished_at,
            engine_boot_id=request.engine_boot_id if close.engine_boot_id is None else close.engine_boot_id,
            sequence=previous + 1,
            waived=close.waived,
        )
        self._last[request.tenant_id] = previous + 1
        self._spool.drop_latest(request.request_id)
        self._open.pop(request.request_id, None)
        written = self._spool.append_kept(records.encode(entry.event))
        self._closing.add(written)
        written.add_done_callback(self._written)
        return written

    def _written(self, closing: asyncio.Future[None]) -> None:
        self._closing.discard(closing)
        closing.exception()  # whether or not someone still waits for it, the spool keeps the record

    def _abandon(self, entry: Entry, opened: asyncio.Future[None]) -> None:
        """The caller of open() was cancelled: whatever reached the disk needs an end."""
        if opened.exception() is None:
            entry.start_close(CloseEvent(_NOTHING, Status.CANCELLED, "cancelled"))
        else:
            self._open.pop(entry.request.request_id, None)
