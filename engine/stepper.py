"""The thread that runs the step loop.

Everything that changes the scheduler or the cache happens here, between two steps: other threads leave commands, and
the loop takes them before the next step. With no work it sleeps on a condition and costs nothing.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from engine.backlog import StreamMessage
from engine.loop import EngineLoop

COLLECT_EVERY_STEPS = 2000
FULL_COLLECTION_EVERY = 20
"""Of those collections, one in so many looks at old objects too: requests that outlived an earlier one."""
COLLECT_IDLE_STEPS = 200
BLOCKED_PAUSE_S = 0.005

log = logging.getLogger(__name__)

Command = Callable[[], None]


class StepThread(threading.Thread):
    """`deliver` sends messages without blocking and names requests whose reader is too slow; `on_crash` is called, on
    this thread, with an exception that the loop itself cannot answer for."""

    def __init__(
        self,
        loop: EngineLoop,
        deliver: Callable[[Sequence[StreamMessage]], list[str]],
        on_crash: Callable[[BaseException], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="steps", daemon=True)
        self._loop = loop
        self._deliver = deliver
        self._on_crash = on_crash
        self._clock = clock
        self._commands: deque[Command] = deque()
        self._condition = threading.Condition()
        self._stopping = False
        self._waiting_since: float | None = None
        """When work began to wait for the step that is running or due; None while there is none."""
        self._collected_at_step = 0
        self._n_collections = 0

    # --- any thread ---------------------------------------------------------------------------------------------------

    def between_steps(self, command: Command) -> None:
        """Run `command` on the loop's thread before its next step; at once when it is idle."""
        with self._condition:
            if self._waiting_since is None:
                self._waiting_since = self._clock()
            self._commands.append(command)
            self._condition.notify()

    def stop(self) -> None:
        """End after the step that is running."""
        with self._condition:
            self._stopping = True
            self._condition.notify()

    def waiting_s(self) -> float:
        """Seconds for which work has waited without a finished step. Any thread."""
        since = self._waiting_since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while self._next_commands():
                n_steps = self._loop.counters.steps
                messages = self._loop.step()
                self._say(messages)
                if messages or self._loop.counters.steps > n_steps:
                    self._note_progress()
                else:
                    self._rest()
        except BaseException as error:
            self._on_crash(error)

    def _next_commands(self) -> bool:
        """Wait for work and run what was commanded. False: stop."""
        while True:
            if not self._commands and not self._loop.has_work:
                self._collect_when_idle()
            with self._condition:
                while not self._commands and not self._loop.has_work and not self._stopping:
                    self._waiting_since = None
                    self._condition.wait()
                if self._stopping:
                    return False
                commands, self._commands = self._commands, deque()
            for command in commands:
                command()
            if self._loop.has_work:
                return True

    def _say(self, messages: Sequence[StreamMessage]) -> None:
        if messages:
            for request_id in self._deliver(messages):
                self._loop.cancel(request_id)

    def _note_progress(self) -> None:
        self._waiting_since = self._clock()
        if self._loop.counters.steps - self._collected_at_step >= COLLECT_EVERY_STEPS:
            self._n_collections += 1
            self._collect(1 if self._n_collections % FULL_COLLECTION_EVERY else 2)

    def _rest(self) -> None:
        """Work waits and none of it can run. It still counts as waiting: somebody should look when this lasts."""
        with self._condition:
            if not self._commands and not self._stopping:
                self._condition.wait(BLOCKED_PAUSE_S)

    def _collect_when_idle(self) -> None:
        if self._loop.counters.steps - self._collected_at_step >= COLLECT_IDLE_STEPS:
            self._collect(2)

    def _collect(self, generation: int) -> None:
        """Garbage is collected between steps and never in one: automatic collection is off in this process."""
        self._collected_at_step = self._loop.counters.steps
        gc.collect(generation)
