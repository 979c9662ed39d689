"""What is tidied up when a node's computation is confirmed: fewer, longer edges and no second copies."""

from __future__ import annotations

from radix_cache.children import common_prefix
from radix_cache.owners import PUBLIC
from radix_cache.tree import BLOCK_ID_BYTES, Node, RadixTree

MAX_MERGED_BLOCKS = 256
"""Longer edges are left as they are, so that a sequence that grows block by block copies a bounded edge each time."""


def settle(tree: RadixTree, node: Node) -> None:
    """Tidy up around a node that has just been confirmed or inserted as computed."""
    if node.owner.name == PUBLIC:
        absorb_private_copies(tree, node)
    drop_superseded_partials(tree, node)
    merge_with_parent(tree, node)


def merge_with_parent(tree: RadixTree, node: Node) -> None:
    """Put the parent's edge before the node's own when nobody could tell them apart: an only child of the same
    namespace, with the same users (every user of a node is one of its parent, so equal counts mean the same ones)."""
    parent = node.parent
    if (
        parent is None
        or parent.parent is None
        or parent.ns != node.ns
        or parent.branches is not None
        or parent.locks != node.locks
        or node.locks == 0
        or parent.fence is not None
        or node.fence is not None
        or parent.children is None
        or len(parent.children) > 1
        or parent.n_blocks + node.n_blocks > MAX_MERGED_BLOCKS
    ):
        return
    node.edge = parent.edge[: parent.n_bytes] + node.edge[: node.n_bytes]
    node.blocks = parent.blocks[: parent.n_blocks * BLOCK_ID_BYTES] + node.blocks[: node.n_blocks * BLOCK_ID_BYTES]
    node.n_bytes += parent.n_bytes
    node.n_blocks += parent.n_blocks
    node.parent = grandparent = parent.parent
    tree.kids(grandparent, node.ns)[node.edge[: tree.block_bytes]] = node  # type: ignore[index]
    parent.n_blocks = 0
    parent.children = None
    parent.parent = None
    tree.n_nodes -= 1


def drop_superseded_partials(tree: RadixTree, node: Node) -> None:
    """A sealed partial block whose tokens begin this node's first block has nothing to offer any more."""
    kids = tree.kids(node.parent, node.ns)  # type: ignore[arg-type]
    key = node.edge[: min(tree.block_bytes, node.n_bytes)]
    while (partial := kids.prefix_of(key)) is not None and partial.locks == 0:  # type: ignore[union-attr]
        tree.give_up(partial, 1)


def absorb_private_copies(tree: RadixTree, public: Node) -> None:
    """Where tenants hold copies of what has become public: drop them, and hang what continues them below the public
    node. Copies in use stay until they are evicted."""
    parent = public.parent
    key = public.edge[: tree.block_bytes]
    if parent is None or parent.branches is None or public.fence is not None or public.n_bytes < tree.block_bytes:
        return
    for kids in list(parent.branches.values()):
        copy = kids.get(key)
        if copy is None or copy.locks or copy.fence is not None:
            continue
        head = parent.children[key]  # type: ignore[index]  # `public`, or its upper part once it has been split
        shared = common_prefix(copy.edge, copy.n_bytes, head.edge[: head.n_bytes], 0) // tree.block_bytes
        if shared * tree.block_bytes < copy.n_bytes:
            copy = tree.split(copy, shared)
        if copy.children is not None:
            _move_children(tree, copy, head if shared == head.n_blocks else tree.split(head, shared))
        tree.give_up(copy, copy.n_blocks)


def _move_children(tree: RadixTree, copy: Node, public: Node) -> None:
    """Hang the children of an unlocked private `copy` below the end of `public`."""
    for key, child in list(copy.children.items()):  # type: ignore[union-attr]
        if tree.find_child(public, child.ns, key) is not None and key not in (public.children or ()):
            # the tenant has continued the public prefix in the same way already
            for owner, blocks in tree.remove(child):
                tree.hand_back(owner, blocks)
            continue
        tree.detach(child)
        tree.attach(public, child)
        if public.children is not None and key in public.children:
            absorb_private_copies(tree, public.children[key])
