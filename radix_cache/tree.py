"""The radix tree: edges of whole blocks of token ids over the physical blocks that hold their attention state.

An edge is `bytes` (little-endian int32, a copy: no node keeps a prompt alive); matching it is one memcmp, and the first
difference is found by bisection. A leaf's edge may end in a sealed partial block. Public nodes form the trunk; a
tenant's nodes hang below it in `branches`, by namespace, and below each other in `children`. So no walk for one tenant
can come to another's node.

A node is locked when a sequence builds on it, and then so are its ancestors: an unlocked node has only unlocked
descendants. Unlocked nodes are known to their owner's eviction policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from radix_cache.blocks import BlockPool, Blocks
from radix_cache.children import TOKEN_BYTES, Children, common_prefix
from radix_cache.eviction import Link
from radix_cache.ghosts import Ghost, Ghosts
from radix_cache.owners import PUBLIC, Namespace, Owner

if TYPE_CHECKING:
    from radix_cache.leases import Lease

BLOCK_ID_BYTES = 4
MIN_GHOSTS = 1024
BLOCKS_PER_GHOST = 4
"""One ghost for so many blocks of the pool: memory for explanations stays small beside the store's own."""


class Node(Link):
    """`edge` and `blocks` may be longer than n_bytes and n_blocks: what eviction cut off is dropped when it is half."""

    __slots__ = (
        "blocks",
        "branches",
        "children",
        "edge",
        "fence",
        "lease",
        "lease_ended",
        "leases",
        "listed",
        "locks",
        "mark",
        "n_blocks",
        "n_bytes",
        "ns",
        "owner",
        "parent",
        "used_at",
    )

    def __init__(self, ns: Namespace, owner: Owner, edge: bytes, blocks: bytes) -> None:
        super().__init__()
        self.ns = ns
        self.owner = owner
        self.edge = edge
        self.blocks = blocks  # int32 block ids
        self.n_bytes = len(edge)
        self.n_blocks = len(blocks) // BLOCK_ID_BYTES  # 0: a root, or a node that is gone
        self.parent: Node | None = None
        self.children: Children | None = None
        self.branches: dict[Namespace, Children] | None = None
        self.locks = 0
        self.fence: int | None = None  # the step that computes it, until that is confirmed
        self.lease: Lease | None = None  # the one that ends here
        self.leases = 0  # on this node and below
        self.lease_ended = False  # one did, and nothing has been leased here since
        self.listed = False  # known to the owner's policy
        self.used_at = 0
        self.mark: Any = None

    @property
    def has_children(self) -> bool:
        return self.children is not None or self.branches is not None

    def descendants(self) -> list[Node]:
        """All nodes below, of any owner."""
        found: list[Node] = []
        todo = [self]
        while todo:
            node = todo.pop()
            for kids in (node.children, *(node.branches or {}).values()):
                if kids is not None:
                    todo.extend(kids.values())
                    found.extend(kids.values())
        return found


class Match(NamedTuple):
    """The longest resident prefix of a key: it ends `offset` bytes into the edge of `node`, n_bytes from the start."""

    node: Node
    offset: int
    n_bytes: int


class RadixTree:
    """The nodes of every namespace. Owns `pool.in_tree`; sequences' references to blocks are the caller's."""

    def __init__(self, block_size: int, pool: BlockPool, public: Owner, rank: Callable[[Owner], None]) -> None:
        self.block_bytes = block_size * TOKEN_BYTES
        self.pool = pool
        self.tick = 0  # grows with every use
        self.n_nodes = 0
        self.locked_blocks = 0
        self.fenced: dict[int, list[Node]] = {}
        self.roots: dict[Namespace, Node] = {}
        self.ghosts = Ghosts(MIN_GHOSTS + pool.n_blocks // BLOCKS_PER_GHOST)
        self.public = public
        self._rank = rank  # tells the evictor that an owner has a node to give up

    # --- reading --------------------------------------------------------------------------------------------------

    def root(self, ns: Namespace) -> Node:
        """The root under which the public and all tenants keep what belongs to one model revision and adapter."""
        trunk = (PUBLIC, *ns[1:3], "")
        root = self.roots.get(trunk)
        if root is None:
            root = self.roots[trunk] = Node(trunk, self.public, b"", b"")
        return root

    def match(self, ns: Namespace, key: bytes, limit: int) -> Match:
        """The longest prefix of `key` (token ids as int32), of at most `limit` bytes, that `ns` may reuse: of the
        public path and the branches of `ns` from it. It ends inside a block only where that may be copied from.

        Read-only. O(edges on the path) and one memcmp.
        """
        root = self.root(ns)
        forks: list[tuple[Node, int]] = []
        if root.branches is not None and ns in root.branches:
            forks.append((root, 0))
        best = self._reusable(self._walk(root, root.children, key, 0, ns, forks), limit)
        for node, pos in forks:
            kids = node.branches[ns]  # type: ignore[index]
            found = self._reusable(self._walk(node, kids, key, pos, ns, []), limit)
            if found.n_bytes > best.n_bytes:
                best = found
        return best

    def _walk(
        self, node: Node, kids: Children | None, key: bytes, pos: int, ns: Namespace, forks: list[tuple[Node, int]]
    ) -> Match:
        """Down from `node`, whose edge ends at key[pos], through `kids`. Notes in `forks` where `ns` branches off."""
        block_bytes = self.block_bytes
        while kids is not None:
            first_block = key[pos : pos + block_bytes]
            child = kids.get(first_block)
            if child is None:
                near = kids.nearest(first_block)
                return Match(node, node.n_bytes, pos) if near is None else Match(near[0], near[1], pos + near[1])
            n_bytes = child.n_bytes
            if not key.startswith(child.edge, pos):
                shared = common_prefix(child.edge, n_bytes, key, pos)
                if shared < n_bytes:
                    return Match(child, shared, pos + shared)
            node, kids = child, child.children
            pos += n_bytes
            if node.branches is not None and ns in node.branches:
                forks.append((node, pos))
        return Match(node, node.n_bytes, pos)

    def _reusable(self, match: Match, limit: int) -> Match:
        """`match` cut to `limit` bytes, and to whole blocks where its last block is still being computed."""
        node, offset, n_bytes = match
        if n_bytes > limit:
            offset -= n_bytes - limit
            n_bytes = limit
        while True:
            while offset <= 0 and node.parent is not None:
                node = node.parent
                offset += node.n_bytes
            partial = n_bytes % self.block_bytes
            if partial == 0 or node.fence is None:
                return Match(node, offset, n_bytes)
            offset -= partial
            n_bytes -= partial

    def kids(self, node: Node, ns: Namespace) -> Children | None:
        """The children of `node` that belong to `ns`."""
        if ns == node.ns:
            return node.children
        return None if node.branches is None else node.branches.get(ns)

    def find_child(self, node: Node, ns: Namespace, first_block: bytes) -> Node | None:
        """The child of `node` that `ns` may see and that begins with this block: a public one first."""
        found = None if node.children is None else node.children.get(first_block)
        if found is None and ns != node.ns and node.branches is not None and ns in node.branches:
            found = node.branches[ns].get(first_block)
        return found

    def depth(self, node: Node | None) -> int:
        """Blocks from the root to the end of `node`."""
        n_blocks = 0
        while node is not None and node.parent is not None:
            n_blocks += node.n_blocks
            node = node.parent
        return n_blocks

    def path_blocks(self, node: Node) -> Blocks:
        """The physical blocks from the root to the end of `node`: int32 [blocks]."""
        parts = []
        while node.parent is not None:
            parts.append(node.blocks[: node.n_blocks * BLOCK_ID_BYTES])
            node = node.parent
        return np.frombuffer(b"".join(reversed(parts)), np.int32)

    # --- changing -------------------------------------------------------------------------------------------------

    def stem(self, match: Match) -> Node:
        """The node that ends where the whole blocks of `match` end; splits an edge for it if need be."""
        offset = match.offset - match.n_bytes % self.block_bytes
        if offset == 0 and match.node.parent is not None:
            return match.node.parent
        if offset == match.node.n_bytes:
            return match.node
        return self.split(match.node, offset // self.block_bytes)

    def split(self, node: Node, n_blocks: int) -> Node:
        """Give the first n_blocks of `node` to a new parent of it and return that. `node` stays the lower part, so who
        had locked it still has."""
        cut = n_blocks * self.block_bytes
        upper = Node(node.ns, node.owner, node.edge[:cut], node.blocks[: n_blocks * BLOCK_ID_BYTES])
        upper.locks, upper.fence, upper.used_at, upper.mark = node.locks, node.fence, node.used_at, node.mark
        upper.leases, upper.lease_ended = node.leases, node.lease_ended
        if upper.fence is not None:
            self.fenced[upper.fence].append(upper)
        upper.parent = parent = node.parent
        self.kids(parent, node.ns)[upper.edge[: self.block_bytes]] = upper  # type: ignore[arg-type, index]
        node.edge = node.edge[cut : node.n_bytes]
        node.blocks = node.blocks[n_blocks * BLOCK_ID_BYTES : node.n_blocks * BLOCK_ID_BYTES]
        node.n_bytes -= cut
        node.n_blocks -= n_blocks
        upper.children = Children()
        upper.children.add(node.edge[: self.block_bytes], node)
        node.parent = upper
        if node.listed:
            upper.listed = True
            node.owner.policy.split(upper, node)
        self.n_nodes += 1
        return upper

    def insert(self, parent: Node, ns: Namespace, owner: Owner, edge: bytes, blocks: Blocks, fence: int | None) -> Node:
        """Hang a new node under `parent`, locked once. Its blocks, private to a sequence so far, go to the tree."""
        self.pool.enter_tree(blocks)
        node = Node(ns, owner, edge, blocks.tobytes())
        node.locks = 1
        node.fence = fence
        if fence is not None:
            self.fenced.setdefault(fence, []).append(node)
        owner.private_blocks -= node.n_blocks
        owner.tree_blocks += node.n_blocks
        owner.locked_blocks += node.n_blocks
        self.locked_blocks += node.n_blocks
        owner.counters.written_blocks += node.n_blocks
        self.n_nodes += 1
        self.attach(parent, node)
        return node

    def attach(self, parent: Node, node: Node) -> None:
        _trim(parent)
        kids = self.kids(parent, node.ns)
        if kids is None:
            kids = Children()
            if node.ns == parent.ns:
                parent.children = kids
            else:
                if parent.branches is None:
                    parent.branches = {}
                parent.branches[node.ns] = kids
        kids.add(node.edge[: min(self.block_bytes, node.n_bytes)], node)
        node.parent = parent

    def detach(self, node: Node) -> None:
        """Take `node`, with what is below it, from its parent. node.parent stays for whoever has to climb from here."""
        parent = node.parent
        kids = self.kids(parent, node.ns)  # type: ignore[arg-type]
        kids.drop(node.edge[: min(self.block_bytes, node.n_bytes)])  # type: ignore[union-attr]
        if kids:
            return
        if node.ns == parent.ns:  # type: ignore[union-attr]
            parent.children = None  # type: ignore[union-attr]
        else:
            del parent.branches[node.ns]  # type: ignore[union-attr]
            parent.branches = parent.branches or None  # type: ignore[union-attr]

    def expose(self, node: Node) -> None:
        """`node` may have lost its last child: if it had been set aside as the coldest, it comes back."""
        if node.n_blocks and node.locks == 0 and not node.listed and not node.has_children:
            node.listed = True
            node.owner.policy.exposed(node)
            self._rank(node.owner)

    def set_aside(self, node: Node) -> None:
        """Its owner's policy offers `node`, which still has children."""
        node.listed = False
        node.owner.policy.taken(node)

    def lock(self, node: Node) -> None:
        """A sequence builds on `node`. O(depth)."""
        while node.parent is not None:
            self.lock_one(node)
            node = node.parent

    def lock_one(self, node: Node) -> None:
        """The same for a node whose ancestors this sequence has locked."""
        if node.locks == 0:
            if node.listed:
                node.listed = False
                node.owner.policy.taken(node)
            node.owner.locked_blocks += node.n_blocks
            self.locked_blocks += node.n_blocks
        node.locks += 1

    def unlock(self, node: Node) -> None:
        """That sequence is done. What nobody else builds on becomes evictable, as the most recently used. O(depth)."""
        self.tick += 1
        leaf = node
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                owner = node.owner
                owner.locked_blocks -= node.n_blocks
                self.locked_blocks -= node.n_blocks
                node.used_at = self.tick
                node.listed = True
                owner.policy.used(node)
            node = node.parent
        self._rank(leaf.owner)
        self._rank(self.public)

    def give_up(self, leaf: Node, n_blocks: int, ghost: Ghost | None = None) -> int:
        """Take the last n_blocks of an unlocked leaf out of the tree, remembered by `ghost`. Returns how many became
        free."""
        kept = leaf.n_blocks - n_blocks
        if ghost is not None:
            start = kept * self.block_bytes
            block = leaf.edge[start : min(start + self.block_bytes, leaf.n_bytes)]
            self.ghosts.remember(leaf.ns, self.depth(leaf.parent) + kept, block, ghost)
        blocks = leaf.blocks[kept * BLOCK_ID_BYTES : leaf.n_blocks * BLOCK_ID_BYTES]
        owner = leaf.owner
        if kept == 0:
            self.drop_leaf(leaf)
        else:
            leaf.n_blocks = kept
            leaf.n_bytes = kept * self.block_bytes
            if len(leaf.edge) > 2 * leaf.n_bytes:
                _trim(leaf)
        return self.hand_back(owner, blocks)

    def drop_leaf(self, leaf: Node) -> None:
        """Forget an unlocked leaf; its blocks are handed back apart."""
        parent = leaf.parent
        self.detach(leaf)
        if leaf.listed:
            leaf.listed = False
            leaf.owner.policy.taken(leaf)
        leaf.n_blocks = 0
        leaf.parent = None
        self.n_nodes -= 1
        self.expose(parent)  # type: ignore[arg-type]

    def hand_back(self, owner: Owner, blocks: bytes) -> int:
        """Blocks of a node that is gone leave the tree. Those that sequences still use stay charged to the owner as
        private. Returns how many became free."""
        n_blocks = len(blocks) // BLOCK_ID_BYTES
        freed = self.pool.leave_tree(np.frombuffer(blocks, np.int32))
        owner.tree_blocks -= n_blocks
        owner.private_blocks += n_blocks - freed
        return freed

    def remove(self, top: Node) -> list[tuple[Owner, bytes]]:
        """Take `top` and everything below it out of the tree, locked or not. Returns the blocks to hand back.

        The nodes keep their `parent`, with n_blocks 0, so that who built on them can climb to what is left.
        """
        parent = top.parent
        found = []
        self.detach(top)
        for node in (top, *top.descendants()):
            if node.listed:
                node.listed = False
                node.owner.policy.taken(node)
            if node.locks:
                node.owner.locked_blocks -= node.n_blocks
                self.locked_blocks -= node.n_blocks
            found.append((node.owner, node.blocks[: node.n_blocks * BLOCK_ID_BYTES]))
            node.n_blocks = 0
            self.n_nodes -= 1
        self.expose(parent)  # type: ignore[arg-type]
        return found


def _trim(node: Node) -> None:
    """Let go of the part of the edge that eviction cut off."""
    if len(node.edge) > node.n_bytes:
        node.edge = node.edge[: node.n_bytes]
        node.blocks = node.blocks[: node.n_blocks * BLOCK_ID_BYTES]
