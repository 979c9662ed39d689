"""What clients say about caching, as the engine hears it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.protocol import Breakpoint
from gateway.api.openai_caching import MAX_BREAKPOINTS
from tests.gateway.support import LiveGateway

HALF_AN_HOUR, HALF_A_DAY = 1800, 43200


def part(text: str, ttl: str | None = None, *, marked: bool = True) -> dict[str, Any]:
    breakpoint_ = {"mode": "explicit"} | ({"ttl": ttl} if ttl else {})
    return {"type": "text", "text": text} | ({"prompt_cache_breakpoint": breakpoint_} if marked else {})


def submitted(gateway: LiveGateway, *parts: dict[str, Any], **parameters: Any):
    messages = [{"role": "user", "content": list(parts)}]
    gateway.client().chat.completions.create(model="tiny", messages=messages, **parameters)
    return gateway.engine.submitted[-1]


def prefix(gateway: LiveGateway, submit, n_tokens: int) -> str:
    return gateway.tokenizer.decode_with_names(list(memoryview(submit.prompt_ids).cast("i")[:n_tokens]))


def test_without_a_word_the_cache_is_used_and_nothing_is_promised(gateway: LiveGateway):
    submit = submitted(gateway, part("The quick", marked=False))
    assert submit.use_cache and submit.breakpoints == ()


def test_a_breakpoint_is_the_exact_end_of_its_part(gateway: LiveGateway):
    submit = submitted(gateway, part("The quick fox", "12h"), part("jumps"), part("over", marked=False))
    assert [b.ttl_s for b in submit.breakpoints] == [HALF_A_DAY, HALF_AN_HOUR]
    assert prefix(gateway, submit, submit.breakpoints[0].offset_tokens) == "<|start|>user\nThe quick fox"
    assert prefix(gateway, submit, submit.breakpoints[1].offset_tokens) == "<|start|>user\nThe quick fox\njumps"


def test_the_implicit_breakpoint_is_promised_when_a_lifetime_is_asked_for(gateway: LiveGateway):
    submit = submitted(gateway, part("fox"), prompt_cache_options={"ttl": "30m"})
    assert submit.breakpoints[-1] == Breakpoint(len(submit.prompt_ids) // 4, HALF_AN_HOUR)
    assert len(submit.breakpoints) == 2


@pytest.mark.parametrize(("mode", "kept"), [("implicit", MAX_BREAKPOINTS - 1), ("explicit", MAX_BREAKPOINTS)])
def test_the_latest_breakpoints_count(gateway: LiveGateway, mode, kept):
    parts = [part(f"fox {index}") for index in range(6)]
    submit = submitted(gateway, *parts, prompt_cache_options={"mode": mode})
    shown = [prefix(gateway, submit, b.offset_tokens).rpartition("\n")[2] for b in submit.breakpoints]
    assert shown == [f"fox {index}" for index in range(6 - kept, 6)] and submit.use_cache


def test_explicit_mode_without_a_breakpoint_does_not_use_the_cache(gateway: LiveGateway):
    submit = submitted(gateway, part("fox", marked=False), prompt_cache_options={"mode": "explicit"})
    assert not submit.use_cache and submit.breakpoints == ()


def test_retention_and_the_key_change_nothing_and_are_named(gateway: LiveGateway):
    answer = gateway.chat(prompt_cache_retention="24h", prompt_cache_key="k")
    assert answer.headers["x-radixgate-ignored"] == "prompt_cache_key, prompt_cache_retention"


def test_the_service_tier_is_told_when_it_was_asked_for(gateway: LiveGateway):
    assert gateway.chat(service_tier="flex").json()["service_tier"] == "default"
    assert "service_tier" not in gateway.chat().json()
