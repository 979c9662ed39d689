"""Socket thread and step thread together, around a step loop that the test drives."""

import tempfile
import threading
import time
from array import array
from pathlib import Path

import pytest

from engine import protocol as p
from engine.accounting import EngineCounters
from engine.errors import Refused
from engine.listener import listen
from engine.null import null_hello
from engine.service import EngineService
from radix_cache.blocks import InvariantError
from tests.engine.test_server import Peer

IDS = array("i", [5, 6, 7]).tobytes()
RECORD = p.PromptRecord(written_unleased=3)


class CountingLoop:
    """A step gives every request its next token, 0, 1, 2 ...; a gate holds a step up for as long as the test likes."""

    def __init__(self):
        self.requests, self.messages, self.gate, self.entered = {}, [], threading.Event(), threading.Semaphore(0)
        self.gate.set()
        self.broken = None
        self.counters = EngineCounters()

    has_work = property(lambda self: bool(self.requests or self.messages))
    n_waiting = property(lambda self: 0)
    n_running = property(lambda self: len(self.requests))

    def submit(self, submit):
        if submit.owner == "refused":
            raise Refused("queue_full", "later")
        self.requests[submit.request_id] = [submit, 0]
        self.messages.append(p.Accepted(submit.request_id, RECORD, 0.0))

    def cancel(self, request_id, error=None):
        self._end(request_id, "cancelled" if error is None else "error", error)

    def stop(self, request_id, output_index, n_tokens):
        if request_id in self.requests:
            self.requests[request_id][1] = n_tokens
            self._end(request_id, "stop")

    def step(self):
        self.entered.release()
        self.gate.wait(10)
        if self.broken:
            raise self.broken
        self.counters.steps += 1
        for request_id, entry in list(self.requests.items()):
            submit, n = entry
            entry[1] = n + 1
            self.messages.append(p.Delta(request_id, 0, (n,), n + 1))
            if entry[1] == submit.sampling.max_tokens:
                self._end(request_id, "length")
        said, self.messages = self.messages, []
        return said

    def _end(self, request_id, reason, error=None):
        if (entry := self.requests.pop(request_id, None)) is not None:
            self.messages.append(p.Finished(request_id, RECORD, (entry[1],), (reason,), error=error))

    def probe(self, owner, prompt_ids, salt):
        return len(prompt_ids) // 4 - 1

    def stats(self):
        return {"cache": {"free_blocks": 7}}

    def check_invariants(self):
        return {"free_blocks": 7}

    def flush(self, owner):
        return 3 if owner is None else 1


@pytest.fixture
def engine():
    class Running:
        loop = CountingLoop()

    with tempfile.TemporaryDirectory(prefix="rg-") as folder:
        Running.path = Path(folder) / "engine.sock"
        service = Running.service = EngineService(Running.loop, null_hello(), listen(Running.path), drain_s=60.0)
        service.start()
        codes = Running.codes = []
        thread = Running.thread = threading.Thread(target=lambda: codes.append(service.run()))
        thread.start()
        yield Running
        Running.loop.gate.set()
        service.terminate()
        service.terminate()
        thread.join(20)
        assert not thread.is_alive()
        for timer in threading.enumerate():
            if isinstance(timer, threading.Timer):
                timer.join(10)
                assert not timer.is_alive(), "a deadline outlives the service, and would end this process"


def submit(request_id="r", max_tokens=3, owner="acme", **changes):
    return p.Submit(request_id, owner, IDS, p.Sampling(max_tokens=max_tokens), **changes)


def tokens(messages):
    return [i for message in messages if isinstance(message, p.Delta) for i in message.token_ids]


def test_a_request_runs_and_the_loop_rests(engine):
    peer = Peer(engine.path)
    peer.say(submit())
    heard = peer.hear_streams(p.Finished)
    assert (heard[0], tokens(heard)) == (p.Accepted("r", RECORD, 0.0), [0, 1, 2])
    assert heard[-1] == p.Finished("r", RECORD, (3,), ("length",))
    while engine.service.beat().waiting_s:
        pass  # the step thread is on its way to bed
    assert engine.service.beat() == (3, 0.0, 0, 0)


def test_probes_and_stats_are_answered_while_a_step_runs_and_the_tree_is_left_alone(engine):
    peer = Peer(engine.path)
    engine.loop.gate.clear()
    peer.say(submit())
    engine.loop.entered.acquire(timeout=10)
    peer.say(p.Query(1, "flush", {"owner": "acme"}), p.Probe(2, "acme", IDS), p.Query(3, "stats", {}))
    assert peer.hear() == p.ProbeResult(2, 2)
    stats = peer.hear()
    assert stats.query_id == 3
    assert stats.value["waiting_s"] > 0
    assert {"cache": {"free_blocks": 7}, "queue": 0, "running": 1, "connections": 1, "boot_id": "null"}.items() <= (
        stats.value.items()
    )
    engine.loop.gate.set()
    while not isinstance(message := peer.hear(), p.Answer):
        pass
    assert message == p.Answer(1, {"blocks": 1})


def test_a_step_that_hangs_shows_in_the_beat(engine):
    peer = Peer(engine.path)
    engine.loop.gate.clear()
    before = time.monotonic()
    peer.say(submit())
    engine.loop.entered.acquire(timeout=10)
    first = engine.service.beat().waiting_s
    second = engine.service.beat().waiting_s
    assert 0 < first < second <= time.monotonic() - before


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (submit(owner="refused"), "queue_full"),
        (p.Submit("r", "acme", b"", p.Sampling(max_tokens=1)), "invalid_request"),
        (p.Submit("r", "acme", b"abc", p.Sampling(max_tokens=1)), "invalid_request"),
        (p.Submit("r", "acme", array("i", [49152]).tobytes(), p.Sampling(max_tokens=1)), "invalid_request"),
        (p.Submit("r", "acme", array("i", [-1]).tobytes(), p.Sampling(max_tokens=1)), "invalid_request"),
        (p.Submit("r", "", IDS, p.Sampling(max_tokens=1)), "invalid_request"),
        (p.Submit("r", "acme", IDS, p.Sampling(max_tokens=-1)), "invalid_request"),
        (p.Submit("r", "acme", IDS, p.Sampling(max_tokens=1, temperature=-1.0)), "invalid_request"),
        (p.Submit("r", "acme", IDS, p.Sampling(max_tokens=1, top_p=1.5)), "invalid_request"),
        (p.Submit("r", "acme", IDS, p.Sampling(max_tokens=1, logit_bias=((49152, 1.0),))), "invalid_request"),
        (p.Submit("r", "acme", IDS, p.Sampling(max_tokens=1, seed=2**64)), "invalid_request"),
        (submit(n=0), "invalid_request"),
        (submit(n=10**9), "invalid_request"),
        (submit(breakpoints=(p.Breakpoint(4, 300),)), "invalid_request"),
    ],
    ids=lambda value: "" if isinstance(value, p.Submit) else value,
)
def test_what_cannot_run_is_refused_and_the_engine_lives(engine, bad, code):
    peer = Peer(engine.path)
    peer.say(bad)
    (finished,) = peer.hear().messages
    assert (finished.request_id, finished.error.code, sum(finished.output_tokens)) == ("r", code, 0)
    peer.say(submit())
    assert tokens(peer.hear_streams(p.Finished)) == [0, 1, 2]


def test_not_a_number_is_refused(engine):
    peer = Peer(engine.path)
    frame = p.encode(p.Submit("r", "acme", IDS, p.Sampling(max_tokens=1, temperature=0.125)))
    peer.sock.sendall(frame.replace(b"0.125", b"  NaN"))
    (finished,) = peer.hear().messages
    assert (finished.error.code, finished.error.message) == (
        "invalid_request",
        "temperature is nan; expected 0 to 1e+06",
    )


def test_a_broken_invariant_is_an_answer(engine):
    def broken():
        raise InvariantError("block 3 is free and owned")

    engine.loop.check_invariants = broken
    peer = Peer(engine.path)
    peer.say(p.Query(1, "invariants", {}))
    assert peer.hear() == p.Answer(1, {"ok": False, "error": "block 3 is free and owned"})


def test_queries_that_fail_say_why_and_harm_nothing(engine):
    peer = Peer(engine.path)
    engine.loop.check_invariants = lambda: 1 // 0
    peer.say(p.Query(1, "nonsense", {}), p.Query(2, "flush", {"owner": 3}), p.Query(3, "invariants", {}))
    answers = {answer.query_id: answer.error for answer in (peer.hear() for _ in range(3))}
    assert answers == {
        1: "no query 'nonsense'; expected stats, invariants or flush",
        2: "owner is 3; expected a tenant's id, or nothing for all",
        3: "integer division or modulo by zero",
    }


def test_a_connection_that_closes_gives_back_what_it_held(engine):
    leaver, other = Peer(engine.path), Peer(engine.path)
    engine.loop.gate.clear()
    leaver.say(submit("left", max_tokens=10**9))
    engine.loop.entered.acquire(timeout=10)
    leaver.sock.close()
    other.say(p.Query(1, "invariants", {}))
    engine.loop.gate.set()
    assert other.hear() == p.Answer(1, {"ok": True, "error": None, "free_blocks": 7})
    assert engine.loop.requests == {}


def test_drain_lets_running_requests_finish_and_refuses_new_ones(engine):
    peer = Peer(engine.path)
    engine.loop.gate.clear()
    peer.say(submit("running", max_tokens=5))
    engine.loop.entered.acquire(timeout=10)
    engine.service.terminate()
    peer.say(submit("late"))
    (late,) = peer.hear().messages
    assert (late.request_id, late.error.code) == ("late", "draining")
    engine.loop.gate.set()
    assert tokens(peer.hear_streams(p.Finished)) == [0, 1, 2, 3, 4]
    assert peer.hear() is None
    engine.thread.join(10)
    assert engine.codes == [0]


def test_an_idle_engine_ends_at_once(engine):
    peer = Peer(engine.path)
    engine.service.terminate()
    engine.thread.join(10)
    assert (engine.codes, peer.hear()) == ([0], None)


def test_a_second_signal_ends_what_runs(engine):
    peer = Peer(engine.path)
    peer.say(submit("endless", max_tokens=10**9))
    peer.hear()
    engine.service.terminate()
    engine.service.terminate()
    last = peer.hear_streams(p.Finished)[-1]
    assert (last.finish_reasons, last.error.code) == (("error",), "draining")
    engine.thread.join(10)
    assert engine.codes == [0]


def test_a_broken_step_loop_ends_the_process_with_an_error(engine):
    peer = Peer(engine.path)
    engine.loop.broken = RuntimeError("the loop is broken")
    peer.say(submit())
    assert peer.hear() is None
    engine.thread.join(10)
    assert engine.codes == [1]
