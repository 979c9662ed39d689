"""The messages of a chat as its template takes them: plain roles and plain texts."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.errors import invalid, unsupported

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_INERT_KEYS = frozenset(["refusal", "annotations", "audio", "function_call", "reasoning_content", "reasoning", "name"])


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked, and with multi-part contents joined by line breaks. Raises ApiError naming the message."""
    if not messages:
        raise invalid("Invalid 'messages': at least one message is needed.", "messages", "empty_array")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"Invalid '{path}.role': expected one of {', '.join(ROLES)}.", f"{path}.role")
    result: dict[str, Any] = {"role": role, "content": _content(message.get("content"), path)}
    for name, value in message.items():
        if value is None or name in ("role", "content"):
            continue
        if name == "tool_calls" and role == "assistant":
            result["tool_calls"] = _tool_calls(value, f"{path}.tool_calls")
        elif name in ("tool_call_id", "name"):
            if not isinstance(value, str):
                raise invalid(f"Invalid '{path}.{name}': expected a string.", f"{path}.{name}", "invalid_type")
            result[name] = value
        elif name in ("audio", "function_call"):
            raise unsupported(f"{path}.{name}")
        elif name not in _INERT_KEYS:
            raise invalid(f"Unknown parameter: '{path}.{name[:100]}'.", f"{path}.{name[:100]}", "unknown_parameter")
    return result


def _content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        # An assistant's turn may consist of tool calls alone, and clients send turns back as they got them.
        return ""
    if not isinstance(content, list):
        raise invalid(f"Invalid '{path}.content': expected a string or an array.", f"{path}.content", "invalid_type")
    return "\n".join(_part(part, f"{path}.content[{index}]") for index, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid(f"Invalid '{path}': expected an object.", path, "invalid_type")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise unsupported(f"{path}.type", f"Invalid '{path}.type': this server's models take text only.")
    text = part.get(kind)
    if not isinstance(text, str):
        raise invalid(f"Invalid '{path}.{kind}': expected a string.", f"{path}.{kind}", "invalid_type")
    return text


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Templates want arguments as an object; the API carries them as a text of JSON."""
    if not isinstance(calls, list):
        raise invalid(f"Invalid '{path}': expected an array.", path, "invalid_type")
    result = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"Invalid '{path}[{index}]': expected a function call.", f"{path}[{index}]", "invalid_type")
        arguments = function.get("arguments", "")
        try:
            parsed = orjson.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}
        except orjson.JSONDecodeError:
            parsed = arguments
        result.append({**call, "function": {**function, "arguments": parsed}})
    return result
