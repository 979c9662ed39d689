"""The output format of gpt-oss: messages with a header, each on a channel.

`<|channel|>analysis<|message|>` thinking, `<|channel|>final<|message|>` the answer, and
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}` a call. A message ends with `<|end|>`,
`<|call|>` or `<|return|>`, and the next one begins with `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from gateway.output_reader import Grammar, Kind, Reader
from gateway.tool_calls import Offered

SPECIAL_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")
_MAX_HEADER_CHARS = 400


def harmony(reader: Reader, offered: Offered, most: int | None = None) -> Grammar:
    while (yield from reader.peek()):
        header = yield from _header(reader)
        if header is None:
            yield from reader.show_until("text")
            return
        recipient = _RECIPIENT.search(header)
        kind: Kind = "reasoning" if "<|channel|>analysis" in header else "text"
        if recipient and recipient[1] in offered:
            reader.give("call", reader.position - reader.given, recipient[1])
            kind = "arguments"
        else:
            reader.drop()
        if (yield from reader.show_until(kind, *_ENDS)):
            yield from reader.literal(*_ENDS[:3])
            reader.drop()
        if reader.calls == most:
            return


def _header(reader: Reader) -> Generator[None, None, str | None]:
    """Passes over the header; None when what comes is no message."""
    while True:
        rest = reader.buffer[reader.position :]
        at = rest.find("<|message|>")
        if at >= 0:
            reader.position += at + len("<|message|>")
            return rest[:at]
        if len(rest) > _MAX_HEADER_CHARS or not (yield from reader.more()):
            return None
