"""A request's body to typed values: every way it can be wrong is a 400 that names the parameter."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.requests import Request

from gateway.errors import ApiError, invalid

Body = TypeVar("Body", bound=msgspec.Struct)

# A broken body up to this size is parsed again, leniently, to say which parameter is at fault.
_DIAGNOSED_BYTES = 1_000_000
_PATH = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"required field `([^`]*)`")


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError."""
    return parse_object(await request.body())


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises ApiError."""
    if not raw:
        raise invalid("The request has no body; send a JSON object.", code="invalid_json")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _diagnosis(raw, error) from None
    if not isinstance(value, dict):
        raise invalid(f"The body is a JSON {_kind(value)}; send an object.", code="invalid_json")
    return value


def convert(value: dict[str, Any], kind: type[Body]) -> Body:
    """The object as a `kind`, null standing for absent. Raises ApiError."""
    present = {name: item for name, item in value.items() if item is not None}
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        path = _PATH.search(text)
        message = text[: path.start()] if path else text
        param = path[1] if path else None
        if missing := _MISSING.search(message):
            param = f"{param}.{missing[1]}" if param else missing[1]
            raise invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter") from None
        raise invalid(f"Invalid '{param or 'body'}': {message}.", param, "invalid_type") from None
    except RecursionError:
        raise invalid("The body is nested too deeply.", code="invalid_json") from None


def _diagnosis(raw: bytes, error: orjson.JSONDecodeError) -> ApiError:
    """What is wrong with a body that is no strict JSON: the parameter, where a lenient reader can tell."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as undecodable:
        return invalid(f"The body is not UTF-8 (byte {undecodable.start}).", code="invalid_json")
    if len(raw) <= _DIAGNOSED_BYTES:
        try:
            for param, value in _leaves(json.loads(text), ""):
                if isinstance(value, float) and not math.isfinite(value):
                    return invalid(f"Invalid '{param}': a number must be finite.", param or None, "invalid_type")
                if isinstance(value, str) and not value.isascii() and _has_surrogate(value):
                    return invalid(
                        f"Invalid '{param}': half of a surrogate pair is not a character.",
                        param or None,
                        "invalid_type",
                    )
        except (ValueError, RecursionError):
            pass
    return invalid(
        f"The body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}).", code="invalid_json"
    )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield path, name
            yield from _leaves(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
