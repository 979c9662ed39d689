"""Statistics of the store: counters only grow; gauges are named *_blocks without a verb."""

from __future__ import annotations

from dataclasses import dataclass

from radix_cache.blocks import BlockPool
from radix_cache.owners import Owner, OwnerCounters
from radix_cache.tree import RadixTree


@dataclass(frozen=True, slots=True)
class OwnerStats:
    lookups: int
    """Acquisitions that went on to hold memory for their sequence: waiting and asking again counts once."""
    prompt_tokens: int
    hit_tokens: int
    hit_public_tokens: int
    written_blocks: int
    """Blocks that entered the tree."""
    evicted_by_own_blocks: int
    evicted_by_others_blocks: int
    flushed_blocks: int
    revoked_blocks: int
    regretted_blocks: int
    """Evicted and wanted again within an hour."""
    leases_granted: int
    leases_refused: int
    tree_blocks: int
    locked_blocks: int
    leased_blocks: int
    private_blocks: int
    reserve_blocks: int
    ceiling_blocks: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    total_blocks: int
    free_blocks: int
    private_blocks: int
    tree_blocks: int
    locked_blocks: int
    """Of the tree's: on the path of a running sequence."""
    nodes: int
    lookups: int
    prompt_tokens: int
    hit_tokens: int
    written_blocks: int
    evicted_blocks: int
    owners: dict[str, OwnerStats]
    """By owner; the public's name is ''."""


def collect(pool: BlockPool, tree: RadixTree, owners: list[Owner]) -> CacheStats:
    by_owner = {owner.name: _of(owner) for owner in owners}
    every = by_owner.values()
    return CacheStats(
        total_blocks=pool.n_blocks,
        free_blocks=pool.n_free,
        private_blocks=pool.n_private,
        tree_blocks=pool.n_tree,
        locked_blocks=tree.locked_blocks,
        nodes=tree.n_nodes,
        lookups=sum(stats.lookups for stats in every),
        prompt_tokens=sum(stats.prompt_tokens for stats in every),
        hit_tokens=sum(stats.hit_tokens for stats in every),
        written_blocks=sum(stats.written_blocks for stats in every),
        evicted_blocks=sum(stats.evicted_by_own_blocks + stats.evicted_by_others_blocks for stats in every),
        owners=by_owner,
    )


def _of(owner: Owner) -> OwnerStats:
    counters: OwnerCounters = owner.counters
    return OwnerStats(
        lookups=counters.lookups,
        prompt_tokens=counters.prompt_tokens,
        hit_tokens=counters.hit_tokens,
        hit_public_tokens=counters.hit_public_tokens,
        written_blocks=counters.written_blocks,
        evicted_by_own_blocks=counters.evicted_by_own_blocks,
        evicted_by_others_blocks=counters.evicted_by_others_blocks,
        flushed_blocks=counters.flushed_blocks,
        revoked_blocks=counters.revoked_blocks,
        regretted_blocks=counters.regretted_blocks,
        leases_granted=counters.leases_granted,
        leases_refused=counters.leases_refused,
        tree_blocks=owner.tree_blocks,
        locked_blocks=owner.locked_blocks,
        leased_blocks=owner.leased_blocks,
        private_blocks=owner.private_blocks,
        reserve_blocks=owner.reserve_blocks,
        ceiling_blocks=owner.ceiling_blocks,
    )
