"""Tools for a model whose chat template knows none: explained in the system message, calls and results as text.

The format is the one named after the Hermes models, which many open models have seen in training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gateway.conversation import Message, Part, Tool, ToolCall
from gateway.tool_calls import argument_value

_BEFORE = "You can call functions. Their signatures are given as JSON, one a line, within <tools></tools>:\n<tools>"
_AFTER = """\
</tools>
To call a function, write a JSON object with its name and its arguments within <tool_call></tool_call>, like this:
<tool_call>
{"name": "function_name", "arguments": {"argument_name": "value"}}
</tool_call>"""


def tool_json(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def explain_tools(messages: Sequence[Message], tools: Sequence[Tool], *, takes_system: bool) -> list[Message]:
    """The tools before everything else, in the system message if the template takes one."""
    signatures = [Part(json.dumps(tool_json(tool)["function"], ensure_ascii=False), tool.marker) for tool in tools]
    parts = (Part(_BEFORE), *signatures, Part(_AFTER))
    roles = ("system", "developer") if takes_system else ("user",)
    if messages and messages[0].role in roles:
        first = messages[0]
        return [replace(first, parts=(*parts, Part(""), *first.parts)), *messages[1:]]
    return [Message(role="system" if takes_system else "user", parts=parts), *messages]


def spell_out_calls(messages: Sequence[Message]) -> list[Message]:
    """Calls become the assistant's text and results the user's, in one message with what the user says then."""
    shown: list[Message] = []
    answering = False
    for message in messages:
        is_result = message.role == "tool"
        if is_result:
            parts = (Part("<tool_response>"), *message.parts, Part("</tool_response>"))
            message = Message(role="user", parts=parts, marker=message.marker)
        elif message.tool_calls:
            spoken = tuple(part for part in message.parts if part.text or part.marker)
            calls = tuple(Part(_spelled(call)) for call in message.tool_calls)
            message = replace(message, parts=(*spoken, *calls), tool_calls=())
        if answering and message.role == "user":
            before = shown.pop()
            last = replace(before.parts[-1], marker=before.marker or before.parts[-1].marker)
            message = replace(message, parts=(*before.parts[:-1], last, *message.parts))
        answering = message.role == "user" and (answering or is_result)
        shown.append(message)
    return shown


def _spelled(call: ToolCall) -> str:
    value = {"name": call.name, "arguments": argument_value(call.arguments)}
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"
