"""Taking over the spool of a process that is gone: what it left open is closed, and the spool is sealed."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec

from tenants import records
from tenants.model import LedgerEvent, Status, Timings, TokenUsage
from tenants.records import OpenRecord, ProgressRecord
from tenants.segments import SpoolFiles, SpoolLocked, end_of, orphans, read_all, write_atomically

_log = logging.getLogger(__name__)
_NOTHING = TokenUsage()


class Seal(NamedTuple):
    """The summary of a spool that grows no more."""

    version: int
    last: dict[str, int]
    """Tenant id -> sequence of its last event here."""


class Adopted(NamedTuple):
    """An orphan spool, now ours and sealed. `files` holds its lock."""

    files: SpoolFiles
    last: dict[str, int]
    aborted: int
    """Requests that were open when the owner died."""


def adopt_orphans(root: Path) -> list[Adopted]:
    """Take over every spool under `root` that nobody owns. Those without a single request are removed.

    Blocking. Idempotent: killed at any point, the next call does what is missing.
    """
    adopted = []
    for path in orphans(root):
        try:
            files = SpoolFiles.adopt(path)
        except (SpoolLocked, FileNotFoundError):
            continue
        last, aborted = _read_seal(path), 0
        if last is None:
            last, aborted = _close_open_requests(files)
            seal(files, last)
        if last:
            adopted.append(Adopted(files, last, aborted))
        else:
            shutil.rmtree(path, ignore_errors=True)
            files.close()
    return adopted


def seal(files: SpoolFiles, last: dict[str, int]) -> None:
    """Note that every request in the spool is closed, so that it need not be read again unless Redis lost events."""
    files.release_reserve()
    write_atomically(files.path / "sealed.json", msgspec.json.encode(Seal(1, last)))


def _close_open_requests(files: SpoolFiles) -> tuple[dict[str, int], int]:
    """Append a CLOSE for each OPEN without one. Returns the last sequences by tenant and how many were open.

    Unreadable bytes may have held CLOSEs that Redis has booked, so new sequences start beyond any that fit into them;
    a request booked under its lost CLOSE is not booked again, because Redis knows its id.
    """
    opened: dict[str, OpenRecord] = {}
    progress: dict[str, ProgressRecord] = {}
    last: dict[str, int] = {}
    lost_bytes = 0
    for chunk in read_all(files.path, end_of(files.path)):
        for fault in chunk.faults:
            _log.log(logging.WARNING if fault.torn else logging.ERROR, "%s", fault)
            lost_bytes += fault.n_bytes
        for frame in chunk.frames:
            record = records.decode(frame.payload)
            if isinstance(record, OpenRecord):
                opened[record.request_id] = record
            elif isinstance(record, ProgressRecord):
                progress[record.request_id] = record
            else:
                opened.pop(record.request_id, None)
                progress.pop(record.request_id, None)
                last[record.tenant_id] = max(record.sequence, last.get(record.tenant_id, 0))
    payloads = []
    for request in opened.values():
        sequence = last.get(request.tenant_id, 0) + 1 + lost_bytes
        event = _aborted(request, progress.get(request.request_id), sequence)
        last[request.tenant_id] = event.sequence
        payloads.append(records.encode(event))
    if payloads:
        files.release_reserve()
        files.append(payloads)
        files.sync()
    return last, len(payloads)


def _aborted(request: OpenRecord, progress: ProgressRecord | None, sequence: int) -> LedgerEvent:
    """The end of a request whose process died: billed for what its last PROGRESS says was handed over."""
    usage = progress.usage if progress else _NOTHING
    return records.close_event(
        request,
        usage,
        Status.ABORTED,
        finish_reason="aborted",
        timings=Timings(),
        finished_at=progress.time_s if progress else request.started_at,
        engine_boot_id=request.engine_boot_id,
        sequence=sequence,
    )


def _read_seal(path: Path) -> dict[str, int] | None:
    try:
        found = msgspec.json.decode((path / "sealed.json").read_bytes(), type=Seal)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    return found.last if found.version == 1 else None
