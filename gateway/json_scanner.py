"""Follows a JSON object or array (RFC 8259) that arrives in pieces, to where it ends or stops being JSON."""

from __future__ import annotations

import re

MAX_DEPTH = 200
MAX_SCALAR_CHARS = 400

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[^\s,:\[\]{}\"]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_SPACES = frozenset(" \t\n\r")
_CLOSER = {"{": "}", "[": "]"}


class NotJson(Exception):
    """`at`: index, in the text that was fed last, of the first character that cannot follow."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class JsonScanner:
    """Feed it text until it is `complete`. Amortized O(1) per character."""

    def __init__(self) -> None:
        self.complete = False
        self._closers: list[str] = []
        # What may come next: a value, a key, ":" or ","; `_may_close` tells whether the container may end instead.
        self._expected = "value"
        self._may_close = False
        self._in_string = False
        self._is_key = False
        self._escape = ""
        self._scalar: str | None = None
        """The number or literal that is being read."""

    def feed(self, text: str) -> int:
        """How many of these characters belong to the value. Raises NotJson."""
        at = 0
        while at < len(text) and not self.complete:
            if self._in_string:
                at = self._string(text, at)
            elif self._scalar is not None:
                at = self._read_scalar(text, at)
            elif text[at] in _SPACES:
                at += 1
            else:
                self._structure(text[at], at)
                at += self._scalar is None
        return at

    def _structure(self, character: str, at: int) -> None:
        if self._may_close and character == self._closers[-1]:
            self._closers.pop()
            self._ended()
        elif self._expected in (",", ":"):
            if character != self._expected:
                raise NotJson(at)
            self._expected = "key" if character == "," and self._closers[-1] == "}" else "value"
            self._may_close = False
        elif character == '"' and self._closers:
            self._in_string, self._is_key = True, self._expected == "key"
        elif self._expected == "key":
            raise NotJson(at)
        elif character in _CLOSER and len(self._closers) < MAX_DEPTH:
            self._closers.append(_CLOSER[character])
            self._expected, self._may_close = ("key" if character == "{" else "value"), True
        elif self._closers and (character.isalnum() or character == "-"):
            self._scalar = ""
        else:
            raise NotJson(at)

    def _string(self, text: str, at: int) -> int:
        if self._escape:
            return self._escaped(text, at)
        plain = _PLAIN.match(text, at)
        assert plain is not None
        at = plain.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escape = "\\"
        elif text[at] == '"':
            self._in_string = False
            if self._is_key:
                self._expected, self._may_close, self._is_key = ":", False, False
            else:
                self._ended()
        else:
            raise NotJson(at)
        return at + 1

    def _escaped(self, text: str, at: int) -> int:
        """The characters after a backslash: one, or `u` and four digits."""
        character = text[at]
        self._escape += character
        if len(self._escape) == 2:
            if character not in '"\\/bfnrtu':
                raise NotJson(at)
            if character != "u":
                self._escape = ""
        elif character not in _HEX:
            raise NotJson(at)
        elif len(self._escape) == 6:
            self._escape = ""
        return at + 1

    def _read_scalar(self, text: str, at: int) -> int:
        word = _WORD.match(text, at)
        assert word is not None and self._scalar is not None
        self._scalar += word[0]
        if len(self._scalar) > MAX_SCALAR_CHARS or (word.end() < len(text) and not _SCALAR.fullmatch(self._scalar)):
            raise NotJson(at)
        if word.end() < len(text):
            self._scalar = None
            self._ended()
        return word.end()

    def _ended(self) -> None:
        """A value inside the innermost container has ended."""
        self.complete = not self._closers
        self._expected, self._may_close = ",", True
