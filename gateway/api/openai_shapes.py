"""The JSON that OpenAI's clients read, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from engine.protocol import TokenLogprob
from gateway.accounting import Usage
from gateway.sse import event
from gateway.streams import ShownLogprob
from gateway.tokenizer import Tokenizer

DONE = event(b"[DONE]")
# JSON has no infinity; a token that cannot be drawn gets this.
MIN_LOGPROB = -9999.0
NANO_USD = 10**9


@dataclass
class Choice:
    """One output, gathered."""

    text: list[str] = field(default_factory=list)
    logprobs: list[ShownLogprob] = field(default_factory=list)
    finish_reason: str | None = None


def usage_json(usage: Usage) -> dict[str, Any]:
    """`cache_write_tokens` are the leased ones: an unleased write is ordinary input to a vendor's client.

    `cost` is in USD, `cost_nano_usd` the same exactly.
    """
    tokens = usage.tokens
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.output,
        "total_tokens": tokens.prompt + tokens.output,
        "prompt_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": tokens.leased},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "cost": usage.cost_nano_usd / NANO_USD,
        "cost_nano_usd": usage.cost_nano_usd,
    }


class Shapes(Protocol):
    """One API's JSON."""

    def first(self, index: int) -> bytes:
        """The chunk that begins a choice; may be empty."""

    def text(self, index: int, text: str, logprobs: Sequence[ShownLogprob]) -> bytes: ...
    def finish(self, index: int, reason: str) -> bytes: ...
    def usage(self, usage: Usage) -> bytes: ...
    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes: ...


class _Frame:
    """What all chunks of one answer share, serialized once."""

    def __init__(
        self, kind: str, call_id: str, created: int, model: str, fingerprint: str, include_usage: bool
    ) -> None:
        self.head = {
            "id": call_id, "object": kind, "created": created, "model": model, "system_fingerprint": fingerprint
        }  # fmt: skip
        self._before = b"data: " + orjson.dumps(self.head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        return self._before + choice + self._after

    def usage(self, usage: Usage) -> bytes:
        return event(orjson.dumps({**self.head, "choices": [], "usage": usage_json(usage)}))

    def whole(self, kind: str, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return orjson.dumps({**self.head, "object": kind, "choices": choices, "usage": usage_json(usage)})


class ChatShapes:
    def __init__(
        self, call_id: str, created: int, model: str, fingerprint: str, include_usage: bool, tokenizer: Tokenizer
    ) -> None:
        self._frame = _Frame("chat.completion.chunk", call_id, created, model, fingerprint, include_usage)
        self._tokenizer = tokenizer

    def first(self, index: int) -> bytes:
        return self._delta(index, b'{"role":"assistant","content":"","refusal":null}')

    def text(self, index: int, text: str, logprobs: Sequence[ShownLogprob]) -> bytes:
        shown = orjson.dumps(self._logprobs(logprobs)) if logprobs else b"null"
        return self._delta(index, b'{"content":%b}' % orjson.dumps(text), shown)

    def finish(self, index: int, reason: str) -> bytes:
        return self._delta(index, b"{}", b"null", orjson.dumps(reason))

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        shapes = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": self._logprobs(choice.logprobs) if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._frame.whole("chat.completion", shapes, usage)

    def _delta(self, index: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        return self._frame.chunk(
            b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, reason)
        )

    def _logprobs(self, shown: Sequence[ShownLogprob]) -> dict[str, Any]:
        content = [
            {**self._token(one.logprob.token_id, one.logprob.logprob),
             "top_logprobs": [self._token(*alternative) for alternative in one.logprob.top]}
            for one in shown
        ]  # fmt: skip
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.shown_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionShapes:
    def __init__(
        self, call_id: str, created: int, model: str, fingerprint: str, include_usage: bool, tokenizer: Tokenizer
    ) -> None:
        self._frame = _Frame("text_completion", call_id, created, model, fingerprint, include_usage)
        self._tokenizer = tokenizer

    def first(self, index: int) -> bytes:
        return b""

    def text(self, index: int, text: str, logprobs: Sequence[ShownLogprob]) -> bytes:
        shown = orjson.dumps(self._logprobs(logprobs)) if logprobs else b"null"
        return self._choice(index, orjson.dumps(text), shown)

    def finish(self, index: int, reason: str) -> bytes:
        return self._choice(index, b'""', b"null", orjson.dumps(reason))

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        shapes = [
            {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": self._logprobs(choice.logprobs) if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._frame.whole("text_completion", shapes, usage)

    def _choice(self, index: int, text: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        return self._frame.chunk(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (index, text, logprobs, reason)
        )

    def _logprobs(self, shown: Sequence[ShownLogprob]) -> dict[str, Any]:
        return {
            "tokens": [self._token(one.logprob.token_id) for one in shown],
            "token_logprobs": [_finite(one.logprob.logprob) for one in shown],
            "top_logprobs": [self._alternatives(one.logprob) for one in shown],
            "text_offset": [one.offset for one in shown],
        }

    def _alternatives(self, logprob: TokenLogprob) -> dict[str, float] | None:
        """By the token's text; of two with the same text (parts of characters) the likelier one."""
        best: dict[str, float] = {}
        for token_id, value in logprob.top:
            best.setdefault(self._token(token_id), _finite(value))
        return best or None

    def _token(self, token_id: int) -> str:
        return self._tokenizer.shown_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
