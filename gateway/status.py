"""What the supervisor tells its workers: one small JSON file, replaced atomically, read by whoever asks for readiness.

Kept in the run directory. A reader asks the file each time: that costs some microseconds and can never be stale.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

log = logging.getLogger("radixgate.supervisor")


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine process as the supervisor sees it."""

    name: str
    """The model's name."""
    socket: str
    """Where its Unix socket is, once it listens."""
    up: bool = False
    stage: str = "starting"
    """starting, the engine's own stages while it loads, ready, stalled, restarting or stopped."""
    fraction: float | None = None
    """How much of the stage is done, 0 to 1; None when that is not known."""
    message: str = ""
    """Why it is not up, in words for an operator."""
    pid: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """The state of the whole server."""

    stage: str
    """starting, ready, degraded (was ready; something is being restarted), draining or stopped."""
    message: str
    redis_url: str
    redis_up: bool = False
    engines: dict[str, EngineStatus] = field(default_factory=dict)
    supervisor_pid: int = 0
    started_at: float = 0.0
    """Seconds since 1970."""

    @property
    def ready(self) -> bool:
        return self.stage == "ready"

    @property
    def draining(self) -> bool:
        return self.stage in ("draining", "stopped")


NO_STATUS = Status(stage="starting", message="the supervisor has not written its status yet", redis_url="")


class StatusFile:
    """The writer's end. Every change of `current` is in the file when the call returns, unless the disk is full."""

    def __init__(self, path: Path, initial: Status) -> None:
        self.path = path
        self.current = replace(initial, supervisor_pid=os.getpid(), started_at=time.time())
        self._write()

    def update(self, **changes: Any) -> None:
        """Change fields of the server's status."""
        self._set(replace(self.current, **changes))

    def update_engine(self, name: str, **changes: Any) -> None:
        """Change fields of one engine's status."""
        engine = replace(self.current.engines[name], **changes)
        self._set(replace(self.current, engines={**self.current.engines, name: engine}))

    def _set(self, status: Status) -> None:
        if status != self.current:
            self.current = status
            try:
                self._write()
            except OSError as error:  # a full disk ends no server; the next change tries again
                log.warning("%s cannot be written: %s", self.path, error.strerror)

    def _write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self.current)))
        part.replace(self.path)


class StatusReader:
    """The readers' end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = ""
        self._status = NO_STATUS

    def read(self) -> Status:
        """The latest status; NO_STATUS before there is one. Unchanged text is not parsed again."""
        try:
            text = self._path.read_text()
            if text != self._text:
                self._status = parse(text)
                self._text = text
        except (OSError, ValueError, TypeError, KeyError):
            pass  # keep the last one that was whole
        return self._status


def parse(text: str) -> Status:
    """The status in a file's text. Raises ValueError, TypeError or KeyError when it is none."""
    record = json.loads(text)
    engines = {name: EngineStatus(**engine) for name, engine in record.pop("engines").items()}
    return Status(engines=engines, **record)
