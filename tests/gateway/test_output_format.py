"""How each family's output is read: thinking, calls and text, whatever the cuts of the stream."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.output_format import (
    BARE_JSON,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    QWEN_XML,
    CallFamily,
    OutputFormat,
    family_of,
)
from gateway.reasoning import TAGS, tags_of

TEXT = {"type": "string"}
NAMES = {"add": {}, "get_weather": {"type": "object", "properties": {"city": TEXT, "days": {"type": "integer"}}}}
THINK = TAGS[0]


def calls(family: CallFamily, **options) -> OutputFormat:
    return OutputFormat(calls=family, offered=NAMES, **options)


def read(output_format: OutputFormat, text: str, cuts: list[int]) -> list[tuple[str, str]]:
    """The pieces, neighbours of one kind joined. No character of the output is lost or counted twice."""
    parser = output_format.parser()
    pieces, at = [], 0
    for size in [*cuts, len(text)]:
        if at >= len(text):
            break
        pieces += parser.push(text[at : at + size])
        at = min(len(text), at + size)
    pieces += parser.finish()
    assert sum(piece.n_raw for piece in pieces) == len(text)
    joined: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.kind == "markup":
            assert piece.text == ""
        elif joined and joined[-1][0] == piece.kind != "call":
            joined[-1] = (piece.kind, joined[-1][1] + piece.text)
        else:
            joined.append((piece.kind, piece.text))
    return joined


CASES = {
    "hermes: text, then two calls": (
        calls(HERMES),
        'I see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par\\"is", "n": [1, -2.5e3, true]}}\n'
        '</tool_call>\n<tool_call>{"arguments": {"a": {}}, "name": "add"}</tool_call>\n',
        [
            ("text", "I see."),
            ("call", "get_weather"),
            ("arguments", '{"city": "Par\\"is", "n": [1, -2.5e3, true]}'),
            ("call", "add"),
            ("arguments", '{"a": {}}'),
        ],
    ),
    "hermes: a function that was not offered": (
        calls(HERMES),
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call> hi',
        [("text", '<tool_call>{"name": "rm", "arguments": {}}</tool_call> hi')],
    ),
    "hermes: arguments that are no JSON from the start": (
        calls(HERMES),
        'a <tool_call>{"name": "add", "arguments": {bad}}</tool_call> hi',
        [("text", 'a <tool_call>{"name": "add", "arguments": {bad}}</tool_call> hi')],
    ),
    "hermes: arguments that go wrong later are as the model wrote them": (
        calls(HERMES),
        '<tool_call>{"name": "add", "arguments": {"a": bad}}</tool_call> hi',
        [("call", "add"), ("arguments", '{"a": bad}}'), ("text", " hi")],
    ),
    "hermes: no object": (
        calls(HERMES),
        "<tool_call>[1]</tool_call><tool_call></tool_call><tool_call>7",
        [("text", "<tool_call>[1]</tool_call><tool_call></tool_call><tool_call>7")],
    ),
    "hermes: what only looks like a call": (
        calls(HERMES),
        'a <b> <tool_cal <tool_call>{"name": "add", "argum',
        [("text", 'a <b> <tool_cal <tool_call>{"name": "add", "argum')],
    ),
    "hermes: cut off within the arguments": (
        calls(HERMES),
        '<tool_call>{"name": "add", "arguments": {"a": 1',
        [("call", "add"), ("arguments", '{"a": 1')],
    ),
    "hermes: no closing tag, and text": (
        calls(HERMES),
        '<tool_call>{"name": "add", "arguments": {}}\nDone.',
        [("call", "add"), ("arguments", "{}"), ("text", "Done.")],
    ),
    "hermes: one call at most": (
        calls(HERMES, most_calls=1),
        '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>{"name": "add", "arguments": {}}',
        [("call", "add"), ("arguments", "{}")],
    ),
    "hermes: a name in escapes": (
        calls(HERMES),
        '<tool_call>{"name": "\\u0061dd", "arguments": {"s": "</tool_call>"}}</tool_call>',
        [("call", "add"), ("arguments", '{"s": "</tool_call>"}')],
    ),
    "hermes: half of a surrogate pair": (
        calls(HERMES),
        '<tool_call>{"arguments": {"s": "\\ud83d"}, "name": "add"}</tool_call>',
        [("call", "add"), ("arguments", '{"s": "\\ud83d"}')],
    ),
    "llama: two calls": (
        calls(LLAMA),
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"type": "function", "name": "add", "parameters": {}}',
        [("call", "add"), ("arguments", '{"a": 1}'), ("call", "add"), ("arguments", "{}")],
    ),
    "llama: an answer in JSON": (
        calls(LLAMA),
        '{"answer": 42, "name": "add"} end',
        [("text", '{"answer": 42, "name": "add"} end')],
    ),
    "llama: a call is an answer's beginning": (calls(LLAMA), 'Hi {"name": "add"}', [("text", 'Hi {"name": "add"}')]),
    "json: an array in a fence": (
        calls(BARE_JSON),
        '```json\n[{"name": "add", "arguments": {"a": 1}},\n {"name":"add","arguments":"{\\"b\\":2}"}]\n```',
        [("call", "add"), ("arguments", '{"a": 1}'), ("call", "add"), ("arguments", '{"b": 2}')],
    ),
    "json: no arguments": (calls(BARE_JSON), '{"name": "add"}', [("call", "add"), ("arguments", "{}")]),
    "json: a list": (calls(BARE_JSON), " [1] see here", [("text", " [1] see here")]),
    "json: a fence": (calls(BARE_JSON), "```\ncode\n```", [("text", "```\ncode\n```")]),
    "mistral: text, then an array": (
        calls(MISTRAL),
        'Sure [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}, "id": "9"}]',
        [("text", "Sure"), ("call", "add"), ("arguments", '{"a": 1}'), ("call", "add"), ("arguments", "{}")],
    ),
    "mistral: named calls": (
        calls(MISTRAL_NAMED),
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"c": "}"}',
        [("call", "add"), ("arguments", '{"a": 1}'), ("call", "get_weather"), ("arguments", '{"c": "}"}')],
    ),
    "mistral: a function that was not offered": (
        calls(MISTRAL_NAMED),
        '[TOOL_CALLS]rm[ARGS]{"a": 1}',
        [("text", '[TOOL_CALLS]rm[ARGS]{"a": 1}')],
    ),
    "mistral: no arguments come": (calls(MISTRAL_NAMED), "[TOOL_CALLS]add[ARGS]", [("text", "[TOOL_CALLS]add[ARGS]")]),
    "xml: text and values of every kind": (
        calls(QWEN_XML),
        'Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZü"rich\n\n</param>\n</parameter>\n'
        '<parameter=days>\n3\n</parameter>\n<parameter=other>\n{"a": [1]}\n</parameter>\n'
        "<parameter=odd>\nnot json\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
        [
            ("text", "Sure."),
            ("call", "get_weather"),
            (
                "arguments",
                '{"city": "Zü\\"rich\\n\\n</param>", "days": 3, "other": {"a": [1]}, "odd": "not json"}',
            ),
            ("call", "add"),
            ("arguments", "{}"),
        ],
    ),
    "xml: a function that was not offered": (
        calls(QWEN_XML),
        "<tool_call>\n<function=rm>\n</function></tool_call>",
        [("text", "<tool_call>\n<function=rm>\n</function></tool_call>")],
    ),
    "xml: cut off in a text": (
        calls(QWEN_XML),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZü",
        [("call", "get_weather"), ("arguments", '{"city": "Zü"}')],
    ),
    "xml: forced": (
        calls(QWEN_XML, begun=QWEN_XML.forcing("get_weather"), most_calls=1),
        "<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call> and",
        [("call", "get_weather"), ("arguments", '{"city": "Bern"}')],
    ),
    "harmony: thinking and a call": (
        calls(HARMONY),
        "<|channel|>analysis<|message|>think hard<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a":1}<|call|>',
        [("reasoning", "think hard"), ("call", "add"), ("arguments", '{"a":1}')],
    ),
    "harmony: thinking and an answer": (
        OutputFormat(HARMONY),
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>Hello  there<|return|>",
        [("reasoning", "think"), ("text", "Hello  there")],
    ),
    "harmony: no channel": (OutputFormat(HARMONY), "Hello", [("text", "Hello")]),
    "thinking": (
        OutputFormat(tags=THINK),
        "\n<think>\nhmm a<b </thin\n\n</think>\n\nAnswer <think>",
        [("reasoning", "hmm a<b </thin"), ("text", "Answer <think>")],
    ),
    "thinking: begun by the prompt, and cut off": (
        OutputFormat(tags=THINK, is_thinking=True),
        "so it",
        [("reasoning", "so it")],
    ),
    "thinking: none": (OutputFormat(tags=THINK), "  Answer <think> x", [("text", "  Answer <think> x")]),
    "thinking, then a call": (
        calls(HERMES, tags=THINK, is_thinking=True),
        'so <tool_call>\n</think>\n\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        [("reasoning", "so <tool_call>"), ("call", "add"), ("arguments", '{"a": 1}')],
    ),
    "forced: the call goes on": (
        calls(HERMES, begun=HERMES.forcing("add"), most_calls=1),
        ' {"a": 2}}\n</tool_call> and more',
        [("call", "add"), ("arguments", '{"a": 2}')],
    ),
    "forced: the model does something else": (
        calls(HERMES, begun=HERMES.forcing(None)),
        " nonsense",
        [("text", '<tool_call>\n{"name": nonsense')],
    ),
    "forced: by name": (
        calls(MISTRAL_NAMED, begun=MISTRAL_NAMED.forcing("add")),
        '{"a": 2}',
        [("call", "add"), ("arguments", '{"a": 2}')],
    ),
    "forced: bare JSON": (
        calls(LLAMA, begun=LLAMA.forcing("add")),
        ' {"a": 2}}',
        [("call", "add"), ("arguments", '{"a": 2}')],
    ),
    "forced: harmony": (
        calls(HARMONY, begun=HARMONY.forcing("add"), most_calls=1),
        '{"a": 2}<|call|>',
        [("call", "add"), ("arguments", '{"a": 2}')],
    ),
}


@pytest.mark.parametrize("name", CASES)
@given(cuts=st.lists(st.integers(1, 7), max_size=200))
@settings(max_examples=40, deadline=None)
def test_pieces(name, cuts):
    output_format, text, expected = CASES[name]
    assert read(output_format, text, cuts) == read(output_format, text, [1] * len(text)) == expected


SCRAPS = """
<tool_call> </tool_call> {"name":"add","arguments": {"a":1} } [TOOL_CALLS] [ARGS] add [ ] , ```json <|python_tag|> " \\
<|channel|> <|message|> <|end|> to=functions.add analysis
<function=add> <function=get_weather> <parameter=city> </parameter> <think> </think> x 🙂
"""


@pytest.mark.parametrize(
    "family", [HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, QWEN_XML, HARMONY], ids=lambda family: family.name
)
@given(
    parts=st.lists(
        st.sampled_from([*SCRAPS.split(), " ", "\n"]),
        max_size=12,
    ),
    cuts=st.lists(st.integers(1, 9), max_size=100),
)
@settings(max_examples=150, deadline=None)
def test_no_output_breaks_a_parser_or_depends_on_the_cuts(family, parts, cuts):
    text = "".join(parts)
    output_format = calls(family, tags=None if family.thinks else THINK)
    pieces = read(output_format, text, cuts)
    assert pieces == read(output_format, text, [])
    for kind, value in pieces:
        assert kind != "call" or value in NAMES


def test_arguments_come_as_they_are_written():
    parser = calls(HERMES).parser()
    parser.push('<tool_call>{"name": "add", "arguments": {"text": "')
    assert [piece.text for piece in parser.push("abc")] == ["abc"]
    assert [piece.text for piece in parser.push("def")] == ["def"]


def test_an_answer_in_json_is_not_held_back():
    parser = calls(LLAMA).parser()
    assert [piece.text for piece in parser.push('{"answer": 4')] == ['{"answer": 4']


@pytest.mark.parametrize(
    ("template", "renders_tools", "has_python_tag", "family"),
    [
        ("<tool_call> {{ tools }}", True, False, HERMES),
        ("<tool_call> <function=name> {{ tools }}", True, False, QWEN_XML),
        ("{{ messages }}", False, False, HERMES),
        ("{{ tools }} Environment: ipython", True, True, LLAMA),
        ("{{ tools }} python_tag", True, False, LLAMA),
        ("{{ tools }}", True, False, BARE_JSON),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", True, False, MISTRAL),
        ("[TOOL_CALLS]name[ARGS]", True, False, MISTRAL_NAMED),
        ("<|channel|>", True, False, HARMONY),
    ],
)
def test_a_family_is_known_by_its_template(template, renders_tools, has_python_tag, family):
    assert family_of(template, renders_tools=renders_tools, has_python_tag=has_python_tag) is family


def test_tags_are_known_by_the_template():
    assert tags_of("x") is None
    assert tags_of("{{ content.split('</think>') }}") is THINK
    assert tags_of("[THINK]") is TAGS[1]


def test_plain_text_needs_no_parser():
    assert OutputFormat().parser() is None
