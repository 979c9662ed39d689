"""The step that is being planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.admission import Leaders
from engine.plan import Chunk, StepPlan
from engine.sequence import Sequence

if TYPE_CHECKING:
    from radix_cache.cache import BlockCopy


class StepDraft:
    """Chunks and copies so far, and what is left of the token budget."""

    def __init__(self, step: int, budget_tokens: int, leaders: Leaders) -> None:
        self.step = step
        self.budget_tokens = budget_tokens
        self.leaders = leaders
        self.chunks: dict[Sequence, Chunk] = {}
        self.copies: dict[Sequence, list[BlockCopy]] = {}
        self.fences: dict[Sequence, int] = {}
        self.started: set[Sequence] = set()
        """Admitted in this step: what they matched may lie behind a fence of it."""

    def add(self, chunk: Chunk) -> None:
        self.chunks[chunk.sequence] = chunk
        self.budget_tokens -= chunk.n_tokens
        chunk.sequence.scheduled_step = self.step

    def add_copies(self, sequence: Sequence, copies: list[BlockCopy]) -> None:
        if copies:
            self.copies.setdefault(sequence, []).extend(copies)

    def drop(self, sequence: Sequence) -> None:
        """The sequence does not run in this step after all. It must not have published anything in it."""
        self.copies.pop(sequence, None)
        self.started.discard(sequence)
        chunk = self.chunks.pop(sequence, None)
        if chunk is not None:
            self.budget_tokens += chunk.n_tokens

    def plan(self) -> StepPlan:
        copies = [copy for group in self.copies.values() for copy in group]
        return StepPlan(self.step, list(self.chunks.values()), copies)
