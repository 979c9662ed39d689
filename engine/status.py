"""What an engine process tells whoever started it: JSON lines on an inherited file descriptor."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

BEAT_S = 1.0
LAST_WORD_S = 5.0


class Beat(NamedTuple):
    """One heartbeat."""

    steps: int
    waiting_s: float
    """Seconds for which work has waited without a finished step; 0 when there is none or it advances."""
    queue: int
    running: int


class StatusLine:
    """Writes the lines. Without a descriptor they go to stderr, for a person who starts an engine by hand.

    A reader that is gone or does not read never stops the engine: heartbeats are dropped then.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        if fd is not None:
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)

    def progress(self, stage: str, fraction: float) -> None:
        """`fraction` of this stage is done, 0 to 1."""
        self._write({"type": "progress", "stage": stage, "fraction": round(min(max(fraction, 0.0), 1.0), 4)}, 0.0)

    def ready(self) -> None:
        self._write({"type": "ready"}, LAST_WORD_S)

    def failed(self, code: str, message: str) -> None:
        self._write({"type": "failed", "code": code, "message": message}, LAST_WORD_S)

    def beat(self, beat: Beat) -> None:
        if self._fd is not None:
            fields = {"steps": beat.steps, "waiting_s": round(beat.waiting_s, 3)}
            self._write({"type": "beat", **fields, "queue": beat.queue, "running": beat.running}, 0.0)

    def _write(self, line: dict[str, Any], patience_s: float) -> None:
        data = json.dumps(line).encode() + b"\n"
        if self._fd is None:
            sys.stderr.write(data.decode())
            return
        with self._lock:
            try:
                while data:
                    if not select.select([], [self._fd], [], patience_s)[1]:
                        return
                    data = data[os.write(self._fd, data) :]
                    patience_s = LAST_WORD_S  # never leave half a line
            except OSError:
                self._fd = None


class Heart(threading.Thread):
    """Beats once a second from a thread of its own, so that a step which hangs is seen from outside, and a process
    that was stopped while it loads."""

    def __init__(self, status: StatusLine) -> None:
        super().__init__(name="heart", daemon=True)
        self._status = status
        self._work: Callable[[], Beat] = lambda: Beat(0, 0.0, 0, 0)
        self._stopped = threading.Event()

    def follow(self, work: Callable[[], Beat]) -> None:
        """From now on tell what `work` says; before, there is none that could wait."""
        self._work = work

    def beat(self) -> None:
        self._status.beat(self._work())

    def run(self) -> None:
        while True:
            self.beat()
            if self._stopped.wait(BEAT_S):
                return

    def stop(self) -> None:
        self._stopped.set()
