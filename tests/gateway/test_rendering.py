"""Conversations as prompts: tools with and without the template's help, forced calls, thinking, markers."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from engine.protocol import Breakpoint
from gateway.conversation import Conversation, Marker, Message, Part, Tool, ToolCall, ToolChoice
from gateway.errors import ApiError
from gateway.output_format import BARE_JSON, HERMES, LLAMA, MISTRAL
from gateway.prompts import Prompts
from gateway.rendering import ConversationRenderer
from gateway.templates import ChatTemplate, TemplateFailed
from gateway.tokenizer import Tokenizer
from tests.gateway.support import TEMPLATE, byte_level_tokenizer
from tests.gateway.templates import ALWAYS_THINKING, ONE_CALL, SHORT_IDS, STRICT, THINKING_TOOLS

ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
SUB = Tool("sub")
CALLED = Message(role="assistant", tool_calls=(ToolCall("call_1", "add", '{"a": 1}'),))
RESULT = Message(role="tool", parts=(Part("2"),), tool_call_id="call_1")


def tokenizer(*tool_tokens: str) -> Tokenizer:
    backend = byte_level_tokenizer()
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in tool_tokens])
    return Tokenizer(backend)


def say(text: str, marker: Marker | None = None, role: str = "user") -> Message:
    return Message(role=role, parts=(Part(text, marker),))


def render(template: str, *messages: Message, tokens: tuple[str, ...] = (), **options):
    return ConversationRenderer(ChatTemplate(template), tokenizer(*tokens)).render(
        Conversation(messages=messages, **options)
    )


# --- tools ------------------------------------------------------------------------------------------------------------


def test_a_template_that_knows_tools_gets_them():
    rendered = render(THINKING_TOOLS, say("hi"), CALLED, RESULT, tools=(ADD, SUB))
    assert rendered.text == (
        "<|start|>system\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "description": "Adds.", '
        '"parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}\n'
        '{"type": "function", "function": {"name": "sub", "description": "", "parameters": {}}}\n'
        "</tools><|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>\n<|start|>tool\n2<|end|>\n<|start|>assistant\n'
    )
    assert rendered.output_format.calls is HERMES
    assert rendered.output_format.offered == {"add": ADD.parameters, "sub": {}}


def test_a_template_that_does_not_gets_a_system_message_and_texts():
    system = say("Be brief.", role="system")
    rendered = render(TEMPLATE, system, say("hi"), CALLED, RESULT, say("and?"), tools=(SUB,))
    before, _, rest = rendered.text.partition("<tools>\n")
    assert before.startswith("<|start|>system\nYou can call functions.")
    assert rest.startswith('{"name": "sub", "description": "", "parameters": {}}\n</tools>\n')
    assert rest.endswith(
        "\n\nBe brief.<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>\n'
        "<|start|>user\n<tool_response>\n2\n</tool_response>\nand?<|end|>\n<|start|>assistant\n"
    )
    assert rendered.output_format.calls is HERMES


def test_roles_still_take_turns_where_the_template_insists_and_knows_no_system_message():
    two = Message(role="assistant", tool_calls=(CALLED.tool_calls[0], ToolCall("call_2", "sub", "")))
    rendered = render(STRICT, say("hi"), two, RESULT, RESULT, say("so"), tools=(ADD,))
    assert rendered.text.startswith("<|start|>user\nYou can call functions.")
    assert rendered.text.count("<tool_response>") == 2
    with pytest.raises(TemplateFailed, match="no system role"):
        render(STRICT, say("x", role="system"), say("hi"))


def test_llamas_template_takes_parallel_calls_one_by_one():
    two = Message(role="assistant", tool_calls=(CALLED.tool_calls[0], ToolCall("call_2", "sub", "")))
    other = Message(role="tool", parts=(Part("3"),), tool_call_id="call_2")
    text = render(ONE_CALL, say("hi"), two, RESULT, other, tools=(ADD,)).text
    order = [text.index(part) for part in ('"add"', "tool\n2", '"sub"', "tool\n3")]
    assert order == sorted(order)


def test_mistrals_template_gets_ids_of_its_own_kind_and_always_the_same():
    first, second = (render(SHORT_IDS, CALLED, RESULT, tools=(ADD,)).text for _ in range(2))
    call_id = first.removeprefix("[TOOL_CALLS]")[:9]
    assert first == second and call_id.isalnum()
    assert first == f"[TOOL_CALLS]{call_id}<|end|>[TOOL_RESULTS]{call_id}2<|end|>!"
    kept = Message(role="assistant", tool_calls=(ToolCall("abcdef123", "add", "{}"),))
    assert "[TOOL_CALLS]abcdef123" in render(SHORT_IDS, kept, tools=(ADD,)).text


# --- tool_choice ------------------------------------------------------------------------------------------------------


def choice(mode: str, *names: str) -> ToolChoice:
    return ToolChoice(mode, frozenset(names))


def test_a_required_call_is_begun_by_the_prompt():
    rendered = render(THINKING_TOOLS, say("hi"), tools=(ADD, SUB), tool_choice=choice("required"))
    assert rendered.text.endswith('<|start|>assistant\n<tool_call>\n{"name":')
    assert rendered.output_format.begun == '<tool_call>\n{"name":'
    assert rendered.output_format.most_calls is None


def test_a_named_call_is_the_only_one():
    rendered = render(THINKING_TOOLS, say("hi"), tools=(ADD, SUB), tool_choice=choice("required", "sub"))
    assert rendered.text.endswith('<tool_call>\n{"name": "sub", "arguments":')
    assert (rendered.output_format.most_calls, rendered.output_format.offered) == (1, {"sub": {}})


def test_allowed_tools_leave_the_prompt_as_it_is():
    rendered = render(THINKING_TOOLS, say("hi"), tools=(ADD, SUB), tool_choice=choice("auto", "sub"))
    assert rendered.text == render(THINKING_TOOLS, say("hi"), tools=(ADD, SUB)).text
    assert rendered.output_format.offered == {"sub": {}}


def test_without_parallel_calls_there_is_one():
    rendered = render(TEMPLATE, say("hi"), tools=(ADD,), parallel_tool_calls=False)
    assert rendered.output_format.most_calls == 1


def test_no_calls_keeps_the_cached_prompt_where_a_call_begins_with_a_token_of_its_own():
    none = choice("none")
    rendered = render(THINKING_TOOLS, say("hi"), tools=(ADD,), tool_choice=none, tokens=("<tool_call>",))
    assert rendered.text == render(THINKING_TOOLS, say("hi"), tools=(ADD,), tokens=("<tool_call>",)).text
    opening = tokenizer("<tool_call>").id_of("<tool_call>")
    assert rendered.output_format.forbidden_ids == {opening} and rendered.output_format.calls is None
    without = render(THINKING_TOOLS, say("hi"), tools=(ADD,), tool_choice=none)
    assert "add" not in without.text and not without.output_format.forbidden_ids


def test_what_cannot_be_forced_is_refused():
    with pytest.raises(ApiError) as refusal:
        render("<|channel|>{{ tools }}", say("hi"), tools=(ADD, SUB), tool_choice=choice("required"))
    assert (refusal.value.status, refusal.value.param) == (400, "tool_choice")
    only = render("<|channel|>{{ tools }}", say("hi"), tools=(ADD,), tool_choice=choice("required"))
    assert only.text.endswith("<|channel|>commentary to=functions.add <|constrain|>json<|message|>")


@pytest.mark.parametrize(
    ("template", "family"),
    [(TEMPLATE, HERMES), (ONE_CALL, LLAMA), (SHORT_IDS, MISTRAL), ("{{ tools }}", BARE_JSON)],
)
def test_the_family_of_a_template(template, family):
    assert ConversationRenderer(ChatTemplate(template), tokenizer()).family is family


# --- thinking ---------------------------------------------------------------------------------------------------------


def test_a_prompt_that_begins_the_thinking():
    assert render(ALWAYS_THINKING, say("hi")).output_format.is_thinking
    assert not render(ALWAYS_THINKING, say("<think>")).text.endswith("<think><|end|>\n")
    assert not render(THINKING_TOOLS, say("<think>")).output_format.is_thinking


def test_no_effort_is_no_thinking():
    by_switch = render(THINKING_TOOLS, say("hi"), reasoning_effort="none")
    assert by_switch.text.endswith("assistant\n<think>\n\n</think>\n\n") and not by_switch.output_format.is_thinking
    closed = render(ALWAYS_THINKING, say("hi"), reasoning_effort="none")
    assert closed.text.endswith("assistant\n<think>\n\n</think>\n\n") and not closed.output_format.is_thinking
    assert render(TEMPLATE, say("hi"), reasoning_effort="none").text == render(TEMPLATE, say("hi")).text


def test_an_effort_needs_a_template_that_takes_one():
    assert render("{{ reasoning_effort }}", say("hi"), reasoning_effort="low").text == "low"
    for template in (TEMPLATE, ALWAYS_THINKING):
        with pytest.raises(ApiError, match="reasoning_effort"):
            render(template, say("hi"), reasoning_effort="high")
    with pytest.raises(ApiError, match="always thinks"):
        render("<|channel|>", say("hi"), reasoning_effort="none")


def test_a_forced_call_ends_the_thinking_first():
    rendered = render(ALWAYS_THINKING, say("hi"), tools=(ADD,), tool_choice=choice("required", "add"))
    assert rendered.text.endswith('<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments":')
    assert not rendered.output_format.is_thinking


def test_earlier_thoughts_are_shown_to_a_template_that_wants_them():
    thought = Message(role="assistant", parts=(Part("Yes."),), reasoning="hmm")
    text = render(THINKING_TOOLS, say("hi"), thought, add_generation_prompt=False).text
    assert text.endswith("<|start|>assistant\n<think>\nhmm\n</think>\n\nYes.<|end|>\n")
    assert "hmm" not in render(TEMPLATE, say("hi"), thought).text


# --- the last message -------------------------------------------------------------------------------------------------


def test_a_prompt_without_a_generation_prompt():
    assert render(TEMPLATE, say("hi"), add_generation_prompt=False).text == "<|start|>user\nhi<|end|>\n"


def test_the_answer_continues_the_last_message_as_it_was_sent():
    text = render(TEMPLATE, say("hi"), say("Well, ", role="assistant"), continue_final_message=True).text
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\nWell, "


@pytest.mark.parametrize("last", [say("hi"), CALLED], ids=["user", "call"])
def test_only_a_text_of_the_assistant_is_continued(last):
    with pytest.raises(ApiError) as refusal:
        render(TEMPLATE, say("hi"), last, continue_final_message=True)
    assert refusal.value.param == "continue_final_message"


def test_a_continued_message_may_be_within_the_thinking():
    options = {"continue_final_message": True}
    last = say("<think>\nFirst", role="assistant")
    assert render(ALWAYS_THINKING, say("hi"), last, **options).output_format.is_thinking
    last = say("<think>x</think> So", role="assistant")
    assert not render(THINKING_TOOLS, say("hi"), last, **options).output_format.is_thinking


def test_variables_of_the_template_may_be_set_but_not_ours():
    assert render("{{ tone }}", say("hi"), template_variables={"tone": "dry"}).text == "dry"
    for name in ("messages", "bos_token", "other"):
        with pytest.raises(ApiError, match="no such variable"):
            render("{{ tone }}{{ bos_token }}{{ messages }}", say("hi"), template_variables={name: ""})


# --- markers ----------------------------------------------------------------------------------------------------------


def marked(template: str, *messages: Message, **options) -> list[tuple[str, int]]:
    """The text up to each marker, its last 24 characters, and its lifetime."""
    rendered = render(template, *messages, **options)
    return [(rendered.text[: marker.offset][-24:], marker.ttl_s) for marker in rendered.markers]


def test_a_part_ends_where_its_text_ends():
    parts = (Part("one", Marker(300)), Part("two"), Part("three", Marker(3600)))
    shown = marked(TEMPLATE, Message(role="user", parts=parts), say("more"))
    assert [(text.rpartition("\n")[2], ttl_s) for text, ttl_s in shown] == [("one", 300), ("three", 3600)]


def test_a_template_that_strips_a_part_moves_its_end():
    shown = marked(THINKING_TOOLS, say("  spaced  ", Marker(300)), say("x  ", Marker(60)), say("more"))
    assert [text.rpartition("\n")[2] for text, _ in shown] == ["spaced", "x"]


def test_a_message_ends_with_its_end_token():
    assert marked(THINKING_TOOLS, say("hi"), Message(role="assistant", tool_calls=CALLED.tool_calls, marker=Marker(9)),
                  RESULT, tools=(ADD,)) == [('": 1}}\n</tool_call><|end|>\n'[-24:], 9)]  # fmt: skip


@pytest.mark.parametrize("template", [THINKING_TOOLS, TEMPLATE])
def test_a_tool_ends_behind_its_definition(template):
    tools = (Tool("add", marker=Marker(300)), Tool("sub", marker=Marker(3600)))
    texts = [render(template, say("hi"), tools=tools).text[: marker.offset]
             for marker in render(template, say("hi"), tools=tools).markers]  # fmt: skip
    assert texts[0].rstrip("\n").endswith("}") and '"add"' in texts[0] and '"sub"' not in texts[0]
    assert texts[1].rstrip("\n").endswith("}") and '"sub"' in texts[1] and "</tools>" not in texts[1].split('"sub"')[1]


def test_the_end_of_the_prompt_is_behind_everything():
    rendered = render(TEMPLATE, say("hi"), marker=Marker(1800))
    assert [tuple(marker) for marker in rendered.markers] == [(len(rendered.text), 1800)]


def test_breakpoints_are_the_markers_in_tokens(run):
    async def main():
        prompts = Prompts(tokenizer(), ChatTemplate(TEMPLATE))
        parts = (Part("The quick brown", Marker(300)), Part("fox jumps", Marker(60)))
        # Two markers at one place: the longer promise counts.
        messages = (Message(role="user", parts=parts, marker=Marker(60)), say("more"))
        conversation = Conversation(messages=messages, marker=Marker(3600))
        for _ in range(2):
            prompt = await prompts.render(conversation, tenant_id="t")
        return prompts, prompt

    prompts, prompt = run(main)
    text = "<|start|>user\nThe quick brown\nfox jumps<|end|>\n"
    encode = prompts.tokenizer.encode
    ends = [len(encode(end, add_special_tokens=False)) for end in (text[:29], text[:39], text)]
    assert prompt.breakpoints == (
        Breakpoint(ends[0], 300),
        Breakpoint(ends[1], 60),
        Breakpoint(ends[2], 60),
        Breakpoint(len(prompt.ids), 3600),
    )
    for breakpoint_ in prompt.breakpoints[:2]:
        shown = prompts.tokenizer.decode_with_names(list(prompt.ids[: breakpoint_.offset_tokens]))
        assert text.startswith(shown)
    rest = "<|start|>user\nmore<|end|>\n<|start|>assistant\n"
    assert prompt.ids == encode(text + rest, add_special_tokens=False)
