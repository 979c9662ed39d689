"""The prompt's bill is frozen at admission and adds up, whatever happens to the request afterwards."""

import pytest

from engine.protocol import Accepted, Delta, PromptRecord
from engine.simulation.naive_cache import NaiveCache
from engine.simulation.rig import Rig
from radix_cache.cache import PrefixCache


@pytest.fixture(params=[PrefixCache, NaiveCache], ids=["radix", "naive"])
def rig(request):
    return lambda **settings: Rig(request.param, **settings)


def test_a_cold_prompt_of_four_chunks_has_nothing_cached_and_is_accepted_once(rig):
    r = rig(max_batch_tokens=16)
    finished = r.ask("a", range(62))
    assert len(r.plans) == 4 + 3
    assert finished.prompt == r.record("a") == PromptRecord(written_unleased=60, uncached=2)
    assert sum(isinstance(m, Accepted) for m in r.messages) == 1


def test_the_first_request_reports_the_write_and_the_second_the_read(rig):
    r = rig(n_blocks=1000, block_size=16, max_model_len=10_000, max_batch_tokens=2048)
    first = [i % 997 for i in range(7237)]
    assert r.ask("first", first, max_tokens=3).prompt == PromptRecord(written_unleased=7232, uncached=5)
    more = [*first, *r.output("first"), *range(500, 540)]
    # The two generated tokens that were computed lie in the sealed last block as well.
    assert r.ask("second", more).prompt == PromptRecord(7239, written_unleased=7280 - 7239)


def test_a_prompt_of_whole_blocks_again_computes_one_token_that_is_not_written(rig):
    r = rig(block_size=4)
    assert r.ask("first", range(16)).prompt == PromptRecord(written_unleased=16)
    assert r.ask("again", range(16)).prompt == PromptRecord(15, uncached=1)
    assert r.loop.counters.computed_tokens == (16 + 3) + (1 + 3)
    assert r.output("again") == r.output("first")


def test_the_last_block_is_written_when_only_a_part_of_it_was_there(rig):
    r = rig(block_size=4)
    r.ask("first", range(15), max_tokens=1)
    assert r.ask("longer", range(16)).prompt == PromptRecord(15, written_unleased=1)


def test_a_prompt_shorter_than_a_block_is_neither_read_nor_written(rig):
    r = rig(block_size=4)
    for name in ("first", "again"):
        assert r.ask(name, range(3), max_tokens=1).prompt == PromptRecord(uncached=3)


def test_an_opted_out_request_neither_reads_nor_writes(rig):
    r = rig()
    r.ask("warm", range(20))
    assert r.ask("out", range(20), use_cache=False).prompt == PromptRecord(uncached=20)
    assert r.ask("other", range(50, 70), use_cache=False).prompt == PromptRecord(uncached=20)
    assert r.ask("cold", range(50, 70)).prompt.cached == 0


def test_parallel_samples_count_the_prompt_once(rig):
    r = rig()
    finished = r.ask("a", range(18), max_tokens=5, n=4)
    assert finished.prompt == PromptRecord(written_unleased=16, uncached=2)
    assert finished.output_tokens == (5, 5, 5, 5)
    assert r.loop.counters.computed_tokens == 18 + 4 * 4


def test_preemption_does_not_change_what_was_cached(rig):
    r = rig(n_blocks=12, block_size=4)
    r.ask("warm", range(12), max_tokens=1)
    r.submit("a", range(12), max_tokens=30)
    r.submit("b", range(12), max_tokens=30)
    r.run()
    preempted = r.finished("b")
    assert preempted.preemptions >= 1
    assert preempted.recovered_tokens > 0
    assert preempted.prompt == r.record("b") == PromptRecord(11, uncached=1)
    assert r.output("b") == r.undisturbed("b")


def test_one_lookup_for_a_request_that_was_blocked_for_ten_steps():
    r = Rig(PrefixCache, n_blocks=10, block_size=4)
    r.submit("a", range(100, 124), max_tokens=12)
    r.step()
    r.submit("b", range(24), max_tokens=1)
    r.step(11)
    assert r.cache.stats().lookups == 1
    assert r.loop.n_waiting == 1
    r.run()
    assert r.cache.stats().lookups == 2


def test_counters_only_grow_and_a_request_in_eight_chunks_hits_once(rig):
    r = rig(max_batch_tokens=16, max_sequences=4, n_blocks=128)
    r.ask("warm", range(64))
    r.submit("a", [*range(64), *range(200, 322)])
    before = r.loop.counters.as_dict()
    while r.loop.has_work:
        r.step()
        now = r.loop.counters.as_dict()
        assert all(now[name] >= before[name] for name in now)
        before = now
    assert len([plan for plan in r.plans if plan.chunks[0].sequence.request.id == "a"]) == 8 + 3
    assert r.loop.counters.prompt_cached_private == 64


def test_a_client_that_leaves_in_mid_stream_pays_the_prompt_and_what_was_generated(rig):
    r = rig(n_blocks=100)
    r.submit("a", range(30), max_tokens=200)
    r.step(20)
    r.loop.cancel("a")
    r.run()
    finished = r.finished("a")
    assert finished.prompt == PromptRecord(written_unleased=28, uncached=2)
    assert (finished.output_tokens, finished.finish_reasons, finished.error) == ((20,), ("cancelled",), None)
    assert r.output("a") == r.undisturbed("a")[:20]


def test_a_client_that_leaves_in_mid_prefill_pays_cached_and_computed_so_far(rig):
    r = rig(max_batch_tokens=16)
    r.ask("warm", range(16))
    r.submit("a", [*range(16), *range(100, 150)])
    r.step(2)
    r.loop.cancel("a")
    r.run()
    assert r.record("a") == PromptRecord(16, written_unleased=48, uncached=2)
    assert r.finished("a").prompt == PromptRecord(16, written_unleased=32)


def test_a_client_that_leaves_the_queue_pays_nothing(rig):
    r = rig(max_sequences=1)
    r.submit("a", [1], max_tokens=9)
    r.submit("b", range(20))
    r.step()
    r.loop.cancel("b")
    r.run()
    assert r.finished("b").prompt == PromptRecord()
    assert r.finished("b").finish_reasons == ("cancelled",)


# --- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_later", [0, 1, 5])
def test_a_stop_bills_and_publishes_up_to_its_token_whenever_it_arrives(rig, steps_later):
    r = rig(block_size=1)
    r.submit("a", range(10), max_tokens=50)
    r.step(6 + steps_later)
    r.loop.stop("a", 0, 6)
    r.run()
    assert (r.finished("a").output_tokens, r.finished("a").finish_reasons) == ((6,), ("stop",))
    last = [m for m in r.messages if isinstance(m, Delta)][-1]
    assert (last.token_ids, last.n_tokens, last.finish_reason) == ((), 6, "stop")
    assert r.loop.counters.output_tokens == 6
    everything = [*range(10), *r.undisturbed("a")]
    # The sixth token itself was computed only if another was generated after it.
    assert r.ask("next", everything).prompt.cached == (16 if steps_later else 15)


def test_a_stop_reaches_an_output_that_ended_while_others_go_on(rig):
    r = rig()
    r.submit("a", range(10), n=2, max_tokens=8)
    r.step(4)
    r.loop.stop("a", 0, 4)
    r.loop.stop("a", 0, 2)
    r.run()
    assert r.finished("a").output_tokens == (2, 8)
    assert r.finished("a").finish_reasons == ("stop", "length")


def test_a_stop_that_crosses_the_end_is_taken_off_the_counters(rig):
    r = rig()
    assert r.ask("a", range(10), max_tokens=8).output_tokens == (8,)
    r.loop.stop("a", 0, 5)
    r.loop.stop("a", 0, 5)
    counters = r.loop.counters
    assert (counters.output_tokens, counters.late_stop_tokens) == (8, 3)


def test_a_stop_for_nothing_is_ignored(rig):
    r = rig()
    r.submit("a", range(10), max_tokens=3)
    r.loop.stop("a", 0, 0)
    r.loop.stop("a", 7, 1)
    r.loop.stop("nobody", 0, 1)
    r.run()
    assert r.finished("a").output_tokens == (3,)
