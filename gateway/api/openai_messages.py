"""The messages of a chat as a conversation's: plain roles, parts of text, calls and their results."""

from __future__ import annotations

from typing import Any

from gateway.api.openai_caching import DEFAULT_TTL_S, marker_of
from gateway.conversation import Message, Part, Role, ToolCall
from gateway.errors import invalid, unsupported

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_INERT_KEYS = frozenset(["refusal", "annotations", "name"])
_REASONING_KEYS = ("reasoning_content", "reasoning")


def conversation_messages(messages: list[dict[str, Any]], default_ttl_s: int = DEFAULT_TTL_S) -> tuple[Message, ...]:
    """Checked. Raises ApiError naming the message at fault."""
    if not messages:
        raise invalid("Invalid 'messages': at least one message is needed.", "messages", "empty_array")
    return tuple(_message(message, f"messages[{index}]", default_ttl_s) for index, message in enumerate(messages))


def _message(message: dict[str, Any], path: str, default_ttl_s: int) -> Message:
    given = message.get("role")
    if not isinstance(given, str) or given not in ROLES:
        raise invalid(f"Invalid '{path}.role': expected one of {', '.join(ROLES)}.", f"{path}.role")
    role = ROLES[given]
    if role != "assistant" and len(message) == 2 and type(text := message.get("content")) is str and given != "tool":
        return Message(role=role, parts=(Part(text),))
    for name, value in message.items():
        if name in ("audio", "function_call") and value is not None:
            raise unsupported(f"{path}.{name}")
        if name not in _KEYS and value is not None:
            raise invalid(f"Unknown parameter: '{path}.{name[:100]}'.", f"{path}.{name[:100]}", "unknown_parameter")
    call_id = _text(message, "tool_call_id", path)
    if given == "tool" and call_id is None:
        raise invalid(
            f"Missing required parameter: '{path}.tool_call_id'.", f"{path}.tool_call_id", "missing_required_parameter"
        )
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise invalid(f"Invalid '{path}.tool_calls': only the assistant calls tools.", f"{path}.tool_calls")
    content = message.get("content")
    if role != "assistant":
        _require_content(content, f"{path}.content")
    return Message(
        role=role,
        parts=_parts(content, path, default_ttl_s),
        tool_calls=_tool_calls(calls, f"{path}.tool_calls"),
        tool_call_id=call_id,
        name=_text(message, "name", path),
        reasoning=next((text for name in _REASONING_KEYS if (text := _text(message, name, path))), None),
    )


_KEYS = frozenset(
    ["role", "content", "tool_calls", "tool_call_id", "audio", "function_call", *_REASONING_KEYS, *_INERT_KEYS]
)


def _text(message: dict[str, Any], name: str, path: str) -> str | None:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"Invalid '{path}.{name}': expected a string.", f"{path}.{name}", "invalid_type")
    return value


def _require_content(content: Any, path: str) -> None:
    """An empty text says something, if little; no text at all is a client's slip, and its answer would be billed."""
    if content is None:
        raise invalid(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    if content == []:
        raise invalid(f"Invalid '{path}': expected a string or at least one part.", path, "empty_array")


def _parts(content: Any, path: str, default_ttl_s: int) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (Part(content),)
    if content is None:
        # An assistant's turn may consist of tool calls alone, and clients send turns back as they got them.
        return ()
    if not isinstance(content, list):
        raise invalid(f"Invalid '{path}.content': expected a string or an array.", f"{path}.content", "invalid_type")
    return tuple(_part(part, f"{path}.content[{index}]", default_ttl_s) for index, part in enumerate(content))


def _part(part: Any, path: str, default_ttl_s: int) -> Part:
    if not isinstance(part, dict):
        raise invalid(f"Invalid '{path}': expected an object.", path, "invalid_type")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise unsupported(f"{path}.type", f"Invalid '{path}.type': this server's models take text only.")
    text = part.get(kind)
    if not isinstance(text, str):
        raise invalid(f"Invalid '{path}.{kind}': expected a string.", f"{path}.{kind}", "invalid_type")
    marker = marker_of(part.get("prompt_cache_breakpoint"), f"{path}.prompt_cache_breakpoint", default_ttl_s)
    return Part(text, marker)


def _tool_calls(calls: Any, path: str) -> tuple[ToolCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise invalid(f"Invalid '{path}': expected an array.", path, "invalid_type")
    return tuple(_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls))


def _tool_call(call: Any, path: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"Invalid '{path}': expected a function call.", path, "invalid_type")
    call_id, arguments = call.get("id", ""), function.get("arguments", "")
    if not isinstance(call_id, str):
        raise invalid(f"Invalid '{path}.id': expected a string.", f"{path}.id", "invalid_type")
    if not isinstance(arguments, str):
        path = f"{path}.function.arguments"
        raise invalid(f"Invalid '{path}': expected a text of JSON.", path, "invalid_type")
    return ToolCall(call_id, function["name"], arguments)
