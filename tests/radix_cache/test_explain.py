"""A miss has a reason, and the place where the prompt left what is resident."""

from __future__ import annotations

from array import array

from radix_cache.cache import PUBLIC
from radix_cache.explain import Reason
from tests.radix_cache.harness import TRUNK, A, B, ids, namespace
from tests.radix_cache.test_leases import Store


def explained(store: Store, prompt: list[int] | range, ns=A):
    return store.cache.explain(ns, ids(*prompt))


def tokens(snippet: bytes) -> list[int]:
    return array("i", snippet).tolist()


def test_a_prompt_never_seen() -> None:
    store = Store(40)
    answer = explained(store, range(12))
    assert answer[:5] == (12, 0, 0, Reason.NEVER_SEEN, 0)
    assert tokens(answer.prompt_snippet) == list(range(12)) and answer.resident_snippet == b""


def test_a_resident_prompt_is_cached_but_for_its_last_token() -> None:
    store = Store(40)
    store.serve(A, range(12))
    answer = explained(store, range(12))
    assert (answer.cached_tokens, answer.reason, answer.diverges_at) == (11, Reason.RESIDENT, 12)


def test_it_shows_where_the_prompt_diverges_and_what_follows_on_either_side() -> None:
    store = Store(40)
    store.serve(A, range(16))
    answer = explained(store, [*range(6), 90, 91, 92, 93, 94, 95])
    assert (answer.cached_tokens, answer.reason, answer.diverges_at) == (6, Reason.NEVER_SEEN, 6)
    assert tokens(answer.prompt_snippet)[:3] == [90, 91, 92]
    assert tokens(answer.resident_snippet)[:3] == [6, 7, 8]


def test_a_prompt_that_goes_on_where_the_resident_one_ends() -> None:
    store = Store(40)
    store.serve(A, range(8))
    answer = explained(store, range(16))
    assert (answer.cached_tokens, answer.reason, answer.diverges_at) == (8, Reason.NEVER_SEEN, 8)
    assert answer.resident_snippet == b""


def test_less_than_a_block_is_too_short() -> None:
    store = Store(40)
    assert explained(store, range(3)).reason is Reason.TOO_SHORT
    store.serve(A, range(8))
    assert explained(store, range(10)).reason is Reason.TOO_SHORT
    assert explained(store, []).reason is Reason.RESIDENT


def test_evicted_by_others_and_when() -> None:
    store = Store(40)
    store.serve(A, range(17))
    store.clock.now_s = 50
    store.flood(B)
    answer = explained(store, range(17))
    assert (answer.reason, answer.evicted_s) == (Reason.OTHERS_PRESSURE, 50)


def test_evicted_by_its_own_later_prompts() -> None:
    store = Store(40)
    store.serve(A, range(17))
    store.flood(A)
    assert explained(store, range(17)).reason is Reason.OWN_PRESSURE


def test_evicted_after_its_lease_had_ended() -> None:
    store = Store(40)
    store.serve(A, range(17), lease=(16, 300))
    store.clock.now_s = 301
    store.flood(B)
    assert explained(store, range(17)).reason is Reason.LEASE_EXPIRED


def test_flushed() -> None:
    store = Store(40)
    store.serve(A, range(17))
    store.cache.flush("a")
    assert explained(store, range(17)).reason is Reason.FLUSHED


def test_under_another_salt_of_the_same_owner_and_never_of_another_owner() -> None:
    store = Store(40)
    store.serve(namespace("a", salt="x"), range(17))
    assert explained(store, range(17)).reason is Reason.OTHER_SALT
    assert explained(store, range(17), B).reason is Reason.NEVER_SEEN


def test_public_tokens_are_told_apart() -> None:
    store = Store(40)
    assert TRUNK[0] == PUBLIC
    store.serve(TRUNK, range(8))
    store.serve(A, range(16))
    answer = explained(store, range(20))
    assert (answer.cached_tokens, answer.cached_public_tokens) == (16, 8)


def test_explaining_changes_nothing() -> None:
    store = Store(40)
    store.serve(A, range(17))
    before = store.cache.stats()
    explained(store, [*range(6), 90, 91])
    assert store.cache.stats() == before


def test_what_is_wanted_again_soon_after_its_eviction_is_regretted() -> None:
    store = Store(40)
    store.serve(A, range(17))
    store.flood(B)
    store.clock.now_s = 3599
    store.serve(A, range(17))
    assert store.cache.stats().owners["a"].regretted_blocks > 0


def test_and_not_an_hour_later() -> None:
    store = Store(40)
    store.serve(A, range(17))
    store.flood(B)
    store.clock.now_s = 3601
    store.serve(A, range(17))
    assert store.cache.stats().owners["a"].regretted_blocks == 0


def test_ghosts_are_bounded() -> None:
    store = Store(40)
    for start in range(0, 3_000_000, 1000):
        store.serve(A, range(start, start + 5))
    assert len(store.cache._tree.ghosts) <= 1024 + 10
