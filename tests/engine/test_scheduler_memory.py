"""At the edge of memory: nothing leaks, the oldest gets on, preemptions are bounded and order is kept."""

from itertools import pairwise

import pytest

from engine.protocol import Accepted, Delta, Finished
from engine.simulation.naive_cache import NaiveCache
from engine.simulation.rig import Rig
from radix_cache.cache import PrefixCache


@pytest.fixture(params=[PrefixCache, NaiveCache], ids=["radix", "naive"])
def rig(request):
    return lambda **settings: Rig(request.param, **settings)


def free_blocks(r):
    return r.cache.stats().free_blocks


def test_a_hundred_prompts_that_opt_out_leave_no_block_behind(rig):
    r = rig(max_batch_tokens=16)
    start = free_blocks(r)
    for i in range(100):
        r.submit(f"r{i}", range(i, i + 40), use_cache=False, max_tokens=3)
    r.run()
    assert free_blocks(r) == start == 64


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_a_cancel_at_any_point_frees_everything_before_the_next_step_ends(rig, steps):
    r = rig(max_batch_tokens=20)
    r.submit("a", range(50), max_tokens=50, n=3)
    r.step(steps)
    r.loop.cancel("a")
    r.step()
    assert r.finished("a").finish_reasons == ("cancelled",) * 3
    assert r.scheduler.holdings() == []
    assert r.cache.available_blocks == 64
    assert not r.loop.has_work


def test_a_cancel_of_a_preempted_request_frees_its_place(rig):
    r = rig(n_blocks=10, block_size=4)
    r.submit("a", range(14), max_tokens=20)
    r.submit("b", range(100, 114), max_tokens=20)
    r.step()
    while r.loop.n_waiting == 0:
        r.step()
    generated = len(r.output("b"))
    r.loop.cancel("b")
    r.run()
    assert r.finished("b").output_tokens == (generated,)
    assert r.finished("b").prompt == r.record("b")
    assert r.finished("a").output_tokens == (20,)


def test_contexts_slightly_larger_than_the_pool_preempt_a_bounded_number_of_times(rig):
    r = rig(n_blocks=20, block_size=4)
    for name in "abc":
        r.submit(name, range(ord(name), ord(name) + 20), max_tokens=40)
    output_sizes = []
    while r.loop.has_work:
        r.step()
        output_sizes.append(sum(isinstance(m, Delta) for m in r.messages))
    assert all(after > before for before, after in pairwise(output_sizes))
    assert r.loop.counters.preemptions <= 3
    assert [r.output(name) for name in "abc"] == [r.undisturbed(name) for name in "abc"]


def test_order_is_kept_under_preemption(rig):
    r = rig(n_blocks=10, block_size=4, max_sequences=2)
    for name in "abc":
        r.submit(name, range(ord(name), ord(name) + 14), max_tokens=14)
    r.run()
    assert r.finished("b").preemptions == 1
    assert r.order_of(Accepted) == r.order_of(Finished) == ["a", "b", "c"]


def test_the_youngest_of_the_tenant_that_holds_most_gives_way(rig):
    r = rig(n_blocks=16, block_size=4)
    r.submit("a1", range(12), max_tokens=30, owner="acme")
    r.submit("a2", range(100, 112), max_tokens=30, owner="acme")
    r.submit("b1", range(200, 212), max_tokens=30, owner="bolt")
    r.step()
    while r.loop.n_waiting == 0:
        r.step()
    assert [sequence.request.id for sequence in r.scheduler.queue] == ["a2"]
    r.run()
    assert [r.output(name) for name in ("a1", "a2", "b1")] == [r.undisturbed(name) for name in ("a1", "a2", "b1")]


def test_a_tenant_of_more_weight_may_hold_more(rig):
    r = rig(n_blocks=17, block_size=4)
    r.scheduler.queue.set_weight("acme", 3.0)
    r.submit("a1", range(12), max_tokens=30, owner="acme")
    r.submit("a2", range(100, 112), max_tokens=30, owner="acme")
    r.submit("b1", range(200, 212), max_tokens=30, owner="bolt")
    r.step()
    while r.loop.n_waiting == 0:
        r.step()
    assert [sequence.request.id for sequence in r.scheduler.queue] == ["b1"]


def test_the_oldest_is_never_preempted(rig):
    r = rig(n_blocks=12, block_size=4, max_sequences=6)
    r.submit("oldest", range(16), max_tokens=28, owner="acme")
    for i in range(5):
        r.submit(f"r{i}", range(100 * i, 100 * i + 8), max_tokens=10, owner="bolt")
    r.run()
    assert r.finished("oldest").preemptions == 0
    assert r.output("oldest") == r.undisturbed("oldest")


def test_less_than_a_block_is_wasted_per_sequence(rig):
    r = rig(n_blocks=200, block_size=8, max_batch_tokens=256)
    for i in range(10):
        r.submit(f"r{i}", range(100 * i, 100 * i + 11 + i), max_tokens=30)
    while r.loop.n_running or r.loop.has_work:
        r.step()
        for sequence in r.scheduler.running:
            assert 0 <= sequence.holding.n_blocks * 8 - sequence.n_computed < 8


def test_a_prompt_that_hits_all_of_a_full_pool_still_runs(rig):
    """The path and the source of the block copy fill the pool: there is no block for the copy."""
    r = rig(n_blocks=4, block_size=4)
    r.ask("first", range(15), max_tokens=2)
    for name in ("again", "and again"):
        finished = r.ask(name, range(15), max_tokens=2)
        assert finished.error is None
        assert (finished.output_tokens, finished.prompt.cached) == ((2,), 12)
        assert r.output(name) == r.undisturbed(name)


def test_a_prefill_without_memory_does_not_stop_the_decodes(rig):
    r = rig(n_blocks=16, block_size=4, max_batch_tokens=17)
    r.submit("a", range(16), max_tokens=30)
    r.step()
    r.submit("b", range(100, 140), max_tokens=5)
    r.run()
    assert r.output("a") == r.undisturbed("a")
    assert r.output("b") == r.undisturbed("b")


def test_a_victim_whose_block_copy_is_not_made_yet_gives_nothing_of_it_to_the_tree(rig):
    """Three samples diverge in the step in which three others need a block: one that was to copy is preempted."""
    r = rig(n_blocks=18, block_size=4, max_batch_tokens=20)
    r.submit("a", range(5), max_tokens=60, owner="acme")
    r.step()
    r.submit("b", range(100, 134), max_tokens=30, owner="bolt", n=3)
    r.step()
    for i in range(3):
        r.submit(f"c{i}", range(300 + 100 * i, 307 + 100 * i), max_tokens=30, owner="acme")
    r.run()
    assert r.finished("b").preemptions >= 2
    assert [r.output("b", i) for i in range(3)] == [r.undisturbed("b", i) for i in range(3)]
    assert [r.output(f"c{i}") for i in range(3)] == [r.undisturbed(f"c{i}") for i in range(3)]
