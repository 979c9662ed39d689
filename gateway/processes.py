"""Child processes: started in a session of their own, tied to us by a pipe, reaped at once, findable after a crash.

A terminal's Ctrl-C goes to its foreground group. The children are in other sessions, so the supervisor alone hears it
and ends them in order. A child is given the read end of a pipe, its lifeline: when we are gone, it reads the end. Each
has a pipe of its own, since whether reads block is a property of the pipe's end and not of the descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MAX_LOG_BYTES = 16 * 2**20
KILL_WAIT_S = 10.0
_SECRET_VARIABLES = ("RADIXGATE_REDIS_URL", "RADIXGATE_ADMIN_KEY")


class Lifeline:
    """A pipe that ends when we do: the child gets `fd`, we keep the other end open as long as the child lives."""

    def __init__(self) -> None:
        self.fd, self._our_end = os.pipe()

    def handed_over(self) -> None:
        """The child has its end."""
        os.close(self.fd)

    def end(self) -> None:
        os.close(self._our_end)


class Child:
    """A running child. `exited` resolves with its return code, negative for a signal."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], lifeline: Lifeline | None = None) -> None:
        self.name = name
        self.lifeline = lifeline
        self.pid = process.pid
        self.process = process
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self.exited.done()

    def signal(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill_all(self) -> None:
        """SIGKILL to the child and to whatever it started in its session's group."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within the time."""
        return bool((await asyncio.wait([self.exited], timeout=timeout_s))[0])


class Children:
    """Starts and reaps. Needs the running loop of the main thread; takes its SIGCHLD."""

    def __init__(self, run_dir: Path) -> None:
        self._records = run_dir / "children.json"
        self._running: dict[int, Child] = {}
        self._adopted: dict[str, int] = {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def spawn(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        lifeline: Lifeline | None = None,
        pass_fds: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> Child:
        """Start `command`, its output appended to `log`. `lifeline` is ours from here on. Raises OSError."""
        _rotate(log)
        environment = {key: value for key, value in os.environ.items() if key not in _SECRET_VARIABLES}
        inherited = (*pass_fds, lifeline.fd) if lifeline is not None else tuple(pass_fds)
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=output,
                    stderr=output,
                    pass_fds=inherited,
                    env=environment,
                    start_new_session=True,
                )
        except OSError:
            if lifeline is not None:
                lifeline.end()
            raise
        finally:
            if lifeline is not None:
                lifeline.handed_over()
        child = Child(name, process, lifeline)
        self._running[child.pid] = child
        self._write_records()
        return child

    def adopt(self, name: str, pid: int) -> None:
        """Keep an earlier run's child in the records, so that the next run finds it too."""
        self._adopted[name] = pid
        self._write_records()

    def close(self) -> None:
        """End of the lifelines: whatever is still there learns that it is alone."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        for child in self._running.values():
            if child.lifeline is not None:
                child.lifeline.end()

    def _reap(self) -> None:
        ended = [child for child in self._running.values() if child.process.poll() is not None]
        for child in ended:
            del self._running[child.pid]
            if child.lifeline is not None:
                child.lifeline.end()
            if not child.exited.done():
                child.exited.set_result(child.process.returncode)
        if ended:
            self._write_records()

    def _write_records(self) -> None:
        pids = self._adopted | {child.name: child.pid for child in self._running.values()}
        records = {name: [pid, start_mark(pid)] for name, pid in pids.items()}
        part = self._records.with_suffix(".part")
        with contextlib.suppress(OSError):  # a full disk ends no server
            part.write_text(json.dumps(records))
            part.replace(self._records)


def leftovers(run_dir: Path) -> dict[str, int]:
    """Name -> pid of an earlier run's children that are still alive."""
    try:
        records = json.loads((run_dir / "children.json").read_text())
        return {name: pid for name, (pid, mark) in records.items() if mark is not None and start_mark(pid) == mark}
    except (OSError, ValueError, TypeError):
        return {}


def end_leftover(pid: int, *, patience_s: float = 0.0) -> None:
    """End a process that is not our child: SIGTERM, and SIGKILL to its group after `patience_s`. Blocks."""
    mark = start_mark(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if patience_s > 0:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # a stopped process hears nothing
            _await_end(pid, mark, patience_s)
        if start_mark(pid) == mark is not None:
            os.killpg(pid, signal.SIGKILL)
            _await_end(pid, mark, KILL_WAIT_S)


def _await_end(pid: int, mark: str | None, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while start_mark(pid) == mark and time.monotonic() < deadline:
        time.sleep(0.02)


def start_mark(pid: int) -> str | None:
    """When that process began, so that a recycled pid is told from the one we knew; None when there is none."""
    if sys.platform == "linux":
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return shown or None


def describe_exit(code: int) -> str:
    """How a child ended, in words."""
    if code >= 0:
        return f"it ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; the kernel does this when memory runs out" if -code == signal.SIGKILL else ""
    return f"it was ended by {name}{hint}"


def log_tail(log: Path, n_lines: int = 6) -> str:
    """The last lines of a child's log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join("    " + line[:300] for line in lines[-n_lines:])


def _rotate(log: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > MAX_LOG_BYTES:
            log.replace(log.with_name(log.name + ".1"))
