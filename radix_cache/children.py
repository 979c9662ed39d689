"""The children of one tree node that belong to one namespace, by the bytes of their first block.

A dict answers "is there a child that starts with exactly this block". For token-exact reuse one also asks "which
child's first block has the longest part in common with these tokens": in lexicographic order that is a direct neighbour
of the asked bytes, so the keys are kept sorted as well, from the first such question on a node with several children.
Sorted keys lie in runs of at most MAX_RUN, so that adding and removing cost the same with 500 children as with 50,000.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radix_cache.tree import Node

TOKEN_BYTES = 4
MAX_RUN = 512


def common_prefix(edge: bytes, edge_bytes: int, key: bytes, start: int) -> int:
    """How many bytes, in whole tokens, `edge[:edge_bytes]` and `key[start:]` have in common. Bisects over memcmp."""
    same, differ = 0, min(edge_bytes, len(key) - start) // TOKEN_BYTES + 1  # the first `same` tokens agree
    while differ - same > 1:
        middle = (same + differ) // 2
        low, high = same * TOKEN_BYTES, middle * TOKEN_BYTES
        if key.startswith(edge[low:high], start + low):
            same = middle
        else:
            differ = middle
    return same * TOKEN_BYTES


class Children(dict[bytes, "Node"]):
    """first block -> node. A key shorter than a block belongs to a sealed partial block. Change it by add and drop."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        super().__init__()
        self._order: SortedKeys | None = None

    def add(self, key: bytes, node: Node) -> None:
        if self._order is not None and key not in self:
            self._order.add(key)
        self[key] = node

    def drop(self, key: bytes) -> None:
        del self[key]
        if self._order is not None:
            self._order.remove(key)

    def nearest(self, key: bytes) -> tuple[Node, int] | None:
        """The child whose first block shares most with `key`, and how many bytes; None when no token is shared."""
        best, best_bytes = None, 0
        for neighbour in self if len(self) == 1 else self._sorted().around(key):
            n_bytes = common_prefix(neighbour, len(neighbour), key, 0)
            if n_bytes > best_bytes:
                best, best_bytes = self[neighbour], n_bytes
        return None if best is None else (best, best_bytes)

    def prefix_of(self, key: bytes) -> Node | None:
        """The child just before the child `key` when its (partial) block is a beginning of `key`."""
        if len(self) == 1:
            return None
        before = self._sorted().before(key)
        return self[before] if before is not None and key.startswith(before) else None

    def _sorted(self) -> SortedKeys:
        if self._order is None:
            self._order = SortedKeys(sorted(self))
        return self._order


class SortedKeys:
    """Distinct byte strings in order: O(log n) to find, O(MAX_RUN) bytes moved to add or remove."""

    __slots__ = ("_last", "_runs")

    def __init__(self, keys: list[bytes]) -> None:
        half = MAX_RUN // 2
        self._runs = [keys[i : i + half] for i in range(0, len(keys), half)]
        self._last = [run[-1] for run in self._runs]

    def add(self, key: bytes) -> None:
        if not self._runs:
            self._runs, self._last = [[key]], [key]
            return
        i = min(bisect_left(self._last, key), len(self._runs) - 1)
        run = self._runs[i]
        insort(run, key)
        self._last[i] = run[-1]
        if len(run) > MAX_RUN:
            half = len(run) // 2
            self._runs[i : i + 1] = [run[:half], run[half:]]
            self._last[i : i + 1] = [run[half - 1], run[-1]]

    def remove(self, key: bytes) -> None:
        i = bisect_left(self._last, key)
        run = self._runs[i]
        del run[bisect_left(run, key)]
        if run:
            self._last[i] = run[-1]
        else:
            del self._runs[i], self._last[i]

    def around(self, key: bytes) -> list[bytes]:
        """The greatest key below `key` and the least one not below it, where they exist."""
        i = bisect_left(self._last, key)
        before = self.before(key)
        found = [] if before is None else [before]
        if i < len(self._runs):
            found.append(self._runs[i][bisect_left(self._runs[i], key)])
        return found

    def before(self, key: bytes) -> bytes | None:
        """The greatest key below `key`."""
        i = bisect_left(self._last, key)
        j = bisect_left(self._runs[i], key) if i < len(self._runs) else 0
        if j > 0:
            return self._runs[i][j - 1]
        return self._last[i - 1] if i > 0 else None
