"""The pool: who uses a block, whose it is, and when it is free again."""

import numpy as np
import pytest

from radix_cache.blocks import BlockPool, InvariantError


def test_lower_ids_are_handed_out_first_and_a_freed_block_comes_back_next() -> None:
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first.tolist() == [0, 1] and second.tolist() == [2, 3, 4]
    assert pool.release(first[1:]) == 1
    assert pool.allocate(1).tolist() == [1]
    assert pool.n_free == 1


def test_a_block_is_free_when_its_last_user_lets_go() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.retain(blocks[:2])
    assert pool.release(blocks) == 1
    assert pool.refs.tolist() == [1, 1, 0, 0]
    assert pool.release(blocks[:2]) == 2
    assert pool.n_free == 4


def test_a_block_of_the_tree_stays_when_nobody_uses_it_and_goes_when_the_tree_lets_go() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.enter_tree(blocks)
    assert pool.release(blocks) == 0
    assert (pool.n_free, pool.n_tree, pool.n_private) == (2, 2, 0)
    assert pool.leave_tree(blocks) == 2
    assert (pool.n_free, pool.n_tree, pool.n_private) == (4, 0, 0)


def test_a_block_that_leaves_the_tree_while_it_is_used_becomes_private() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.enter_tree(blocks)
    assert pool.leave_tree(blocks) == 0
    assert (pool.n_free, pool.n_tree, pool.n_private) == (1, 0, 1)


def test_ten_thousand_blocks_freed_and_taken_again_are_the_same_blocks() -> None:
    pool = BlockPool(20_000)
    blocks = pool.allocate(10_000)
    pool.release(blocks)
    assert sorted(pool.allocate(10_000).tolist()) == blocks.tolist()
    assert pool.n_free == 10_000


def test_faults_are_named() -> None:
    pool = BlockPool(3)
    with pytest.raises(InvariantError, match="4 blocks asked for, 3 are free"):
        pool.allocate(4)
    with pytest.raises(InvariantError, match="block 1 is released by a sequence that does not use it"):
        pool.release(np.array([1], np.int32))
    blocks = pool.allocate(2)
    pool.enter_tree(blocks[1:])
    with pytest.raises(InvariantError, match="block 1 enters the tree a second time"):
        pool.enter_tree(blocks)
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
