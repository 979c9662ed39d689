"""A model whose every token follows from its context alone, and a runner that proves what each sequence reads.

The attention state of a token is stood in for by a 64-bit digest of all tokens up to it. The runner keeps one per slot,
as the KV memory would, writes and copies them as the plan says, and checks at every step that each chunk reads, through
its block table, exactly the digests of its own context. A wrong share, a lost copy or a block written twice is a
ContextError, not a wrong token that nobody notices.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.plan import StepPlan
from engine.protocol import Sampling
from engine.sequence import SampledToken, Sequence
from engine.simulation.clock import VirtualClock

if TYPE_CHECKING:
    from engine.simulation.faults import Faults

_MASK = (1 << 64) - 1
_UNWRITTEN = 0


class ContextError(BaseException):
    """A sequence would have read something that is not its own context. No Exception: no retry may hide it."""


def digest_after(before: int, token: int) -> int:
    """The digest of a context that `token` was appended to. Never 0, which marks a slot that was not written."""
    mixed = ((before ^ (token + 1)) * 0x9E3779B97F4A7C15) & _MASK
    return (mixed ^ (mixed >> 29)) or 1


def next_token(digest: int, output_index: int, seed: int | None, vocab_size: int) -> int:
    """The token that follows a context, for one sample of it."""
    mixed = digest_after(digest, output_index * 1009 + (seed or 0))
    return (mixed >> 17) % vocab_size


def answer(
    prompt: Many[int],
    sampling: Sampling,
    output_index: int,
    *,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    max_tokens: int,
) -> tuple[list[int], str]:
    """(tokens, finish reason) of one output when nothing disturbs it. `max_tokens`: with model and pool counted in."""
    digest = 0
    for token in prompt:
        digest = digest_after(digest, token)
    tokens: list[int] = []
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_token_ids)
    while len(tokens) < max_tokens:
        token = next_token(digest, output_index, sampling.seed, vocab_size)
        tokens.append(token)
        digest = digest_after(digest, token)
        if token in stops and len(tokens) > sampling.min_tokens:
            return tokens, "stop"
    return tokens, "length"


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step: fixed + per_token x computed tokens + per_context_token x tokens attended to."""

    fixed_s: float = 0.004
    per_token_s: float = 0.00005
    per_context_token_s: float = 0.0000002


class FakeRunner:
    """engine.loop.Runner over digests. `logits` is uint64 [rows]: the context's digest, or 0 for a row of NaN."""

    def __init__(
        self,
        n_blocks: int,
        block_size: int,
        clock: VirtualClock,
        *,
        cost: StepCost | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.block_size = block_size
        self.slots = np.zeros(n_blocks * block_size, np.uint64)
        self.computed_tokens = 0
        self.copied_tokens = 0
        self._clock = clock
        self._cost = cost or StepCost()
        self._faults = faults
        self._digests: dict[tuple[str, int], array[int]] = {}

    def execute(self, plan: StepPlan) -> np.ndarray:
        if self._faults is not None:
            self._faults.before(plan)
        self._copy(plan)
        contexts = [self._context(chunk.sequence, chunk.end) for chunk in plan.chunks]
        slots = [self._slots(chunk.sequence, chunk.end) for chunk in plan.chunks]
        for chunk, context, where in zip(plan.chunks, contexts, slots, strict=True):
            self.slots[where[chunk.start :]] = context[chunk.start :]
        for chunk, context, where in zip(plan.chunks, contexts, slots, strict=True):
            wrong = np.flatnonzero(self.slots[where] != context)
            if len(wrong):
                raise ContextError(f"step {plan.step}: {chunk.sequence!r} reads a foreign token at {wrong[0]}")
        self.computed_tokens += plan.n_tokens
        cost = self._cost
        self._clock.advance(
            cost.fixed_s
            + cost.per_token_s * plan.n_tokens
            + cost.per_context_token_s * sum(chunk.end for chunk in plan.chunks)
        )
        rows = [(context[-1], chunk) for context, chunk in zip(contexts, plan.chunks, strict=True) if chunk.samples]
        if self._faults is not None:
            self._faults.after(plan)
            rows = [(0 if self._faults.is_nan(chunk) else digest, chunk) for digest, chunk in rows]
        return np.array([digest for digest, _ in rows], np.uint64)

    def forget(self, request_id: str, n_outputs: int) -> None:
        for index in range(n_outputs):
            self._digests.pop((request_id, index), None)

    def _copy(self, plan: StepPlan) -> None:
        targets = [copy.target for copy in plan.copies]
        if len(set(targets)) != len(targets):
            raise ContextError(f"step {plan.step} copies twice into one block: {sorted(targets)}")
        sources = [
            self.slots[copy.source * self.block_size : copy.source * self.block_size + copy.n_tokens].copy()
            for copy in plan.copies
        ]
        for copy, digests in zip(plan.copies, sources, strict=True):
            start = copy.target * self.block_size
            self.slots[start : start + self.block_size] = _UNWRITTEN
            self.slots[start : start + copy.n_tokens] = digests
            self.copied_tokens += copy.n_tokens

    def _context(self, sequence: Sequence, end: int) -> np.ndarray:
        """uint64 [end]: what the sequence must find in its slots."""
        digests = self._digests.setdefault((sequence.request.id, sequence.output_index), array("Q"))
        before = digests[-1] if digests else 0
        for token in sequence.tokens[len(digests) : end]:
            before = digest_after(before, token)
            digests.append(before)
        return np.array(digests[:end], np.uint64)

    def _slots(self, sequence: Sequence, end: int) -> np.ndarray:
        holding = sequence.holding
        if holding is None or holding.n_blocks * self.block_size < end:
            raise ContextError(f"{sequence!r} has no room for {end} tokens")
        blocks = np.asarray(holding.blocks[: math.ceil(end / self.block_size)], np.int64)
        return (blocks[:, None] * self.block_size + np.arange(self.block_size)).ravel()[:end]


class FakeSampler:
    """engine.loop.Sampler for FakeRunner's rows."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits: np.ndarray, sequences: list[Sequence]) -> list[SampledToken]:
        return [self._pick(int(digest), sequence) for digest, sequence in zip(logits, sequences, strict=True)]

    def _pick(self, digest: int, sequence: Sequence) -> SampledToken:
        if digest == _UNWRITTEN:
            return SampledToken(-1, error="the logits are not finite")
        seed = sequence.request.sampling.seed
        return SampledToken(next_token(digest, sequence.output_index, seed, self.vocab_size))
