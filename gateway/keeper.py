"""Keeps one child process running: starts it, listens to its status lines, replaces it when it dies or hangs.

The child writes JSON lines to an inherited pipe: `progress` while it starts, `ready` once, and `beat`s; `failed` when
it cannot start at all. Silence, or work that waits with no finished step, means that it hangs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway.failures import ChildFailed, child_failure
from gateway.processes import Child, Children, Lifeline, describe_exit, log_tail

FIRST_BACK_OFF_S = 0.5
LAST_BACK_OFF_S = 30.0
HEALTHY_S = 60.0
"""A child that lived this long starts the back-off anew when it dies."""
MIN_SILENCE_S = 3.0
"""Beats come once a second; less than this is no silence."""
MAX_SILENCE_S = 30.0
"""A child may let work wait for `stall_s`, which may be long; one that is alive at all says so more often."""
LOADING_SILENCE_S = 600.0
"""Before the first beat: a stage of the start may take long."""
LOADING_MIN_SILENCE_S = 30.0
"""Between beats before the child is ready: importing a large library can hold all of its threads for seconds."""
START_ATTEMPTS = 3
DUMP_S = 1.0
"""How long a hanging child has to write its stacks after SIGUSR1."""
LAST_WORDS_S = 5.0


@dataclass(frozen=True, slots=True)
class ChildState:
    """What is known of the child; `stage` is as in gateway.status.EngineStatus."""

    stage: str = "starting"
    fraction: float | None = None
    message: str = ""
    up: bool = False
    pid: int | None = None
    restarts: int = 0


class Keeper:
    """One child, from first start to stop().

    Args:
        name: for logs and records.
        command: the command line, given the descriptors of the status pipe and of the lifeline.
        pass_fds: further descriptors that the child inherits.
        on_change: told of every new state.
        stall_s: how long the child's work may wait, or the child be silent, before it is replaced; silence counts from
            MAX_SILENCE_S on at the latest.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int, int], Sequence[str]],
        children: Children,
        log: Path,
        *,
        stall_s: float,
        on_change: Callable[[ChildState], None],
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.state = ChildState()
        self.ready = asyncio.Event()
        """Set when the child has been ready for the first time."""
        self._command = command
        self._children = children
        self._log = log
        self._stall_s = stall_s
        self._on_change = on_change
        self._pass_fds = tuple(pass_fds)
        self._child: Child | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Until stop(). Raises ServeError when the child cannot start; once it was ready it is restarted for ever."""
        loop = asyncio.get_running_loop()
        deaths = 0
        while not self._stopping.is_set():
            started_s = loop.time()
            reason = await self._run_once()
            if self._stopping.is_set():
                break
            deaths = 1 if loop.time() - started_s > HEALTHY_S else deaths + 1
            if not self.ready.is_set() and deaths >= START_ATTEMPTS:
                raise ChildFailed(
                    f"{self.name} does not start: {reason}. Its log {self._log} ends with\n{log_tail(self._log)}"
                )
            back_off_s = min(FIRST_BACK_OFF_S * 2 ** (deaths - 1), LAST_BACK_OFF_S)
            message = f"{reason}; it is restarted"
            self._change(
                stage="restarting", up=False, pid=None, fraction=None, message=message, restarts=self.state.restarts + 1
            )
            await _first_of(self._stopping.wait(), asyncio.sleep(back_off_s))
        self._change(stage="stopped", up=False, pid=None)

    async def stop(self, patience_s: float, hurry: asyncio.Event) -> None:
        """SIGTERM; SIGKILL after `patience_s` or as soon as `hurry` is set."""
        self._stopping.set()
        child = self._child
        if child is not None and child.alive:
            child.signal(signal.SIGTERM)
            await _first_of(child.wait(patience_s), hurry.wait())
            child.kill_all()
            await child.wait(LAST_WORDS_S)

    # --- one life -----------------------------------------------------------------------------------------------------

    async def _run_once(self) -> str:
        """Start the child and listen until it is gone. Returns why it went. Raises ServeError on its own word."""
        read_fd, write_fd = os.pipe()
        lifeline = Lifeline()
        try:
            child = self._child = self._children.spawn(
                self.name,
                self._command(write_fd, lifeline.fd),
                self._log,
                lifeline=lifeline,
                pass_fds=(write_fd, *self._pass_fds),
            )
        except OSError as error:
            os.close(read_fd)
            raise ChildFailed(f"{self.name} cannot be started: {error}") from None
        finally:
            os.close(write_fd)
        lines = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(read_fd, "rb", 0)
        )
        self._change(stage="starting", up=False, fraction=None, message="", pid=child.pid)
        try:
            fault = await self._listen(lines)
            if fault is not None:
                await self._replace(child, fault)
                return fault
            if not await child.wait(LAST_WORDS_S):
                child.kill_all()
                await child.wait(LAST_WORDS_S)
            return describe_exit(child.exited.result()) if not child.alive else "it cannot be killed"
        finally:
            transport.close()

    async def _listen(self, lines: asyncio.StreamReader) -> str | None:
        """Follow the status lines. Returns what is wrong with a child that hangs; None when the pipe has ended."""
        floor_s = LOADING_MIN_SILENCE_S
        patience_s = max(LOADING_SILENCE_S, self._stall_s)
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    line = await lines.readline()
            except TimeoutError:
                return f"it has said nothing for {patience_s:.0f} s"
            if not line:
                return None
            message = _parse(line)
            kind = message.get("type")
            if kind == "progress":
                self._change(stage=str(message.get("stage", "")), fraction=_number(message.get("fraction")))
            elif kind == "ready":
                floor_s = MIN_SILENCE_S
                patience_s = max(min(self._stall_s, MAX_SILENCE_S), floor_s)
                self._change(stage="ready", up=True, fraction=None, message="")
                self.ready.set()
            elif kind == "failed":
                self._fail(message)
            elif kind == "beat":
                patience_s = max(min(self._stall_s, MAX_SILENCE_S), floor_s)
                waiting_s = _number(message.get("waiting_s")) or 0.0
                if waiting_s > self._stall_s:
                    return f"work has waited {waiting_s:.0f} s without a finished step"

    def _fail(self, message: dict[str, Any]) -> None:
        """The child's own word that it cannot start: final, unless it could before."""
        text = str(message.get("message") or message.get("code") or "it gave no reason")
        if not self.ready.is_set():
            raise child_failure(str(message.get("code")), f"{self.name}: {text}")
        self._change(stage="restarting", up=False, message=text)

    async def _replace(self, child: Child, fault: str) -> None:
        """End a child that hangs, with its stacks in the log."""
        self._change(stage="stalled", up=False, message=fault)
        child.signal(signal.SIGUSR1)
        child.signal(signal.SIGCONT)  # a stopped process writes nothing
        await child.wait(DUMP_S)
        child.kill_all()
        await child.wait(LAST_WORDS_S)

    def _change(self, **changes: Any) -> None:
        state = replace(self.state, **changes)
        if state != self.state:
            self.state = state
            self._on_change(state)


async def _first_of(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
