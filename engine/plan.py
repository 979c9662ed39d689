"""One forward pass, as the scheduler hands it to the runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine.sequence import State

if TYPE_CHECKING:
    from engine.sequence import Sequence
    from radix_cache.cache import BlockCopy


class Chunk(NamedTuple):
    """Tokens [start, start + n_tokens) of one sequence. Its block table has room for them."""

    sequence: Sequence
    start: int
    n_tokens: int
    samples: bool
    """The logits of its last token are wanted."""

    @property
    def end(self) -> int:
        return self.start + self.n_tokens


class Rows(NamedTuple):
    """Which row of the logits each sampled sequence takes. Parallel samples share the row of their prompt's end."""

    indices: list[int]
    sequences: list[Sequence]


class StepPlan(NamedTuple):
    step: int
    chunks: list[Chunk]
    """Decodes first. Without chunks, only the copies are to be made."""
    copies: list[BlockCopy]
    """Every source is read before any target or slot is written."""

    @property
    def n_tokens(self) -> int:
        return sum(chunk.n_tokens for chunk in self.chunks)

    def rows(self) -> Rows:
        indices: list[int] = []
        sequences: list[Sequence] = []
        row = 0
        for chunk in self.chunks:
            if not chunk.samples:
                continue
            takers = [chunk.sequence, *forking(chunk.sequence)]
            indices += [row] * len(takers)
            sequences += takers
            row += 1
        return Rows(indices, sequences)


def forking(sequence: Sequence) -> list[Sequence]:
    """The further samples that begin when this sequence's prompt is computed."""
    if sequence.output_index or len(sequence.request.sequences) == 1:
        return []
    return [sibling for sibling in sequence.request.sequences if sibling.state is State.FORKING]
