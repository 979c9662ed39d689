"""Tools as clients describe them, checked: what every API asks of a function's name and of its JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gateway.conversation import Tool, ToolChoice
from gateway.errors import invalid

MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = 32

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPES = frozenset(["string", "number", "integer", "boolean", "object", "array", "null"])
# Keywords whose values are schemas, lists of schemas, and schemas by name.
_SCHEMA_KEYS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_name(name: Any, path: str) -> str:
    """Raises ApiError."""
    if not isinstance(name, str):
        raise invalid(f"Invalid '{path}': expected a string.", path, "invalid_type")
    if not _NAME.fullmatch(name):
        raise invalid(f"Invalid '{path}': 1 to 64 letters, digits, '_' and '-' are allowed.", path)
    return name


def check_parameters(schema: Any, path: str) -> dict[str, Any]:
    """The JSON Schema of a function's arguments, which are an object. Raises ApiError naming what is wrong in it."""
    if not isinstance(schema, dict):
        raise invalid(f"Invalid '{path}': expected a JSON Schema, which is an object.", path, "invalid_type")
    if schema.get("type", "object") != "object":
        raise invalid(f"Invalid '{path}.type': the arguments of a function are an object.", f"{path}.type")
    _check_schema(schema, path, 0)
    return schema


def check_tools(tools: Sequence[Tool], param: str = "tools") -> tuple[Tool, ...]:
    """Raises ApiError when there are too many, or two of one name."""
    if len(tools) > MAX_TOOLS:
        raise invalid(f"Invalid '{param}': {len(tools)} tools; the limit is {MAX_TOOLS}.", param)
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise invalid(f"Invalid '{param}': there are two tools named '{tool.name}'.", param)
        seen.add(tool.name)
    return tuple(tools)


def check_choice(choice: ToolChoice, tools: Sequence[Tool], param: str = "tool_choice") -> ToolChoice:
    """Raises ApiError when it asks for a tool that there is not."""
    if choice.mode == "required" and not tools:
        raise invalid(f"'{param}' is only allowed when 'tools' are given.", param)
    missing = choice.names - {tool.name for tool in tools}
    if missing:
        raise invalid(f"Invalid '{param}': there is no tool named '{min(missing)[:64]}'.", param)
    return choice


def _check_schema(schema: Any, path: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise invalid(f"Invalid '{path}': expected a JSON Schema.", path, "invalid_type")
    if depth >= MAX_SCHEMA_DEPTH:
        raise invalid(f"Invalid '{path}': a schema may be nested {MAX_SCHEMA_DEPTH} deep.", path)
    _check_type(schema.get("type"), f"{path}.type")
    required = schema.get("required")
    if required is not None and not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise invalid(f"Invalid '{path}.required': expected an array of names.", f"{path}.required", "invalid_type")
    if "enum" in schema and not isinstance(schema["enum"], list):
        raise invalid(f"Invalid '{path}.enum': expected an array.", f"{path}.enum", "invalid_type")
    for key in _SCHEMA_KEYS:
        if schema.get(key) is not None and not (key == "items" and isinstance(schema[key], list)):
            _check_schema(schema[key], f"{path}.{key}", depth + 1)
    for key in _SCHEMA_LISTS:
        entries = schema.get(key)
        if entries is None:
            continue
        if not isinstance(entries, list):
            raise invalid(f"Invalid '{path}.{key}': expected an array of schemas.", f"{path}.{key}", "invalid_type")
        for index, entry in enumerate(entries):
            _check_schema(entry, f"{path}.{key}[{index}]", depth + 1)
    for key in _SCHEMA_MAPS:
        entries = schema.get(key)
        if entries is None:
            continue
        if not isinstance(entries, dict):
            raise invalid(f"Invalid '{path}.{key}': expected schemas by name.", f"{path}.{key}", "invalid_type")
        for name, entry in entries.items():
            _check_schema(entry, f"{path}.{key}.{name[:64]}", depth + 1)


def _check_type(given: Any, path: str) -> None:
    types = given if isinstance(given, list) else [given]
    for one in types:
        if given is not None and not (isinstance(one, str) and one in _TYPES):
            raise invalid(f"Invalid '{path}': {one!r:.40} is no type of JSON Schema.", path)
