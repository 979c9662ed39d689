"""One output's way from token ids to shown text: detokenized, cut at a stop string, each token's log probability beside
the text it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import TokenLogprob
from gateway.detokenize import Detokenizer


class StopFinder:
    """Finds stop strings in text that arrives in pieces.

    Text that may still turn out to begin a stop string is held back, so nothing of a stop string is ever shown.
    Of several that end in the same piece, the one that begins first wins.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is safe to show. `found` is set when a stop string ended it; push nothing after that."""
        text = self._held + text
        if may_stop:
            hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
            if hits:
                at, self.found = min(hits, key=lambda hit: hit[0])
                self._held = ""
                return text[:at]
        n_held = self._beginning_of_a_stop(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _beginning_of_a_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string without completing it."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class ShownLogprob:
    offset: int
    """Where the token's text begins in the output's text, in characters."""
    logprob: TokenLogprob


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Newly shown text, with the log probabilities of the tokens whose text it begins to show."""

    text: str
    logprobs: tuple[ShownLogprob, ...] = ()
    stopped_at: int | None = None
    """Set when a stop string ended the output: the count of tokens up to and with the one that completed it."""


class OutputText:
    """The text of one output, built from the engine's Deltas."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._finder = StopFinder(stops) if stops else None
        self._min_tokens = min_tokens
        self.n_decoded = 0
        """Characters that the tokens so far complete, held ones included."""
        self._n_shown = 0
        self._waiting: list[ShownLogprob] = []
        self.stop_sequence: str | None = None

    def push(
        self, token_ids: Sequence[int], n_tokens: int, logprobs: Sequence[TokenLogprob] = (), *, last: bool = False
    ) -> OutputPiece:
        """The next ids. `n_tokens` counts the output's tokens with these; `last`: no more come, show what is held."""
        if self._finder is None and not logprobs and not self._waiting:
            text = self._detokenizer.push(token_ids) + (self._detokenizer.flush() if last else "")
            self.n_decoded += len(text)
            self._n_shown = self.n_decoded
            return OutputPiece(text)
        shown: list[str] = []
        first = n_tokens - len(token_ids) + 1
        for offset, token_id in enumerate(token_ids):
            if offset < len(logprobs):
                self._waiting.append(ShownLogprob(self.n_decoded, logprobs[offset]))
            shown.append(self._find(self._detokenizer.push((token_id,)), may_stop=first + offset >= self._min_tokens))
            if self.stop_sequence is not None:
                return self._piece(shown, stopped_at=first + offset)
        if last:
            shown.append(self._find(self._detokenizer.flush(), may_stop=n_tokens >= self._min_tokens))
            if self.stop_sequence is not None:
                return self._piece(shown, stopped_at=n_tokens)
            shown.append(self._finder.flush() if self._finder else "")
        return self._piece(shown, everything=last)

    def _find(self, text: str, *, may_stop: bool) -> str:
        self.n_decoded += len(text)
        if self._finder is None:
            return text
        shown = self._finder.push(text, may_stop=may_stop)
        self.stop_sequence = self._finder.found
        return shown

    def _piece(self, shown: list[str], *, stopped_at: int | None = None, everything: bool = False) -> OutputPiece:
        text = "".join(shown)
        self._n_shown += len(text)
        # A token goes out with the first of its characters; one cut off by a stop string never does.
        released = self._waiting if everything else [w for w in self._waiting if w.offset < self._n_shown]
        self._waiting = self._waiting[len(released) :]
        return OutputPiece(text, tuple(released), stopped_at)
