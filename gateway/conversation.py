"""A conversation in no API's words: what all APIs translate to, and what a model's chat template is given.

A Marker says that the prompt up to here is worth keeping: it becomes a Breakpoint at the exact token. It may stand at
the end of a part of text, of a message (its tool calls included), of a tool's definition, or of the whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Marker:
    ttl_s: int
    """How long the prefix is to stay resident after each read."""


@dataclass(frozen=True, slots=True)
class Part:
    text: str
    marker: Marker | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """A text of JSON, as the model wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    parts: tuple[Part, ...] = ()
    """Shown to the model joined by line breaks."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of the assistant."""
    tool_call_id: str | None = None
    """Of a tool: the call that it answers."""
    name: str | None = None
    """Who speaks, or which tool."""
    reasoning: str | None = None
    """What the assistant thought before it spoke."""
    marker: Marker | None = None

    @property
    def text(self) -> str:
        return self.parts[0].text if len(self.parts) == 1 else "\n".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask the client to call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """A JSON Schema of the arguments."""
    marker: Marker | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] = frozenset()
    """Only these may be called; empty: any. `required` with one name forces that function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    """False: the answer ends after its first call."""
    marker: Marker | None = None
    """At the end of the prompt."""
    reasoning_effort: str | None = None
    """none, or an effort; None leaves it to the model."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The answer goes on where the last message, which is the assistant's, ends."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the model's template."""
