"""What a step is made of, what is refused, and how outputs end."""

import pytest

from engine.protocol import Accepted, Delta, EngineError, Finished, PromptRecord, Sampling
from engine.settings import SchedulerSettings
from engine.simulation.naive_cache import NaiveCache
from engine.simulation.rig import Rig
from radix_cache.cache import PrefixCache


@pytest.fixture(params=[PrefixCache, NaiveCache], ids=["radix", "naive"])
def rig(request):
    return lambda **settings: Rig(request.param, **settings)


def chunks(plan):
    return [(chunk.sequence.request.id, chunk.start, chunk.n_tokens, chunk.samples) for chunk in plan.chunks]


# --- the batch --------------------------------------------------------------------------------------------------------


def test_decodes_come_first_and_a_prompt_fills_the_rest_of_the_budget(rig):
    r = rig(max_batch_tokens=20)
    r.submit("a", range(100, 110), max_tokens=8)
    r.step()
    r.submit("b", range(200, 230))
    r.step(2)
    assert [chunks(plan) for plan in r.plans] == [
        [("a", 0, 10, True)],
        [("a", 10, 1, True), ("b", 0, 19, False)],
        [("a", 11, 1, True), ("b", 19, 11, True)],
    ]


def test_a_step_holds_several_prompts_and_no_more_tokens_than_its_budget(rig):
    r = rig(max_batch_tokens=16)
    for name in "abc":
        r.submit(name, range(ord(name) * 10, ord(name) * 10 + 7))
    r.step(2)
    assert chunks(r.plans[0]) == [("a", 0, 7, True), ("b", 0, 7, True), ("c", 0, 2, False)]
    assert r.plans[1].n_tokens == 2 + 5


def test_no_more_sequences_run_than_allowed(rig):
    r = rig(max_sequences=2)
    for i in range(4):
        r.submit(f"r{i}", [i, i + 1], max_tokens=3)
    r.step(3)
    assert {chunk.sequence.request.id for plan in r.plans for chunk in plan.chunks} == {"r0", "r1"}
    r.run()
    assert r.order_of(Finished) == ["r0", "r1", "r2", "r3"]


def test_messages_come_in_order_and_count_up(rig):
    r = rig()
    r.submit("a", [5, 6, 7], max_tokens=3)
    r.run()
    tokens = r.undisturbed("a")
    assert r.messages == [
        Accepted("a", PromptRecord(uncached=3), 0.0),
        Delta("a", 0, (tokens[0],), 1),
        Delta("a", 0, (tokens[1],), 2),
        Delta("a", 0, (tokens[2],), 3, "length"),
        r.finished("a"),
    ]
    assert r.finished("a").output_tokens == (3,)
    assert r.finished("a").finish_reasons == ("length",)


def test_times_are_those_of_queue_prefill_and_decode(rig):
    r = rig(max_sequences=1)
    r.submit("a", [1], max_tokens=2)
    r.submit("b", [2], max_tokens=2)
    r.run()
    b = r.finished("b")
    step_s = 0.004
    assert b.queue_s == pytest.approx(2 * step_s, rel=0.05)
    assert b.prefill_s == pytest.approx(step_s, rel=0.05)
    assert b.decode_s == pytest.approx(step_s, rel=0.05)
    assert r.accepted("b").queue_s == b.queue_s


# --- how an output ends -----------------------------------------------------------------------------------------------


def ending(rig, prompt=range(10), **sampling):
    """(output, its last Delta) of one request under these sampling fields."""
    r = rig(eos_token_ids=frozenset(sampling.pop("eos", ())))
    r.submit("a", prompt, sampling=Sampling(**{"max_tokens": 20, **sampling}))
    r.run()
    return r.output("a"), [m for m in r.messages if isinstance(m, Delta)][-1]


def test_an_end_token_ends_the_output_and_is_named(rig):
    free, _ = ending(rig)
    output, last = ending(rig, eos=[free[4]])
    assert output == free[:5]
    assert (last.finish_reason, last.stop_token_id, last.n_tokens) == ("stop", free[4], 5)


def test_ignore_eos_does_not_ignore_stop_tokens(rig):
    free, _ = ending(rig)
    output, last = ending(rig, eos=[free[2]], ignore_eos=True, stop_token_ids=(free[6],))
    assert output == free[:7]
    assert (last.finish_reason, last.stop_token_id) == ("stop", free[6])


def test_no_end_before_min_tokens(rig):
    free, _ = ending(rig)
    output, last = ending(rig, eos=[free[2]], min_tokens=3)
    assert output == free[:20]
    assert (last.finish_reason, last.stop_token_id) == ("length", None)


def test_an_output_ends_where_the_models_context_ends(rig):
    r = rig(max_model_len=14)
    finished = r.ask("a", range(10), max_tokens=20)
    assert (finished.output_tokens, finished.finish_reasons) == ((4,), ("length",))


def test_an_output_ends_where_the_pool_ends(rig):
    r = rig(n_blocks=4, block_size=4)
    finished = r.ask("a", range(10), max_tokens=20)
    # 16 tokens of memory; the seventh token is sampled from the sixteenth and needs none.
    assert (finished.output_tokens, finished.finish_reasons, finished.error) == ((7,), ("length",), None)
    assert r.output("a") == r.undisturbed("a")[:7]


def test_max_tokens_zero_computes_the_prompt_and_generates_nothing(rig):
    r = rig()
    finished = r.ask("warm", range(9), max_tokens=0)
    assert (finished.output_tokens, finished.finish_reasons) == ((0,), ("length",))
    assert finished.prompt == PromptRecord(written_unleased=8, uncached=1)
    r.ask("hit", range(9))
    assert r.record("hit").cached == 8


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_prompt_one_token_too_long_for_the_model_is_refused_and_the_next_is_served(rig):
    r = rig(max_model_len=20)
    r.submit("long", range(20))
    error = r.refusals["long"]
    assert error.code == "context_length_exceeded"
    assert "20 tokens" in error.message
    assert r.ask("fits", range(19), max_tokens=5).output_tokens == (1,)
    assert r.loop.counters.prompt_uncached + r.loop.counters.prompt_written_unleased == 19


def test_a_prompt_larger_than_the_pool_is_refused_with_both_numbers_and_the_next_is_served(rig):
    r = rig(n_blocks=4, block_size=4)
    r.submit("large", range(16))
    error = r.refusals["large"]
    assert error.code == "prompt_exceeds_pool"
    assert "has 16 tokens" in error.message and "memory of 16 tokens" in error.message
    assert r.ask("fits", range(15), max_tokens=1).finish_reasons == ("length",)


def test_a_tenants_full_queue_is_no_other_tenants(rig):
    r = rig(max_waiting_per_tenant=2)
    for i in range(3):
        r.submit(f"r{i}", [i])
    r.submit("other", [9], owner="bolt")
    assert {name: error.code for name, error in r.refusals.items()} == {"r2": "queue_full"}
    assert r.loop.counters.refused_requests == 1


def test_an_id_in_use_and_an_empty_prompt_are_refused(rig):
    r = rig()
    r.submit("a", [1])
    r.submit("empty", [])
    assert r.refusals["empty"].code == "invalid_request"
    r.submit("a", [2])
    assert r.refusals["a"].code == "invalid_request"


def test_waiting_longer_than_its_limit_ends_a_request_unbilled(rig):
    r = rig(max_sequences=1)
    r.submit("a", [1], max_tokens=50)
    r.step()
    r.submit("b", [2], queue_timeout_s=0.1)
    r.run()
    finished = r.finished("b")
    assert finished.error is not None and finished.error.code == "queue_timeout"
    assert (finished.prompt, finished.output_tokens, finished.finish_reasons) == (PromptRecord(), (0,), ("error",))
    assert finished.queue_s == pytest.approx(0.1, abs=0.005)
    assert r.finished("a").output_tokens == (50,)


def test_a_request_that_was_admitted_in_time_does_not_time_out(rig):
    r = rig()
    r.submit("a", [1], max_tokens=100, queue_timeout_s=0.1)
    r.run()
    assert r.finished("a").output_tokens == (100,)


def test_a_deadline_that_has_passed_already_is_a_timeout(rig):
    r = rig()
    r.submit("a", [1], queue_timeout_s=0.0)
    r.run()
    assert r.finished("a").error == EngineError(
        "queue_timeout", "the request waited 0.0 s to be admitted, longer than its limit of 0 s"
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"n_blocks": 0}, "n_blocks is 0"), ({"max_batch_tokens": 8, "max_sequences": 9}, "below max_sequences of 9")],
)
def test_settings_that_cannot_work_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        SchedulerSettings(**{"n_blocks": 4, "block_size": 4, "max_model_len": 10, **wrong})
