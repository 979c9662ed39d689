"""Tools and thinking on chat completions as the official client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from redis import Redis
from tokenizers import AddedToken

from tests.gateway.support import PROMPT, LiveGateway, live_gateway
from tests.gateway.templates import THINKING_TOOLS

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
ARGUMENTS = '{"city": "Zürich 🙂", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(scope="module")
def thinker(valkey_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    """A model that calls in tags, of which the opening one is a token, and that may think."""
    url = f"unix://{valkey_socket}"
    with Redis.from_url(url) as redis:
        redis.flushall()
    with live_gateway(
        tmp_path_factory.mktemp("thinker"),
        url,
        template=THINKING_TOOLS,
        added_tokens=[AddedToken("<tool_call>", special=False, normalized=False)],
        max_model_len=4096,
        tokens_per_delta=2,
    ) as live:
        yield live


@pytest.fixture(autouse=True)
def clean(thinker: LiveGateway) -> None:
    thinker.engine.submitted.clear()
    thinker.engine.error = None


def create(live: LiveGateway, **parameters: Any) -> Any:
    return live.client().chat.completions.create(**{"model": "tiny", "messages": PROMPT, **parameters})


def stream(live: LiveGateway, **parameters: Any) -> list[Any]:
    return list(create(live, stream=True, **parameters))


def gathered(chunks: list[Any]) -> dict[str, Any]:
    """A stream's deltas as one message."""
    content, reasoning, calls = "", "", {}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            entry = calls.setdefault(call.index, {"name": "", "arguments": "", "ids": []})
            entry["name"] += call.function.name or ""
            entry["arguments"] += call.function.arguments or ""
            entry["ids"] += [call.id] if call.id else []
    return {"content": content, "reasoning": reasoning, "calls": [calls[i] for i in sorted(calls)]}


def prompt_of(live: LiveGateway) -> str:
    ids = memoryview(live.engine.submitted[-1].prompt_ids).cast("i")
    return live.tokenizer.decode_with_names(list(ids))


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_call_streamed_and_not_is_the_same(thinker: LiveGateway):
    thinker.reply(f"Let me look.\n{CALL}\n{CALL}")
    choice = create(thinker, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    assert [call.type for call in choice.message.tool_calls] == ["function", "function"]
    assert {(call.function.name, call.function.arguments) for call in choice.message.tool_calls} == {
        ("get_weather", ARGUMENTS)
    }
    assert len({call.id for call in choice.message.tool_calls}) == 2

    chunks = stream(thinker, tools=[WEATHER])
    whole = gathered(chunks)
    assert whole["content"] == "Let me look."
    assert [(call["name"], call["arguments"], len(call["ids"])) for call in whole["calls"]] == [
        ("get_weather", ARGUMENTS, 1)
    ] * 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_golden_order_of_a_streamed_call(thinker: LiveGateway):
    thinker.reply(CALL)
    body = {"model": "tiny", "messages": PROMPT, "tools": [WEATHER], "stream": True}
    lines = [line for line in thinker.post(body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    choices = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    (first,) = deltas[1]["tool_calls"]
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert len(deltas) > 6, "arguments come in fragments"
    for delta in deltas[2:-1]:
        ((call,),) = delta.values()
        assert set(call) == {"index", "function"} and type(call["index"]) is int
        assert set(call["function"]) == {"arguments"}
    assert deltas[-1] == {} and choices[-1]["finish_reason"] == "tool_calls"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


def test_the_content_of_a_message_of_calls_alone_is_null(thinker: LiveGateway):
    thinker.reply(CALL)
    message = create(thinker, tools=[WEATHER]).choices[0].message
    assert message.content is None and len(message.tool_calls) == 1


def test_the_clients_own_stream_helper_and_its_strict_tools(thinker: LiveGateway):
    class GetWeather(BaseModel):
        city: str
        days: list[int]

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    thinker.reply(CALL)
    with thinker.client().chat.completions.stream(model="tiny", messages=PROMPT, tools=[tool]) as events:
        message = events.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Zürich 🙂", days=[1, 2])
    answer = thinker.post({"model": "tiny", "messages": PROMPT, "tools": [tool]})
    assert answer.headers["x-radixgate-ignored"] == "tools.strict"


def test_a_conversation_with_calls_goes_on(thinker: LiveGateway):
    thinker.reply(CALL)
    message = create(thinker, tools=[WEATHER]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    thinker.reply("It is sunny.")
    answer = create(thinker, messages=[*PROMPT, message.model_dump(), result], tools=[WEATHER])
    assert answer.choices[0].message.content == "It is sunny." and answer.choices[0].finish_reason == "stop"
    assert prompt_of(thinker).endswith(
        f"<|start|>assistant\n{CALL}<|end|>\n<|start|>tool\nsunny<|end|>\n<|start|>assistant\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "rm_rf", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {oops}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arg',
    ],
)
def test_a_malformed_call_is_text(thinker: LiveGateway, text):
    thinker.reply(text)
    choice = create(thinker, tools=[WEATHER]).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    assert gathered(stream(thinker, tools=[WEATHER])) == {"content": text, "reasoning": "", "calls": []}


def test_without_tools_a_call_is_text(thinker: LiveGateway):
    thinker.reply(CALL)
    assert create(thinker).choices[0].message.content == CALL


def test_each_of_several_outputs_has_its_calls(thinker: LiveGateway):
    thinker.reply(CALL)
    answer = create(thinker, tools=[WEATHER], n=3)
    assert [len(choice.message.tool_calls) for choice in answer.choices] == [1, 1, 1]
    chunks = stream(thinker, tools=[WEATHER], n=3)
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.choices[0].index == index]
        assert gathered(own)["calls"][0]["arguments"] == ARGUMENTS


# --- tool_choice ------------------------------------------------------------------------------------------------------


def test_a_named_function_is_forced_and_the_output_ends_with_it(thinker: LiveGateway):
    forced = f" {ARGUMENTS}}}\n</tool_call>"
    thinker.reply(forced + " and more text")
    choice_of = {"type": "function", "function": {"name": "get_weather"}}
    answer = create(thinker, tools=[WEATHER, TIME], tool_choice=choice_of)
    message = answer.choices[0].message
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [("get_weather", ARGUMENTS)]
    assert message.content is None and answer.choices[0].finish_reason == "tool_calls"
    assert prompt_of(thinker).endswith('<tool_call>\n{"name": "get_weather", "arguments":')
    n_forced = len(thinker.tokenizer.encode(forced, add_special_tokens=False))
    assert answer.usage.completion_tokens == n_forced, "what follows the call is neither shown nor billed"
    assert sum(event["usage"]["output"] for event in thinker.booked()[-1:]) == n_forced


def test_required_begins_a_call_of_any_function(thinker: LiveGateway):
    thinker.reply(f' "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>')
    message = create(thinker, tools=[WEATHER, TIME], tool_choice="required").choices[0].message
    assert message.tool_calls[0].function.arguments == ARGUMENTS
    assert prompt_of(thinker).endswith('<tool_call>\n{"name":')


def test_none_keeps_the_prompt_and_forbids_the_token_that_begins_a_call(thinker: LiveGateway):
    thinker.reply("Fine.")
    create(thinker, tools=[WEATHER])
    with_tools = thinker.engine.submitted[-1]
    create(thinker, tools=[WEATHER], tool_choice="none", logit_bias={"5": 2})
    submitted = thinker.engine.submitted[-1]
    assert submitted.prompt_ids == with_tools.prompt_ids
    assert submitted.sampling.logit_bias == ((5, 2.0), (thinker.tokenizer.id_of("<tool_call>"), -100.0))


def test_only_allowed_tools_are_called(thinker: LiveGateway):
    thinker.reply(CALL)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TIME]}}
    message = create(thinker, tools=[WEATHER, TIME], tool_choice=allowed).choices[0].message
    assert message.tool_calls is None and message.content == CALL
    assert "get_weather" in prompt_of(thinker), "the cached prompt stays the same"


def test_one_call_when_parallel_calls_are_off(thinker: LiveGateway):
    thinker.reply(CALL + CALL)
    for chunks in (stream(thinker, tools=[WEATHER], parallel_tool_calls=False),):
        assert len(gathered(chunks)["calls"]) == 1


# --- thinking ---------------------------------------------------------------------------------------------------------


def test_thinking_has_its_own_field_and_is_counted(thinker: LiveGateway):
    thinker.reply("<think>\nHmm, naïve.\n</think>\n\nYes 🙂.")
    answer = create(thinker)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Yes 🙂.", "Hmm, naïve.")
    n_thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < n_thought < answer.usage.completion_tokens
    chunks = stream(thinker, stream_options={"include_usage": True})
    assert gathered(chunks[:-1]) == {"content": "Yes 🙂.", "reasoning": "Hmm, naïve.", "calls": []}
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == n_thought


def test_thinking_before_a_call(thinker: LiveGateway):
    thinker.reply(f"<think>\nI need a tool.\n</think>\n\n{CALL}")
    message = create(thinker, tools=[WEATHER]).choices[0].message
    assert message.reasoning_content == "I need a tool." and message.content is None
    assert message.tool_calls[0].function.arguments == ARGUMENTS


def test_effort_none_turns_the_thinking_off(thinker: LiveGateway):
    thinker.reply("Yes.")
    assert create(thinker, reasoning_effort="none").choices[0].message.content == "Yes."
    assert prompt_of(thinker).endswith("<|start|>assistant\n<think>\n\n</think>\n\n")
    create(thinker, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert prompt_of(thinker).endswith("<|start|>assistant\n<think>\n\n</think>\n\n")


def test_a_message_is_continued(thinker: LiveGateway):
    thinker.reply(" jumps")
    messages = [*PROMPT, {"role": "assistant", "content": "The fox"}]
    answer = create(thinker, messages=messages, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content == " jumps"
    assert prompt_of(thinker).endswith("<|start|>assistant\nThe fox")
