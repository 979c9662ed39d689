"""The check of everything that must hold between calls, recomputed from the tree and the holdings alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from radix_cache.blocks import BlockPool, InvariantError
from radix_cache.eviction import RecencyList
from radix_cache.holding import Holding
from radix_cache.leases import Leases
from radix_cache.owners import PUBLIC, Owner, Owners
from radix_cache.tree import Node, RadixTree


def check(pool: BlockPool, tree: RadixTree, owners: Owners, holdings: Iterable[Holding], leases: Leases) -> None:
    """Raises InvariantError naming the first thing that is wrong. O(blocks + nodes + tables)."""
    holdings = list(holdings)
    nodes = [node for root in tree.roots.values() for node in root.descendants()]
    _check_shape(tree, nodes)
    _check_blocks(pool, nodes, holdings)
    _check_holdings(tree, holdings)
    _check_locks(tree, nodes, holdings, leases)
    _check_leases(owners, nodes, leases)
    _check_owners(pool, owners, nodes)
    for owner in owners.all():
        _check_policy(owner, [node for node in nodes if node.owner is owner])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)


def _name(node: Node) -> str:
    return f"node {node.ns} of {node.n_blocks} blocks from {_blocks(node)[:4].tolist()}"


def _blocks(node: Node) -> np.ndarray:
    return np.frombuffer(node.blocks, np.int32)[: node.n_blocks]


def _check_shape(tree: RadixTree, nodes: list[Node]) -> None:
    _require(len(nodes) == tree.n_nodes, f"{len(nodes)} nodes in the tree, {tree.n_nodes} counted")
    for node in nodes:
        parent = node.parent
        if parent is None or (parent.n_blocks == 0 and parent.parent is not None):
            raise InvariantError(f"{_name(node)}: its parent is gone")
        key = node.edge[: min(tree.block_bytes, node.n_bytes)]
        kids = tree.kids(parent, node.ns)
        _require(kids is not None and kids.get(key) is node, f"{_name(node)}: not under its first block")
        _require(node.n_blocks > 0, f"{_name(node)}: empty")
        _require(
            -(-node.n_bytes // tree.block_bytes) == node.n_blocks, f"{_name(node)}: {node.n_bytes} bytes of tokens"
        )
        _require(len(node.edge) <= max(2 * node.n_bytes, tree.block_bytes), f"{_name(node)}: slack {len(node.edge)}")
        _require(node.ns == parent.ns or parent.ns[0] == PUBLIC, f"{_name(node)}: below {parent.ns}")
        _require(parent.ns[1:3] == node.ns[1:3], f"{_name(node)}: below {parent.ns}")
        _require(node.owner.name == node.ns[0], f"{_name(node)}: owned by {node.owner.name!r}")
        if node.has_children:
            _require(node.n_bytes % tree.block_bytes == 0, f"{_name(node)}: children below a partial block")
        for kids in (node.children, *(node.branches or {}).values()):
            _require(kids is None or len(kids) > 0, f"{_name(node)}: keeps an empty map of children")
        if node.fence is not None:
            _require(node in tree.fenced.get(node.fence, ()), f"{_name(node)}: fence {node.fence} does not know it")


def _check_blocks(pool: BlockPool, nodes: list[Node], holdings: list[Holding]) -> None:
    in_tree = np.zeros(pool.n_blocks, np.int64)
    for node in nodes:
        np.add.at(in_tree, _blocks(node), 1)
    _require(bool((in_tree <= 1).all()), f"block {in_tree.argmax()} is owned by {in_tree.max()} nodes")
    differ = (in_tree == 1) != pool.in_tree
    _require(not differ.any(), f"block {differ.argmax()}: the tree and the pool disagree whose it is")
    refs = np.zeros(pool.n_blocks, np.int64)
    for holding in holdings:
        table = holding.blocks
        _require(len(np.unique(table)) == len(table), f"a block table holds a block twice: {table.tolist()}")
        refs[table] += 1
        if holding.pin is not None:
            refs[holding.pin.block] += 1
    differ = refs != pool.refs
    at = int(differ.argmax())
    _require(not differ.any(), f"block {at}: {pool.refs[at]} uses counted, {refs[at]} found")
    free = np.zeros(pool.n_blocks, np.int64)
    np.add.at(free, pool.free, 1)
    _require(bool((free <= 1).all()), f"block {free.argmax()} is free twice")
    expected = (refs == 0) & (in_tree == 0)
    differ = expected != (free == 1)
    at = int(differ.argmax())
    _require(not differ.any(), f"block {at}: {refs[at]} uses, in the tree {bool(in_tree[at])}, free {bool(free[at])}")
    _require(pool.n_tree == int(in_tree.sum()), f"{pool.n_tree} tree blocks counted, {in_tree.sum()} found")


def _check_holdings(tree: RadixTree, holdings: list[Holding]) -> None:
    for holding in holdings:
        _require(
            0 <= holding.cached_public_tokens <= holding.cached_tokens <= max(holding.prompt_tokens - 1, 0),
            f"{holding.cached_tokens} cached tokens of a prompt of {holding.prompt_tokens}",
        )
        if holding.node is not None:
            n_path = len(tree.path_blocks(holding.node)) * tree.block_bytes // 4
            _require(
                n_path == holding.published_tokens, f"path of {n_path} tokens, {holding.published_tokens} published"
            )


def _path(node: Node | None) -> Iterator[Node]:
    """From `node` up to the last one below the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def _check_locks(tree: RadixTree, nodes: list[Node], holdings: list[Holding], leases: Leases) -> None:
    ends = [holding.node for holding in holdings] + [lease.node for lease in leases.active]
    locks = Counter(node for end in ends for node in _path(end))
    for node in nodes:
        _require(node.locks == locks[node], f"{_name(node)}: {node.locks} locks counted, {locks[node]} found")
    _require(locks.keys() <= set(nodes), "a holding or a lease builds on a node that is not in the tree")
    locked = sum(node.n_blocks for node in nodes if node.locks)
    _require(locked == tree.locked_blocks, f"{tree.locked_blocks} locked blocks counted, {locked} found")


def _check_leases(owners: Owners, nodes: list[Node], leases: Leases) -> None:
    counts = Counter(node for lease in leases.active for node in _path(lease.node))
    for lease in leases.active:
        _require(lease.node is not None and lease.node.lease is lease, f"a lease of {lease.owner.name!r} lost its node")
    for node in nodes:
        _require(node.leases == counts[node], f"{_name(node)}: {node.leases} leases counted, {counts[node]} found")
        _require(node.lease is None or node.lease in leases.active, f"{_name(node)}: keeps a lease that has ended")
    for owner in owners.all():
        leased = sum(node.n_blocks for node in nodes if node.owner is owner and node.leases)
        _require(owner.leased_blocks == leased, f"owner {owner.name!r}: leased blocks")


def _check_owners(pool: BlockPool, owners: Owners, nodes: list[Node]) -> None:
    for owner in owners.all():
        own = [node for node in nodes if node.owner is owner]
        _require(owner.tree_blocks == sum(node.n_blocks for node in own), f"owner {owner.name!r}: tree blocks")
        locked = sum(node.n_blocks for node in own if node.locks)
        _require(owner.locked_blocks == locked, f"owner {owner.name!r}: locked blocks")
        _require(owner.private_blocks >= 0, f"owner {owner.name!r}: {owner.private_blocks} private blocks")
    charged = sum(owner.private_blocks for owner in owners.all())
    _require(charged == pool.n_private, f"{charged} private blocks charged to owners, {pool.n_private} found")


def _check_policy(owner: Owner, nodes: list[Node]) -> None:
    for node in nodes:
        _require(not (node.listed and node.locks), f"{_name(node)}: locked and offered for eviction")
        _require(node.listed or node.locks > 0 or node.has_children, f"{_name(node)}: an unlocked leaf nobody offers")
    if not isinstance(owner.policy, RecencyList):
        return
    listed = list(owner.policy)
    _require(set(listed) == {node for node in nodes if node.listed}, f"owner {owner.name!r}: recency list")
    _require(len(listed) == len(set(listed)), f"owner {owner.name!r}: a node is twice in the recency list")
    place = {node: i for i, node in enumerate(listed)}
    for node in listed:
        parent = node.parent
        _require(parent not in place or place[parent] > place[node], f"{_name(node)}: more recent than its parent")
    if listed:
        _require(owner.queued_key <= owner.policy.key(listed[0]), f"owner {owner.name!r}: not in the evictor's queue")
