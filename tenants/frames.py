"""The bytes of a spool segment: a versioned header, then frames; how to write them and how to read them back.

    header  magic 8 | version u32 | segment number u32 | spool id 16 | crc32 u32 of all before it
    frame   sync 2  | length u32 | crc32 u32 of the length and the payload | payload

Little-endian. A process that dies while writing leaves a torn tail: bytes after the last good frame, with no good frame
after them. Anything else that does not check is damage: it is reported with its place, and reading goes on at the next
good frame, found by its sync mark.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from tenants.model import TenantsError

FORMAT_VERSION = 1
MAX_PAYLOAD_BYTES = 1 << 20
_MAGIC = b"RGSPOOL\n"
_SYNC = b"\xa7\x1e"
_HEADER = struct.Struct("<8sII16s")
_FRAME = struct.Struct("<2sII")
_U32 = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _U32.size
_WINDOW_BYTES = 2 * (MAX_PAYLOAD_BYTES + _FRAME.size)


class SpoolVersionError(TenantsError):
    """A segment was written by another version of this format."""


class Frame(NamedTuple):
    offset: int
    payload: bytes


class Fault(NamedTuple):
    """Bytes of a segment that are no frame. `torn`: nothing good follows them in the segment."""

    path: Path
    offset: int
    n_bytes: int
    torn: bool

    def __str__(self) -> str:
        what = "torn tail" if self.torn else "damaged bytes"
        return f"{self.path}: {what}, {self.n_bytes} bytes at offset {self.offset}"


class Window(NamedTuple):
    frames: list[Frame]
    next_offset: int
    faults: list[Fault]


def header(spool_id: str, number: int) -> bytes:
    body = _HEADER.pack(_MAGIC, FORMAT_VERSION, number, bytes.fromhex(spool_id))
    return body + _U32.pack(zlib.crc32(body))


def frame(payload: bytes) -> bytes:
    return _FRAME.pack(_SYNC, len(payload), _checksum(payload)) + payload


def read_window(path: Path, offset: int, end: int) -> Window:
    """The frames from `offset` on, up to about 2 MiB and never past `end`; start at offset 0.

    `next_offset` is where to go on; it equals `end` when the segment is read through. Raises SpoolVersionError.
    """
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(min(_WINDOW_BYTES, end - offset))
        faults: list[Fault] = []
        position = 0
        if offset == 0:
            position = min(HEADER_BYTES, len(data))
            if not _check_header(path, data):
                faults.append(Fault(path, 0, position, torn=len(data) < HEADER_BYTES))
        frames: list[Frame] = []
        at_end = offset + len(data) == end
        while position < len(data):
            payload = _frame_at(data, position)
            if payload is not None:
                frames.append(Frame(offset + position, payload))
                position += _FRAME.size + len(payload)
            elif not at_end and len(data) - position < _WINDOW_BYTES // 2:
                break
            else:
                fault = _fault_at(path, file.read(end - offset - len(data)), data, offset, position, end)
                faults.append(fault)
                return Window(frames, fault.offset + fault.n_bytes, faults)
    return Window(frames, offset + position, faults)


def _fault_at(path: Path, rest: bytes, data: bytes, offset: int, position: int, end: int) -> Fault:
    """The extent of what does not check at `position` of the window: up to the next good frame, or to the end."""
    data += rest
    following = data.find(_SYNC, position + 1)
    while following >= 0 and _frame_at(data, following) is None:
        following = data.find(_SYNC, following + 1)
    if following < 0:
        return Fault(path, offset + position, end - offset - position, torn=True)
    return Fault(path, offset + position, following - position, torn=False)


def _frame_at(data: bytes, position: int) -> bytes | None:
    if len(data) - position < _FRAME.size:
        return None
    sync, length, checksum = _FRAME.unpack_from(data, position)
    start = position + _FRAME.size
    if sync != _SYNC or length > MAX_PAYLOAD_BYTES or start + length > len(data):
        return None
    payload = data[start : start + length]
    return payload if _checksum(payload) == checksum else None


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_U32.pack(len(payload))))


def _check_header(path: Path, data: bytes) -> bool:
    """Whether the header is sound. Raises SpoolVersionError for a sound one of another version."""
    body, check = data[: _HEADER.size], data[_HEADER.size : HEADER_BYTES]
    if len(check) < _U32.size or _U32.pack(zlib.crc32(body)) != check:
        return False
    magic, version, _, _ = _HEADER.unpack(body)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise SpoolVersionError(
            f"{path} is in spool format {version}; this version of radixgate reads format {FORMAT_VERSION}; "
            "drain it with the version that wrote it"
        )
    return True


def write_all(fd: int, data: bytes) -> None:
    """Every byte, or OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
