"""Who gives up memory, and in which order."""

from __future__ import annotations

import random
import sys
from array import array
from itertools import count

import pytest

from radix_cache.cache import PrefixCache, QuotaError
from tests.radix_cache.harness import TRUNK, A, B, FakeEngine, ids


def resident(one: FakeEngine, prompt: list[int], ns: tuple[str, ...] = A) -> int:
    return one.cache.probe(ns, ids(*prompt, -7)).cached_tokens


def test_the_least_recently_used_goes_first_and_from_its_tail() -> None:
    one = FakeEngine(6, 4)
    old, new = [1] * 12, [2] * 12
    one.serve(A, old)
    one.serve(A, new)
    one.serve(A, [3] * 4)
    assert (resident(one, old), resident(one, new)) == (8, 12)
    one.serve(A, [4] * 12)
    assert (resident(one, old), resident(one, new), resident(one, [3] * 4)) == (0, 8, 4)


def test_reading_makes_recent() -> None:
    one = FakeEngine(6, 4)
    one.serve(A, [1] * 8)
    one.serve(A, [2] * 8)
    one.serve(A, [1] * 8 + [9])  # keeps one block more: the sealed partial one
    one.serve(A, [3] * 12)
    assert (resident(one, [1] * 8 + [9]), resident(one, [2] * 8)) == (9, 0)


def test_after_a_split_the_unmatched_suffix_goes_first() -> None:
    one = FakeEngine(8, 4)
    long = list(range(16))
    one.serve(A, long)
    one.serve(A, [2] * 8)
    one.serve(A, [*long[:8], 90])  # splits the edge; only its first half was read
    one.serve(A, [3] * 12)
    assert resident(one, long) == 8
    assert resident(one, [2] * 8) == 8
    one.check()


def test_a_split_that_nobody_used_keeps_both_halves_old() -> None:
    one = FakeEngine(8, 4)
    old = list(range(16))
    one.serve(A, old)
    one.serve(A, [2] * 12)
    tree = one.cache._tree
    node = tree.root(A).branches[A][ids(*old[:4]).tobytes()]  # type: ignore[index]
    tree.split(node, 2)
    one.check()
    one.serve(A, [3] * 16)
    assert (resident(one, old), resident(one, [2] * 12)) == (4, 12)


def test_what_running_sequences_build_on_is_never_taken() -> None:
    one = FakeEngine(6, 4)
    one.serve(A, [1] * 8)
    running = one.admit(A, [1] * 8 + [2])
    assert running is not None
    one.serve(A, [3] * 8)
    assert one.serve(A, [4] * 16) == 0
    assert resident(one, [1] * 8) == 8
    one.discard(running)
    one.check()


def test_between_owners_the_least_recently_used_of_all_goes_first() -> None:
    one = FakeEngine(6, 4)
    one.serve(A, [1] * 8)
    one.serve(B, [1] * 8)
    one.serve(A, [2] * 8)
    one.serve(B, [3] * 8)
    assert [resident(one, [1] * 8, A), resident(one, [1] * 8, B)] == [0, 8]
    stats = one.cache.stats().owners
    assert (stats["a"].evicted_by_others_blocks, stats["a"].evicted_by_own_blocks) == (2, 0)
    one.serve(B, [4] * 8)
    assert one.cache.stats().owners["b"].evicted_by_own_blocks == 2


def test_a_reserve_is_lent_out_and_comes_back_from_the_borrower() -> None:
    one = FakeEngine(8, 4)
    one.cache.set_quota("a", reserve=0.5)
    one.serve(B, [1] * 32)
    assert one.cache.stats().owners["b"].tree_blocks == 8
    one.serve(A, [1] * 16)
    assert [one.cache.stats().owners[name].tree_blocks for name in "ab"] == [4, 4]
    for n in range(2, 6):
        one.serve(B, [n] * 16)
    assert resident(one, [1] * 16) == 16  # although it has idled all along
    one.serve(A, [9] * 16)  # at its reserve, it takes from those above theirs first
    assert [one.cache.stats().owners[name].tree_blocks for name in "ab"] == [8, 0]
    one.serve(B, [9] * 16)  # and what it has beyond its reserve is anybody's, the oldest first
    assert [one.cache.stats().owners[name].tree_blocks for name in "ab"] == [4, 4]
    assert (resident(one, [1] * 16), resident(one, [9] * 16)) == (0, 16)


def test_a_ceiling_makes_an_owner_replace_its_own() -> None:
    one = FakeEngine(8, 4)
    one.cache.set_quota("a", ceiling=0.5)
    one.serve(B, [1] * 8)
    one.serve(A, [1] * 16)
    one.serve(A, [2] * 8)
    assert (resident(one, [1] * 16), resident(one, [2] * 8), resident(one, [1] * 8, B)) == (8, 8, 8)
    sequence = one.admit(A, [3] * 20)
    assert sequence is not None and not one.cache.extend(sequence.holding, 20)
    one.discard(sequence)
    one.check()


def test_weight_makes_blocks_of_the_same_age_dearer() -> None:
    one = FakeEngine(8, 4)
    one.cache.set_quota("a", weight=100.0)
    one.serve(A, [1] * 16)
    one.serve(B, [1] * 16)
    one.serve(B, [2] * 8)
    assert (resident(one, [1] * 16), resident(one, [1] * 16, B)) == (16, 8)


def test_quotas_that_cannot_be_kept_are_refused() -> None:
    cache = PrefixCache(10, 4)
    cache.set_quota("a", reserve=0.6)
    with pytest.raises(QuotaError, match="exceed the pool of 10 blocks"):
        cache.set_quota("b", reserve=0.5)
    cache.set_quota("a", reserve=0.5)
    cache.set_quota("b", reserve=0.5)
    with pytest.raises(QuotaError, match="reserve <= ceiling"):
        cache.set_quota("c", reserve=0.2, ceiling=0.1)
    with pytest.raises(QuotaError, match="weight above 0"):
        cache.set_quota("c", weight=0.0)


def test_the_public_trunk_goes_only_when_no_tenant_builds_on_it() -> None:
    one = FakeEngine(6, 4)
    trunk = [1] * 8
    one.serve(TRUNK, trunk)
    one.serve(A, [*trunk, 2, 2, 2, 2])
    # The trunk is the older one, but the tenant's leaf below it has to go first.
    one.serve(B, [3] * 16)
    assert (resident(one, trunk, B), one.cache.stats().owners["a"].tree_blocks) == (8, 0)
    one.serve(B, [4] * 20)
    assert resident(one, trunk, B) < 8
    one.check()


def test_a_prompt_shorter_than_a_block_displaces_nothing_that_stays() -> None:
    one = FakeEngine(4, 4)
    one.serve(A, [1] * 12)
    one.serve(A, [2] * 3)
    assert resident(one, [1] * 12) == 12
    assert one.cache.stats().tree_blocks == 3


def test_hits_equal_those_of_a_plain_list_of_blocks() -> None:
    """The tree's own tail-first LRU against a flat simulation: last use per block, the oldest without a child goes."""
    rng = random.Random(3)
    capacity, unique = 40, count(10**6)
    cache = PrefixCache(capacity, 1)
    used: dict[tuple[int, ...], int] = {}
    for now in range(3000):
        prompt = tuple(rng.choice((0, 0, 0, 1, 2)) for _ in range(rng.randrange(1, 25)))
        paths = [prompt[: n + 1] for n in range(len(prompt))]
        hits = next((n for n, path in enumerate(paths) if path not in used), len(paths))
        while len(used) + len(paths) - hits > capacity:
            parents = {path[:-1] for path in used}
            leaves = [path for path in used if path not in parents and path not in paths[:hits]]
            del used[min(leaves, key=lambda path: (used[path], -len(path)))]
        used.update(dict.fromkeys(paths, now))

        holding = cache.acquire(A, array("i", [*prompt, next(unique)]))
        assert holding is not None and holding.cached_tokens == hits, f"request {now}"
        assert cache.extend(holding, len(prompt))
        cache.release(holding, array("i", prompt), len(prompt))
        assert cache.stats().tree_blocks == len(used)
    cache.check_invariants([])


def test_evicting_takes_as_many_operations_with_500_leaves_as_with_20_000() -> None:
    counts = []
    for n_leaves in (500, 20_000):
        cache = PrefixCache(2 * n_leaves, 2)
        for n in range(n_leaves):
            holding = cache.acquire(A, ids(n, 1, 1, 1))
            assert holding is not None and cache.extend(holding, 4)
            cache.release(holding, ids(n, 1, 1, 1), 4)
        assert cache.stats().nodes == n_leaves and cache.stats().free_blocks == 0
        owner = cache._owners.get("a")
        counts.append(_lines_run(lambda cache=cache, owner=owner: cache._evictor.reclaim(50, owner)))  # type: ignore[misc]
        assert cache.stats().free_blocks == 50
    assert counts[0] == counts[1]


def _lines_run(work) -> int:  # type: ignore[no-untyped-def]
    n_lines = 0

    def trace(frame, event, argument):  # type: ignore[no-untyped-def]
        nonlocal n_lines
        n_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return n_lines
