"""Owners of memory: each tenant, and the public. What each holds, may hold, and has done so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radix_cache.eviction import Policy

Namespace = tuple[str, ...]
"""(owner, model revision, adapter, salt). Compared as a tuple, never joined."""

PUBLIC = ""
"""The owner of what everybody may read. No tenant can have this name."""


DEFAULT_PIN_BUDGET = 0.25
"""Of the pool: what leases of one owner may hold."""


class QuotaError(ValueError):
    """A reserve, ceiling or weight that cannot be honoured."""


@dataclass(slots=True)
class OwnerCounters:
    """What an owner has done since the start. Counters only grow."""

    lookups: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    hit_public_tokens: int = 0
    written_blocks: int = 0
    evicted_by_own_blocks: int = 0
    evicted_by_others_blocks: int = 0
    flushed_blocks: int = 0
    revoked_blocks: int = 0
    regretted_blocks: int = 0
    """Evicted and wanted again within an hour."""
    leases_granted: int = 0
    leases_refused: int = 0


class Owner:
    """One owner's gauges (in blocks), its two knobs and its weight, its eviction policy and its counters."""

    __slots__ = (
        "ceiling_blocks",
        "counters",
        "leased_blocks",
        "locked_blocks",
        "name",
        "pin_budget_blocks",
        "policy",
        "private_blocks",
        "queued_key",
        "reserve_blocks",
        "tree_blocks",
        "weight",
    )

    def __init__(self, name: str, policy: Policy, n_blocks: int) -> None:
        self.name = name
        self.policy = policy
        self.tree_blocks = 0
        self.locked_blocks = 0
        self.private_blocks = 0
        self.leased_blocks = 0
        self.reserve_blocks = 0
        self.ceiling_blocks = n_blocks
        self.pin_budget_blocks = int(n_blocks * DEFAULT_PIN_BUDGET)
        self.weight = 1.0
        self.queued_key = math.inf  # the evictor's: this owner's place in its queue
        self.counters = OwnerCounters()

    @property
    def used_blocks(self) -> int:
        """All it occupies: running sequences and the tree."""
        return self.tree_blocks + self.private_blocks

    @property
    def evictable_blocks(self) -> int:
        return self.tree_blocks - self.locked_blocks


class Owners:
    """Every owner seen so far, made at first sight, and the sums over them."""

    def __init__(self, n_blocks: int, make_policy: Callable[[], Policy]) -> None:
        self._n_blocks = n_blocks
        self._make_policy = make_policy
        self._by_name: dict[str, Owner] = {}
        self.reserved: list[Owner] = []
        self.public = self.get(PUBLIC)

    def get(self, name: str) -> Owner:
        owner = self._by_name.get(name)
        if owner is None:
            owner = self._by_name[name] = Owner(name, self._make_policy(), self._n_blocks)
        return owner

    def all(self) -> list[Owner]:
        return list(self._by_name.values())

    @property
    def reserved_blocks(self) -> int:
        return sum(owner.reserve_blocks for owner in self.reserved)

    def set_quota(
        self, name: str, *, reserve: float, ceiling: float, weight: float, pin_budget: float, spoken_for_blocks: int
    ) -> None:
        """Fractions of the pool. Raises QuotaError when all reserves together, with the blocks that are spoken for
        (pins, and one longest sequence), would be more than the pool."""
        if not 0 <= pin_budget <= 1:
            raise QuotaError(f"expected a pin budget from 0 to 1, got {pin_budget}")
        if not (0 <= reserve <= ceiling <= 1):
            raise QuotaError(f"expected 0 <= reserve <= ceiling <= 1, got reserve {reserve} and ceiling {ceiling}")
        if not (0 < weight < math.inf):
            raise QuotaError(f"expected a weight above 0, got {weight}")
        reserve_blocks = math.ceil(reserve * self._n_blocks)
        others = sum(owner.reserve_blocks for owner in self.reserved if owner.name != name)
        if others + reserve_blocks + spoken_for_blocks * (reserve_blocks > 0) > self._n_blocks:
            raise QuotaError(
                f"a reserve of {reserve_blocks} blocks for {name!r}, {others} reserved for others and "
                f"{spoken_for_blocks} for leases and one longest sequence exceed the pool of {self._n_blocks} blocks; "
                "lower one of them"
            )
        owner = self.get(name)
        owner.reserve_blocks = reserve_blocks
        owner.ceiling_blocks = math.floor(ceiling * self._n_blocks)
        owner.weight = weight
        owner.pin_budget_blocks = math.floor(pin_budget * self._n_blocks)
        owner.queued_key = math.inf
        self.reserved = [owner for owner in self._by_name.values() if owner.reserve_blocks]
