"""A process's spool: records durable before anything depends on them.

Writes are grouped: while one group's fsync runs, the next gathers; there is no timer. On a full disk what is new is
refused, and what must be kept may use the reserve; nothing new is taken until the reserve is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tenants import frames
from tenants.model import TenantsError
from tenants.segments import Position, SpoolFiles

RETRY_S = 1.0

_log = logging.getLogger(__name__)


class SpoolFull(TenantsError):
    """The disk has no room for a new request's record."""


class SpoolFailed(TenantsError):
    """The disk refused a write or an fsync for another reason than space."""


class _Append(NamedTuple):
    payload: bytes
    must_keep: bool
    done: asyncio.Future[None]


class Spool:
    """Group commit over SpoolFiles, for one event loop; disk work runs in a thread of its own."""

    def __init__(self, files: SpoolFiles) -> None:
        self.files = files
        self.durable = files.position
        """The end of what fsync has confirmed."""
        self._appends: list[_Append] = []
        self._kept: list[bytes] = []
        self._latest: dict[str, bytes] = {}
        self._wake = asyncio.Event()
        self._advanced: list[asyncio.Event] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._closing = False
        self._healthy = True
        self._task = asyncio.get_running_loop().create_task(self._run(), name="spool")

    def append(self, payload: bytes) -> asyncio.Future[None]:
        """Queue a record; the future ends when it is durable, or with SpoolFull or SpoolFailed when it is dropped."""
        return self._queue(payload, must_keep=False)

    def append_kept(self, payload: bytes) -> asyncio.Future[None]:
        """Like append, for what must not be lost: it may use the reserve, and when even that fails the future ends
        with the error but the record stays queued and is tried again every RETRY_S seconds.
        """
        return self._queue(payload, must_keep=True)

    def put_latest(self, key: str, payload: bytes) -> None:
        """Write a record with the next group, without waiting for its fsync; a newer one of the key replaces it."""
        self._latest[key] = payload
        self._wake.set()

    def drop_latest(self, key: str) -> None:
        self._latest.pop(key, None)

    def notify(self, event: asyncio.Event) -> None:
        """Set `event` whenever `durable` has advanced."""
        self._advanced.append(event)

    @property
    def unwritten(self) -> int:
        """Records that must be kept and wait for room on the disk."""
        return len(self._kept)

    async def close(self, seal: Callable[[SpoolFiles], None]) -> None:
        """Write what is queued, stop, `seal` the files if all of it was written, and release them. Raises SpoolFailed
        when some record that must be kept could not be written.
        """
        self._closing = True
        self._wake.set()
        await self._task
        self._thread.shutdown()
        try:
            if self.unwritten:
                raise SpoolFailed(f"{self.unwritten} finished requests could not be written to {self.files.path}")
            await asyncio.to_thread(seal, self.files)
        finally:
            self.files.close()

    def _queue(self, payload: bytes, *, must_keep: bool) -> asyncio.Future[None]:
        if self._closing:
            raise SpoolFailed("the spool is closed")
        if len(payload) > frames.MAX_PAYLOAD_BYTES:
            raise ValueError(f"a record of {len(payload)} bytes is over the limit of {frames.MAX_PAYLOAD_BYTES}")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._appends.append(_Append(payload, must_keep, done))
        self._wake.set()
        return done

    async def _run(self) -> None:
        while not self._closing or self._appends or self._latest:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._kept else None):
                    await self._wake.wait()
            self._wake.clear()
            if self._appends or self._latest or self._kept:
                await self._commit()

    async def _commit(self) -> None:
        """One group: all of it, else what must be kept."""
        appends, self._appends = self._appends, []
        latest, self._latest = self._latest, {}
        kept, self._kept = self._kept, []
        everything = [*kept, *(append.payload for append in appends), *latest.values()]
        error = await self._write(everything, sync=bool(kept or appends), needs_reserve=not _all_kept(appends))
        if error is not None:
            refused = [append for append in appends if not append.must_keep]
            _settle(refused, error)
            appends = [append for append in appends if append.must_keep]
            kept += [append.payload for append in appends]
            error = await self._write_with_reserve(kept) if kept else None
            if error is not None:
                self._kept = kept
        _settle(appends, error)

    async def _write_with_reserve(self, payloads: list[bytes]) -> TenantsError | None:
        self.files.release_reserve()
        return await self._write(payloads, sync=True, needs_reserve=False)

    async def _write(self, payloads: list[bytes], *, sync: bool, needs_reserve: bool) -> TenantsError | None:
        try:
            loop = asyncio.get_running_loop()
            position = await loop.run_in_executor(self._thread, self._write_in_thread, payloads, sync, needs_reserve)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            reason = f"{self.files.path}: {error.strerror or error}"
            if self._healthy:
                _log.error("the spool cannot be written: %s", reason)
            self._healthy = False
            return (
                SpoolFull(f"no room for the ledger's spool: {reason}; free some disk") if full else SpoolFailed(reason)
            )
        self._healthy = True
        if sync:
            self.durable = position
            for event in self._advanced:
                event.set()
        return None

    def _write_in_thread(self, payloads: list[bytes], sync: bool, needs_reserve: bool) -> Position:
        if needs_reserve and not self.files.has_reserve:
            self.files.restore_reserve()
        self.files.append(payloads)
        if sync:
            self.files.sync()
        return self.files.position


def _all_kept(appends: list[_Append]) -> bool:
    return all(append.must_keep for append in appends)


def _settle(appends: list[_Append], error: TenantsError | None) -> None:
    for append in appends:
        if append.done.done():
            continue
        if error is None:
            append.done.set_result(None)
        else:
            append.done.set_exception(error)
