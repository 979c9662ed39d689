"""Turns between tenants go by weighted work, and turns within a tenant by what the cache holds, with ageing."""

import random

import pytest

from engine.fairness import CostWeights, FairQueue, lowest
from engine.protocol import Accepted, Finished, PromptRecord, Sampling, Submit
from engine.sequence import Request
from engine.simulation.naive_cache import NaiveCache
from engine.simulation.rig import Rig
from radix_cache.cache import PrefixCache


@pytest.fixture(params=[PrefixCache, NaiveCache], ids=["radix", "naive"])
def rig(request):
    return lambda **settings: Rig(request.param, **settings)


def waiting(owner, seniority):
    submit = Submit(f"r{seniority}", owner, bytes(4), Sampling(max_tokens=1))
    return Request(submit, (owner, "", "", ""), seniority, 0.0).primary


# --- counters ---------------------------------------------------------------------------------------------------------


def test_cost_of_a_prompt_by_class():
    record = PromptRecord(cached_private=100, cached_public=50, written_unleased=30, uncached=7)
    assert CostWeights(uncached=1, cached=0.1, output=2).prompt(record) == pytest.approx(37 + 15)


def test_the_lowest_counter_has_its_turn_and_ties_go_by_name():
    queue = FairQueue()
    for i, owner in enumerate(("c", "b", "a")):
        queue.add(waiting(owner, i))
    assert lowest(queue.with_waiting()).owner == "a"
    queue.charge("a", 5)
    queue.charge("b", 3)
    assert lowest(queue.with_waiting()).owner == "c"
    assert lowest(queue.with_waiting(), {queue.tenant("c")}).owner == "b"


def test_a_tenant_of_weight_two_is_charged_half():
    queue = FairQueue()
    queue.set_weight("a", 2.0)
    queue.charge("a", 10)
    assert queue.tenant("a").counter == 5
    with pytest.raises(ValueError, match="above 0"):
        queue.set_weight("a", 0)


def test_a_tenant_that_returns_is_lifted_to_the_smallest_counter_that_waits():
    queue = FairQueue()
    queue.add(waiting("a", 0))
    queue.add(waiting("b", 1))
    queue.charge("a", 100)
    queue.charge("b", 300)
    queue.add(waiting("new", 2))
    assert queue.tenant("new").counter == 100
    queue.add(waiting("b", 3))
    assert queue.tenant("b").counter == 300


def test_when_nobody_waits_a_tenant_is_lifted_to_the_one_that_left_last():
    queue = FairQueue()
    first = waiting("a", 0)
    queue.add(first)
    queue.charge("a", 40)
    queue.remove(first)
    queue.add(waiting("b", 1))
    assert queue.tenant("b").counter == 40


def test_a_sequence_that_ran_goes_back_to_its_old_place():
    queue = FairQueue()
    sequences = [waiting("a", i) for i in range(4)]
    for sequence in sequences[1:]:
        queue.add(sequence)
    queue.put_back(sequences[0])
    assert [sequence.seniority for sequence in queue] == [0, 1, 2, 3]
    sequences[2].request.record = PromptRecord()
    queue.remove(sequences[2])
    queue.put_back(sequences[2])
    assert [sequence.seniority for sequence in queue] == [2, 0, 1, 3]
    assert queue.n_waiting == 4


# --- between tenants --------------------------------------------------------------------------------------------------


def test_a_flood_of_one_tenant_does_not_delay_another(rig):
    r = rig(max_sequences=1)
    for i in range(20):
        r.submit(f"flood{i}", [i], owner="flood")
    r.submit("quiet0", [100], owner="quiet")
    r.submit("quiet1", [101], owner="quiet")
    r.run()
    assert r.order_of(Accepted)[:4] == ["flood0", "quiet0", "flood1", "quiet1"]


def test_cached_input_costs_less_than_computed_input(rig):
    r = rig(max_sequences=1, n_blocks=200)
    r.ask("warm", range(60), owner="hits", max_tokens=1)
    r.ask("level", range(200, 260), owner="misses", max_tokens=1)
    for i in range(6):
        r.submit(f"hit{i}", [*range(60), 500 + i], owner="hits", max_tokens=1)
        r.submit(f"miss{i}", range(300 + 61 * i, 361 + 61 * i), owner="misses", max_tokens=1)
    r.run()
    # A hit costs 6 + 1 + 2, a miss 61 + 2: after one miss, the six hits are still cheaper.
    order = [name for name in r.order_of(Accepted) if name.startswith(("hit", "miss"))]
    assert order.index("miss1") > order.index("hit5")


def test_a_long_prompt_of_one_tenant_lets_another_tenants_short_one_through(rig):
    r = rig(max_batch_tokens=16, n_blocks=200)
    r.submit("long", range(400), owner="heavy")
    r.step(2)
    r.submit("short", range(500, 508), owner="light")
    r.step()
    chunks = [(c.sequence.request.id, c.n_tokens) for c in r.plans[-1].chunks]
    assert chunks == [("short", 8), ("long", 8)]


def test_two_backlogged_tenants_never_differ_by_more_than_the_bound(rig):
    """|Wf - Wg| <= 2 max(wp Lin, wq M): M is the tokens that a step can hold, Lin the longest prompt."""
    max_batch_tokens, longest = 32, 40
    r = rig(max_batch_tokens=max_batch_tokens, n_blocks=60, max_sequences=6)
    rng = random.Random(1)
    for i in range(120):
        owner = "fg"[i % 2]
        length = rng.randrange(1, longest + 1) if owner == "f" else rng.randrange(1, 9)
        output = rng.randrange(1, 4) if owner == "f" else rng.randrange(1, 20)
        prompt = [rng.randrange(1000) for _ in range(length)]
        r.submit(f"{owner}{i}", prompt, owner=owner, max_tokens=output, use_cache=False)
    bound = 2 * max(1 * longest, 2 * max_batch_tokens)
    f, g = r.scheduler.queue.tenant("f"), r.scheduler.queue.tenant("g")
    while len(f) and len(g):
        r.step()
        assert abs(f.counter - g.counter) <= bound


# --- within a tenant --------------------------------------------------------------------------------------------------


def test_the_longest_cached_prefix_goes_first(rig):
    r = rig(max_sequences=1, n_blocks=200)
    r.ask("warm", range(40))
    r.submit("running", [999], max_tokens=3)
    r.step()
    r.submit("cold", range(500, 530))
    r.submit("warmer", [*range(20), 600])
    r.submit("warmest", [*range(36), 601])
    r.run()
    assert r.order_of(Accepted)[2:] == ["warmest", "warmer", "cold"]


def test_a_cold_request_starts_within_its_ageing_bound(rig):
    r = rig(max_sequences=1, n_blocks=200, max_passes=5)
    r.ask("warm", range(40))
    r.submit("running", [999])
    r.step()
    r.submit("cold", range(500, 530))
    for i in range(12):
        r.submit(f"hot{i}", [*range(40), 600 + i], max_tokens=1)
    r.run()
    assert r.order_of(Accepted).index("cold") == 2 + 5


def test_priority_goes_before_the_cache_and_not_before_age(rig):
    r = rig(max_sequences=1, max_passes=2)
    r.ask("warm", range(20))
    r.submit("running", [999])
    r.step()
    r.submit("warm again", range(20))
    r.submit("cold", [1])
    for i in range(4):
        r.submit(f"urgent{i}", [i], priority=1)
    r.run()
    assert r.order_of(Accepted)[2:] == ["urgent0", "urgent1", "warm again", "cold", "urgent2", "urgent3"]


def test_small_requests_pass_a_large_one_so_often_and_then_the_queue_drains_for_it(rig):
    r = rig(n_blocks=20, block_size=4, max_passes=3)
    r.submit("running", range(40), max_tokens=20)
    r.step()
    r.submit("large", range(500, 556), owner="bolt")
    for i in range(8):
        r.submit(f"small{i}", [600 + i], owner="acme", max_tokens=2)
    r.run()
    order = r.order_of(Accepted)
    assert order.index("large") == 1 + 3
    assert len(r.order_of(Finished)) == 10
