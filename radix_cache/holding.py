"""What one sequence holds of the cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from radix_cache.blocks import Blocks
from radix_cache.owners import Namespace, Owner
from radix_cache.tree import Node


class BlockCopy(NamedTuple):
    """Copy the first n_tokens of block `source` to block `target`. All sources of a step are read before any target is
    written, and all copies run before the step's own writes."""

    source: int
    target: int
    n_tokens: int


class Pin(NamedTuple):
    """A copy source, kept from being reused until the copy has been handed to a step."""

    block: int
    owner: Owner


class Holding:
    """A sequence's block table and its place in the tree. Changed by PrefixCache only; `copies` is the scheduler's to
    take and empty."""

    __slots__ = (
        "cached_public_tokens",
        "cached_tokens",
        "copied_tokens",
        "copies",
        "counted",
        "n_blocks",
        "node",
        "ns",
        "owner",
        "pin",
        "prompt_tokens",
        "published_tokens",
        "regretted_blocks",
        "table",
    )

    def __init__(self, ns: Namespace, owner: Owner, prompt_tokens: int, node: Node | None) -> None:
        self.ns = ns
        self.owner = owner
        self.prompt_tokens = prompt_tokens
        self.node = node
        """The node that ends at published_tokens, locked; None when the sequence has opted out of the cache."""
        self.table = np.empty(8, np.int32)
        self.n_blocks = 0
        self.cached_tokens = 0
        """Prompt tokens found at acquire, at most prompt - 1; includes the copied part."""
        self.cached_public_tokens = 0
        self.copies: list[BlockCopy] = []
        """To be run before the first step that writes."""
        self.copied_tokens = 0
        """Where the last copy ends: a block that ends there has only been copied, perhaps by a step that fails."""
        self.published_tokens = 0
        """Whole blocks up to here are in the tree, which holds this path for the sequence."""
        self.pin: Pin | None = None
        self.counted = False
        self.regretted_blocks = 0
        """Missing at acquire, and evicted a short while before."""

    @property
    def blocks(self) -> Blocks:
        """The block table so far, int32 [n_blocks]: a view, valid until the next call that changes this holding."""
        return self.table[: self.n_blocks]

    def append(self, blocks: Blocks) -> None:
        end = self.n_blocks + len(blocks)
        if end > len(self.table):
            grown = np.empty(max(end, 2 * len(self.table)), np.int32)
            grown[: self.n_blocks] = self.blocks
            self.table = grown
        self.table[self.n_blocks : end] = blocks
        self.n_blocks = end
