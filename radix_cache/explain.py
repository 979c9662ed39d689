"""Why a prompt hit as much as it did, and no more. Read-only, in token ids: texts are made by who may see them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from radix_cache.children import TOKEN_BYTES, Children
from radix_cache.owners import Namespace
from radix_cache.tree import Match, Node, RadixTree

SNIPPET_TOKENS = 32
MAX_SALTS = 64
"""Other namespaces of the owner that an explanation looks into."""


class Reason(StrEnum):
    """Why the prompt's next block is not resident."""

    RESIDENT = "resident"
    """It is: all that could be reused was."""
    TOO_SHORT = "too_short"
    """Less than a block is left, or the prompt has less than one."""
    NEVER_SEEN = "never_seen"
    OTHER_SALT = "other_salt"
    """The same owner has it under another salt."""
    OWN_PRESSURE = "evicted_by_own_pressure"
    OTHERS_PRESSURE = "evicted_by_others_pressure"
    LEASE_EXPIRED = "lease_expired"
    FLUSHED = "flushed"


class Explanation(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    """What a request would find; never the last token."""
    cached_public_tokens: int
    reason: Reason
    diverges_at: int
    """The token at which the prompt leaves the nearest resident prefix; the prompt's length when it never does."""
    prompt_snippet: bytes
    """int32: how the prompt goes on there."""
    resident_snippet: bytes
    """int32: how the nearest resident prefix goes on there; empty when nothing follows."""
    evicted_s: float | None
    """When what is missing left the tree, on the store's clock; None when it is not known to have been there."""


def explain(tree: RadixTree, ns: Namespace, key: bytes) -> Explanation:
    """`key`: the prompt as int32 bytes. O(edges), and O(salts of the owner) where it misses."""
    whole = tree.match(ns, key, len(key))
    usable = tree.match(ns, key, max(len(key) - TOKEN_BYTES, 0))
    reason, evicted_s = _reason(tree, ns, key, whole)
    end = whole.n_bytes
    return Explanation(
        prompt_tokens=len(key) // TOKEN_BYTES,
        cached_tokens=usable.n_bytes // TOKEN_BYTES,
        cached_public_tokens=public_bytes(tree, usable) // TOKEN_BYTES,
        reason=reason,
        diverges_at=end // TOKEN_BYTES,
        prompt_snippet=key[end : end + SNIPPET_TOKENS * TOKEN_BYTES],
        resident_snippet=_continuation(tree, ns, whole),
        evicted_s=evicted_s,
    )


def next_block(match: Match, key: bytes, block_bytes: int) -> tuple[int, bytes]:
    """(depth in blocks, bytes) of the first block of `key` that is not resident as a whole."""
    depth = match.n_bytes // block_bytes
    return depth, key[depth * block_bytes : (depth + 1) * block_bytes]


def public_bytes(tree: RadixTree, match: Match) -> int:
    """How much of the match lies in public nodes, which come first on every path."""
    node: Node | None = match.node
    part, private = match.offset, 0
    while node is not None and node.parent is not None and node.owner is not tree.public:
        private += part
        node = node.parent
        part = node.n_bytes
    return match.n_bytes - private


def _reason(tree: RadixTree, ns: Namespace, key: bytes, match: Match) -> tuple[Reason, float | None]:
    if match.n_bytes == len(key):
        return Reason.RESIDENT, None
    depth, block = next_block(match, key, tree.block_bytes)
    ghost = tree.ghosts.find(ns, depth, block)
    if ghost is not None:
        return Reason(ghost.cause.value), ghost.evicted_s
    if _under_other_salt(tree, ns, key, match.n_bytes):
        return Reason.OTHER_SALT, None
    if len(block) < tree.block_bytes:
        return Reason.TOO_SHORT, None
    return Reason.NEVER_SEEN, None


def _under_other_salt(tree: RadixTree, ns: Namespace, key: bytes, n_bytes: int) -> bool:
    root = tree.root(ns)
    salts = [other for other in root.branches or () if other[0] == ns[0] and other != ns]
    return any(tree.match(other, key, len(key)).n_bytes > n_bytes for other in salts[:MAX_SALTS])


def _continuation(tree: RadixTree, ns: Namespace, match: Match) -> bytes:
    """What follows the end of the match: the rest of its edge, or the beginning of a child."""
    node, offset = match.node, match.offset
    if offset < node.n_bytes:
        return node.edge[offset : min(node.n_bytes, offset + SNIPPET_TOKENS * TOKEN_BYTES)]
    kids: Children | None = tree.kids(node, ns) or node.children
    for child in kids.values() if kids else ():
        return child.edge[: min(child.n_bytes, SNIPPET_TOKENS * TOKEN_BYTES)]
    return b""
