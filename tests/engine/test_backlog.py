"""What waits for a slow reader: order kept per request, Deltas of one output merged."""

from engine.backlog import Backlog
from engine.protocol import Accepted, Delta, Finished, PromptRecord, TokenLogprob

RECORD = PromptRecord(uncached=3)


def test_deltas_of_one_output_become_one_and_the_order_of_a_request_stays():
    backlog = Backlog()
    accepted, finished = Accepted("a", RECORD, 0.0), Finished("a", RECORD, (3, 1), ("stop", "length"))
    for message in (
        accepted,
        Delta("a", 0, (1,), 1),
        Delta("a", 1, (9,), 1, "length"),
        Delta("b", 0, (5,), 1),
        Delta("a", 0, (2,), 2),
        Delta("a", 0, (3,), 3, "stop", 3),
        finished,
    ):
        backlog.put(message)
    assert len(backlog) == 5
    assert backlog.take() == [
        accepted,
        Delta("a", 0, (1, 2, 3), 3, "stop", 3),
        Delta("a", 1, (9,), 1, "length"),
        Delta("b", 0, (5,), 1),
        finished,
    ]
    assert backlog.take() == []


def test_logprobs_are_joined_and_weigh():
    backlog = Backlog()
    first, second = TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.0))), TokenLogprob(2, -0.25)
    assert backlog.put(Delta("a", 0, (1,), 1, logprobs=(first,))) == 3
    assert backlog.put(Delta("a", 0, (2,), 2, logprobs=(second,))) == 4
    assert backlog.put(Delta("b", 0, (1,), 1)) == 1
    assert backlog.take()[0] == Delta("a", 0, (1, 2), 2, logprobs=(first, second))


def test_a_backlog_that_was_taken_starts_anew():
    backlog = Backlog()
    backlog.put(Delta("a", 0, (1,), 1))
    backlog.take()
    assert backlog.put(Delta("a", 0, (2,), 2)) == 1
    assert backlog.take() == [Delta("a", 0, (2,), 2)]


def test_merging_is_linear():
    backlog = Backlog()
    for i in range(50_000):
        backlog.put(Delta("a", 0, (i,), i + 1))
    assert len(backlog) == 1
    assert backlog.take()[0].token_ids == tuple(range(50_000))
