"""Leases: promises that a prefix stays resident until a time, renewed by every read of it.

A lease ends at a node and holds a lock on it, so eviction passes its path over. It is granted up front or not at all:
blocks that it will pin are set aside when the request is admitted, and the lock is taken when they are computed. What
may be pinned is bounded twice: each owner by its pin budget, and all together so that every reserve and one sequence of
the longest kind still fit beside them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from radix_cache.holding import Holding
from radix_cache.owners import Owner, Owners
from radix_cache.tree import Node, RadixTree

MAX_TTL_S = 366 * 24 * 3600.0


class Refusal(StrEnum):
    """Why a lease is not granted. The request is served without it."""

    NOT_CACHED = "not_cached"
    """The request has opted out of the cache."""
    TOO_SHORT = "too_short"
    """The prefix does not fill a block."""
    BAD_TTL = "bad_ttl"
    """Not above zero, or above a year."""
    PIN_BUDGET = "pin_budget_exceeded"
    """The owner's pins would be more than it may have."""
    POOL = "pool_exhausted"
    """All pins, reserves and one longest sequence would be more than the pool."""


class EarlyEnd(NamedTuple):
    """A lease that ended before its time: what was promised and not kept."""

    owner: str
    n_blocks: int
    ttl_s: float
    unserved_s: float


@dataclass(eq=False, slots=True)
class Lease:
    """`node` None: its blocks are still being computed, by `holding`."""

    owner: Owner
    n_blocks: int
    """Of the whole prefix."""
    ttl_s: float
    expires_s: float
    holding: Holding | None
    node: Node | None = None
    n_pending: int = 0
    """Blocks set aside for it until it is attached."""


class Leases:
    """All leases of a store. Its caller holds the store's lock."""

    def __init__(self, tree: RadixTree, owners: Owners, n_blocks: int, clock: Callable[[], float]) -> None:
        self.longest_blocks = 0
        """Blocks of the longest sequence that must always fit."""
        self._tree = tree
        self._owners = owners
        self._n_blocks = n_blocks
        self._clock = clock
        self._active: set[Lease] = set()
        self._pending: list[Lease] = []
        self._expiries: list[tuple[float, int, Lease]] = []
        self._serial = 0

    @property
    def pinned_blocks(self) -> int:
        """Blocks of the tree under a lease, and those set aside for one."""
        return sum(owner.leased_blocks for owner in self._owners.all()) + sum(one.n_pending for one in self._pending)

    @property
    def active(self) -> frozenset[Lease]:
        return frozenset(self._active)

    def grant(self, holding: Holding, n_blocks: int, ttl_s: float) -> Refusal | None:
        """Promise the first n_blocks of the holding's prompt for ttl_s seconds from now. None: granted."""
        if holding.node is None:
            return Refusal.NOT_CACHED
        if n_blocks < 1:
            return Refusal.TOO_SHORT
        if not 0 < ttl_s <= MAX_TTL_S:
            return Refusal.BAD_TTL
        owner = holding.owner
        n_new = n_blocks - self._leased_on_path(holding, n_blocks)
        pending = sum(lease.n_pending for lease in self._pending if lease.owner is owner)
        if owner.leased_blocks + pending + n_new > owner.pin_budget_blocks:
            return Refusal.PIN_BUDGET
        if self.pinned_blocks + n_new + self._owners.reserved_blocks + self.longest_blocks > self._n_blocks:
            return Refusal.POOL
        expires_s = self._clock() + ttl_s
        self._pending.append(Lease(owner, n_blocks, ttl_s, expires_s, holding, n_pending=n_new))
        self.attach_ready()
        return None

    def attach_ready(self) -> None:
        """Lock what has been computed of the prefixes that wait for it."""
        if self._pending:
            self._pending = [lease for lease in self._pending if not self._attach(lease)]

    def renew(self, node: Node) -> None:
        """A read went down to the end of `node`: every lease on its path begins anew. O(depth)."""
        if not self._active:
            return
        now_s = self._clock()
        step: Node | None = node
        while step is not None and step.parent is not None:
            if step.lease is not None:
                step.lease.expires_s = now_s + step.lease.ttl_s
            step = step.parent

    def expire(self) -> None:
        """End the leases whose time is over. Amortised O(log leases) each."""
        if not self._expiries:
            return
        now_s = self._clock()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, _, lease = heapq.heappop(self._expiries)
            if lease not in self._active:
                continue
            if lease.expires_s > now_s:
                self._queue(lease)
            else:
                self._release(lease)

    def forget(self, holding: Holding) -> None:
        """The holding ends: what it had not computed of its leases will not be."""
        if self._pending:
            self._pending = [lease for lease in self._pending if lease.holding is not holding]

    def end(self, owner: Owner | None = None) -> list[EarlyEnd]:
        """End the leases of one owner, or all, before their time."""
        self.expire()
        now_s = self._clock()
        ended = [lease for lease in self._active if owner is None or lease.owner is owner]
        for lease in ended:
            self._release(lease)
        return [EarlyEnd(lease.owner.name, lease.n_blocks, lease.ttl_s, lease.expires_s - now_s) for lease in ended]

    # --- helpers --------------------------------------------------------------------------------------------------

    def _leased_on_path(self, holding: Holding, n_blocks: int) -> int:
        """How many of the first n_blocks of the holding's path are under a lease already."""
        end = holding.published_tokens * 4 // self._tree.block_bytes
        leased, node = 0, holding.node
        while node is not None and node.parent is not None:
            start = end - node.n_blocks
            if node.leases:
                leased += max(0, min(end, n_blocks) - start)
            end, node = start, node.parent
        return leased

    def _attach(self, lease: Lease) -> bool:
        """Lock the lease's path if it is in the tree and computed. A node that ends beyond it is split."""
        assert lease.holding is not None
        node = lease.holding.node
        end = lease.holding.published_tokens * 4 // self._tree.block_bytes
        if node is None or end < lease.n_blocks:
            return False
        while node is not None and end - node.n_blocks >= lease.n_blocks:
            end, node = end - node.n_blocks, node.parent
        if node is None or _has_fence(node):
            return False
        if end > lease.n_blocks:
            node = self._tree.split(node, lease.n_blocks - (end - node.n_blocks))
        lease.n_pending, lease.holding = 0, None
        if node.lease is not None:
            node.lease.ttl_s = max(node.lease.ttl_s, lease.ttl_s)
            node.lease.expires_s = max(node.lease.expires_s, lease.expires_s)
            return True
        node.lease, lease.node = lease, node
        self._tree.lock(node)
        self._count(node, 1)
        self._active.add(lease)
        self._queue(lease)
        return True

    def _release(self, lease: Lease) -> None:
        node = lease.node
        assert node is not None
        self._active.remove(lease)
        node.lease = lease.node = None
        node.lease_ended = True
        self._count(node, -1)
        self._tree.unlock(node)

    def _count(self, node: Node, change: int) -> None:
        """Add to the number of leases on every node of the path, and to their owners' leased blocks."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            before = step.leases
            step.leases += change
            if before == 0 or step.leases == 0:
                step.owner.leased_blocks += step.n_blocks if before == 0 else -step.n_blocks
            step = step.parent

    def _queue(self, lease: Lease) -> None:
        self._serial += 1
        heapq.heappush(self._expiries, (lease.expires_s, self._serial, lease))


def _has_fence(node: Node) -> bool:
    step: Node | None = node
    while step is not None:
        if step.fence is not None:
            return True
        step = step.parent
    return False
