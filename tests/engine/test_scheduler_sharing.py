"""Equal beginnings are computed once, and never mixed up. The fake runner checks every token that is read."""

import pytest

from engine.protocol import Accepted, Finished, PromptRecord, Sampling
from engine.simulation.naive_cache import NaiveCache
from engine.simulation.rig import Rig
from radix_cache.cache import PrefixCache


@pytest.fixture(params=[PrefixCache, NaiveCache], ids=["radix", "naive"])
def rig(request):
    return lambda **settings: Rig(request.param, **settings)


def test_two_equal_prompts_in_one_batch_are_computed_once(rig):
    r = rig(block_size=4)
    for name in "ab":
        r.submit(name, range(18))
    r.step()
    assert [(c.start, c.n_tokens) for c in r.plans[0].chunks] == [(0, 18), (16, 2)]
    r.run()
    assert r.record("a") == PromptRecord(written_unleased=16, uncached=2)
    assert r.record("b") == PromptRecord(16, uncached=2)
    assert r.output("a") == r.output("b") == r.undisturbed("a")


def test_two_equal_prompts_of_whole_blocks_in_one_batch(rig):
    r = rig(block_size=4)
    for name in "ab":
        r.submit(name, range(16))
    r.run()
    # The last token is always computed, and a block behind a fence is not copied from: the whole block, not kept.
    assert r.record("b") == PromptRecord(12, uncached=4)
    assert r.output("a") == r.output("b") == r.undisturbed("a")


def test_sixty_four_equal_prompts_at_once_are_computed_once(rig):
    r = rig(n_blocks=1200, block_size=16, max_model_len=5000, max_batch_tokens=512, max_sequences=64)
    for i in range(64):
        r.submit(f"r{i}", range(4000), max_tokens=1)
    r.run()
    # Six fit in the leader's last step: behind its fence they match whole blocks and compute the last one themselves.
    cached = [r.finished(f"r{i}").prompt.cached for i in range(64)]
    assert (cached[0], cached.count(3984), cached.count(3999)) == (0, 6, 57)
    assert r.loop.counters.computed_tokens == 4000 + 6 * 16 + 57
    assert all(r.output(f"r{i}") == r.undisturbed("r0") for i in range(64))


def test_a_follower_waits_for_the_part_that_a_leader_computes(rig):
    r = rig(block_size=4, max_batch_tokens=16)
    r.submit("leader", range(60), max_tokens=1)
    r.submit("follower", [*range(40), *range(100, 110)], max_tokens=1)
    r.submit("other", range(200, 204), max_tokens=1)
    r.step(2)
    assert r.order_of(Accepted) == ["leader"]
    r.step()
    # The third chunk ends at 48; what the follower shares ends at 40. It and the other come next.
    r.run()
    assert r.record("follower") == PromptRecord(40, written_unleased=8, uncached=2)
    assert r.output("follower") == r.undisturbed("follower")
    assert r.loop.counters.computed_tokens == 60 + 10 + 4


def test_a_follower_computes_for_itself_when_its_leader_is_gone(rig):
    r = rig(block_size=4, max_batch_tokens=16)
    r.submit("leader", range(60))
    r.submit("follower", range(60))
    r.step()
    r.loop.cancel("leader")
    r.run()
    assert r.record("follower") == PromptRecord(16, written_unleased=44)
    assert r.output("follower") == r.undisturbed("follower")


def test_an_abort_in_mid_prefill_leaves_what_was_computed_and_nothing_else(rig):
    r = rig(block_size=4, max_batch_tokens=18)
    r.submit("gone", range(60))
    r.step()
    r.loop.cancel("gone")
    r.run()
    again = r.ask("again", range(60))
    assert again.prompt == PromptRecord(18, written_unleased=42)
    assert r.output("again") == r.undisturbed("again")


def test_a_preempted_sequence_hits_its_own_blocks(rig):
    r = rig(n_blocks=10, block_size=4, max_sequences=2)
    r.submit("a", range(14), max_tokens=16)
    r.submit("b", range(100, 114), max_tokens=16)
    r.run()
    assert r.finished("b").preemptions == 1
    assert r.finished("b").recovered_tokens > 0
    for name in "ab":
        assert r.output(name) == r.undisturbed(name)


def test_interleaved_conversations_each_equal_their_cold_run(rig):
    r = rig(n_blocks=200)
    histories = {"A": list(range(20)), "B": [*range(10), *range(300, 312)]}
    for turn, name in enumerate("ABABAB"):
        request_id = f"{name}{turn}"
        r.ask(request_id, histories[name], max_tokens=5)
        assert r.output(request_id) == r.undisturbed(request_id)
        histories[name] += [*r.output(request_id), turn]


def test_an_opted_out_request_shares_with_nobody(rig):
    r = rig()
    r.submit("a", range(20), use_cache=False)
    r.submit("b", range(20))
    r.submit("c", range(20), use_cache=False)
    r.run()
    assert [r.record(name).cached for name in "abc"] == [0, 0, 0]
    assert [r.output(name) for name in "abc"] == [r.undisturbed("a")] * 3


def test_tenants_and_salts_share_nothing(rig):
    r = rig()
    r.ask("a", range(20))
    assert r.ask("b", range(20), owner="bolt").prompt.cached == 0
    assert r.ask("salted", range(20), salt="s").prompt.cached == 0
    assert r.ask("again", range(20)).prompt.cached == 19
    computed = r.loop.counters.computed_tokens
    r.ask("b-salted", range(20), owner="bolt", salt="s")
    assert r.loop.counters.computed_tokens - computed == 20 + 3


# --- fences -----------------------------------------------------------------------------------------------------------


def test_a_follower_of_a_failed_step_is_rolled_back_before_anything_was_said(rig):
    r = rig(block_size=4)
    r.submit("culprit", range(18))
    r.submit("follower", range(18))
    r.faults.poisoned["culprit"] = 0
    assert [message.request_id for message in r.step()] == ["culprit"]
    assert r.finished("culprit").error.code == "step_failed"
    assert r.finished("culprit").prompt == PromptRecord()
    r.run()
    assert r.record("follower") == PromptRecord(written_unleased=16, uncached=2)
    assert r.output("follower") == r.undisturbed("follower")


def test_a_follower_of_a_failed_step_gets_its_share_when_the_leader_succeeds_again(rig):
    r = rig(block_size=4)
    r.submit("leader", range(18))
    r.submit("follower", range(18))
    r.faults.fail_next_late = True
    r.run()
    assert r.record("leader") == PromptRecord(written_unleased=16, uncached=2)
    assert r.record("follower") == PromptRecord(16, uncached=2)
    assert r.finished("leader").error is r.finished("follower").error is None
    assert r.output("leader") == r.output("follower") == r.undisturbed("leader")


def test_what_a_row_of_nan_published_is_not_shared(rig):
    r = rig(block_size=4)
    r.submit("culprit", range(18))
    r.submit("follower", range(18))
    r.faults.nan["culprit", 0] = 18
    r.run()
    assert r.finished("culprit").error.code == "step_failed"
    assert r.finished("follower").error is None
    assert r.record("follower").cached == 0
    assert r.output("follower") == r.undisturbed("follower")


# --- parallel samples -------------------------------------------------------------------------------------------------


def test_samples_share_the_prompt_and_copy_only_the_block_that_diverges(rig):
    r = rig(block_size=4)
    r.submit("a", range(18), max_tokens=6, n=3)
    r.step(2)
    assert r.runner.copied_tokens == 2 * 2
    tables = [r.sequence("a", i).holding.blocks[:4].tolist() for i in range(3)]
    assert tables[0] == tables[1] == tables[2]
    assert len({int(r.sequence("a", i).holding.blocks[4]) for i in range(3)}) == 3
    r.run()
    outputs = [r.output("a", i) for i in range(3)]
    assert outputs == [r.undisturbed("a", i) for i in range(3)]
    assert len(set(map(tuple, outputs))) == 3


def test_samples_of_a_prompt_of_whole_blocks_copy_nothing(rig):
    r = rig(block_size=4)
    r.ask("a", range(16), n=3)
    assert r.runner.copied_tokens == 0


def test_a_sample_that_ends_at_its_first_token_leaves_the_prompt_to_the_others(rig):
    r = rig(block_size=4)
    first = Rig(NaiveCache)
    first.ask("a", range(18), max_tokens=1)
    stop = first.output("a")[0]
    r.submit("a", range(18), n=3, sampling=Sampling(max_tokens=5, stop_token_ids=(stop,)))
    r.run()
    assert r.finished("a").output_tokens == (1, 5, 5)
    assert [r.output("a", i) for i in range(3)] == [r.undisturbed("a", i) for i in range(3)]


def test_more_samples_than_slots_take_turns(rig):
    r = rig(max_sequences=3)
    finished = r.ask("a", range(18), max_tokens=6, n=8)
    assert finished.output_tokens == (6,) * 8
    assert (finished.preemptions, finished.recovered_tokens) == (0, 0)
    assert [r.output("a", i) for i in range(8)] == [r.undisturbed("a", i) for i in range(8)]
    assert max(len(plan.chunks) for plan in r.plans) == 3


def test_many_samples_in_a_small_pool(rig):
    r = rig(n_blocks=12, block_size=4, max_sequences=128, max_batch_tokens=256)
    finished = r.ask("a", range(10), max_tokens=12, n=128)
    assert finished.output_tokens == (12,) * 128
    assert finished.prompt == PromptRecord(written_unleased=8, uncached=2)
    assert [r.output("a", i) for i in range(128)] == [r.undisturbed("a", i) for i in range(128)]


def test_all_requests_finish_whatever_the_order(rig):
    r = rig(n_blocks=30, block_size=4, max_sequences=3)
    for i in range(12):
        r.submit(f"r{i}", [*range(12), i % 4, i], max_tokens=9, owner=f"t{i % 2}", n=1 + i % 3)
    r.run()
    assert len(r.order_of(Finished)) == 12
    for i in range(12):
        assert [r.output(f"r{i}", k) for k in range(1 + i % 3)] == [r.undisturbed(f"r{i}", k) for k in range(1 + i % 3)]
