"""Who can find what: tenants, salts, revisions, adapters, and the public."""

from __future__ import annotations

import pytest

from tests.radix_cache.harness import TRUNK, A, B, FakeEngine, ids, namespace

PROMPT = list(range(20))


@pytest.mark.parametrize(
    "other",
    [
        B,
        namespace("a", salt="s"),
        namespace("a", revision="r2"),
        namespace("a", adapter="lora"),
        namespace("", revision="r1"),
        namespace("a,r1"),
        ("a", "r1", "", "\x00"),
    ],
)
def test_another_namespace_finds_nothing(other: tuple[str, ...]) -> None:
    one = FakeEngine(64, 4)
    one.serve(A, PROMPT)
    assert one.cache.probe(other, ids(*PROMPT)) == (0, 0)
    assert one.serve(other, PROMPT) == 0
    assert one.serve(A, PROMPT) == 19  # and the owner still finds all of it


def test_names_are_never_joined() -> None:
    one = FakeEngine(64, 4)
    one.serve(("ab", "c", "d", "e"), PROMPT)
    for ns in (("a", "bc", "d", "e"), ("ab", "cd", "", "e"), ("ab", "c", "de", "")):
        assert one.cache.probe(ns, ids(*PROMPT)).cached_tokens == 0


def test_a_salt_is_no_way_into_another_tenants_salt() -> None:
    one = FakeEngine(64, 4)
    one.serve(namespace("a", salt="s"), PROMPT)
    assert one.serve(namespace("b", salt="s"), PROMPT) == 0


def test_a_public_prefix_is_stored_once_and_every_tenant_continues_it_alone() -> None:
    one = FakeEngine(64, 4)
    one.serve(TRUNK, PROMPT)
    a = [*PROMPT, 100, 101, 102, 103, 104]
    assert one.serve(A, a) == 20
    assert one.cache.probe(A, ids(*a)) == (24, 20)
    assert one.cache.probe(namespace("a", salt="s"), ids(*a)) == (20, 20)
    assert one.cache.probe(B, ids(*a)) == (20, 20)
    assert one.cache.probe(TRUNK, ids(*a)) == (20, 20)
    assert one.serve(B, a) == 20
    stats = one.cache.stats().owners
    assert [stats[name].tree_blocks for name in ("", "a", "b")] == [5, 2, 2]
    assert (stats["a"].hit_tokens, stats["a"].hit_public_tokens) == (20, 20)


def test_the_public_part_of_a_copied_block_is_public() -> None:
    one = FakeEngine(64, 4)
    one.serve(TRUNK, PROMPT)
    assert one.cache.probe(A, ids(*PROMPT)) == (19, 19)
    assert one.cache.probe(A, ids(*PROMPT[:6], 99, 99)) == (6, 6)


def test_publishing_merges_private_copies_and_keeps_what_continues_them() -> None:
    one = FakeEngine(64, 4)
    a, b = [*PROMPT, *range(30, 38)], [*PROMPT[:8], *range(50, 58)]
    one.serve(A, a)
    one.serve(B, b)
    assert one.cache.stats().tree_blocks == 7 + 4
    one.serve(TRUNK, PROMPT)
    stats = one.cache.stats()
    assert [stats.owners[name].tree_blocks for name in ("", "a", "b")] == [5, 2, 2]
    assert one.cache.probe(A, ids(*a, 1)) == (28, 20)
    assert one.cache.probe(B, ids(*b, 1)) == (16, 8)
    assert one.serve(A, [*a, 1]) == 28
    assert one.serve(B, [*b, 1]) == 16


def test_a_private_copy_in_use_is_not_merged_and_the_longest_path_is_taken() -> None:
    one = FakeEngine(64, 4)
    a = [*PROMPT, *range(30, 38)]
    running = one.admit(A, a)
    assert running is not None and one.schedule(running, 28)
    one.run()
    one.serve(TRUNK, PROMPT)
    assert one.cache.probe(A, ids(*a, 1)) == (28, 0)
    assert one.cache.probe(A, ids(*PROMPT, 1)).cached_tokens == 20
    one.release(running)
    one.check()


def test_flushing_one_owner_leaves_the_others() -> None:
    one = FakeEngine(64, 4)
    one.serve(TRUNK, PROMPT)
    one.serve(A, [*PROMPT, *range(30, 38)])
    one.serve(B, [*PROMPT[:10], 7, 7])
    assert one.cache.flush("a") == 2
    one.check()
    assert one.cache.probe(B, ids(*PROMPT[:10], 7, 7, 1)).cached_tokens == 12
    assert one.cache.flush("") == 3  # the part of the trunk that the other tenant does not build on
    one.check()
    assert one.cache.flush() == 3
    one.check()
    assert one.cache.stats().free_blocks == 64
