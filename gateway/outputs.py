"""One output of a request, from the engine's tokens to the events that a client sees."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from engine.protocol import Delta, TokenLogprob
from gateway.events import Event, OutputFinished, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from gateway.output_format import OutputFormat
from gateway.output_reader import OutputParser, Piece
from gateway.streams import OutputText, ShownLogprob
from gateway.tokenizer import Tokenizer


class Change(NamedTuple):
    events: list[Event]
    stopped_at: int | None = None
    """Set when the gateway ends the output: the count of its tokens up to there."""


class Output:
    def __init__(
        self, index: int, tokenizer: Tokenizer, output_format: OutputFormat, stops: Sequence[str], min_tokens: int
    ) -> None:
        self.index = index
        self.n_tokens = 0
        self.finished = False
        self._text = OutputText(tokenizer.detokenizer(output_format.named_ids), stops, min_tokens)
        parser = output_format.parser()
        self._parsed = None if parser is None else _ParsedText(index, parser)

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._parsed is None else self._parsed.reasoning_tokens

    def push(self, delta: Delta) -> Change:
        """The engine's next tokens."""
        ids, logprobs = delta.token_ids, delta.logprobs
        if delta.stop_token_id is not None:
            # A stop token is counted, though it has no text.
            ids, logprobs = ids[:-1], logprobs[: len(ids) - 1]
        n_tokens = delta.n_tokens - (len(delta.token_ids) - len(ids))
        change = self._read(ids, n_tokens, logprobs, last=delta.finish_reason is not None)
        self.n_tokens = delta.n_tokens if change.stopped_at is None else change.stopped_at
        if change.stopped_at is not None:
            change.events.append(self._finish("stop"))
        elif delta.finish_reason in ("stop", "length"):
            change.events.append(self._finish(delta.finish_reason))
        # Of an output that failed or was cancelled, the request's end tells why.
        self.finished = self.finished or delta.finish_reason is not None
        return change

    def end(self, reason: str) -> list[Event]:
        """It ended without a last Delta: show what its text still holds."""
        events = self._read((), self.n_tokens, (), last=True).events
        return [*events, self._finish(reason)]

    def _read(self, ids: Sequence[int], n_tokens: int, logprobs: Sequence[TokenLogprob], *, last: bool) -> Change:
        if self._parsed is not None:
            return self._read_one_by_one(self._parsed, ids, n_tokens, logprobs, last=last)
        piece = self._text.push(ids, n_tokens, logprobs, last=last)
        shown = [TextDelta(self.index, piece.text, piece.logprobs)] if piece.text or piece.logprobs else []
        return Change([*shown], piece.stopped_at)

    def _read_one_by_one(
        self, parsed: _ParsedText, ids: Sequence[int], n_tokens: int, logprobs: Sequence[TokenLogprob], *, last: bool
    ) -> Change:
        """So that each token is known to be thought, said or called, and the output can end at any of them."""
        first = n_tokens - len(ids) + 1
        for at, token_id in enumerate(ids):
            parsed.token_begins(self._text.n_decoded)
            piece = self._text.push((token_id,), first + at, logprobs[at : at + 1])
            parsed.push(piece.text, piece.logprobs)
            if piece.stopped_at is not None:
                parsed.finish()
            if piece.stopped_at is not None or parsed.has_enough:
                return Change(parsed.take(), first + at)
        stopped_at = None
        if last:
            piece = self._text.push((), n_tokens, last=True)
            parsed.push(piece.text, piece.logprobs)
            parsed.finish()
            stopped_at = piece.stopped_at
        return Change(parsed.take(), stopped_at)

    def _finish(self, reason: str) -> OutputFinished:
        self.finished = True
        found = self._text.stop_sequence
        if reason != "length":
            called = self._parsed is not None and self._parsed.n_calls and found is None
            reason = "tool_calls" if called else "stop"
        return OutputFinished(self.index, reason, found)


class _ParsedText:
    """Text that is read for thinking and calls."""

    def __init__(self, output_index: int, parser: OutputParser) -> None:
        self._index = output_index
        self._parser = parser
        self._events: list[Event] = []
        self._n_read = 0
        self._token_starts: deque[int] = deque()
        self._logprobs: deque[ShownLogprob] = deque()
        self._has_arguments = True
        self.n_calls = 0
        self.reasoning_tokens = 0
        self._ended = False

    @property
    def has_enough(self) -> bool:
        """No further text is wanted."""
        return self._parser.done and not self._ended

    def token_begins(self, offset: int) -> None:
        """The next token's text begins at this character of the output."""
        self._token_starts.append(offset)

    def push(self, text: str, logprobs: Sequence[ShownLogprob]) -> None:
        self._logprobs += logprobs
        if text:
            self._take_in(self._parser.push(text))
        if self._parser.done:
            self._complete_call()

    def finish(self) -> None:
        self._ended = True
        self._take_in(self._parser.finish())
        self._complete_call()

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _take_in(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._n_read += piece.n_raw
            while self._token_starts and self._token_starts[0] < self._n_read:
                self._token_starts.popleft()
                self.reasoning_tokens += piece.kind == "reasoning"
            said = []
            while self._logprobs and self._logprobs[0].offset < self._n_read:
                said.append(self._logprobs.popleft())
            match piece.kind:
                case "text":
                    self._events.append(TextDelta(self._index, piece.text, tuple(said)))
                case "reasoning":
                    self._events.append(ReasoningDelta(self._index, piece.text))
                case "call":
                    self._complete_call()
                    call_id = f"call_{secrets.token_hex(12)}"
                    self._events.append(ToolCallStarted(self._index, self.n_calls, call_id, piece.text))
                    self.n_calls += 1
                    self._has_arguments = False
                case "arguments":
                    self._events.append(ToolCallDelta(self._index, self.n_calls - 1, piece.text))
                    self._has_arguments = True

    def _complete_call(self) -> None:
        if not self._has_arguments:
            self._has_arguments = True
            self._events.append(ToolCallDelta(self._index, self.n_calls - 1, "{}"))
