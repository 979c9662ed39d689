"""A spool: the append-only record of one process, durable before anything depends on it.

A spool is a directory `<root>/<spool id>/` with segments `00000001.seg`, ..., a `lock` held by flock for as long as a
process owns it, a `reserve` file, and, once its owner is gone and every request in it is closed, `sealed.json`.

Writes are grouped: while one group's fsync runs, the next gathers; there is no timer. The reserve is 1 MiB of disk that
is given up when the disk is full, so that what was opened can still be closed; nothing new is opened until it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tenants import frames
from tenants.model import TenantsError

SEGMENT_BYTES = 64 * 1024 * 1024
RESERVE_BYTES = 1024 * 1024
RETRY_S = 1.0

_log = logging.getLogger(__name__)


class SpoolFull(TenantsError):
    """The disk has no room for a new request's record."""


class SpoolFailed(TenantsError):
    """The disk refused a write or an fsync for another reason than space."""


class SpoolLocked(TenantsError):
    """Another process owns this spool."""


class Position(NamedTuple):
    """A place between two frames: segment number (from 1) and byte offset."""

    segment: int
    offset: int


START = Position(1, 0)


# --- files ------------------------------------------------------------------------------------------------------------


class SpoolFiles:
    """The owner's side of a spool directory: lock, segments, reserve. Synchronous; one thread at a time."""

    def __init__(self, path: Path, lock_fd: int, segment_bytes: int) -> None:
        self.path = path
        self.id = path.name
        self.segment_bytes = segment_bytes
        self._lock_fd = lock_fd
        self._fd: int | None = None
        self._number = max(segment_numbers(path), default=0)
        self._offset = 0

    @classmethod
    def create(cls, root: Path, *, segment_bytes: int = SEGMENT_BYTES) -> SpoolFiles:
        """A new spool with a random id. Raises OSError when the directory cannot be written.

        It appears under its name only when it is locked, so that nobody takes it for an orphan.
        """
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        spool_id = uuid.uuid4().hex
        unnamed = root / f".new-{spool_id}"
        unnamed.mkdir(mode=0o700)
        lock_fd = _lock(unnamed)
        unnamed.rename(root / spool_id)
        _sync_directory(root)
        files = cls(root / spool_id, lock_fd, segment_bytes)
        files.restore_reserve()
        return files

    @classmethod
    def adopt(cls, path: Path, *, segment_bytes: int = SEGMENT_BYTES) -> SpoolFiles:
        """An existing spool. Records go to a new segment, the old ones stay as they are. Raises SpoolLocked."""
        return cls(path, _lock(path), segment_bytes)

    @property
    def position(self) -> Position:
        """The end of what was written."""
        if self._fd is not None:
            return Position(self._number, self._offset)
        return end_of(self.path)

    @property
    def has_reserve(self) -> bool:
        return (self.path / "reserve").exists()

    def append(self, payloads: list[bytes]) -> None:
        """Write frames, all or none of them. Raises OSError."""
        data = b"".join(map(frames.frame, payloads))
        if self._fd is None or self._offset >= self.segment_bytes:
            self._start_segment()
        assert self._fd is not None
        try:
            frames.write_all(self._fd, data)
        except OSError:
            self._drop_after(self._offset)
            raise
        self._offset += len(data)

    def sync(self) -> None:
        """What was appended is on the disk. Raises OSError; then what the disk holds is unknown, and the next append
        starts a new segment.
        """
        if self._fd is None:
            return
        try:
            sync_file(self._fd)
        except OSError:
            self._close_segment()
            raise

    def release_reserve(self) -> None:
        (self.path / "reserve").unlink(missing_ok=True)

    def restore_reserve(self) -> None:
        """Raises OSError when there is no room for it."""
        target = self.path / "reserve"
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            frames.write_all(fd, bytes(RESERVE_BYTES))
            sync_file(fd)
        except OSError:
            target.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def close(self) -> None:
        """Give up the lock. The files stay."""
        self._close_segment()
        os.close(self._lock_fd)

    def _start_segment(self) -> None:
        self._close_segment()
        number = self._number + 1
        path = segment_path(self.path, number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            frames.write_all(fd, frames.header(self.id, number))
            sync_file(fd)
            _sync_directory(self.path)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._fd, self._number, self._offset = fd, number, frames.HEADER_BYTES

    def _close_segment(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _drop_after(self, offset: int) -> None:
        """Undo a partial write; when even that fails, its torn frame ends this segment."""
        assert self._fd is not None
        try:
            os.ftruncate(self._fd, offset)
        except OSError:
            self._close_segment()


def segment_path(spool: Path, number: int) -> Path:
    return spool / f"{number:08d}.seg"


def segment_numbers(spool: Path) -> list[int]:
    return sorted(int(path.stem) for path in spool.glob("*.seg") if path.stem.isdigit())


def end_of(spool: Path) -> Position:
    """Where the spool's files end now."""
    numbers = segment_numbers(spool)
    return Position(numbers[-1], segment_path(spool, numbers[-1]).stat().st_size) if numbers else START


def orphans(root: Path) -> list[Path]:
    """Every spool directory under `root`, oldest first; whether it has an owner shows when it is adopted."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if path.is_dir() and len(path.name) == 32 and (path / "lock").exists()]
    return sorted(found, key=lambda path: (path.stat().st_ctime, path.name))


class Records(NamedTuple):
    """Some records of a spool, and where reading goes on."""

    frames: list[frames.Frame]
    position: Position
    faults: list[frames.Fault]


def read(spool: Path, position: Position, end: Position) -> Records:
    """The next records from `position`, at most about 2 MiB; `position` of the result equals `end` when done."""
    numbers = [number for number in segment_numbers(spool) if position.segment <= number <= end.segment]
    for number in numbers:
        offset = position.offset if number == position.segment else 0
        path = segment_path(spool, number)
        stop = end.offset if number == end.segment else path.stat().st_size
        if offset < stop:
            window = frames.read_window(path, offset, stop)
            return Records(window.frames, Position(number, window.next_offset), window.faults)
    return Records([], end, [])


def read_all(spool: Path, end: Position) -> Iterator[Records]:
    position = START
    while position != end:
        records = read(spool, position, end)
        position = records.position
        yield records


def bytes_between(spool: Path, position: Position, end: Position) -> int:
    total = 0
    for number in segment_numbers(spool):
        if position.segment <= number <= end.segment:
            stop = end.offset if number == end.segment else segment_path(spool, number).stat().st_size
            total += stop - (position.offset if number == position.segment else 0)
    return total


def sync_file(fd: int) -> None:
    """The file's bytes are on the medium, not only in the drive's cache."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(fd)


def write_atomically(path: Path, data: bytes) -> None:
    """The whole file or none of it, also after a crash."""
    unnamed = path.with_suffix(".tmp")
    fd = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        frames.write_all(fd, data)
        sync_file(fd)
    finally:
        os.close(fd)
    unnamed.rename(path)
    _sync_directory(path.parent)


def _lock(path: Path) -> int:
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise SpoolLocked(f"the spool {path} belongs to a running process; each process has its own") from None
    return fd


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- group commit -----------------------------------------------------------------------------------------------------


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
