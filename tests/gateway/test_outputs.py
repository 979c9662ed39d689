"""One output's events: what is thought, said and called, and which tokens are which."""

from __future__ import annotations

import json

import pytest

from engine.protocol import Delta, TokenLogprob
from gateway.events import Event, OutputFinished, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from gateway.output_format import HERMES, MISTRAL_NAMED, PLAIN, OutputFormat
from gateway.outputs import Output
from gateway.reasoning import TAGS
from gateway.tokenizer import Tokenizer
from tests.gateway.support import byte_level_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLS = OutputFormat(calls=HERMES, offered={"add": {}})
THINKING = OutputFormat(tags=TAGS[0])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = byte_level_tokenizer()
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "<hidden>"])
    return Tokenizer(backend)


def run_output(
    tokenizer: Tokenizer,
    text: str,
    output_format: OutputFormat,
    *,
    stops: tuple[str, ...] = (),
    per_delta: int = 1,
    reason: str = "stop",
    logprobs: bool = False,
) -> tuple[Output, list[Event], int | None]:
    """The events of an output whose tokens spell `text`, and where the gateway stopped it."""
    output, events = Output(0, tokenizer, output_format, stops, 0), []
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    for start in range(0, len(ids), per_delta):
        part = ids[start : start + per_delta]
        end = start + len(part)
        scores = tuple(TokenLogprob(token_id, -0.5) for token_id in part) if logprobs else ()
        change = output.push(Delta("r", 0, part, end, reason if end == len(ids) else None, None, scores))
        events += change.events
        if change.stopped_at is not None:
            return output, events, change.stopped_at
    return output, events, None


def joined(events: list[Event], kind: type) -> str:
    return "".join(e.arguments if kind is ToolCallDelta else e.text for e in events if isinstance(e, kind))


@pytest.mark.parametrize("per_delta", [1, 3, 1000])
def test_a_call_among_text(tokenizer, per_delta):
    output, events, stopped_at = run_output(tokenizer, f"Let me see.\n{CALL}", CALLS, per_delta=per_delta)
    assert joined(events, TextDelta) == "Let me see."
    (started,) = [event for event in events if isinstance(event, ToolCallStarted)]
    assert (started.output_index, started.call_index, started.name) == (0, 0, "add")
    assert started.id.startswith("call_") and len(started.id) == 29
    assert json.loads(joined(events, ToolCallDelta)) == {"a": 1}
    assert events[-1] == OutputFinished(0, "tool_calls") and stopped_at is None and output.finished


def test_calls_are_numbered_and_have_ids_of_their_own(tokenizer):
    _, events, _ = run_output(tokenizer, CALL + CALL, CALLS)
    started = [event for event in events if isinstance(event, ToolCallStarted)]
    assert [event.call_index for event in started] == [0, 1]
    assert len({event.id for event in started}) == 2
    assert {event.call_index for event in events if isinstance(event, ToolCallDelta)} == {0, 1}


def test_a_call_without_arguments_has_an_empty_object(tokenizer):
    _, events, _ = run_output(tokenizer, '<tool_call>{"name": "add"}</tool_call>', CALLS)
    assert joined(events, ToolCallDelta) == "{}"


def test_the_output_is_stopped_and_billed_to_the_end_of_its_only_call(tokenizer):
    one = OutputFormat(calls=HERMES, offered={"add": {}}, most_calls=1)
    for per_delta in (1, 1000):
        output, events, stopped_at = run_output(tokenizer, CALL + " and " + CALL, one, per_delta=per_delta)
        assert stopped_at == output.n_tokens == len(tokenizer.encode(CALL, add_special_tokens=False))
        assert events[-1] == OutputFinished(0, "tool_calls")


def test_the_length_ends_an_output_in_the_middle_of_a_call(tokenizer):
    _, events, _ = run_output(tokenizer, CALL[:40], CALLS, reason="length")
    assert joined(events, ToolCallDelta) == CALL[:40].partition('"arguments": ')[2]
    assert events[-1] == OutputFinished(0, "length")


def test_a_stop_string_ends_an_output_with_calls_in_it(tokenizer):
    _, events, stopped_at = run_output(tokenizer, CALL + "Now STOP it", CALLS, stops=("STOP",))
    assert joined(events, TextDelta) == "Now " and stopped_at is not None
    assert events[-1] == OutputFinished(0, "stop", "STOP")


def test_what_is_no_call_is_all_there(tokenizer):
    text = '<tool_call>{"name": "rm", "arguments": {}}</tool_call> <tool_c'
    _, events, _ = run_output(tokenizer, text, CALLS)
    assert joined(events, TextDelta) == text and events[-1] == OutputFinished(0, "stop")


def test_special_tokens_of_the_grammar_are_seen_and_others_are_not(tokenizer):
    ids = frozenset(tokenizer.id_of(name) for name in ("[TOOL_CALLS]", "[ARGS]"))
    named = OutputFormat(calls=MISTRAL_NAMED, offered={"add": {}}, named_ids=ids)
    _, events, _ = run_output(tokenizer, 'a<hidden>b[TOOL_CALLS]add[ARGS]{"a": 1}', named)
    assert joined(events, TextDelta) == "ab" and joined(events, ToolCallDelta) == '{"a": 1}'


@pytest.mark.parametrize("per_delta", [1, 4, 1000])
def test_thinking_is_set_apart_and_its_tokens_are_counted(tokenizer, per_delta):
    thought = "The fox, naïve 你好, jumps."
    text = f"<think>\n{thought}\n</think>\n\nIt does 🙂."
    output, events, _ = run_output(tokenizer, text, THINKING, per_delta=per_delta)
    assert joined(events, ReasoningDelta) == thought and joined(events, TextDelta) == "It does 🙂."
    # Tokens whose text begins within the thought.
    starts, inside = 0, 0
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        at = text.encode()[:starts].decode(errors="ignore")
        inside += len("<think>\n") <= len(at) < len("<think>\n" + thought)
        starts += len(tokenizer.token_bytes(token_id))
    assert output.reasoning_tokens == inside
    assert events[-1] == OutputFinished(0, "stop")


def test_an_output_cut_off_in_its_thinking_is_thinking_to_the_end(tokenizer):
    inside = OutputFormat(tags=TAGS[0], is_thinking=True)
    output, events, _ = run_output(tokenizer, "The fox jumps", inside, reason="length")
    assert joined(events, ReasoningDelta) == "The fox jumps" and joined(events, TextDelta) == ""
    assert output.reasoning_tokens == output.n_tokens
    assert events[-1] == OutputFinished(0, "length")


def test_logprobs_go_with_what_is_said(tokenizer):
    said = "It does 🙂."
    _, events, _ = run_output(tokenizer, f"<think>hmm</think>{said}", THINKING, logprobs=True)
    shown = [one for event in events if isinstance(event, TextDelta) for one in event.logprobs]
    assert b"".join(tokenizer.shown_bytes(one.logprob.token_id) for one in shown).decode() == said


def test_an_output_that_failed_has_no_reason(tokenizer):
    output = Output(0, tokenizer, PLAIN, (), 0)
    change = output.push(Delta("r", 0, (40, 41), 2, "error"))
    assert output.finished and not any(isinstance(event, OutputFinished) for event in change.events)


@pytest.mark.parametrize("output_format", [PLAIN, CALLS])
def test_what_is_held_is_shown_when_no_last_delta_comes(tokenizer, output_format):
    output = Output(0, tokenizer, output_format, ("<END>",), 0)
    ids = tuple(tokenizer.encode("fox <E", add_special_tokens=False))
    shown = output.push(Delta("r", 0, ids, len(ids))).events + output.end("stop")
    assert joined(shown, TextDelta) == "fox <E" and shown[-1] == OutputFinished(0, "stop")
