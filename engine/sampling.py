"""From logits to tokens, for all rows of a step at once.

Order, per row: penalties, logit_bias, min_tokens; then greedy (temperature 0), or temperature, min_p, top_k, top_p and
one draw. Reported logprobs are those of the model's own logits, before any of this.

A draw is one number in [0, 1) that depends on the request's seed, the output's index and the token's position alone, so
a seed gives the same tokens in whatever company, and again after a preemption. It picks from the cumulative
probabilities, in the order of token ids or, where a filter applies, of falling probability.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.protocol import Sampling, TokenLogprob
from engine.sequence import SampledToken

if TYPE_CHECKING:
    from engine.sequence import Sequence

LOGPROB_FLOOR = -9999.0
"""Reported for a token that the model rules out: minus infinity is not a JSON number."""
GREEDY_BELOW = 1e-5
"""Temperatures under this are zero: dividing by them overflows."""
CANDIDATES = 512
"""How many of the likeliest tokens are looked at first; all are when these do not hold a row's nucleus."""


class Sampler:
    """Stateless but for its seed, from which requests without a seed of their own draw."""

    def __init__(self, eos_token_ids: Many[int], seed: int) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._seed = seed

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: Many[Sequence]) -> list[SampledToken]:
        """float32 [R, V], one row a sequence -> one token a row. A row without a usable distribution (NaN, infinity,
        everything ruled out) gets an `error` and disturbs no other. `logits` is left as it was."""
        if not sequences:
            return []
        best, tokens = logits.max(dim=-1)
        broken = ~torch.isfinite(best)  # a maximum is NaN when any of the row is
        settings = [sequence.request.sampling for sequence in sequences]
        processed = logits
        if changed := [i for i, sequence in enumerate(sequences) if self._changes_logits(sequence)]:
            processed = logits.clone()
            for i in changed:
                self._change_logits(processed[i], sequences[i])
            best, tokens = processed.max(dim=-1)
            broken |= ~torch.isfinite(best)
        sound = (~broken).tolist()
        drawing = [i for i, s in enumerate(settings) if s.temperature >= GREEDY_BELOW and s.top_k != 1 and sound[i]]
        if drawing:
            rows = torch.tensor(drawing, device=logits.device)
            draws = [self._draw(sequences[i]) for i in drawing]
            tokens[rows] = _draw_tokens(processed[rows], [settings[i] for i in drawing], draws)
        logprobs = _logprobs(
            logits, tokens, [s.logprobs if ok else None for s, ok in zip(settings, sound, strict=True)]
        )
        return [
            SampledToken(token, logprob)
            if ok
            else SampledToken(token, error="the model gave no usable probabilities for this token (NaN or infinity)")
            for token, logprob, ok in zip(tokens.tolist(), logprobs, sound, strict=True)
        ]

    def _changes_logits(self, sequence: Sequence) -> bool:
        s = sequence.request.sampling
        return bool(
            s.logit_bias
            or s.repetition_penalty != 1.0
            or s.presence_penalty
            or s.frequency_penalty
            or sequence.n_output < s.min_tokens
        )

    def _change_logits(self, row: Tensor, sequence: Sequence) -> None:
        """In place. Repetition counts prompt and output, presence and frequency the output alone."""
        s = sequence.request.sampling
        if s.repetition_penalty != 1.0:
            seen = torch.zeros_like(row, dtype=torch.bool)
            seen[_ids(sequence, 0).to(row.device)] = True
            penalized = torch.where(row > 0, row / s.repetition_penalty, row * s.repetition_penalty)
            torch.where(seen, penalized, row, out=row)
        if (s.presence_penalty or s.frequency_penalty) and sequence.n_output:
            ids, counts = _ids(sequence, sequence.n_prompt).to(row.device).unique(return_counts=True)
            row[ids] -= s.presence_penalty + s.frequency_penalty * counts
        if s.logit_bias:
            ids = torch.tensor([token for token, _ in s.logit_bias], device=row.device)
            biases = torch.tensor([bias for _, bias in s.logit_bias], dtype=row.dtype, device=row.device)
            row.index_add_(0, ids, biases)
        if sequence.n_output < s.min_tokens:
            ends = [*s.stop_token_ids, *(() if s.ignore_eos else self._eos_token_ids)]
            row[torch.tensor([token for token in ends if token < len(row)], dtype=torch.int64)] = float("-inf")

    def _draw(self, sequence: Sequence) -> float:
        request = sequence.request
        own = request.sampling.seed
        source = ("seed", own) if own is not None else ("boot", self._seed, request.id)
        key = repr((*source, sequence.output_index, len(sequence.tokens))).encode()
        return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def _ids(sequence: Sequence, start: int) -> Tensor:
    """A copy: a view would keep the array from growing."""
    return torch.from_numpy(np.frombuffer(sequence.tokens, np.int32)[start:].astype(np.int64))


# --- drawing ----------------------------------------------------------------------------------------------------------


def _draw_tokens(logits: Tensor, settings: list[Sampling], draws: list[float]) -> Tensor:
    """[R, V] -> int64 [R]. Every row draws; each has a finite maximum."""
    device = logits.device
    scaled = logits / _column(settings, "temperature", device)
    scaled = scaled - scaled.max(dim=-1, keepdim=True).values
    if any(s.min_p > 0 for s in settings):
        scaled = scaled.masked_fill(scaled < _column(settings, "min_p", device).log(), float("-inf"))
    draw = torch.tensor(draws, dtype=torch.float64, device=device)
    vocabulary = logits.shape[-1]
    filtered = [i for i, s in enumerate(settings) if s.top_p < 1 or 0 < s.top_k < vocabulary]
    if not filtered:
        return _pick(scaled.exp().double(), draw)
    tokens = torch.empty(len(settings), dtype=torch.int64, device=device)
    if rest := sorted(set(range(len(settings))) - set(filtered)):
        tokens[rest] = _pick(scaled[rest].exp().double(), draw[rest])
    tokens[filtered] = _draw_filtered(scaled[filtered], [settings[i] for i in filtered], draw[filtered])
    return tokens


def _draw_filtered(scaled: Tensor, settings: list[Sampling], draw: Tensor, n_candidates: int = 0) -> Tensor:
    """Top k, then the least set of the likeliest of those whose probability reaches top p."""
    vocabulary = scaled.shape[-1]
    limits = [s.top_k if 0 < s.top_k < vocabulary else vocabulary for s in settings]
    if not n_candidates:
        n_candidates = min(vocabulary, max([CANDIDATES, *(k for k in limits if k < vocabulary)]))
    values, ids = scaled.topk(n_candidates, dim=-1)
    limit = torch.tensor(limits, device=scaled.device)[:, None]
    weights = values.exp().double()
    weights = weights.masked_fill(torch.arange(n_candidates, device=scaled.device) >= limit, 0.0)
    total = scaled.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    mass = torch.where(limit < vocabulary, weights.sum(dim=-1, keepdim=True), total)
    before = weights.cumsum(dim=-1) - weights
    outside = before >= _column(settings, "top_p", scaled.device).double() * mass
    incomplete = ~outside[:, -1] & (limit[:, 0] > n_candidates)
    outside[:, 0] = False  # top_p of 0 leaves the likeliest
    tokens = ids.gather(1, _pick(weights.masked_fill(outside, 0.0), draw)[:, None])[:, 0]
    if again := incomplete.nonzero()[:, 0].tolist():  # a flat distribution: all tokens are candidates
        tokens[again] = _draw_filtered(scaled[again], [settings[i] for i in again], draw[again], vocabulary)
    return tokens


def _pick(weights: Tensor, draw: Tensor) -> Tensor:
    """float64 weights [R, N], draws [R] in [0, 1) -> the first column at which the running sum passes the draw."""
    running = weights.cumsum(dim=-1)
    total = running[:, -1:]
    # Rounding may carry a draw to the very end; the sum rises below it at a token that has weight.
    target = torch.minimum(draw[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(running, target, right=True)[:, 0]


def _column(settings: list[Sampling], name: str, device: torch.device) -> Tensor:
    return torch.tensor([getattr(s, name) for s in settings], dtype=torch.float32, device=device)[:, None]


# --- reporting --------------------------------------------------------------------------------------------------------


def _logprobs(logits: Tensor, tokens: Tensor, wanted: list[int | None]) -> list[TokenLogprob | None]:
    """Per row: nothing, or the chosen token's logprob with the `wanted` likeliest beside it."""
    reported: list[TokenLogprob | None] = [None] * len(wanted)
    rows = [i for i, n in enumerate(wanted) if n is not None]
    if not rows:
        return reported
    logprobs = torch.log_softmax(logits[rows].float(), dim=-1).clamp_(min=LOGPROB_FLOOR)
    chosen = logprobs.gather(1, tokens[rows][:, None])[:, 0].tolist()
    most = min(max(n for n in wanted if n is not None), logits.shape[-1])
    values, ids = (part.tolist() for part in logprobs.topk(most, dim=-1))
    for at, i in enumerate(rows):
        n = min(wanted[i] or 0, most)
        reported[i] = TokenLogprob(int(tokens[i]), chosen[at], tuple(zip(ids[at][:n], values[at][:n], strict=True)))
    return reported
