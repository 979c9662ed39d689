"""One live server for the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from engine.protocol import PromptRecord
from tests.gateway.support import LiveGateway, live_gateway

REPLY = "The quick fox, naïve 你好世界 👩‍👩‍👧‍👦 and 🙂 done."


def cached_eight(submit) -> PromptRecord:
    """A bill with every class: 8 cached (3 of them public), 4 leased for 5 minutes, 2 uncached, the rest unleased; of a
    prompt too short for that, all unleased.
    """
    n_prompt = len(submit.prompt_ids) // 4
    if n_prompt < 14:
        return PromptRecord(written_unleased=n_prompt)
    return PromptRecord(5, 3, n_prompt - 14, ((300, 4),), 2)


@pytest.fixture(scope="module")
def gateway(valkey_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    """Answers every request with REPLY, three tokens at a time."""
    url = f"unix://{valkey_socket}"
    with Redis.from_url(url) as redis:
        redis.flushall()
    with live_gateway(tmp_path_factory.mktemp("gateway"), url, bill=cached_eight, tokens_per_delta=3) as live:
        yield live


@pytest.fixture(autouse=True)
def usual_reply(request: pytest.FixtureRequest) -> None:
    """Undo what a test did to the shared server's engine."""
    if "gateway" in request.fixturenames:
        live: LiveGateway = request.getfixturevalue("gateway")
        live.reply(REPLY)
        live.engine.error = None
        live.engine._delay_s = 0.0
        live.engine.submitted.clear()
