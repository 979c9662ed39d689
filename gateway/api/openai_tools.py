"""Chat completions' tools and tool_choice as a conversation's."""

from __future__ import annotations

from typing import Any

from gateway.conversation import Tool, ToolChoice
from gateway.errors import invalid, unsupported
from gateway.tool_schemas import check_choice, check_name, check_parameters, check_tools


def tools_of(given: list[dict[str, Any]]) -> tuple[Tool, ...]:
    """Raises ApiError naming what is wrong."""
    return check_tools([_tool(entry, f"tools[{index}]") for index, entry in enumerate(given)])


def has_strict(given: list[dict[str, Any]]) -> bool:
    """Whether a checked list of tools asks for arguments that follow the schema to the letter."""
    return any(entry["function"].get("strict") for entry in given)


def choice_of(given: str | dict[str, Any] | None, tools: tuple[Tool, ...]) -> ToolChoice:
    """Raises ApiError."""
    return check_choice(_choice(given), tools)


def _tool(entry: dict[str, Any], path: str) -> Tool:
    kind = entry.get("type")
    if kind != "function":
        if kind in ("custom", "web_search", "mcp", "file_search", "code_interpreter"):
            raise unsupported(f"{path}.type", f"Invalid '{path}.type': this server has tools of type 'function' only.")
        raise invalid(f"Invalid '{path}.type': expected 'function'.", f"{path}.type")
    function, path = entry.get("function"), f"{path}.function"
    if not isinstance(function, dict):
        raise invalid(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    if "name" not in function:
        raise invalid(f"Missing required parameter: '{path}.name'.", f"{path}.name", "missing_required_parameter")
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(description, str | None):
        raise invalid(f"Invalid '{path}.description': expected a string.", f"{path}.description", "invalid_type")
    if type(function.get("strict")) not in (bool, type(None)):
        raise invalid(f"Invalid '{path}.strict': expected a boolean.", f"{path}.strict", "invalid_type")
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    return Tool(
        check_name(function["name"], f"{path}.name"),
        description or "",
        check_parameters(schema, f"{path}.parameters"),
    )


def _choice(given: str | dict[str, Any] | None) -> ToolChoice:
    if given is None or given == "auto":
        return ToolChoice()
    if given == "none":
        return ToolChoice("none")
    if given == "required":
        return ToolChoice("required")
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(given, dict) and kind == "function":
        return ToolChoice("required", frozenset([_named(given, "tool_choice")]))
    if isinstance(given, dict) and kind == "allowed_tools":
        return _allowed(given.get("allowed_tools"))
    raise invalid(
        "Invalid 'tool_choice': expected 'none', 'auto', 'required', or an object of type 'function' or "
        "'allowed_tools'.",
        "tool_choice",
    )


def _allowed(allowed: Any) -> ToolChoice:
    path = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict):
        raise invalid(f"Invalid '{path}': expected an object with 'mode' and 'tools'.", path, "invalid_type")
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise invalid(f"Invalid '{path}.mode': expected 'auto' or 'required'.", f"{path}.mode")
    if not isinstance(tools, list) or not tools:
        raise invalid(f"Invalid '{path}.tools': expected an array of tools.", f"{path}.tools", "invalid_type")
    names = frozenset(_named(entry, f"{path}.tools[{index}]") for index, entry in enumerate(tools))
    return ToolChoice("required" if mode == "required" else "auto", names)


def _named(entry: Any, path: str) -> str:
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(function, dict) or entry.get("type") != "function":
        raise invalid(f"Invalid '{path}': expected a function and its name.", path, "invalid_type")
    return check_name(function.get("name"), f"{path}.function.name")
