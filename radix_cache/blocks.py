"""The pool of physical KV blocks.

A block is free, or owned by the tree (`in_tree`), or private to sequences. `refs[block]` says how many sequences use
it, in whichever set it is; a block goes back to the free stack when no sequence uses it and the tree does not own it.
Every operation takes an array of block ids and costs a few vector operations, whatever the pool's size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int32]


class InvariantError(Exception):
    """The store's bookkeeping contradicts itself. The message names the block, node or holding."""


class BlockPool:
    """`n_blocks` blocks with the ids 0 .. n_blocks - 1, all free at first. Lower ids are handed out first."""

    def __init__(self, n_blocks: int) -> None:
        if n_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {n_blocks}; give the cache more memory")
        self.n_blocks = n_blocks
        self.n_free = n_blocks
        self.n_tree = 0
        self.refs = np.zeros(n_blocks, np.int32)
        self.in_tree = np.zeros(n_blocks, np.bool_)
        self._stack = np.arange(n_blocks - 1, -1, -1, dtype=np.int32)

    @property
    def n_private(self) -> int:
        return self.n_blocks - self.n_free - self.n_tree

    @property
    def free(self) -> Blocks:
        """The free blocks, int32 [n_free]; the last one is handed out next."""
        return self._stack[: self.n_free]

    def allocate(self, n: int) -> Blocks:
        """Take n free blocks, each used once: int32 [n]. The caller has made sure that there are as many."""
        if n > self.n_free:
            raise InvariantError(f"{n} blocks asked for, {self.n_free} are free")
        top = self.n_free
        blocks = self._stack[top - n : top][::-1].copy()
        self.n_free = top - n
        self.refs[blocks] = 1
        return blocks

    def retain(self, blocks: Blocks) -> None:
        """One more sequence uses each of these (distinct) blocks."""
        self.refs[blocks] += 1

    def release(self, blocks: Blocks) -> int:
        """One sequence less uses each of these (distinct) blocks. Returns how many became free."""
        refs = self.refs[blocks] - 1
        if len(refs) and refs.min() < 0:
            raise InvariantError(f"block {blocks[refs.argmin()]} is released by a sequence that does not use it")
        self.refs[blocks] = refs
        return self._push(blocks[(refs == 0) & ~self.in_tree[blocks]])

    def enter_tree(self, blocks: Blocks) -> None:
        """The tree owns these (distinct) blocks from now on."""
        owned = self.in_tree[blocks]
        if owned.any():
            raise InvariantError(f"block {blocks[owned.argmax()]} enters the tree a second time")
        self.in_tree[blocks] = True
        self.n_tree += len(blocks)

    def leave_tree(self, blocks: Blocks) -> int:
        """The tree gives these blocks up. Returns how many became free: those that no sequence uses."""
        self.in_tree[blocks] = False
        self.n_tree -= len(blocks)
        return self._push(blocks[self.refs[blocks] == 0])

    def _push(self, blocks: Blocks) -> int:
        n = len(blocks)
        self._stack[self.n_free : self.n_free + n] = blocks
        self.n_free += n
        return n
