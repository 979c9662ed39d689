"""Blocks that a step is still computing: matched at once, copied from only afterwards, withdrawn when it fails."""

from __future__ import annotations

from tests.radix_cache.harness import A, B, FakeEngine, ids


def test_equal_prompts_in_one_batch_compute_the_shared_part_once() -> None:
    one = FakeEngine(16, 4)
    first = one.admit(A, list(range(10)))
    assert first is not None and one.schedule(first, 10)
    second = one.admit(A, list(range(10)))
    assert second is not None and second.holding.cached_tokens == 8
    assert second.holding.blocks.tolist() == first.holding.blocks.tolist()[:2]
    assert one.schedule(second, 2)
    one.run()
    one.release(first)
    one.release(second)
    one.check()
    assert one.cache.stats().tree_blocks == 3


def test_a_fenced_block_is_no_source_of_a_copy() -> None:
    one = FakeEngine(16, 4)
    first = one.admit(A, list(range(8)))
    assert first is not None and one.schedule(first, 8)
    assert one.cache.probe(A, ids(*range(8))).cached_tokens == 4
    assert one.cache.probe(A, ids(*range(7), 99)).cached_tokens == 4
    one.run()
    assert one.cache.probe(A, ids(*range(8))).cached_tokens == 7


def test_a_failed_step_withdraws_its_blocks_and_names_who_built_on_them() -> None:
    one = FakeEngine(16, 4)
    one.serve(A, list(range(4)))
    first = one.admit(A, list(range(12)))
    assert first is not None and one.schedule(first, 8)
    second = one.admit(A, [*range(12), 50])
    assert second is not None and second.holding.cached_tokens == 12
    other = one.admit(B, list(range(9)))
    assert other is not None and one.schedule(other, 5)
    assert one.schedule(second, 1)
    assert set(one.fail()) == {first, second, other}
    for sequence, left in ((first, [0]), (second, [0]), (other, [])):
        assert sequence.holding.blocks.tolist() == left
        assert sequence.holding.published_tokens == sequence.n_computed == 4 * len(left)
    one.check()
    assert one.cache.stats().free_blocks == 15
    assert one.cache.probe(A, ids(*range(12))).cached_tokens == 4
    # and they go on from what is left
    assert one.schedule(second, 9) and one.schedule(first, 8)
    one.run()
    one.check()


def test_only_the_failed_fence_is_withdrawn() -> None:
    one = FakeEngine(16, 4)
    first, second = one.admit(A, [1] * 8), one.admit(A, [2] * 8)
    assert first is not None and second is not None
    for sequence, fence in ((first, 1), (second, 2)):
        assert one.cache.extend(sequence.holding, 8)
        one.cache.publish(sequence.holding, ids(*sequence.tokens), 8, fence)
    assert one.cache.revoke(1) == [first.holding]
    one.cache.confirm(2)
    one.check()
    assert one.cache.probe(A, ids(*[1] * 9)).cached_tokens == 0
    assert one.cache.probe(A, ids(*[2] * 9)).cached_tokens == 8
    assert one.cache.revoke(2) == []  # confirmed: there is nothing left to take back


def test_an_abort_between_chunks_leaves_what_was_computed_and_nothing_else() -> None:
    one = FakeEngine(16, 4)
    sequence = one.admit(A, list(range(16)))
    assert sequence is not None and one.schedule(sequence, 6)
    one.run()
    assert one.cache.extend(sequence.holding, 16)  # room for the next chunk, never computed
    one.release(sequence)
    one.check()
    assert one.serve(A, list(range(16))) == 6


def test_an_abort_while_the_step_runs_and_fails_leaves_nothing_of_it() -> None:
    one = FakeEngine(16, 4)
    sequence = one.admit(A, list(range(8)))
    assert sequence is not None and one.schedule(sequence, 8)
    one.release(sequence)
    one.plan.chunks.clear()
    assert one.fail() == []
    one.check()
    assert one.cache.stats().free_blocks == 16


def test_the_same_path_published_twice_is_owned_once() -> None:
    one = FakeEngine(16, 4)
    first, second = one.admit(A, list(range(8))), one.admit(A, [*range(8), 40, 41, 42, 43])
    assert first is not None and second is not None  # neither waited for the other
    assert one.schedule(first, 8) and one.schedule(second, 12)
    one.run()
    one.check()
    stats = one.cache.stats()
    assert (stats.tree_blocks, stats.private_blocks) == (3, 2)  # the duplicates stay private to the second
    one.release(second)
    one.release(first)
    one.check()
    assert (one.cache.stats().tree_blocks, one.cache.stats().free_blocks) == (3, 13)


def test_a_duplicate_built_on_withdrawn_blocks_goes_with_them() -> None:
    one = FakeEngine(16, 4)
    first, second = one.admit(A, list(range(8))), one.admit(A, [*range(8), 40, 41, 42, 43])
    assert first is not None and second is not None
    for sequence, fence in ((first, 1), (second, 2)):
        assert one.cache.extend(sequence.holding, len(sequence.tokens))
        one.cache.publish(sequence.holding, ids(*sequence.tokens), len(sequence.tokens), fence)
    assert set(one.cache.revoke(1)) == {first.holding, second.holding}
    one.cache.confirm(2)
    one.check()
    assert one.cache.stats().free_blocks == 16


def test_a_failed_recomputation_of_resident_blocks_can_be_run_again() -> None:
    one = FakeEngine(16, 4)
    late = one.admit(A, list(range(4)))
    assert late is not None
    early = one.admit(A, list(range(4)))
    assert early is not None and one.schedule(early, 4)
    one.run()
    assert one.schedule(late, 4)  # computes a duplicate of what is in the tree by now
    assert one.fail() == []
    assert one.schedule(late, 4)
    one.run()
    one.check()
