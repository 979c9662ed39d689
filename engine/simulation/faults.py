"""What goes wrong in a simulated engine, and when; all of it from one random source."""

from __future__ import annotations

import random

from engine.plan import Chunk, StepPlan
from engine.simulation.clock import VirtualClock


class StepFault(Exception):
    """A step that throws."""


class Faults:
    """Hooks of FakeRunner. `poisoned` requests make every step throw that computes a token of theirs at or past the
    given position; `nan` outputs get a row of NaN when they have so many tokens."""

    def __init__(self, clock: VirtualClock, rng: random.Random) -> None:
        self.poisoned: dict[str, int] = {}
        self.nan: dict[tuple[str, int], int] = {}
        self.fail_next = False
        """The next call throws, once."""
        self.fail_next_late = False
        """The same, but after it wrote its slots."""
        self.slow_next_s = 0.0
        self._clock = clock
        self._rng = rng

    def draw(self, *, failing: float, slow: float) -> None:
        """Decide what happens to the next step."""
        fails = self._rng.random() < failing
        late = self._rng.random() < 0.5
        self.fail_next, self.fail_next_late = fails and not late, fails and late
        self.slow_next_s = self._rng.uniform(0.5, 5.0) if self._rng.random() < slow else 0.0

    def before(self, plan: StepPlan) -> None:
        self._clock.advance(self.slow_next_s)
        self.slow_next_s = 0.0
        if self.fail_next:
            self.fail_next = False
            raise StepFault("a fault of the device")

    def after(self, plan: StepPlan) -> None:
        if plan.chunks and self.fail_next_late:
            self.fail_next_late = False
            raise StepFault("a late fault of the device")
        for chunk in plan.chunks:
            if chunk.end > self.poisoned.get(chunk.sequence.request.id, 1 << 60):
                raise StepFault(f"poisoned by {chunk.sequence.request.id}")

    def is_nan(self, chunk: Chunk) -> bool:
        sequence = chunk.sequence
        at = self.nan.get((sequence.request.id, sequence.output_index))
        return at is not None and len(sequence.tokens) >= at
