"""One sequence at a time: what is found, held and left behind, to the block."""

from __future__ import annotations

import numpy as np
import pytest

from radix_cache.cache import PUBLIC, BlockCopy, InvariantError, PrefixCache
from tests.radix_cache.harness import A, FakeEngine, ids, namespace


def engine(n_blocks: int = 32, block_size: int = 4) -> FakeEngine:
    return FakeEngine(n_blocks, block_size)


def refs(one: FakeEngine) -> dict[int, int]:
    counts = one.cache._pool.refs
    return {int(block): int(counts[block]) for block in np.flatnonzero(counts)}


# --- boundaries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_tokens", "cached_again", "tree_blocks"),
    [
        (0, 0, 0),  # nothing to keep
        (1, 0, 0),
        (3, 0, 0),  # shorter than a block: never stored
        (4, 3, 1),  # exactly one block: its last token is computed again, into a copy
        (5, 4, 2),  # a whole block, and a sealed partial one that has nothing but the last token
        (8, 7, 2),
        (11, 10, 3),
        (12, 11, 3),
    ],
)
def test_a_prompt_sent_twice_is_cached_but_for_its_last_token(
    n_tokens: int, cached_again: int, tree_blocks: int
) -> None:
    one = engine()
    prompt = list(range(10, 10 + n_tokens))
    assert one.serve(A, prompt) == 0
    assert one.cache.stats().tree_blocks == tree_blocks
    assert one.serve(A, prompt) == cached_again
    stats = one.cache.stats()
    assert (stats.tree_blocks, stats.private_blocks) == (tree_blocks, 0)
    assert stats.free_blocks == 32 - tree_blocks


def test_extreme_token_ids_are_tokens_like_others() -> None:
    one = engine()
    prompt = [-1, 2**31 - 1, -(2**31), 0, 2**31 - 1]
    assert one.serve(A, prompt) == 0
    assert one.serve(A, prompt) == 4
    assert one.serve(A, [-1, 2**31 - 2, *prompt[2:]]) == 1


def test_a_prompt_longer_than_the_pool_gets_no_room_and_leaves_nothing() -> None:
    one = engine(n_blocks=3)
    one.serve(A, list(range(8)))
    sequence = one.admit(A, list(range(100, 113)))
    assert sequence is not None
    assert not one.cache.extend(sequence.holding, 13)
    assert sequence.holding.n_blocks == 0
    assert one.cache.stats().tree_blocks == 2  # and nothing was evicted in vain
    one.discard(sequence)
    one.check()


def test_a_pool_of_one_block() -> None:
    one = engine(n_blocks=1)
    assert one.serve(A, [1, 2, 3]) == 0
    assert one.serve(A, [1, 2, 3, 4]) == 0
    assert one.cache.stats().tree_blocks == 1
    # Three tokens are resident, but there is no second block to copy them to.
    assert one.cache.acquire(A, ids(1, 2, 3, 4)) is None
    one.check()
    assert one.serve(A, [9, 2, 3, 4]) == 0  # evicts the block
    assert one.cache.stats().evicted_blocks == 1


def test_blocks_of_one_token() -> None:
    one = engine(block_size=1)
    assert one.serve(A, [5, 6, 7]) == 0
    assert one.serve(A, [5, 6, 7]) == 2
    assert one.serve(A, [5, 6, 8]) == 2


# --- what is shared, block by block -----------------------------------------------------------------------------------


def test_block_table_and_reference_counts_of_a_second_prompt() -> None:
    one = engine()
    one.serve(A, list(range(12)))
    first = one.admit(A, [*range(8), 50, 51])
    assert first is not None
    assert first.holding.blocks.tolist() == [0, 1]
    assert (first.holding.cached_tokens, first.holding.published_tokens, first.holding.copies) == (8, 8, [])
    second = one.admit(A, [*range(10), 60])
    assert second is not None
    # Two tokens of block 2 are reused in a private block; the source is kept as long as the copy has not been run.
    assert second.holding.blocks.tolist() == [0, 1, 3]
    assert second.holding.copies == [BlockCopy(source=2, target=3, n_tokens=2)]
    assert second.holding.cached_tokens == 10
    assert refs(one) == {0: 2, 1: 2, 2: 1, 3: 1}
    one.check()
    assert one.schedule(second, 1)
    assert refs(one) == {0: 2, 1: 2, 3: 1}
    one.run()
    one.release(second)
    one.release(first)
    assert refs(one) == {}
    one.check()


def test_a_copy_source_survives_eviction_until_the_copy_is_run() -> None:
    one = engine(n_blocks=5)
    one.serve(A, list(range(8)))
    sequence = one.admit(A, [*range(6), 70])
    assert sequence is not None and sequence.holding.copies == [BlockCopy(1, 2, 2)]
    other = one.admit(namespace("b"), [1] * 8)
    assert other is not None and one.schedule(other, 8)  # takes the last two free blocks
    third = one.admit(namespace("b"), [2] * 4)
    assert third is not None
    # Block 1 could be evicted from the tree, but it does not become free: it is still to be read.
    assert not one.cache.extend(third.holding, 4)
    assert 1 not in one.cache._pool.free.tolist()
    assert one.schedule(sequence, 1)
    one.run()
    one.check()


def test_an_opted_out_sequence_neither_reads_nor_writes() -> None:
    one = engine()
    one.serve(A, list(range(12)))
    before = one.cache.stats()
    assert one.serve(A, list(range(12)), use_cache=False) == 0
    assert one.serve(A, list(range(100, 120)), use_cache=False) == 0
    after = one.cache.stats()
    assert (after.tree_blocks, after.written_blocks) == (before.tree_blocks, before.written_blocks)
    assert one.cache.probe(A, ids(*range(100, 120))).cached_tokens == 0


def test_a_hundred_long_prompts_that_opt_out_leave_the_pool_as_it_was() -> None:
    one = engine(n_blocks=40)
    one.serve(A, list(range(12)))
    free = one.cache.stats().free_blocks
    for n in range(100):
        sequence = one.admit(A, [n] * 60, use_cache=False)
        assert sequence is not None
        for _ in range(3):
            assert one.schedule(sequence, 20)
            one.run()
        one.release(sequence)
    one.check()
    assert one.cache.stats().free_blocks == free


def test_a_chat_of_a_hundred_turns_keeps_each_token_once() -> None:
    one = engine(n_blocks=2000)
    history: list[int] = []
    for turn in range(100):
        history += [turn] * 21
        one.serve(A, history)
    stats = one.cache.stats()
    assert stats.tree_blocks == -(-len(history) // 4)
    nodes = [node for root in one.cache._tree.roots.values() for node in root.descendants()]
    assert sum(len(node.edge) for node in nodes) == 4 * len(history)
    assert stats.nodes <= 4  # turns grow together; edges stay bounded


def test_interleaved_conversations_read_their_own_context() -> None:
    one = engine(n_blocks=64)
    a, b = list(range(20)), [*range(10), *range(50, 60)]
    assert [one.serve(A, prompt) for prompt in (a, b, a, b)] == [0, 10, 19, 19]


def test_a_preempted_sequence_finds_its_blocks_again() -> None:
    one = engine()
    sequence = one.admit(A, list(range(20)))
    assert sequence is not None and one.schedule(sequence, 14)
    one.run()
    one.release(sequence)
    again = one.admit(A, list(range(20)))
    assert again is not None and again.holding.cached_tokens == 14
    assert one.schedule(again, 6)
    one.run()  # compares everything that it reads
    one.release(again)
    one.check()


# --- looking up changes nothing ---------------------------------------------------------------------------------------


def test_a_probe_touches_neither_edges_nor_counters_nor_recency() -> None:
    one = engine(n_blocks=4)
    one.serve(A, [1] * 8)
    one.serve(A, [2] * 8)
    before = one.cache.stats()
    for _ in range(3):
        assert one.cache.probe(A, ids(*[1] * 5, 9)) == (5, 0)
    assert one.cache.stats() == before
    one.serve(A, [3] * 4)
    assert one.cache.probe(A, ids(*[1] * 9)).cached_tokens == 4  # still the least recently used


def test_a_request_that_waits_counts_as_one_lookup() -> None:
    one = engine(n_blocks=4)
    running = one.admit(A, list(range(16)))
    assert running is not None and one.schedule(running, 16)
    for _ in range(10):
        waiting = one.admit(A, [9] * 4)
        assert waiting is not None and not one.cache.extend(waiting.holding, 4)
        one.discard(waiting)
    one.run()
    one.release(running)
    assert one.cache.stats().lookups == 1
    one.serve(A, [9] * 4)
    assert one.cache.stats().lookups == 2


def test_counters_add_up_per_owner() -> None:
    one = engine()
    one.serve(A, list(range(10)))
    one.serve(A, list(range(10)))
    one.serve(namespace("b"), list(range(6)))
    stats = one.cache.stats()
    assert (stats.lookups, stats.prompt_tokens, stats.hit_tokens) == (3, 26, 9)
    assert (stats.owners["a"].lookups, stats.owners["a"].hit_tokens) == (2, 9)
    assert (stats.owners["b"].lookups, stats.owners["b"].hit_tokens) == (1, 0)
    assert stats.owners["a"].tree_blocks == 3 and stats.owners["b"].tree_blocks == 2


# --- parallel samples -------------------------------------------------------------------------------------------------


def test_parallel_samples_share_the_prompt_and_copy_its_last_block_when_they_diverge() -> None:
    one = engine()
    first = one.admit(A, list(range(6)))
    assert first is not None and one.schedule(first, 6)
    one.run()
    twin = one.cache.fork(first.holding)
    assert twin.blocks.tolist() == first.holding.blocks.tolist() == [0, 1]
    assert refs(one) == {0: 2, 1: 2}
    assert one.cache.make_writable(first.holding, 6) == [BlockCopy(1, 2, 2)]
    assert first.holding.blocks.tolist() == [0, 2] and twin.blocks.tolist() == [0, 1]
    assert one.cache.make_writable(twin, 6) == []  # it is the only user now
    assert refs(one) == {0: 2, 1: 1, 2: 1}
    one.cache.check_invariants([first.holding, twin])
    one.cache.discard(twin)
    one.discard(first)
    one.check()


def test_a_block_that_another_sample_writes_is_not_sealed() -> None:
    one = engine()
    first = one.admit(A, list(range(6)))
    assert first is not None and one.schedule(first, 6)
    one.run()
    twin = one.cache.fork(first.holding)
    one.release(first)
    assert one.cache.probe(A, ids(*range(7))).cached_tokens == 4
    one.cache.release(twin, ids(*range(6)), 6)
    assert one.cache.probe(A, ids(*range(7))).cached_tokens == 6
    one.check()


def test_no_block_for_copy_on_write_changes_nothing() -> None:
    one = engine(n_blocks=2)
    first = one.admit(A, list(range(6)))
    assert first is not None and one.schedule(first, 6)
    one.run()
    twin = one.cache.fork(first.holding)
    assert one.cache.make_writable(twin, 6) is None
    assert twin.blocks.tolist() == [0, 1]
    one.cache.check_invariants([first.holding, twin])


def test_a_copy_that_a_step_has_not_run_is_never_sealed() -> None:
    one = engine()
    first = one.admit(A, list(range(6)))
    assert first is not None and one.schedule(first, 6)
    one.run()
    twin = one.cache.fork(first.holding)
    assert one.cache.make_writable(first.holding, 6) == [BlockCopy(1, 2, 2)]
    one.cache.discard(twin)
    one.release(first)  # cancelled while the step with the copy runs; it may still fail
    assert one.cache.probe(A, ids(*range(7))).cached_tokens == 4
    one.check()


# --- wrong use --------------------------------------------------------------------------------------------------------


def test_wrong_use_is_refused_by_name() -> None:
    cache = PrefixCache(8, 4)
    with pytest.raises(ValueError, match="expected the namespace"):
        cache.acquire(("a",), ids(1))
    with pytest.raises(ValueError, match="public namespace has no salt"):
        cache.acquire((PUBLIC, "r", "", "salt"), ids(1))
    with pytest.raises(ValueError, match="int32"):
        cache.probe(A, b"12345")
    with pytest.raises(ValueError, match="block_size 0"):
        PrefixCache(8, 0)
    with pytest.raises(ValueError, match="unknown eviction policy 'mru'"):
        PrefixCache(8, 4, policy="mru")
    holding = cache.acquire(A, ids(*range(8)))
    assert holding is not None and cache.extend(holding, 4)
    with pytest.raises(ValueError, match="8 computed tokens in 1 blocks of 4"):
        cache.release(holding, ids(*range(8)), 8)
    with pytest.raises(ValueError, match="8 token ids expected, got 5"):
        cache.publish(holding, ids(*range(5)), 8, 1)
    cache.check_invariants([holding])
    cache.discard(holding)
    with pytest.raises(ValueError, match="has been released"):
        cache.discard(holding)


def test_a_lost_holding_is_reported() -> None:
    cache = PrefixCache(8, 4)
    holding = cache.acquire(A, ids(1, 2))
    with pytest.raises(InvariantError, match="1 are lost"):
        cache.check_invariants([])
    assert holding is not None
    cache.check_invariants([holding])


@pytest.mark.parametrize("damage", ["refs", "in_tree", "free", "locks"])
def test_damage_is_found(damage: str) -> None:
    one = engine()
    one.serve(A, list(range(8)))
    pool = one.cache._pool
    if damage == "refs":
        pool.refs[0] += 1
    elif damage == "in_tree":
        pool.in_tree[0] = False
    elif damage == "free":
        pool.n_free -= 1
    else:
        one.cache._tree.root(A).descendants()[0].locks += 1
    with pytest.raises(InvariantError):
        one.check()
