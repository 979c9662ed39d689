"""A conversation as the prompt's text: the model's chat template, and what it leaves to do about calls and thinking."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.conversation import Conversation, Message
from gateway.errors import invalid, unsupported
from gateway.markers import MarkedRendering, TextMarker
from gateway.output_format import MISTRAL, OutputFormat, family_of
from gateway.reasoning import ReasoningTags, tags_of
from gateway.templates import ChatTemplate
from gateway.templates import Message as TemplateMessage
from gateway.tokenizer import Tokenizer
from gateway.tool_calls import argument_value
from gateway.tool_prompts import explain_tools, spell_out_calls, tool_json

# Switches by which templates turn thinking on and off.
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_RESERVED = frozenset(["messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"])


@dataclass(frozen=True, slots=True)
class RenderedText:
    text: str
    markers: tuple[TextMarker, ...]
    output_format: OutputFormat


class ConversationRenderer:
    """For one model: its template, and how it calls functions and thinks. Any thread may call render."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._renders_tools = "tools" in template.variables
        self.family = family_of(
            template.source,
            renders_tools=self._renders_tools,
            has_python_tag=tokenizer.id_of("<|python_tag|>") is not None,
        )
        self.tags = None if self.family.thinks else tags_of(template.source)
        self._opening_id = tokenizer.id_of(self.family.opening) if self.family.opening else None
        names = (*self.family.special_tokens, *((self.tags.open, self.tags.close) if self.tags else ()))
        ids = (tokenizer.id_of(name) for name in names)
        self._named_ids = frozenset(i for i in ids if i is not None) & tokenizer.special_ids

    @property
    def can_think(self) -> bool:
        return self.family.thinks or self.tags is not None

    def render(self, conversation: Conversation) -> RenderedText:
        """Raises TemplateFailed, and ApiError (400) with OpenAI's names of the parameters."""
        forbids_calls = bool(conversation.tools) and conversation.tool_choice.mode == "none"
        if forbids_calls and self._opening_id is None:
            # Nothing else would keep the model from calling.
            conversation = replace(conversation, tools=())
        marked = MarkedRendering(self._template_text, conversation)
        text = marked.text()
        markers = marked.markers(text)
        forcing = self._forcing(conversation) if conversation.tools else ""
        is_thinking = self._is_thinking(conversation, text)
        if self.tags is not None and is_thinking and forcing:
            text += f"\n{self.tags.close}\n\n"
        elif self.tags is not None and self._must_not_think(self.tags, conversation, text):
            text += f"\n{self.tags.close}\n\n" if is_thinking else f"{self.tags.open}\n\n{self.tags.close}\n\n"
            is_thinking = False
        text += forcing
        if conversation.marker:
            markers.append(TextMarker(len(text), conversation.marker.ttl_s))
        output_format = self._format(conversation, forcing, is_thinking and not forcing, forbids_calls)
        return RenderedText(text, tuple(markers), output_format)

    def _template_text(self, conversation: Conversation) -> str:
        """Raises TemplateFailed."""
        messages, variables = self._template_input(conversation)
        return self._template.render(messages, add_generation_prompt=conversation.add_generation_prompt, **variables)

    def _is_thinking(self, conversation: Conversation, text: str) -> bool:
        """Whether the answer begins within the thinking."""
        if self.tags is None:
            return False
        if conversation.continue_final_message:
            last = conversation.messages[-1].text
            return last.rfind(self.tags.open) > last.rfind(self.tags.close)
        return conversation.add_generation_prompt and text.rstrip().endswith(self.tags.open)

    def _must_not_think(self, tags: ReasoningTags, conversation: Conversation, text: str) -> bool:
        """The client wants no thinking, and the template has not seen to it."""
        return (
            conversation.reasoning_effort == "none"
            and conversation.add_generation_prompt
            and not conversation.continue_final_message
            and not text.rstrip().endswith(tags.close)
        )

    def _forcing(self, conversation: Conversation) -> str:
        """What the prompt must end with so that the model calls as it is told to."""
        choice = conversation.tool_choice
        if choice.mode != "required":
            return ""
        name = next(iter(choice.names)) if len(choice.names) == 1 else None
        if name is None and len(conversation.tools) == 1:
            name = conversation.tools[0].name
        forcing = self.family.forcing(name)
        if forcing is None or conversation.continue_final_message:
            raise unsupported(
                "tool_choice",
                "'tool_choice' cannot be honoured here: this model cannot be made to call one of several functions. "
                "Name one function, or use 'auto'.",
            )
        return forcing

    def _format(self, conversation: Conversation, forcing: str, is_thinking: bool, forbids_calls: bool) -> OutputFormat:
        choice = conversation.tool_choice
        calls = bool(conversation.tools) and choice.mode != "none"
        offered = {
            tool.name: tool.parameters
            for tool in conversation.tools
            if calls and (not choice.names or tool.name in choice.names)
        }
        named = choice.mode == "required" and len(choice.names) == 1
        forbidden = [self._opening_id] if forbids_calls and self._opening_id is not None else []
        return OutputFormat(
            calls=self.family if calls or self.family.thinks else None,
            offered=offered,
            most_calls=1 if calls and (named or not conversation.parallel_tool_calls) else None,
            tags=self.tags,
            is_thinking=is_thinking,
            begun=forcing,
            named_ids=self._named_ids,
            forbidden_ids=frozenset(forbidden),
        )

    def _template_input(self, conversation: Conversation) -> tuple[list[TemplateMessage], dict[str, Any]]:
        """The template's messages and variables."""
        messages: Sequence[Message] = conversation.messages
        variables = self._own_variables(conversation) | self._effort(conversation.reasoning_effort)
        if not self._renders_tools:
            messages = spell_out_calls(messages)
            if conversation.tools:
                messages = explain_tools(messages, conversation.tools, takes_system=self._template.takes_system)
        elif conversation.tools:
            variables["tools"] = [tool_json(tool) for tool in conversation.tools]
        if self.family.name == "llama":
            messages = _one_call_each(messages)
        return [self._message(message) for message in messages], variables

    def _own_variables(self, conversation: Conversation) -> dict[str, Any]:
        """Those that the client names. Raises ApiError for one that the template does not read or that is ours."""
        for name in conversation.template_variables:
            if name not in self._template.variables or name in _RESERVED or name.endswith("_token"):
                param = f"chat_template_kwargs.{name[:64]}"
                raise invalid(f"Invalid '{param}': the model's chat template has no such variable to set.", param)
        return dict(conversation.template_variables)

    def _effort(self, effort: str | None) -> dict[str, Any]:
        if effort is None:
            return {}
        variables = self._template.variables
        found: dict[str, Any] = {switch: effort != "none" for switch in _THINKING_SWITCHES if switch in variables}
        if "reasoning_effort" in variables and effort != "none":
            found["reasoning_effort"] = effort
        if not found and effort != "none":
            raise unsupported("reasoning_effort", "'reasoning_effort' is not supported by this model.")
        if not found and self.family.thinks:
            raise unsupported("reasoning_effort", "'reasoning_effort': this model always thinks before it answers.")
        return found

    def _message(self, message: Message) -> TemplateMessage:
        entry: TemplateMessage = {"role": message.role, "content": message.text}
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": self._call_id(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": argument_value(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            entry["tool_call_id"] = self._call_id(message.tool_call_id)
        if message.name is not None:
            entry["name"] = message.name
        if message.reasoning and self.can_think:
            entry["reasoning_content"] = entry["thinking"] = message.reasoning
        return entry

    def _call_id(self, call_id: str) -> str:
        """Mistral's templates take ids of nine letters and digits only."""
        if self.family.name != MISTRAL.name or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
            return call_id
        digest = base64.b32encode(hashlib.sha256(call_id.encode()).digest())
        return digest[:9].decode().lower()


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Each call in a message of its own, its result behind it: some templates take one call a message."""
    results = {message.tool_call_id: message for message in messages if message.role == "tool"}
    shown: list[Message] = []
    moved: set[int] = set()
    for message in messages:
        if id(message) in moved:
            continue
        if len(message.tool_calls) < 2:
            shown.append(message)
            continue
        for call in message.tool_calls:
            shown.append(replace(message, tool_calls=(call,), marker=None))
            if (result := results.get(call.id)) is not None:
                shown.append(result)
                moved.add(id(result))
    return shown
