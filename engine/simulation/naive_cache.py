"""The prefix store done slowly and obviously, behind the door of radix_cache.cache.PrefixCache: an oracle for tests.

One dict entry per block, keyed by the namespace and all the tokens up to the block's end. An entry whose tokens are no
whole number of blocks is a sealed partial block: it is only ever copied from.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from radix_cache.cache import BlockCopy, Namespace, Probe

TOKEN_BYTES = 4

Key = tuple[Namespace, bytes]
Ids: TypeAlias = "bytes | array[int]"


class NaiveStats(NamedTuple):
    acquires: int
    evictions: int
    free_blocks: int
    tree_blocks: int


class NaiveHolding:
    def __init__(self, namespace: Namespace, use_cache: bool, blocks: list[int], cached_tokens: int) -> None:
        self.namespace = namespace
        self.use_cache = use_cache
        self.table = blocks
        self.cached_tokens = cached_tokens
        self.cached_public_tokens = 0
        self.copies: list[BlockCopy] = []
        self.published_tokens = 0

    @property
    def blocks(self) -> np.ndarray:
        return np.array(self.table, np.int32)

    @property
    def n_blocks(self) -> int:
        return len(self.table)


@dataclass(slots=True)
class _Entry:
    key: Key
    block: int
    fence: int | None
    used: int
    children: set[Key] = field(default_factory=set)


class _Match(NamedTuple):
    blocks: list[int]
    source: int | None
    n_copied: int


class NaiveCache:
    def __init__(self, n_blocks: int, block_size: int, *, clock: Callable[[], float] | None = None) -> None:
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.entries: dict[Key, _Entry] = {}
        self.roots: dict[Namespace, set[Key]] = {}
        self.free = list(range(n_blocks))
        self.refs = [0] * n_blocks
        self.holdings: list[NaiveHolding] = []
        self.acquires = self.evictions = self._time = 0

    # --- reading ------------------------------------------------------------------------------------------------------

    def probe(self, ns: Namespace, ids: Ids) -> Probe:
        ids = bytes(memoryview(ids).cast("B"))
        match = self._match(ns, ids)
        return Probe(len(match.blocks) * self.block_size + match.n_copied, 0)

    def _match(self, ns: Namespace, ids: bytes) -> _Match:
        usable = len(ids) // TOKEN_BYTES - 1
        blocks: list[int] = []
        while (len(blocks) + 1) * self.block_size <= usable:
            entry = self.entries.get((ns, self._prefix(ids, (len(blocks) + 1) * self.block_size)))
            if entry is None:
                break
            blocks.append(entry.block)
        start = len(blocks) * self.block_size
        best, source = 0, None
        for key in sorted(self._children((ns, self._prefix(ids, start)))):
            if self.entries[key].fence is None:
                there = key[1][start * TOKEN_BYTES :]
                same = _common_tokens(there, ids[start * TOKEN_BYTES : usable * TOKEN_BYTES])
                if same > best:
                    best, source = same, self.entries[key].block
        return _Match(blocks, source, best)

    @property
    def available_blocks(self) -> int:
        return len(self.free) + sum(1 for entry in self.entries.values() if not self._in_use(entry))

    def _in_use(self, entry: _Entry) -> bool:
        return bool(self.refs[entry.block]) or any(self._in_use(self.entries[key]) for key in entry.children)

    def stats(self) -> NaiveStats:
        return NaiveStats(self.acquires, self.evictions, len(self.free), len(self.entries))

    # --- holdings -----------------------------------------------------------------------------------------------------

    def acquire(self, ns: Namespace, ids: Ids, *, use_cache: bool = True) -> NaiveHolding | None:
        ids = bytes(memoryview(ids).cast("B"))
        self.acquires += 1
        match = self._match(ns, ids) if use_cache else _Match([], None, 0)
        holding = NaiveHolding(ns, use_cache, list(match.blocks), len(match.blocks) * self.block_size)
        holding.published_tokens = holding.cached_tokens
        for block in match.blocks:
            self.refs[block] += 1
        for n in range(len(match.blocks)):
            self._touch(self.entries[ns, self._prefix(ids, (n + 1) * self.block_size)])
        self.holdings.append(holding)
        if match.source is not None and self._room_for(1):
            target = self._allocate(holding)
            holding.copies.append(BlockCopy(match.source, target, match.n_copied))
            holding.cached_tokens += match.n_copied
        return holding

    def extend(self, holding: NaiveHolding, n_tokens: int) -> bool:
        missing = -(-n_tokens // self.block_size) - holding.n_blocks
        if missing > 0 and not self._room_for(missing):
            return False
        for _ in range(missing):
            self._allocate(holding)
        return True

    def publish(self, holding: NaiveHolding, ids: Ids, n_tokens: int, fence: int | None) -> None:
        ids = bytes(memoryview(ids).cast("B"))
        if not holding.use_cache:
            return
        for n in range(n_tokens // self.block_size):
            key = (holding.namespace, self._prefix(ids, (n + 1) * self.block_size))
            if key not in self.entries:
                self._insert(key, holding.table[n], fence)
                holding.published_tokens = (n + 1) * self.block_size
            self._touch(self.entries[key])

    def confirm(self, fence: int) -> None:
        for entry in self.entries.values():
            if entry.fence == fence:
                entry.fence = None

    def revoke(self, fence: int) -> list[NaiveHolding]:
        entries = [entry for entry in self.entries.values() if entry.fence == fence]
        blocks = {entry.block for entry in entries}
        for entry in sorted(entries, key=lambda entry: -len(entry.key[1])):
            self._remove(entry)
        hit = [holding for holding in self.holdings if blocks.intersection(holding.table)]
        for holding in hit:
            left = min(n for n, block in enumerate(holding.table) if block in blocks)
            for block in holding.table[left:]:
                self._drop_ref(block)
            del holding.table[left:]
            holding.published_tokens = left * self.block_size
            holding.cached_tokens = min(holding.cached_tokens, holding.published_tokens)
            holding.copies = []
        return hit

    def fork(self, holding: NaiveHolding) -> NaiveHolding:
        copy = NaiveHolding(holding.namespace, holding.use_cache, list(holding.table), holding.cached_tokens)
        copy.published_tokens = holding.published_tokens
        for block in copy.table:
            self.refs[block] += 1
        self.holdings.append(copy)
        return copy

    def make_writable(self, holding: NaiveHolding, first_token: int) -> list[BlockCopy] | None:
        owned = {entry.block for entry in self.entries.values()}
        shared = [
            n
            for n in range(first_token // self.block_size, holding.n_blocks)
            if self.refs[holding.table[n]] > 1 or holding.table[n] in owned
        ]
        if not self._room_for(len(shared)):
            return None
        copies = []
        for n in shared:
            old = holding.table[n]
            new = self._allocate(holding)
            holding.table.pop()
            holding.table[n] = new
            self._drop_ref(old)
            if first_token > n * self.block_size:
                copies.append(BlockCopy(old, new, first_token - n * self.block_size))
        return copies

    def release(self, holding: NaiveHolding, ids: Ids, n_tokens: int) -> None:
        ids = bytes(memoryview(ids).cast("B"))
        if holding.use_cache:
            self.publish(holding, ids, n_tokens, None)
            whole = n_tokens // self.block_size
            key = (holding.namespace, self._prefix(ids, n_tokens))
            covered = any(
                other[1].startswith(key[1])
                for other in self._children((key[0], self._prefix(ids, whole * self.block_size)))
            )
            if whole and n_tokens % self.block_size and not covered and self.refs[holding.table[whole]] == 1:
                self._insert(key, holding.table[whole], None)
        self.discard(holding)

    def discard(self, holding: NaiveHolding) -> None:
        self.holdings = [other for other in self.holdings if other is not holding]
        for block in holding.table:
            self._drop_ref(block)
        holding.table = []

    def flush(self, owner: str | None = None) -> int:
        dropped = 0
        while True:
            leaves = [entry for entry in self._evictable() if owner is None or entry.key[0][0] == owner]
            if not leaves:
                return dropped
            for entry in leaves:
                self._remove(entry)
            dropped += len(leaves)

    def check_invariants(self, holdings: Iterable[NaiveHolding]) -> None:
        tree = [entry.block for entry in self.entries.values()]
        private = {block for holding in self.holdings for block in holding.table} - set(tree)
        everything = sorted([*self.free, *tree, *private])
        assert everything == list(range(self.n_blocks)), f"blocks are lost or doubled: {everything}"
        refs = [0] * self.n_blocks
        for holding in self.holdings:
            for block in holding.table:
                refs[block] += 1
        assert refs == self.refs, "reference counts differ from the holdings"
        assert {id(holding) for holding in holdings} == {id(holding) for holding in self.holdings}, "a holding leaked"

    # --- inside -------------------------------------------------------------------------------------------------------

    def _prefix(self, ids: bytes, n_tokens: int) -> bytes:
        return ids[: n_tokens * TOKEN_BYTES]

    def _parent(self, key: Key) -> Key:
        n_tokens = len(key[1]) // TOKEN_BYTES
        return key[0], self._prefix(key[1], (n_tokens - 1) // self.block_size * self.block_size)

    def _children(self, key: Key) -> set[Key]:
        if not key[1]:
            return self.roots.setdefault(key[0], set())
        return self.entries[key].children if key in self.entries else set()

    def _touch(self, entry: _Entry) -> None:
        self._time += 1
        entry.used = self._time

    def _insert(self, key: Key, block: int, fence: int | None) -> None:
        assert not self._parent(key)[1] or self._parent(key) in self.entries, "a node without its parent"
        self.entries[key] = _Entry(key, block, fence, 0)
        self._children(self._parent(key)).add(key)
        self._touch(self.entries[key])

    def _remove(self, entry: _Entry) -> None:
        assert not entry.children, "a node with children leaves the tree"
        self._children(self._parent(entry.key)).discard(entry.key)
        del self.entries[entry.key]
        if not self.refs[entry.block]:
            self.free.append(entry.block)

    def _evictable(self) -> list[_Entry]:
        return [entry for entry in self.entries.values() if not entry.children and not self.refs[entry.block]]

    def _room_for(self, n_blocks: int) -> bool:
        """Evict until so many are free; False, and nothing changed, when that cannot be."""
        if n_blocks > self.available_blocks:
            return False
        while len(self.free) < n_blocks:
            self._remove(min(self._evictable(), key=lambda entry: entry.used))
            self.evictions += 1
        return True

    def _allocate(self, holding: NaiveHolding) -> int:
        block = self.free.pop(0)
        self.refs[block] = 1
        holding.table.append(block)
        return block

    def _drop_ref(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block] and all(entry.block != block for entry in self.entries.values()):
            self.free.append(block)


def _common_tokens(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b)) // TOKEN_BYTES
    for i in range(n):
        if a[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES] != b[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES]:
            return i
    return n
