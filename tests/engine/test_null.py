"""NullEngine keeps the protocol of a real engine."""

from array import array
from dataclasses import replace

import pytest

from engine.client import EngineUnavailable
from engine.null import NullEngine
from engine.protocol import Accepted, Delta, EngineError, Finished, PromptRecord, Sampling, Submit

pytestmark = pytest.mark.anyio
SUBMIT = Submit("r", "acme", array("i", [5, 6, 7]).tobytes(), Sampling(max_tokens=4))
RECORD = PromptRecord(written_unleased=3)


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def collect(stream):
    return [message async for message in stream]


async def test_it_answers_with_the_given_tokens():
    engine = NullEngine((11, 12, 13), tokens_per_delta=2)
    assert await collect(engine.submit(SUBMIT)) == [
        Accepted("r", RECORD, 0.0),
        Delta("r", 0, (11, 12), 2),
        Delta("r", 0, (13,), 3, "stop"),
        Finished("r", RECORD, (3,), ("stop",)),
    ]
    assert engine.submitted == [SUBMIT]


async def test_max_tokens_cuts_and_every_output_is_answered():
    engine = NullEngine(lambda submit: range(100), bill=PromptRecord(cached_private=2, uncached=1))
    *_, finished = await collect(engine.submit(replace(SUBMIT, n=2)))
    assert finished == Finished("r", PromptRecord(cached_private=2, uncached=1), (4, 4), ("length", "length"))


async def test_stop_truncates_the_bill():
    stream = NullEngine((11, 12, 13)).submit(SUBMIT)
    async for message in stream:
        if isinstance(message, Delta) and message.n_tokens == 2:
            stream.stop(0, 1)
    assert message == Finished("r", RECORD, (1,), ("stop",))


async def test_cancel_ends_with_what_was_generated():
    stream = NullEngine((11, 12, 13)).submit(SUBMIT)
    async for message in stream:
        if isinstance(message, Delta):
            stream.cancel()
    assert message == Finished("r", RECORD, (1,), ("cancelled",))


async def test_death_and_absence():
    engine = NullEngine(range(100))
    stream = engine.submit(SUBMIT)
    await anext(stream)
    engine.die()
    *_, finished = await collect(stream)
    assert (finished.prompt, finished.error.code) == (RECORD, "engine_died")
    with pytest.raises(EngineUnavailable):
        engine.submit(SUBMIT)
    with pytest.raises(EngineUnavailable):
        await engine.probe("acme", b"")


async def test_an_error_comes_without_accepted():
    error = EngineError("queue_full", "later")
    assert await collect(NullEngine(error=error).submit(SUBMIT)) == [
        Finished("r", PromptRecord(), (0,), ("error",), error=error)
    ]
