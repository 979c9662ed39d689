"""Calls as Qwen's coding models write them: a tag for the function, and one for each of its parameters.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is text where the function's schema says string; elsewhere it is JSON, and text if it is none. A line break
after the opening tag and one before the closing tag belong to the tags.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping

from gateway.output_reader import Grammar, Reader
from gateway.tool_calls import Offered

_VALUE_END = "</parameter>"
_MAX_TAG_CHARS = 256


def qwen_xml(reader: Reader, offered: Offered, most: int | None = None) -> Grammar:
    opening = "<tool_call>"
    while (yield from reader.show_until("text", opening)):
        yield from reader.literal(opening)
        yield from reader.spaces()
        name = yield from _tag(reader, "<function=")
        if name is None or name not in offered:
            reader.as_text()
            continue
        reader.give("call", reader.position - reader.given, name)
        reader.give("arguments", 0, "{")
        properties = offered[name].get("properties") or {}
        n_given = 0
        while True:
            yield from reader.spaces()
            key = yield from _tag(reader, "<parameter=")
            if key is None:
                break
            yield from reader.literal("\n")
            reader.drop()
            reader.give("arguments", 0, f"{', ' if n_given else ''}{json.dumps(key)}: ")
            n_given += 1
            schema = properties.get(key)
            if isinstance(schema, Mapping) and schema.get("type") == "string":
                yield from _text_value(reader)
            else:
                yield from _json_value(reader)
        reader.give("arguments", 0, "}")
        for closing in ("</function>", "</tool_call>"):
            yield from reader.spaces()
            yield from reader.literal(closing)
        reader.drop()
        if reader.calls == most:
            return


def _tag(reader: Reader, opening: str) -> Generator[None, None, str | None]:
    """Passes over `<opening NAME>`; None, where the reader stood, when something else comes."""
    if not (yield from reader.literal(opening)):
        return None
    while (at := reader.buffer.find(">", reader.position)) < 0:
        if len(reader.buffer) - reader.position > _MAX_TAG_CHARS or not (yield from reader.more()):
            return None
    name = reader.buffer[reader.position : at].strip()
    reader.position = at + 1
    return name


def _text_value(reader: Reader) -> Grammar:
    """Hands out the text as it comes, as a string of JSON."""
    reader.give("arguments", 0, '"')
    while (at := reader.buffer.find(_VALUE_END, reader.given)) < 0:
        # What may be the closing tag, or the line break before it, waits.
        safe = max(reader.given, len(reader.buffer) - len(_VALUE_END))
        _give_escaped(reader, safe)
        if not (yield from reader.more()):
            at = len(reader.buffer)
            break
    end = at - 1 if at > reader.given and reader.buffer[at - 1] == "\n" else at
    _give_escaped(reader, end)
    reader.give("arguments", 0, '"')
    reader.position = min(len(reader.buffer), at + len(_VALUE_END))
    reader.drop()


def _give_escaped(reader: Reader, end: int) -> None:
    if end > reader.given:
        raw = reader.buffer[reader.given : end]
        reader.give("arguments", len(raw), json.dumps(raw, ensure_ascii=False)[1:-1])


def _json_value(reader: Reader) -> Grammar:
    while (at := reader.buffer.find(_VALUE_END, reader.position)) < 0:
        if not (yield from reader.more()):
            at = len(reader.buffer)
            break
    raw = reader.buffer[reader.position : at].strip()
    reader.position = min(len(reader.buffer), at + len(_VALUE_END))
    try:
        value = json.dumps(json.loads(raw), allow_nan=False)
    except (ValueError, RecursionError):
        value = json.dumps(raw, ensure_ascii=False)
    reader.give("arguments", reader.position - reader.given, value)
