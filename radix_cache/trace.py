"""Reads traces of requests: hash ids of prompt blocks, or texts.

A trace is JSON lines, gzipped or not. A line holds `hash_ids`, one id per block of the prompt, with `input_length` in
tokens (the last block may be short); or `text`, `prompt` or `messages`, which an encoder turns into token ids.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Encoder = Callable[[str], list[int]]

_MAX_ID = 2**31 - 1


class TraceError(ValueError):
    """A trace that cannot be replayed; the message names the file and the line."""


class TracedRequest(NamedTuple):
    ids: bytes
    """int32: one hash id per block, or one token id per token."""
    n_tokens: int
    time_s: float


class Trace(NamedTuple):
    requests: list[TracedRequest]
    hashed: bool
    """The ids stand for whole blocks."""


def utf8_bytes(text: str) -> list[int]:
    """The encoder when there is no tokenizer: a token is a byte."""
    return list(text.encode("utf-8", "replace"))


def read_trace(
    path: Path,
    *,
    block_tokens: int,
    encode: Encoder = utf8_bytes,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Trace:
    """Every request of the file, in its order. `progress` is told the fraction read.

    Raises TraceError, naming the line, for what is not a request: no JSON, no ids or text, an id twice in one prompt,
    a block with two parents, a length that does not fit its blocks.
    """
    parents: dict[int, int] = {}
    requests: list[TracedRequest] = []
    kinds: set[bool] = set()
    for number, line in _lines(path, progress):
        where = f"{path.name}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{where}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise TraceError(f"{where}: expected an object, got {type(record).__name__}")
        hashed = "hash_ids" in record
        kinds.add(hashed)
        if len(kinds) > 1:
            raise TraceError(f"{where}: a trace holds either hash_ids or texts, and this one holds both")
        request = _hashed(record, where, block_tokens, parents) if hashed else _encoded(record, where, encode)
        requests.append(request)
    return Trace(requests, hashed=True in kinds)


def _lines(path: Path, progress: Callable[[float], None]) -> Iterator[tuple[int, bytes]]:
    n_bytes = max(path.stat().st_size, 1)
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        lines = gzip.GzipFile(fileobj=raw) if zipped else raw
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
                if number % 500 == 0:
                    progress(min(raw.tell() / n_bytes, 1.0))
        except (EOFError, gzip.BadGzipFile) as error:
            raise TraceError(f"{path.name}: damaged gzip data: {error}") from None
    progress(1.0)


def _hashed(record: dict[str, Any], where: str, block_tokens: int, parents: dict[int, int]) -> TracedRequest:
    ids = record["hash_ids"]
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one <= _MAX_ID for one in ids):
        raise TraceError(f"{where}: hash_ids must be a list of integers from 0 to {_MAX_ID}")
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise TraceError(f"{where}: block {twice} stands twice in one prompt")
    for parent, block in zip([-1, *ids], ids, strict=False):
        if parents.setdefault(block, parent) != parent:
            raise TraceError(f"{where}: block {block} follows {parent} here and {parents[block]} before")
    n_tokens = record.get("input_length", len(ids) * block_tokens)
    if type(n_tokens) is not int or not (len(ids) - 1) * block_tokens < n_tokens <= len(ids) * block_tokens:
        raise TraceError(
            f"{where}: input_length {n_tokens!r} does not fit {len(ids)} blocks of {block_tokens} tokens; "
            "is --block-tokens right?"
        )
    return TracedRequest(array("i", ids).tobytes(), n_tokens, _seconds(record, where))


def _encoded(record: dict[str, Any], where: str, encode: Encoder) -> TracedRequest:
    text = record.get("text", record.get("prompt"))
    if text is None and isinstance(messages := record.get("messages"), list):
        if not all(isinstance(message, dict) for message in messages):
            raise TraceError(f"{where}: messages must be a list of objects")
        text = "".join(f"{message.get('role', '')}\n{message.get('content') or ''}\n" for message in messages)
    if not isinstance(text, str):
        raise TraceError(f"{where}: expected hash_ids, text, prompt or messages; got {', '.join(record) or 'nothing'}")
    ids = encode(text)
    return TracedRequest(array("i", ids).tobytes(), len(ids), _seconds(record, where))


def _seconds(record: dict[str, Any], where: str) -> float:
    """`timestamp` is in milliseconds."""
    value = record.get("timestamp", 0)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TraceError(f"{where}: timestamp {value!r} is not a number of milliseconds")
    return value / 1e3
