"""What happens to a request, in no API's words: the events that every API is translated from."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import PromptRecord
from gateway.accounting import Usage
from gateway.streams import ShownLogprob


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has admitted the request: its prompt's record is final."""

    prompt: PromptRecord


@dataclass(frozen=True, slots=True)
class TextDelta:
    output_index: int
    text: str
    logprobs: tuple[ShownLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """What the model thinks before it answers."""

    output_index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The model calls a function: call `call_index`, from 0, of this output."""

    output_index: int
    call_index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next piece of a call's arguments, a text of JSON. Every call has at least one."""

    output_index: int
    call_index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class OutputFinished:
    output_index: int
    finish_reason: str
    """stop, length or tool_calls."""
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """The last event of a request that was served."""

    usage: Usage
    reasoning_tokens: int = 0
    """Of the output tokens, those that the model thought with."""


Event = Started | TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | OutputFinished | Completed
