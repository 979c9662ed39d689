"""The files of a spool: segments of frames in a directory that one process owns.

A spool is a directory `<root>/<spool id>/` with segments `00000001.seg`, ..., a `lock` held by flock for as long as a
process owns it, a `reserve` file, and, once its owner is gone and every request in it is closed, `sealed.json`. The
reserve is 1 MiB of disk that is given up when the disk is full, so that what was opened can still be closed.
"""

from __future__ import annotations

import fcntl
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tenants import frames
from tenants.model import TenantsError

SEGMENT_BYTES = 64 * 1024 * 1024
RESERVE_BYTES = 1024 * 1024


class SpoolLocked(TenantsError):
    """Another process owns this spool."""


class Position(NamedTuple):
    """A place between two frames: segment number (from 1) and byte offset."""

    segment: int
    offset: int


START = Position(1, 0)


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
