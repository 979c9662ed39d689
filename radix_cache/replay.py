"""Replays a trace through the real tree and pool: what would the hit rate be with this much memory?

Every prompt block is admitted and output never is. The rule that a prompt's last token is always computed stands above
the store, and does not apply here: a prompt that is resident as a whole counts as hit as a whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from radix_cache.cache import PrefixCache
from radix_cache.trace import Trace

NAMESPACE = ("trace", "", "", "")
_SENTINEL = array("i", [-1]).tobytes()
"""One more token after each prompt, never published, so that acquire() may match all of the prompt."""


class ReplayResult(NamedTuple):
    n_requests: int
    n_blocks: int
    """Prompt blocks looked up."""
    hit_blocks: int
    """Of these, found: whole blocks of the unbroken prefix."""
    n_tokens: int
    hit_tokens: int

    @property
    def block_hit_rate(self) -> float:
        return self.hit_blocks / self.n_blocks if self.n_blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.n_tokens if self.n_tokens else 0.0


def replay(
    trace: Trace,
    capacity_blocks: int | None,
    *,
    block_tokens: int,
    policy: str = "lru",
    progress: Callable[[float], None] = lambda fraction: None,
) -> ReplayResult:
    """Run the whole trace on an empty store of `capacity_blocks` (None: never evict)."""
    block_size = 1 if trace.hashed else block_tokens
    if capacity_blocks is None:
        capacity_blocks = sum(len(request.ids) // 4 // block_size + 1 for request in trace.requests) + 1
    now_s = 0.0
    cache = PrefixCache(capacity_blocks, block_size, clock=lambda: now_s, policy=policy)
    n_blocks = hit_blocks = n_tokens = hit_tokens = 0
    for number, request in enumerate(trace.requests):
        now_s = request.time_s
        n_units = len(request.ids) // 4
        found = _admit(cache, request.ids, n_units)
        n_blocks += -(-n_units // block_size)
        hit_blocks += found // block_size
        n_tokens += request.n_tokens
        hit_tokens += min(found * block_tokens, request.n_tokens) if trace.hashed else found
        if number % 500 == 0:
            progress(number / len(trace.requests))
    progress(1.0)
    return ReplayResult(len(trace.requests), n_blocks, hit_blocks, n_tokens, hit_tokens)


def _admit(cache: PrefixCache, ids: bytes, n_units: int) -> int:
    """Look a prompt up and keep it. Returns the units found. One that is longer than the store is not kept."""
    holding = cache.acquire(NAMESPACE, ids + _SENTINEL)
    if holding is None:
        return 0
    found = holding.cached_tokens
    fits = cache.extend(holding, n_units)
    cache.release(holding, ids, n_units if fits else holding.published_tokens)
    return found
