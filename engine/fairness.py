"""Fair queues over tenants by virtual token counters.

Each tenant's counter grows by the weighted work it was given, divided by its weight; the lowest counter goes first. A
tenant that returns from idle is lifted to the smallest counter among those that wait, so idling saves up no credit.
The algorithm is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024),
with one difference: prompt tokens that the cache held cost less.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from engine.protocol import PromptRecord
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Cost of one token, by class."""

    uncached: float = 1.0
    cached: float = 0.1
    output: float = 2.0

    def prompt(self, record: PromptRecord) -> float:
        return self.uncached * (record.written + record.uncached) + self.cached * record.cached


class Tenant:
    """One tenant's queue and counter. Both queues are in order of seniority."""

    __slots__ = ("counter", "owner", "resuming", "waiting", "weight")

    def __init__(self, owner: str, weight: float) -> None:
        self.owner = owner
        self.weight = weight
        self.counter = 0.0
        self.resuming: dict[int, Sequence] = {}
        """Admitted before: preempted ones, and further samples that found no slot. They go ahead of `waiting`."""
        self.waiting: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self.resuming) + len(self.waiting)

    def oldest_waiting(self, limit: int) -> list[Sequence]:
        return list(islice(self.waiting.values(), limit))


class FairQueue:
    """Every sequence that waits, by tenant."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._weights: dict[str, float] = {}
        self._last_left = 0.0
        self.n_waiting = 0

    def __iter__(self) -> Iterator[Sequence]:
        for tenant in self._tenants.values():
            yield from tenant.resuming.values()
            yield from tenant.waiting.values()

    def tenant(self, owner: str) -> Tenant:
        tenant = self._tenants.get(owner)
        if tenant is None:
            tenant = self._tenants[owner] = Tenant(owner, self._weights.get(owner, 1.0))
        return tenant

    def set_weight(self, owner: str, weight: float) -> None:
        """A tenant of weight 2 gets twice the work of one of weight 1. Raises ValueError unless positive."""
        if not weight > 0:
            raise ValueError(f"the weight of {owner} is {weight}; it must be above 0")
        self._weights[owner] = weight
        if owner in self._tenants:
            self._tenants[owner].weight = weight

    def add(self, sequence: Sequence) -> None:
        """A new arrival, at the end of its tenant's queue."""
        tenant = self.tenant(sequence.request.owner)
        if not tenant:
            others = [other.counter for other in self._tenants.values() if len(other)]
            tenant.counter = max(tenant.counter, min(others, default=self._last_left))
        tenant.waiting[sequence.seniority] = sequence
        self.n_waiting += 1

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that ran goes back to its old place."""
        tenant = self.tenant(sequence.request.owner)
        queue = tenant.waiting if sequence.request.record is None else tenant.resuming
        queue[sequence.seniority] = sequence
        if len(queue) > 1:
            in_order = sorted(queue.items())
            queue.clear()
            queue.update(in_order)
        self.n_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = self._tenants[sequence.request.owner]
        if tenant.resuming.pop(sequence.seniority, None) is None:
            del tenant.waiting[sequence.seniority]
        self.n_waiting -= 1
        if not tenant:
            self._last_left = tenant.counter

    def with_waiting(self) -> list[Tenant]:
        return [tenant for tenant in self._tenants.values() if tenant.resuming or tenant.waiting]

    def charge(self, owner: str, cost: float) -> None:
        """Cost may be negative: work that was taken back."""
        tenant = self.tenant(owner)
        tenant.counter += cost / tenant.weight


def lowest(tenants: Iterable[Tenant], without: Container[Tenant] = ()) -> Tenant | None:
    """Whose turn it is; by name where counters are equal, so that a replay takes the same turn."""
    return min(
        (tenant for tenant in tenants if tenant not in without),
        key=lambda tenant: (tenant.counter, tenant.owner),
        default=None,
    )
