"""The calls of functions in a model's output, as the model families write them.

Each grammar shows what is no call as text. A call is handed out as soon as its name is known and its arguments begin,
and the arguments as they come; one that goes wrong before that is text, one that goes wrong later keeps what the model
wrote. Only functions that the client offered are called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from enum import Enum
from typing import Any

from gateway.json_scanner import JsonScanner, NotJson
from gateway.output_reader import Grammar, Reader

Offered = Mapping[str, Mapping[str, Any]]
"""The functions that may be called: by name, the schema of the arguments."""

CallGrammar = Callable[[Reader, Offered, int | None], Grammar]
"""Reads calls of the functions offered; ends after so many, if it is given a number."""

_KEY = r'"(?:[^"\\\x00-\x1f]|\\.)*"'
_FIRST_KEY = re.compile(rf"\s*\{{\s*({_KEY})")
_HEADER = re.compile(
    rf'\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*({_KEY})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{\s*["}}])'
)
_CALL_KEYS = frozenset(['"name"', '"arguments"', '"parameters"', '"type"', '"id"'])


class Outcome(Enum):
    CALL = "a whole call"
    NO_CALL = "not a call: nothing of it has been handed out"
    BROKEN = "the arguments are no JSON, or the output ended in them"


def call_object(reader: Reader, offered: Offered) -> Generator[None, None, Outcome]:
    """Reads `{"name": ..., "arguments": {...}}` in any order of keys, from where the reader stands."""
    whole, arguments = JsonScanner(), None
    reader.mark = reader.position
    while True:
        broken = False
        try:
            reader.position += whole.feed(reader.buffer[reader.position :])
        except NotJson as error:
            reader.position += error.at
            broken = True
        if arguments is None:
            if not _may_be_call(reader):
                return Outcome.NO_CALL
            header = _HEADER.match(reader.buffer, reader.mark)
            if header and header.end() + 1 < reader.position:
                name = json.loads(header[1])
                if name not in offered:
                    return Outcome.NO_CALL
                reader.give("call", header.end() - reader.given, name)
                arguments = JsonScanner()
        if arguments is not None and not arguments.complete:
            new = reader.buffer[reader.given : reader.position]
            if used := arguments.feed(new):
                reader.give("arguments", used)
        if whole.complete or broken:
            break
        if not (yield from reader.more()):
            broken = True
            break
    if arguments is not None and arguments.complete:
        reader.drop()
        return Outcome.CALL
    if broken:
        return Outcome.NO_CALL if arguments is None else Outcome.BROKEN
    return _late_call(reader, offered)


def _may_be_call(reader: Reader) -> bool:
    """A JSON object that begins with another key is an answer and not a call, and is not held back."""
    first = _FIRST_KEY.match(reader.buffer, reader.mark)
    return first is None or first[1] in _CALL_KEYS


def _late_call(reader: Reader, offered: Offered) -> Outcome:
    """A complete object whose keys came in another order."""
    found = json.loads(reader.buffer[reader.mark : reader.position])
    if not isinstance(found, dict):
        return Outcome.NO_CALL
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return Outcome.NO_CALL
    name = found.get("name")
    if not isinstance(name, str) or name not in offered or not isinstance(arguments, dict):
        return Outcome.NO_CALL
    try:
        # Escaped, for an escape in the text may be half of a surrogate pair, which is no character.
        written = json.dumps(arguments, allow_nan=False)
    except ValueError:
        return Outcome.NO_CALL
    reader.give("call", reader.position - reader.given, name)
    reader.give("arguments", 0, written)
    return Outcome.CALL


def hermes(reader: Reader, offered: Offered, most: int | None = None) -> Grammar:
    """`<tool_call>{...}</tool_call>`, any number of them, text before and between. Also Qwen's."""
    opening, closing = "<tool_call>", "</tool_call>"
    while (yield from reader.show_until("text", opening)):
        yield from reader.literal(opening)
        yield from reader.spaces()
        outcome = yield from call_object(reader, offered)
        if outcome is Outcome.NO_CALL:
            reader.as_text()
            continue
        if outcome is Outcome.BROKEN:
            yield from reader.show_until("arguments", closing)
        yield from reader.spaces()
        yield from reader.literal(closing)
        reader.drop()
        if reader.calls == most:
            return


def bare_json(reader: Reader, offered: Offered, most: int | None = None) -> Grammar:
    """An answer that is nothing but calls: objects, one after the other or in an array, perhaps after Llama's
    `<|python_tag|>` or within a fence.
    """
    yield from reader.spaces()
    fenced = False
    if (yield from reader.literal("<|python_tag|>", "```json", "```")):
        fenced = True
        yield from reader.spaces()
    if (yield from reader.literal("[")):
        yield from reader.spaces()
    while (yield from reader.peek()) == "{":
        outcome = yield from call_object(reader, offered)
        if outcome is Outcome.NO_CALL:
            break
        if outcome is Outcome.BROKEN:
            yield from reader.show_until("arguments")
        if reader.calls == most:
            return
        yield from _separators(reader, ",;]`" if fenced else ",;]")
    reader.rewind()
    yield from reader.show_until("text")


def mistral(reader: Reader, offered: Offered, most: int | None = None) -> Grammar:
    """`[TOOL_CALLS][{...}, {...}]`, or in newer models `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    opening = "[TOOL_CALLS]"
    while (yield from reader.show_until("text", opening)):
        yield from reader.literal(opening)
        yield from reader.spaces()
        if (yield from reader.peek()) not in ("[", "{"):
            yield from _named_call(reader, offered)
        else:
            yield from reader.literal("[")
            yield from reader.spaces()
            while (yield from reader.peek()) == "{":
                outcome = yield from call_object(reader, offered)
                if outcome is Outcome.BROKEN:
                    yield from reader.show_until("arguments", opening)
                if outcome is not Outcome.CALL or reader.calls == most:
                    break
                yield from _separators(reader, ",]")
        if reader.calls == most:
            return
        reader.as_text()


def _named_call(reader: Reader, offered: Offered) -> Grammar:
    """`name[ARGS]{...}`, perhaps with `[CALL_ID]...` between."""
    start = reader.position - reader.given
    while (at := reader.buffer.find("{", reader.position)) < 0:
        if len(reader.buffer) - reader.position > 256 or not (yield from reader.more()):
            reader.position = len(reader.buffer)
            return
    head = reader.buffer[reader.given + start : at]
    name = head.split("[CALL_ID]")[0].removesuffix("[ARGS]").strip()
    reader.position = at
    if name not in offered:
        return
    reader.give("call", at - reader.given, name)
    arguments = JsonScanner()
    while not arguments.complete:
        try:
            used = arguments.feed(reader.buffer[reader.given :])
        except NotJson:
            yield from reader.show_until("arguments", "[TOOL_CALLS]")
            return
        if used:
            reader.give("arguments", used)
        if not arguments.complete and not (yield from reader.more()):
            return
    yield from reader.spaces()
    reader.drop()


def _separators(reader: Reader, characters: str) -> Grammar:
    while True:
        yield from reader.spaces()
        character = yield from reader.peek()
        if not character or character not in characters:
            reader.drop()
            return
        reader.position += 1


def argument_value(text: str) -> Any:
    """A call's arguments as templates want them: an object, or the text where it is none."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
