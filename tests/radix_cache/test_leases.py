"""A lease keeps a prefix resident until its time, is renewed by reads, and is refused when it cannot be kept."""

from __future__ import annotations

import pytest

from radix_cache.cache import BlockCopy, Holding, PrefixCache, QuotaError, Refusal
from tests.radix_cache.harness import A, B, ids

BLOCK = 4


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Store:
    """A cache whose requests are computed at once."""

    def __init__(self, n_blocks: int, **options: int) -> None:
        self.clock = Clock()
        self.cache = PrefixCache(n_blocks, BLOCK, clock=self.clock, **options)
        self.fence = 0

    def serve(self, ns, prompt: range, *, lease: tuple[int, float] | None = None) -> tuple[int, Refusal | None]:
        """(cached tokens, refusal) of a request that takes a lease of (offset, ttl) at admission."""
        holding = self.cache.acquire(ns, ids(*prompt))
        assert holding is not None
        cached = holding.cached_tokens
        refusal = self.cache.lease(holding, *lease) if lease else None
        self.compute(holding, prompt)
        self.cache.release(holding, ids(*prompt), len(prompt))
        self.cache.check_invariants([])
        return cached, refusal

    def compute(self, holding: Holding, prompt: range) -> list[BlockCopy]:
        assert self.cache.extend(holding, len(prompt))
        self.fence += 1
        self.cache.publish(holding, ids(*prompt), len(prompt), self.fence)
        self.cache.confirm(self.fence)
        return holding.copies

    def flood(self, ns=B) -> None:
        """One-off prompts of more blocks than the pool has."""
        for start in range(1000, 1000 + 100 * 50, 100):
            self.serve(ns, range(start, start + 8))

    def leased_blocks(self, owner: str = "a") -> int:
        return self.cache.stats().owners[owner].leased_blocks


@pytest.fixture
def store() -> Store:
    return Store(40)


PROMPT = range(17)


def test_without_a_lease_a_flood_takes_the_prefix(store: Store) -> None:
    store.serve(A, PROMPT)
    store.flood()
    assert store.serve(A, PROMPT) == (0, None)


def test_a_leased_prefix_survives_a_flood(store: Store) -> None:
    assert store.serve(A, PROMPT, lease=(17, 300)) == (0, None)
    assert store.leased_blocks() == 4
    store.flood()
    assert store.serve(A, PROMPT)[0] == 16


def test_it_covers_the_whole_blocks_up_to_its_offset_and_no_more(store: Store) -> None:
    store.serve(A, PROMPT, lease=(10, 300))
    assert store.leased_blocks() == 2
    store.flood()
    assert store.serve(A, PROMPT)[0] == 8


def test_it_ends_with_its_time(store: Store) -> None:
    store.serve(A, PROMPT, lease=(17, 300))
    store.clock.now_s = 300
    assert store.leased_blocks() == 0
    store.flood()
    assert store.serve(A, PROMPT)[0] == 0


def test_a_read_renews_it(store: Store) -> None:
    store.serve(A, PROMPT, lease=(17, 300))
    store.clock.now_s = 299
    store.serve(A, range(30))
    store.clock.now_s = 598
    store.flood()
    assert store.serve(A, PROMPT)[0] == 16
    store.clock.now_s = 598 + 300
    assert store.leased_blocks() == 0


def test_a_read_of_a_part_and_a_probe_renew_nothing(store: Store) -> None:
    store.serve(A, PROMPT, lease=(17, 300))
    store.clock.now_s = 299
    store.serve(A, range(9))
    store.cache.probe(A, ids(*PROMPT))
    store.clock.now_s = 300
    assert store.leased_blocks() == 0


def test_two_leases_on_one_path_pin_their_blocks_once(store: Store) -> None:
    store.serve(A, range(33), lease=(16, 600))
    store.serve(A, range(33), lease=(32, 300))
    assert store.leased_blocks() == 8
    store.clock.now_s = 300 + 1
    assert store.leased_blocks() == 4


def test_the_longer_of_two_leases_of_one_prefix_counts(store: Store) -> None:
    store.serve(A, PROMPT, lease=(16, 3600))
    store.serve(A, PROMPT, lease=(16, 300))
    store.clock.now_s = 3599
    assert store.leased_blocks() == 4


def test_a_prefix_that_is_resident_is_leased_at_once(store: Store) -> None:
    store.serve(A, PROMPT)
    holding = store.cache.acquire(A, ids(*PROMPT))
    assert holding is not None and store.cache.lease(holding, 16, 300) is None
    assert store.leased_blocks() == 4
    store.cache.discard(holding)
    store.cache.check_invariants([])
    assert store.leased_blocks() == 4


def test_a_request_that_ends_before_it_computed_its_prefix_leaves_no_lease(store: Store) -> None:
    holding = store.cache.acquire(A, ids(*PROMPT))
    assert holding is not None and store.cache.lease(holding, 16, 300) is None
    store.cache.discard(holding)
    assert store.leased_blocks() == 0
    assert store.serve(A, range(100, 140), lease=(40, 300))[1] is None


def test_a_failed_step_takes_no_lease_and_the_next_one_does(store: Store) -> None:
    holding = store.cache.acquire(A, ids(*PROMPT))
    assert holding is not None and store.cache.lease(holding, 16, 300) is None
    assert store.cache.extend(holding, 17)
    store.cache.publish(holding, ids(*PROMPT), 17, 1)
    store.cache.revoke(1)
    assert store.leased_blocks() == 0
    store.compute(holding, PROMPT)
    assert store.leased_blocks() == 4
    store.cache.check_invariants([holding])


@pytest.mark.parametrize(
    ("offset", "ttl_s", "refusal"),
    [
        (3, 300, Refusal.TOO_SHORT),
        (0, 300, Refusal.TOO_SHORT),
        (16, 0, Refusal.BAD_TTL),
        (16, -1, Refusal.BAD_TTL),
        (16, float("nan"), Refusal.BAD_TTL),
        (16, 400 * 24 * 3600, Refusal.BAD_TTL),
        (16, 1e-6, None),
        (16, 365 * 24 * 3600, None),
    ],
)
def test_what_can_be_promised(store: Store, offset: int, ttl_s: float, refusal: Refusal | None) -> None:
    assert store.serve(A, PROMPT, lease=(offset, ttl_s))[1] == refusal


def test_a_request_that_opted_out_gets_none(store: Store) -> None:
    holding = store.cache.acquire(A, ids(*PROMPT), use_cache=False)
    assert holding is not None and store.cache.lease(holding, 16, 300) is Refusal.NOT_CACHED


def test_the_pin_budget_of_an_owner_bounds_its_leases(store: Store) -> None:
    assert store.serve(A, range(41), lease=(40, 300))[1] is None
    assert store.serve(A, range(100, 117), lease=(16, 300))[1] is Refusal.PIN_BUDGET
    assert store.serve(A, range(41), lease=(40, 300))[1] is None, "what is pinned already costs nothing"
    assert store.serve(B, range(100, 117), lease=(16, 300))[1] is None
    stats = store.cache.stats().owners["a"]
    assert (stats.leases_granted, stats.leases_refused, stats.leased_blocks) == (2, 1, 10)


def test_requests_in_flight_count_against_the_budget(store: Store) -> None:
    first, second = (store.cache.acquire(A, ids(*range(start, start + 33))) for start in (0, 100))
    assert first is not None and second is not None
    assert store.cache.lease(first, 32, 300) is None
    assert store.cache.lease(second, 32, 300) is Refusal.PIN_BUDGET


def test_pins_reserves_and_one_longest_sequence_fit_in_the_pool() -> None:
    store = Store(40, longest_tokens=80)
    store.cache.set_quota("b", reserve=0.25)
    store.cache.set_quota("a", pin_budget=1.0)
    assert store.serve(A, range(41), lease=(40, 300))[1] is None
    assert store.serve(A, range(100, 105), lease=(4, 300))[1] is Refusal.POOL
    with pytest.raises(QuotaError, match="30 for leases and one longest sequence"):
        store.cache.set_quota("b", reserve=0.5)


def test_ending_leases_early_says_what_was_not_kept(store: Store) -> None:
    store.serve(A, PROMPT, lease=(16, 300))
    store.serve(B, PROMPT, lease=(8, 3600))
    store.clock.now_s = 100
    assert store.cache.end_leases("a") == [("a", 4, 300, 200.0)]
    assert (store.leased_blocks("a"), store.leased_blocks("b")) == (0, 2)
    store.cache.check_invariants([])
    assert store.cache.end_leases("a") == []


def test_leases_leave_the_pool_usable_for_one_long_sequence() -> None:
    store = Store(20, longest_tokens=40)
    store.cache.set_quota("a", pin_budget=1.0)
    granted = [store.serve(A, range(100 * i, 100 * i + 9), lease=(8, 300))[1] is None for i in range(1, 9)]
    assert granted == [True] * 5 + [False] * 3
    assert store.serve(B, range(40))[0] == 0
