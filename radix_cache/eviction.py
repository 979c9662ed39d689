"""Which tree blocks are given up, and whose.

Within one owner a Policy orders the unlocked nodes. The default, RecencyList, is a ring of the nodes themselves (the
links are fields of the node): a node goes to its newest end when its last user lets go, leaf first and then its
ancestors, so a parent is always newer than its children and the oldest node is a leaf. Taking the oldest, and putting a
node anywhere next to a known one, is O(1) however many leaves there are.

The one exception is a public node with a tenant's child: its place is in another list than its child's. When such a
node has become the oldest it is set aside, and comes back as the oldest when its last child is gone.

Between owners: first those above their reserve, the one whose coldest node is oldest for its weight (with equal weights
that is the least recently used node of all); when there is none, the owner that asks gives up its own.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, cast

from radix_cache.ghosts import Cause, Ghost

if TYPE_CHECKING:
    from radix_cache.owners import Owner, Owners
    from radix_cache.tree import Node, RadixTree


class Policy(Protocol):
    """Orders one owner's unlocked nodes. The tree reports events; the evictor asks for the coldest node.

    Contract: the coldest node must not have a child in the same policy; `key` grows with the wish to keep a node and is
    comparable between owners (same unit as RadixTree.tick). Policies may use a node's fields older, newer and mark.
    """

    def used(self, node: Node) -> None:
        """The last user of `node` let go of it (its descendants were reported before it): it is evictable now."""

    def taken(self, node: Node) -> None:
        """`node` is in use, gone, or set aside: it must not be offered."""

    def split(self, upper: Node, lower: Node) -> None:
        """`lower`, which is evictable, lost its beginning to its new parent `upper`: both are as warm as it was."""

    def exposed(self, node: Node) -> None:
        """`node`, which had been set aside as the coldest, has no child any more."""

    def coldest(self) -> Node | None:
        """The node to give up next."""

    def key(self, node: Node) -> float:
        """How warm the coldest node is."""


class Link:
    """A place in a ring of nodes; both neighbours are None outside of one."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.older: Link | None = None
        self.newer: Link | None = None


class RecencyList:
    """Least recently used first."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends = ends = Link()  # ends.newer is the oldest node, ends.older the newest
        ends.older = ends.newer = ends

    def used(self, node: Node) -> None:
        _link(node, self._ends.older, self._ends)

    def taken(self, node: Node) -> None:
        older, newer = node.older, node.newer
        older.newer, newer.older = newer, older  # type: ignore[union-attr]
        node.older = node.newer = None

    def split(self, upper: Node, lower: Node) -> None:
        _link(upper, lower, lower.newer)

    def exposed(self, node: Node) -> None:
        _link(node, self._ends, self._ends.newer)

    def coldest(self) -> Node | None:
        oldest = self._ends.newer
        return None if oldest is self._ends else cast("Node", oldest)

    def key(self, node: Node) -> float:
        return node.used_at

    def __iter__(self) -> Iterator[Node]:
        """Oldest first."""
        node = self._ends.newer
        while node is not self._ends:
            yield cast("Node", node)
            node = node.newer  # type: ignore[union-attr]


def _link(node: Link, older: Link | None, newer: Link | None) -> None:
    node.older, node.newer = older, newer
    older.newer = newer.older = node  # type: ignore[union-attr]


POLICIES: dict[str, Callable[[], Policy]] = {"lru": RecencyList}


class Evictor:
    """Finds blocks to free. A heap per weight holds the owners by the key of their coldest node.

    Keys in the heaps are lower bounds that are corrected when they come to the top, so an owner whose coldest node got
    warmer costs nothing until then: O(log owners) per node given up.
    """

    def __init__(self, owners: Owners, tree: RadixTree, clock: Callable[[], float]) -> None:
        self._owners = owners
        self._tree = tree
        self._clock = clock
        self._queues: dict[float, list[tuple[float, int, Owner]]] = {}
        self._serial = itertools.count()  # breaks ties in the heaps

    def rank(self, owner: Owner) -> None:
        """`owner` has got a node to give up, or a colder one: keep its key in the queue a lower bound."""
        node = owner.policy.coldest()
        if node is not None:
            key = owner.policy.key(node)
            if key < owner.queued_key:
                owner.queued_key = key
                heapq.heappush(self._queues.setdefault(owner.weight, []), (key, next(self._serial), owner))

    def reclaimable_blocks(self, asking: Owner) -> int:
        """An upper bound of what `reclaim` can free for `asking`: exact unless a protected node or an unlocked block
        in use stands in the way. O(owners with a reserve)."""
        total = self._tree.pool.n_tree - self._tree.locked_blocks
        for owner in self._owners.reserved:
            if owner is not asking:
                total -= owner.evictable_blocks - _takeable(owner)
        return total

    def reclaim(self, n_blocks: int, asking: Owner) -> int:
        """Free up to n_blocks for `asking`, from whoever has to give. Returns how many were freed."""
        freed = 0
        while freed < n_blocks:
            victim = self._next_owner(asking)
            if victim is None:
                return freed + self.reclaim_own(n_blocks - freed, asking)
            wanted = n_blocks - freed
            if victim is not asking:
                wanted = min(wanted, _takeable(victim))
            freed += self._take_from(victim, wanted, asking)
        return freed

    def reclaim_own(self, n_blocks: int, owner: Owner) -> int:
        """Free up to n_blocks of the owner's own."""
        freed = 0
        while freed < n_blocks and owner.policy.coldest() is not None:
            freed += self._take_from(owner, n_blocks - freed, owner)
        return freed

    def _take_from(self, owner: Owner, n_blocks: int, asking: Owner) -> int:
        """Up to n_blocks from the tail of the owner's coldest node. Returns how many became free."""
        node = owner.policy.coldest()
        if node is None:
            return 0
        if node.has_children:
            self._tree.set_aside(node)
            return 0
        n_taken = min(n_blocks, node.n_blocks)
        if owner is asking:
            cause = Cause.OWN_PRESSURE
            owner.counters.evicted_by_own_blocks += n_taken
        else:
            cause = Cause.OTHERS_PRESSURE
            owner.counters.evicted_by_others_blocks += n_taken
        if node.lease_ended:
            cause = Cause.LEASE_EXPIRED
        return self._tree.give_up(node, n_taken, Ghost(cause, self._clock(), n_taken))

    def _next_owner(self, asking: Owner) -> Owner | None:
        """The owner above its reserve whose coldest node is the oldest for its weight."""
        best, best_age = None, -1.0
        for weight, queue in self._queues.items():
            owner = self._head(queue, weight)
            if owner is not None:
                age = (self._tree.tick + 1 - owner.queued_key) / weight
                if age > best_age:
                    best, best_age = owner, age
        return best

    def _head(self, queue: list[tuple[float, int, Owner]], weight: float) -> Owner | None:
        protected = []
        head = None
        while queue and head is None:
            key, serial, owner = queue[0]
            node = owner.policy.coldest()
            if key != owner.queued_key or weight != owner.weight:
                heapq.heappop(queue)  # a newer entry stands for this owner
            elif node is None:
                heapq.heappop(queue)
                owner.queued_key = math.inf
            elif (current := owner.policy.key(node)) != key:
                owner.queued_key = current
                heapq.heapreplace(queue, (current, serial, owner))
            elif _takeable(owner) == 0:
                protected.append(heapq.heappop(queue))
            else:
                head = owner
        for entry in protected:
            heapq.heappush(queue, entry)
        return head


def _takeable(owner: Owner) -> int:
    """Blocks of its tree that the owner's reserve does not protect."""
    return max(0, min(owner.evictable_blocks, owner.used_blocks - owner.reserve_blocks))
