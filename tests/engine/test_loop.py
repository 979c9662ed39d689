"""A step that throws fails its culprit alone; counters are the sums of what was said."""

import pytest

from engine.protocol import Accepted, Delta, Finished
from engine.simulation.naive_cache import NaiveCache
from engine.simulation.rig import Rig
from radix_cache.cache import PrefixCache


@pytest.fixture(params=[PrefixCache, NaiveCache], ids=["radix", "naive"])
def rig(request):
    return lambda **settings: Rig(request.param, **settings)


@pytest.mark.parametrize("culprit", [0, 3, 7])
def test_a_step_that_throws_is_halved_until_the_culprit_is_alone(rig, culprit):
    r = rig()
    for i in range(8):
        r.submit(f"r{i}", range(100 * i, 100 * i + 6))
    r.faults.poisoned[f"r{culprit}"] = 0
    said = r.step()
    finished = [m for m in said if isinstance(m, Finished)]
    assert [(m.request_id, m.error.code, m.finish_reasons) for m in finished] == [
        (f"r{culprit}", "step_failed", ("error",))
    ]
    assert "poisoned" in finished[0].error.message
    # Each of the seven others got its token in the same step: 8, 4, 4, 2, 2, 1, 1 chunks were tried.
    assert sorted(m.request_id for m in said if isinstance(m, Delta)) == [f"r{i}" for i in range(8) if i != culprit]
    assert [len(plan.chunks) for plan in r.plans].count(1) == 2
    assert len(r.plans) == 7
    r.run()
    for i in set(range(8)) - {culprit}:
        assert r.output(f"r{i}") == r.undisturbed(f"r{i}")


def test_two_culprits_in_one_step_both_fail_and_nobody_else(rig):
    r = rig()
    for i in range(8):
        r.submit(f"r{i}", range(100 * i, 100 * i + 6))
    r.faults.poisoned.update({"r1": 0, "r6": 0})
    r.run()
    failed = {m.request_id for m in r.messages if isinstance(m, Finished) and m.error}
    assert failed == {"r1", "r6"}


def test_a_passing_fault_fails_nobody(rig):
    r = rig()
    r.submit("alone", range(6))
    for late in (False, True):
        r.faults.fail_next, r.faults.fail_next_late = not late, late
        r.step()
    r.run()
    assert r.finished("alone").error is None
    assert r.output("alone") == r.undisturbed("alone")
    assert r.loop.counters.failed_steps == 2


def test_a_culprit_in_mid_generation_keeps_its_bill_and_ends_with_an_error(rig):
    r = rig()
    r.submit("culprit", range(10), max_tokens=20)
    r.submit("other", range(100, 110), max_tokens=20)
    r.faults.poisoned["culprit"] = 15
    r.run()
    finished = r.finished("culprit")
    assert (finished.error.code, finished.finish_reasons, finished.output_tokens) == ("step_failed", ("error",), (6,))
    assert finished.prompt == r.record("culprit")
    last = [m for m in r.messages if isinstance(m, Delta) and m.request_id == "culprit"][-1]
    assert (last.token_ids, last.finish_reason) == ((), "error")
    assert r.output("other") == r.undisturbed("other")


def test_a_row_of_nan_fails_its_sequence_only(rig):
    r = rig()
    r.submit("nan", range(10), max_tokens=20, n=3)
    r.submit("other", range(100, 110), max_tokens=20)
    r.faults.nan["nan", 1] = 14
    r.run()
    finished = r.finished("nan")
    assert finished.finish_reasons == ("length", "error", "length")
    assert finished.output_tokens == (20, 4, 20)
    assert finished.error.code == "step_failed"
    assert r.output("other") == r.undisturbed("other")
    assert r.cache.available_blocks == 64


def test_copies_that_fail_are_made_again(rig):
    r = rig()
    r.ask("warm", range(18))
    r.submit("other", range(100, 110), max_tokens=8)
    r.step()
    r.submit("copies", [*range(18), 50, 51])
    r.faults.fail_next = True
    r.run()
    assert r.finished("copies").error is None
    assert r.record("copies").cached == 18
    assert [r.output(name) for name in ("copies", "other")] == [r.undisturbed(name) for name in ("copies", "other")]


def test_copies_that_fail_every_time_fail_their_sequence_at_last(rig, monkeypatch):
    r = rig()
    r.ask("warm", range(18))

    def no_copies(plan):
        if plan.copies:
            raise RuntimeError("no copies today")

    monkeypatch.setattr(r.runner, "_copy", no_copies)
    finished = r.ask("copies", [*range(18), 50, 51])
    assert finished.error.code == "step_failed"
    assert r.ask("next", range(300, 310)).error is None


def test_a_failed_chunk_in_mid_prefill_is_computed_again_from_where_it_stood(rig):
    r = rig(block_size=4, max_batch_tokens=10, max_sequences=4)
    r.submit("a", range(30))
    r.step()
    r.faults.fail_next_late = True
    r.run()
    # 10 tokens were computed, of which the tree held 8: with the failed chunk's blocks the other two went.
    assert [(plan.chunks[0].start, plan.chunks[0].n_tokens) for plan in r.plans[:4]] == [
        (0, 10),
        (10, 10),
        (8, 12),
        (20, 10),
    ]
    assert r.output("a") == r.undisturbed("a")
    assert r.finished("a").prompt == r.record("a")


def test_counters_are_the_sums_of_what_was_finished(rig):
    r = rig(n_blocks=24, max_sequences=4)
    for i in range(12):
        r.submit(f"r{i}", [*range(8), i % 3, i], max_tokens=9, n=1 + i % 2, use_cache=i % 5 > 0)
    r.faults.poisoned["r4"] = 12
    r.step(6)
    r.loop.cancel("r7")
    r.run()
    finished = [m for m in r.messages if isinstance(m, Finished)]
    counters = r.loop.counters
    assert counters.requests == len(finished) == 12
    assert counters.failed_requests == 1
    assert counters.output_tokens == sum(sum(m.output_tokens) for m in finished)
    assert counters.prompt_cached_private == sum(m.prompt.cached_private for m in finished)
    assert counters.prompt_written_unleased == sum(m.prompt.written_unleased for m in finished)
    assert counters.prompt_uncached == sum(m.prompt.uncached for m in finished)
    assert counters.preemptions == sum(m.preemptions for m in finished)
    assert counters.recovered_tokens == sum(m.recovered_tokens for m in finished)
    for message in finished:
        if message.request_id not in ("r4", "r7"):
            assert message.prompt == r.record(message.request_id)


def test_a_probe_changes_nothing(rig):
    r = rig()
    r.ask("warm", range(18))
    before = r.loop.stats()
    prompt = b"".join(i.to_bytes(4, "little") for i in range(18))
    assert r.loop.probe("acme", prompt) == 17
    assert r.loop.probe("bolt", prompt) == 0
    assert r.loop.probe("acme", prompt, "salt") == 0
    assert r.loop.stats() == before


def test_flush_forgets_one_owner(rig):
    r = rig()
    r.ask("a", range(18), owner="acme")
    r.ask("b", range(18), owner="bolt")
    assert r.loop.flush("acme") == 6
    assert r.ask("a2", range(18), owner="acme").prompt.cached == 0
    assert r.ask("b2", range(18), owner="bolt").prompt.cached == 17


def test_the_time_of_the_last_step_is_known(rig):
    r = rig()
    r.submit("a", [1, 2])
    r.step()
    assert r.loop.last_step_finished_at == r.clock() > 0
    assert r.loop.n_running == 1
    assert r.order_of(Accepted) == ["a"]
