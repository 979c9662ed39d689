"""What is remembered of evicted prefixes: enough to say why a prompt missed, in bounded memory.

A ghost stands for the place where an evicted tail began: namespace, depth in blocks and the bytes of its first block.
The store never serves from a ghost, so a hash may stand for the block; a collision can only give a wrong explanation.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import NamedTuple

from radix_cache.owners import Namespace


class Cause(StrEnum):
    """Why blocks left the tree."""

    OWN_PRESSURE = "evicted_by_own_pressure"
    OTHERS_PRESSURE = "evicted_by_others_pressure"
    LEASE_EXPIRED = "lease_expired"
    """Evicted after a lease on it had ended."""
    FLUSHED = "flushed"


class Ghost(NamedTuple):
    cause: Cause
    evicted_s: float
    n_blocks: int


class Ghosts:
    """The last `capacity` evicted tails, oldest forgotten first. O(1) per eviction and per question."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def remember(self, ns: Namespace, depth: int, block: bytes, ghost: Ghost) -> None:
        key = hash((ns, depth, block))
        self._ghosts[key] = ghost
        self._ghosts.move_to_end(key)
        if len(self._ghosts) > self._capacity:
            self._ghosts.popitem(last=False)

    def find(self, ns: Namespace, depth: int, block: bytes) -> Ghost | None:
        return self._ghosts.get(hash((ns, depth, block)))

    def forget_all(self) -> None:
        self._ghosts.clear()
