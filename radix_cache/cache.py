"""PrefixCache: the one face of the prefix store.

A sequence's life: acquire -> (extend -> publish -> confirm or revoke) per step -> release. After every call each block
is free, or in the tree, or private to sequences. Changes are made between steps, by one thread; `probe`, `stats` and
`check_invariants` may come from another one, and a lock keeps them apart.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from radix_cache import invariants, stats
from radix_cache.blocks import BlockPool, Blocks, InvariantError
from radix_cache.children import TOKEN_BYTES, common_prefix
from radix_cache.eviction import POLICIES, Evictor
from radix_cache.explain import Explanation, explain, next_block, public_bytes
from radix_cache.ghosts import Cause, Ghost
from radix_cache.holding import BlockCopy, Holding, Pin
from radix_cache.leases import EarlyEnd, Leases, Refusal
from radix_cache.merging import settle
from radix_cache.owners import DEFAULT_PIN_BUDGET, PUBLIC, Namespace, Owner, Owners, QuotaError
from radix_cache.stats import CacheStats, OwnerStats
from radix_cache.tree import BLOCK_ID_BYTES, Match, Node, RadixTree

__all__ = [
    "PUBLIC",
    "BlockCopy",
    "CacheStats",
    "EarlyEnd",
    "Holding",
    "InvariantError",
    "Namespace",
    "OwnerStats",
    "PrefixCache",
    "Probe",
    "QuotaError",
    "Refusal",
]

Ids: TypeAlias = "bytes | memoryview | array[int] | npt.NDArray[np.int32]"
"""Token ids as int32, from the first token of the sequence on: bytes, or anything with a buffer of int32."""


REGRET_S = 3600.0
"""Blocks that are wanted again so soon after their eviction count as regretted."""


class Probe(NamedTuple):
    """What an acquire would find now."""

    cached_tokens: int
    cached_public_tokens: int


class PrefixCache:
    """`n_blocks` physical blocks of `block_size` tokens, shared by equal prompts of one namespace.

    `policy` names the order in which an owner's own blocks are given up (see eviction.POLICIES). Leases leave room for
    one sequence of `longest_tokens`.
    """

    def __init__(
        self,
        n_blocks: int,
        block_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        policy: str = "lru",
        longest_tokens: int = 0,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"a block holds at least one token, got block_size {block_size}")
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}; expected one of {', '.join(sorted(POLICIES))}")
        self.block_size = block_size
        self.n_blocks = n_blocks
        self._clock = clock
        self._pool = BlockPool(n_blocks)
        self._owners = Owners(n_blocks, POLICIES[policy])
        self._tree = RadixTree(block_size, self._pool, self._owners.public, self._rank)
        self._evictor = Evictor(self._owners, self._tree, clock)
        self._leases = Leases(self._tree, self._owners, n_blocks, clock)
        self._leases.longest_blocks = -(-longest_tokens // block_size)
        self._live: set[Holding] = set()
        self._lock = threading.Lock()

    # --- looking up -----------------------------------------------------------------------------------------------

    def probe(self, ns: Namespace, ids: Ids) -> Probe:
        """What acquire would find for this prompt. Changes nothing: neither recency, nor counters, nor edges."""
        _check_namespace(ns)
        key = _key(ids, 0, None)
        if len(key) <= TOKEN_BYTES:
            return Probe(0, 0)
        with self._lock:
            match = self._tree.match(ns, key, len(key) - TOKEN_BYTES)
            return Probe(match.n_bytes // TOKEN_BYTES, self._public_tokens(match))

    def acquire(self, ns: Namespace, ids: Ids, *, use_cache: bool = True) -> Holding | None:
        """Hold the longest resident prefix of a prompt, at most all but its last token.

        Whole blocks are shared. What the first differing block (or the one that holds the last prompt token) has in
        common is reused by copying it to a private block: `holding.copies`. None: no block can be had for that copy.
        """
        _check_namespace(ns)
        key = _key(ids, 0, None)
        with self._lock:
            self._leases.expire()
            holding = Holding(ns, self._owners.get(ns[0]), len(key) // TOKEN_BYTES, None)
            if use_cache:
                holding.node = self._tree.root(ns)
                if len(key) > TOKEN_BYTES and not self._take_prefix(holding, key):
                    return None
            self._live.add(holding)
            return holding

    def _take_prefix(self, holding: Holding, key: bytes) -> bool:
        tree, pool = self._tree, self._pool
        match = tree.match(holding.ns, key, len(key) - TOKEN_BYTES)
        holding.regretted_blocks = self._regretted(match, holding.ns, key)
        holding.cached_tokens = match.n_bytes // TOKEN_BYTES
        holding.cached_public_tokens = self._public_tokens(match)
        n_partial = holding.cached_tokens % self.block_size
        source, target = 0, None
        if n_partial:
            at = match.offset // tree.block_bytes * BLOCK_ID_BYTES
            source = int.from_bytes(match.node.blocks[at : at + BLOCK_ID_BYTES], "little")
        holding.node = tree.stem(match)
        tree.lock(holding.node)
        self._leases.renew(holding.node)
        if n_partial:
            pool.refs[source] += 1
            holding.pin = Pin(source, match.node.owner)
            target = self._allocate(holding.owner, 1)
            if target is None:
                self._unpin(holding)
                tree.unlock(holding.node)
                return False
            holding.copies.append(BlockCopy(source, int(target[0]), n_partial))
            holding.copied_tokens = holding.cached_tokens
        path = tree.path_blocks(holding.node)
        pool.retain(path)
        holding.append(path)
        holding.published_tokens = len(path) * self.block_size
        if target is not None:
            holding.append(target)
        return True

    def _public_tokens(self, match: Match) -> int:
        return public_bytes(self._tree, match) // TOKEN_BYTES

    def _regretted(self, match: Match, ns: Namespace, key: bytes) -> int:
        """How many of the blocks that are missing next had been evicted a short while ago."""
        ghost = self._tree.ghosts.find(ns, *next_block(match, key, self._tree.block_bytes))
        return 0 if ghost is None or self._clock() - ghost.evicted_s > REGRET_S else ghost.n_blocks

    def explain(self, ns: Namespace, ids: Ids) -> Explanation:
        """How much of this prompt is resident, where it leaves what is, and why the rest is not. Changes nothing."""
        _check_namespace(ns)
        key = _key(ids, 0, None)
        with self._lock:
            return explain(self._tree, ns, key)

    # --- growing --------------------------------------------------------------------------------------------------

    def extend(self, holding: Holding, n_tokens: int) -> bool:
        """Make room for n_tokens in all, evicting if need be. False: it cannot be had now; the holding is as before."""
        with self._lock:
            self._check_live(holding)
            n_missing = -(-n_tokens // self.block_size) - holding.n_blocks
            if n_missing > 0:
                blocks = self._allocate(holding.owner, n_missing)
                if blocks is None:
                    return False
                holding.append(blocks)
            if not holding.counted:
                self._count_lookup(holding)
            return True

    def publish(self, holding: Holding, ids: Ids, n_tokens: int, fence: int | None) -> None:
        """The whole blocks up to n_tokens, which step `fence` computes (None: they are computed), become matchable."""
        with self._lock:
            self._check_live(holding)
            self._unpin(holding)
            end = n_tokens // self.block_size * self.block_size
            if holding.node is not None and end > holding.published_tokens:
                self._publish(holding, holding.node, _key(ids, holding.published_tokens, end), fence)

    def confirm(self, fence: int) -> None:
        """That step completed: its blocks may be copied from."""
        with self._lock:
            nodes = self._tree.fenced.pop(fence, [])
            for node in nodes:
                node.fence = None
            for node in nodes:
                if node.n_blocks:
                    settle(self._tree, node)
            self._leases.attach_ready()

    def revoke(self, fence: int) -> list[Holding]:
        """That step failed: what it published leaves the tree, and everything below it.

        Returns the live holdings that built on it. Each is cut back to the part of its table that the tree still holds
        (`published_tokens`); its blocks from there on are gone, and its copies with them.
        """
        with self._lock:
            doomed = []
            for node in self._tree.fenced.pop(fence, ()):
                if node.n_blocks:
                    doomed += self._tree.remove(node)
            hit = [holding for holding in self._live if _is_gone(holding.node)] if doomed else []
            for holding in hit:
                self._cut_back(holding)
            for owner, blocks in doomed:
                owner.counters.revoked_blocks += len(blocks) // BLOCK_ID_BYTES
                self._tree.hand_back(owner, blocks)
            return hit

    def _publish(self, holding: Holding, node: Node, key: bytes, fence: int | None) -> None:
        """Hang `key`, the tokens that follow holding.published_tokens, below `node`, and lock it for the holding. It
        may end in a partial block, which is then sealed; no more may be published afterwards.

        Where an equal path is there already, the holding's own blocks for it stay private duplicates.
        """
        tree, ns = self._tree, holding.ns
        block_bytes = tree.block_bytes
        done = 0
        while len(key) - done >= block_bytes:
            child = tree.find_child(node, ns, key[done : done + block_bytes])
            if child is None:
                break
            n_shared = common_prefix(child.edge, child.n_bytes, key, done) // block_bytes
            if n_shared * block_bytes < child.n_bytes:
                child = tree.split(child, n_shared)
            tree.lock_one(child)
            node = child
            done += n_shared * block_bytes
        rest = key[done:]
        if len(rest) >= block_bytes or (rest and not self._offers(node, ns, rest)):
            first = holding.published_tokens // self.block_size + done // block_bytes
            blocks = holding.blocks[first : first - (-len(rest) // block_bytes)]
            if len(blocks) * block_bytes < len(rest):
                raise ValueError(f"{holding.n_blocks} blocks do not hold the tokens to publish; extend the holding")
            if not self._pool.in_tree[blocks].any():  # a parallel sample may have published them elsewhere
                node = tree.insert(node, ns, holding.owner, rest, blocks, fence)
                done += len(rest)
                if fence is None:
                    settle(tree, node)
        holding.node = node
        holding.published_tokens += done // block_bytes * self.block_size

    def _offers(self, node: Node, ns: Namespace, partial: bytes) -> bool:
        """Whether a computed block below `node` begins with these tokens already."""
        for kids in (self._tree.kids(node, ns), node.children if ns != node.ns else None):
            near = None if kids is None else kids.nearest(partial)
            if near is not None and near[1] == len(partial) and near[0].fence is None:
                return True
        return False

    # --- leases ---------------------------------------------------------------------------------------------------

    def lease(self, holding: Holding, offset_tokens: int, ttl_s: float) -> Refusal | None:
        """Promise that the whole blocks of the first offset_tokens of the holding's prompt stay resident for ttl_s
        seconds from now, and anew from every read. None: granted; else why not, and nothing has changed."""
        with self._lock:
            self._check_live(holding)
            n_blocks = min(offset_tokens, holding.prompt_tokens) // self.block_size
            refusal = self._leases.grant(holding, n_blocks, ttl_s)
            holding.owner.counters.leases_granted += refusal is None
            holding.owner.counters.leases_refused += refusal is not None
            return refusal

    def end_leases(self, owner: str | None = None) -> list[EarlyEnd]:
        """End the leases of one owner, or all, before their time. Returns what was promised and not kept."""
        with self._lock:
            return self._leases.end(None if owner is None else self._owners.get(owner))

    # --- parallel samples -----------------------------------------------------------------------------------------

    def fork(self, holding: Holding) -> Holding:
        """A parallel sample: it shares every block, also the partly filled last one (see make_writable)."""
        with self._lock:
            self._check_live(holding)
            if holding.copies:
                raise ValueError("a holding whose copies have not been run cannot be forked; run them first")
            twin = Holding(holding.ns, holding.owner, holding.prompt_tokens, holding.node)
            twin.cached_tokens = holding.cached_tokens
            twin.cached_public_tokens = holding.cached_public_tokens
            twin.published_tokens = holding.published_tokens
            twin.copied_tokens = holding.copied_tokens
            twin.counted = True
            twin.append(holding.blocks)
            self._pool.retain(twin.blocks)
            if twin.node is not None:
                self._tree.lock(twin.node)
            self._live.add(twin)
            return twin

    def make_writable(self, holding: Holding, first_token: int) -> list[BlockCopy] | None:
        """Before writing from first_token on: replace the blocks that others use or the tree owns. Returns the copies
        to run before the write, in the same step. None: no block can be had, and nothing has changed."""
        with self._lock:
            self._check_live(holding)
            first = first_token // self.block_size
            tail = holding.blocks[first:]
            shared = np.flatnonzero((self._pool.refs[tail] > 1) | self._pool.in_tree[tail])
            if len(shared) == 0:
                return []
            fresh = self._allocate(holding.owner, len(shared))
            if fresh is None:
                return None
            old = tail[shared]
            tail[shared] = fresh
            self._drop_blocks(holding.owner, old)
            n_kept = first_token % self.block_size
            if shared[0] > 0 or n_kept == 0:
                return []
            holding.copied_tokens = first_token
            return [BlockCopy(int(old[0]), int(fresh[0]), n_kept)]

    # --- letting go -----------------------------------------------------------------------------------------------

    def release(self, holding: Holding, ids: Ids, n_tokens: int) -> None:
        """The sequence ends or is preempted with n_tokens computed. They enter the tree, a partial last block sealed;
        all else is freed. Only ids from holding.published_tokens on are read."""
        with self._lock:
            self._check_live(holding)
            if n_tokens > holding.n_blocks * self.block_size:
                raise ValueError(f"{n_tokens} computed tokens in {holding.n_blocks} blocks of {self.block_size}")
            if holding.node is not None:
                end = n_tokens
                last = n_tokens // self.block_size
                if n_tokens % self.block_size and (
                    last == 0  # too short to keep
                    or n_tokens <= holding.copied_tokens  # the step that runs the copy may still fail
                    or self._pool.refs[holding.table[last]] > 1  # a parallel sample still writes there
                ):
                    end = last * self.block_size
                if end > holding.published_tokens:
                    self._publish(holding, holding.node, _key(ids, holding.published_tokens, end), None)
            self._let_go(holding)

    def discard(self, holding: Holding) -> None:
        """The sequence ends and nothing more of it is kept."""
        with self._lock:
            self._check_live(holding)
            self._let_go(holding)

    def flush(self, owner: str | None = None) -> int:
        """Drop every unlocked node, of one owner or of all. Returns how many blocks left the tree."""
        with self._lock:
            named = self._owners.all() if owner is None else [self._owners.get(owner)]
            before = self._pool.n_tree
            for one in sorted(named, key=lambda one: one is self._owners.public):  # the trunk last
                while (node := one.policy.coldest()) is not None:
                    if node.has_children:
                        self._tree.set_aside(node)
                    else:
                        one.counters.flushed_blocks += node.n_blocks
                        self._tree.give_up(node, node.n_blocks, Ghost(Cause.FLUSHED, self._clock(), node.n_blocks))
            return before - self._pool.n_tree

    # --- operating ------------------------------------------------------------------------------------------------

    def set_quota(
        self,
        owner: str,
        *,
        reserve: float = 0.0,
        ceiling: float = 1.0,
        weight: float = 1.0,
        pin_budget: float = DEFAULT_PIN_BUDGET,
    ) -> None:
        """What neighbours cannot take from `owner`, what it cannot exceed and what its leases may hold, as fractions of
        the pool; and how dear its blocks are next to others' of the same age. Raises QuotaError."""
        with self._lock:
            self._owners.set_quota(
                owner,
                reserve=reserve,
                ceiling=ceiling,
                weight=weight,
                pin_budget=pin_budget,
                spoken_for_blocks=self._leases.pinned_blocks + self._leases.longest_blocks,
            )
            self._rank(self._owners.get(owner))

    @property
    def available_blocks(self) -> int:
        """Free blocks plus those of the tree that no running sequence's path holds. O(1)."""
        return self._pool.n_free + self._pool.n_tree - self._tree.locked_blocks

    def stats(self) -> CacheStats:
        with self._lock:
            self._leases.expire()
            return stats.collect(self._pool, self._tree, self._owners.all())

    def check_invariants(self, holdings: Iterable[Holding] | None = None) -> None:
        """Raises InvariantError naming what is wrong. `holdings`: all that the caller believes to hold. O(blocks)."""
        with self._lock:
            if holdings is not None and (known := set(holdings)) != self._live:
                raise InvariantError(
                    f"{len(known - self._live)} holdings are not known to the cache, {len(self._live - known)} are lost"
                )
            invariants.check(self._pool, self._tree, self._owners, self._live, self._leases)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _rank(self, owner: Owner) -> None:
        self._evictor.rank(owner)

    def _allocate(self, owner: Owner, n: int) -> Blocks | None:
        """n blocks charged to `owner`, within its ceiling, evicting if need be; None when they cannot be had."""
        pool = self._pool
        n_over = owner.used_blocks + n - owner.ceiling_blocks
        n_short = n - pool.n_free
        if n_over > owner.evictable_blocks or (n_short > 0 and n_short > self._evictor.reclaimable_blocks(owner)):
            return None
        if n_over > 0:
            self._evictor.reclaim_own(n_over, owner)
            if owner.used_blocks + n > owner.ceiling_blocks:
                return None
        if n > pool.n_free:
            self._evictor.reclaim(n - pool.n_free, owner)
            if n > pool.n_free:
                return None
        owner.private_blocks += n
        return pool.allocate(n)

    def _drop_blocks(self, owner: Owner, blocks: Blocks) -> None:
        owner.private_blocks -= self._pool.release(blocks)

    def _unpin(self, holding: Holding) -> None:
        if holding.pin is not None:
            self._drop_blocks(holding.pin.owner, np.array([holding.pin.block], np.int32))
            holding.pin = None

    def _let_go(self, holding: Holding) -> None:
        self._live.remove(holding)
        self._unpin(holding)
        self._leases.attach_ready()
        self._leases.forget(holding)
        if holding.node is not None:
            self._tree.unlock(holding.node)
        self._drop_blocks(holding.owner, holding.blocks)
        holding.n_blocks = 0
        holding.copies.clear()
        holding.node = None

    def _cut_back(self, holding: Holding) -> None:
        """To the part of its path that is left in the tree."""
        while _is_gone(holding.node):
            holding.node = holding.node.parent  # type: ignore[union-attr]
        n_left = len(self._tree.path_blocks(holding.node))  # type: ignore[arg-type]
        self._drop_blocks(holding.owner, holding.blocks[n_left:])
        holding.n_blocks = n_left
        holding.published_tokens = n_left * self.block_size
        holding.cached_tokens = min(holding.cached_tokens, holding.published_tokens)
        holding.cached_public_tokens = min(holding.cached_public_tokens, holding.published_tokens)
        holding.copies.clear()
        self._unpin(holding)

    def _count_lookup(self, holding: Holding) -> None:
        holding.counted = True
        counters = holding.owner.counters
        counters.lookups += 1
        counters.prompt_tokens += holding.prompt_tokens
        counters.hit_tokens += holding.cached_tokens
        counters.hit_public_tokens += holding.cached_public_tokens
        counters.regretted_blocks += holding.regretted_blocks

    def _check_live(self, holding: Holding) -> None:
        if holding not in self._live:
            raise ValueError("this holding has been released or discarded, or belongs to another cache")


def _is_gone(node: Node | None) -> bool:
    return node is not None and node.n_blocks == 0 and node.parent is not None


def _check_namespace(ns: Namespace) -> None:
    if len(ns) != 4:
        raise ValueError(f"expected the namespace (owner, model revision, adapter, salt), got {ns!r}")
    if ns[0] == PUBLIC and ns[3]:
        raise ValueError("the public namespace has no salt")


def _key(ids: Ids, start: int, end: int | None) -> bytes:
    """ids[start:end] as bytes of int32; reads nothing else of them."""
    if isinstance(ids, bytes) and start == 0 and (end is None or end * TOKEN_BYTES == len(ids)):
        key = ids
    else:
        with memoryview(ids).cast("B") as view:  # type: ignore[arg-type]
            key = bytes(view[start * TOKEN_BYTES : None if end is None else end * TOKEN_BYTES])
    if len(key) % TOKEN_BYTES:
        raise ValueError(f"token ids are int32, got {len(key)} bytes")
    if end is not None and len(key) != (end - start) * TOKEN_BYTES:
        raise ValueError(f"{end} token ids expected, got {start + len(key) // TOKEN_BYTES}")
    return key
