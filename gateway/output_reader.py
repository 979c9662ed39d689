"""What the grammars of model outputs are written with: a text that is still growing, and the pieces made of it.

A grammar is a generator over a Reader. It reads at `position` and yields where it needs more text; what it has made up
its mind about it hands out as pieces. Whatever the cuts of the text, the pieces joined are the same.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

Grammar = Generator[None, None, None]
Waiting = Generator[None, None, bool]
"""May wait for more text; the value says whether what was looked for is there."""

Kind = Literal["text", "reasoning", "call", "arguments", "markup"]


@dataclass(frozen=True, slots=True)
class Piece:
    kind: Kind
    text: str
    """To be shown; of a call, its function's name; of markup, nothing."""
    n_raw: int
    """How many characters of the output became this. They add up to the output."""


class Reader:
    def __init__(self, begun: str = "") -> None:
        """`begun`: text of the prompt that is read as if the model had written it."""
        self.buffer = begun
        self.position = 0
        self.given = 0
        """Up to here the buffer has been handed out as pieces."""
        self.mark = 0
        """A place that a grammar wants to come back to; moves with the buffer."""
        self.calls = 0
        """Calls that have begun."""
        self._final = False
        self._n_begun = len(begun)
        self._pieces: list[Piece] = []
        # Nothing but white space has come since the last call.
        self._after_call = False

    # --- from outside ---

    def push(self, text: str) -> None:
        cut = min(self.given, self.mark)
        self.buffer = self.buffer[cut:] + text
        self.position -= cut
        self.given -= cut
        self.mark -= cut

    def end(self) -> None:
        self._final = True

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # --- for grammars ---

    def more(self) -> Waiting:
        """Wait for more text. False: none comes."""
        if self._final:
            return False
        yield
        return True

    def spaces(self) -> Grammar:
        """Pass over white space."""
        while True:
            rest = self.buffer[self.position :]
            self.position += len(rest) - len(rest.lstrip())
            if self.position < len(self.buffer) or not (yield from self.more()):
                return

    def literal(self, *texts: str) -> Waiting:
        """Pass over the longest of `texts` that the output goes on with."""
        while True:
            rest = self.buffer[self.position :]
            undecided = any(text.startswith(rest) and text != rest for text in texts)
            if not undecided or not (yield from self.more()):
                break
        found = max((text for text in texts if rest.startswith(text)), key=len, default="")
        self.position += len(found)
        return bool(found)

    def peek(self) -> Generator[None, None, str]:
        """The next character; empty when the output has ended."""
        while self.position >= len(self.buffer):
            if not (yield from self.more()):
                return ""
        return self.buffer[self.position]

    def show_until(self, kind: Kind, *stops: str) -> Waiting:
        """Show text up to the first of `stops` and stand before it; False: the output ended first.

        White space right before it has been read and is not handed out yet.
        """
        longest = max(map(len, stops), default=0)
        while True:
            hits = [at for stop in stops if (at := self.buffer.find(stop, self.given)) >= 0]
            end = min(hits) if hits else len(self.buffer) - self._beginning(stops, longest)
            shown = self.buffer[self.given : end]
            if stops:
                shown = shown.rstrip()
            self._show(kind, shown)
            if hits:
                self.position = end
                return True
            self.position = len(self.buffer)
            if not (yield from self.more()):
                if self._after_call and not self.buffer[self.given :].strip():
                    self.drop()
                self._show(kind, self.buffer[self.given :])
                return False

    def give(self, kind: Kind, n_characters: int, text: str | None = None) -> None:
        """Hand out the next characters, as they are or shown as `text`."""
        raw = self.buffer[self.given : self.given + n_characters]
        self.given += n_characters
        self.position = max(self.position, self.given)
        self.mark = max(self.mark, self.given)
        begun = min(self._n_begun, n_characters)
        self._n_begun -= begun
        if kind == "call":
            self.calls += 1
        self._after_call = kind == "call" or (self._after_call and kind != "text")
        self._pieces.append(Piece(kind, raw if text is None else text, n_characters - begun))

    def drop(self) -> None:
        """What has been read so far is not shown."""
        if self.position > self.given:
            self.give("markup", self.position - self.given, "")

    def rewind(self) -> None:
        """Read again what has not been handed out."""
        self.position = self.given

    def as_text(self) -> None:
        """What has been read so far is text after all."""
        self._show("text", self.buffer[self.given : self.position])

    def _show(self, kind: Kind, text: str) -> None:
        if text:
            self.give(kind, len(text))

    def _beginning(self, stops: Sequence[str], longest: int) -> int:
        """Length of the longest end of the text that may become one of `stops`."""
        for length in range(min(len(self.buffer) - self.given, longest - 1), 0, -1):
            if any(stop.startswith(self.buffer[-length:]) for stop in stops):
                return length
        return 0


class OutputParser:
    """One output's text as pieces."""

    def __init__(self, reader: Reader, grammar: Grammar) -> None:
        self._reader = reader
        self._grammar = grammar
        self.done = False
        """The grammar wants no more text."""
        # What it makes of text that the prompt has begun comes with the first push.
        self._advance()

    @property
    def calls(self) -> int:
        return self._reader.calls

    def push(self, text: str) -> list[Piece]:
        self._reader.push(text)
        self._advance()
        return self._reader.take()

    def finish(self) -> list[Piece]:
        """The rest, once no more text comes."""
        self._reader.end()
        self._advance()
        return self._reader.take()

    def _advance(self) -> None:
        if not self.done:
            try:
                next(self._grammar)
            except StopIteration:
                self.done = True
        if self.done:
            self._reader.position = len(self._reader.buffer)
            self._reader.drop()
