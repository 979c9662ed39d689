"""Token ids to text, a few ids at a time, without ever showing half a character.

Two ways, by what the tokenizer's decoder allows:

- A byte-level tokenizer (GPT-2's family) maps each id to fixed bytes, so text is an incremental UTF-8 decode of their
  concatenation: exact, and O(1) per token.
- Any other decoder (SentencePiece's family: metaspace, byte fallback, a stripped first space) gives an id's text only
  in context. There a window of recent ids is decoded twice, with and without the new ones, and the difference is the
  new text once it no longer ends in a replacement character.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes: an end of more ids than this that decodes badly stays bad.
_MAX_UNREAD_IDS = 8


class TokenTable(Protocol):
    """What a detokenizer needs of a tokenizer."""

    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...
    def fallback_byte(self, token_id: int) -> int | None: ...
    def decode(self, token_ids: list[int]) -> str: ...


class Detokenizer(Protocol):
    """The text of one output. Special tokens have none."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete."""

    def flush(self) -> str:
        """The rest, once no more ids come: an unfinished character is shown as U+FFFD."""


class ByteLevelDetokenizer:
    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._table.token_bytes, token_ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """Keeps `ids[:read]`, whose text is shown, as context for the rest.

    With byte fallback one unfinished character spoils the decode of the whole run of bytes before it, so its bytes are
    kept aside until it is complete.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._ids: list[int] = []
        self._aside: list[int] = []
        self._read = 0
        self._shown = ""

    def push(self, token_ids: Iterable[int]) -> str:
        # A special token decodes to nothing and would leave the next id without left context, so it is left out.
        self._aside += (token_id for token_id in token_ids if token_id not in self._table.special_ids)
        n_complete = len(self._aside) - self._unfinished(self._aside)
        self._ids += self._aside[:n_complete]
        self._aside = self._aside[n_complete:]
        text = self._table.decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read <= _MAX_UNREAD_IDS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        self._ids += self._aside
        self._aside = []
        return self._show(self._table.decode(self._ids))

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new:
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._shown = self._table.decode(self._ids)
        return new

    def _unfinished(self, ids: list[int]) -> int:
        """How many ids at the end are the first bytes of a character whose last bytes are still to come."""
        for n_bytes, token_id in enumerate(reversed(ids[-3:]), 1):
            byte = self._table.fallback_byte(token_id)
            if byte is None or byte < 0x80:
                return 0
            if byte >= 0xC0:
                length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
                return n_bytes if n_bytes < length else 0
        return 0


def byte_of_character() -> dict[str, int]:
    """The byte that each printable stand-in character means in a byte-level vocabulary.

    Printable Latin-1 stands for itself; the other bytes, in order, take the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
