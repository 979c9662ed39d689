"""The JSON that OpenAI's clients read, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from engine.protocol import TokenLogprob
from gateway.accounting import Usage
from gateway.core import (
    Completed,
    Event,
    OutputFinished,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
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
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    logprobs: list[ShownLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, item: Event) -> None:
        if isinstance(item, TextDelta):
            self.text.append(item.text)
            self.logprobs += item.logprobs
        elif isinstance(item, ReasoningDelta):
            self.reasoning.append(item.text)
        elif isinstance(item, ToolCallStarted):
            self.calls.append(Call(item.id, item.name))
        elif isinstance(item, ToolCallDelta):
            self.calls[item.call_index].arguments.append(item.arguments)
        elif isinstance(item, OutputFinished):
            self.finish_reason = item.finish_reason


@dataclass
class Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


def usage_json(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    """`cache_write_tokens` are the leased ones: an unleased write is ordinary input to a vendor's client.

    `cost` is in USD, `cost_nano_usd` the same exactly.
    """
    tokens = usage.tokens
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.output,
        "total_tokens": tokens.prompt + tokens.output,
        "prompt_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": tokens.leased},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "cost": usage.cost_nano_usd / NANO_USD,
        "cost_nano_usd": usage.cost_nano_usd,
    }


class Shapes(Protocol):
    """One API's JSON."""

    def first(self, index: int, item: Event) -> bytes:
        """The chunk that begins a choice, before its first event's; may be empty."""

    def event(self, index: int, item: Event) -> bytes:
        """The chunk of an event of one output."""

    def usage(self, completed: Completed) -> bytes: ...
    def whole(self, choices: Sequence[Choice], completed: Completed) -> bytes: ...


class Head(NamedTuple):
    """What all of one answer's objects say."""

    id: str
    created: int
    model: str
    fingerprint: str
    service_tier: str | None = None


class _Frame:
    """What all chunks of one answer share, serialized once."""

    def __init__(self, kind: str, head: Head, include_usage: bool) -> None:
        self.head: dict[str, Any] = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        if head.service_tier is not None:
            # There is one tier, whichever was asked for.
            self.head["service_tier"] = "default"
        self._before = b"data: " + orjson.dumps(self.head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        return self._before + choice + self._after

    def usage(self, completed: Completed) -> bytes:
        usage = usage_json(completed.usage, completed.reasoning_tokens)
        return event(orjson.dumps({**self.head, "choices": [], "usage": usage}))

    def whole(self, kind: str, choices: list[dict[str, Any]], completed: Completed) -> bytes:
        usage = usage_json(completed.usage, completed.reasoning_tokens)
        return orjson.dumps({**self.head, "object": kind, "choices": choices, "usage": usage})


class ChatShapes:
    def __init__(self, head: Head, include_usage: bool, tokenizer: Tokenizer) -> None:
        self._frame = _Frame("chat.completion.chunk", head, include_usage)
        self._tokenizer = tokenizer

    def first(self, index: int, item: Event) -> bytes:
        if isinstance(item, ToolCallStarted):
            return self._delta(index, b'{"role":"assistant","content":null,"refusal":null}')
        return self._delta(index, b'{"role":"assistant","content":"","refusal":null}')

    def event(self, index: int, item: Event) -> bytes:
        match item:
            case TextDelta(text=text, logprobs=logprobs):
                shown = orjson.dumps(self._logprobs(logprobs)) if logprobs else b"null"
                return self._delta(index, b'{"content":%b}' % orjson.dumps(text), shown)
            case ReasoningDelta(text=text):
                return self._delta(index, b'{"reasoning_content":%b}' % orjson.dumps(text))
            case ToolCallStarted(call_index=at, id=call_id, name=name):
                call = {"index": at, **_call_json(call_id, name, "")}
                return self._delta(index, orjson.dumps({"tool_calls": [call]}))
            case ToolCallDelta(call_index=at, arguments=arguments):
                call = {"index": at, "function": {"arguments": arguments}}
                return self._delta(index, orjson.dumps({"tool_calls": [call]}))
            case OutputFinished(finish_reason=reason):
                return self._delta(index, b"{}", b"null", orjson.dumps(reason))
        return b""

    def usage(self, completed: Completed) -> bytes:
        return self._frame.usage(completed)

    def whole(self, choices: Sequence[Choice], completed: Completed) -> bytes:
        shapes = [
            {
                "index": index,
                "message": _message_json(choice),
                "logprobs": self._logprobs(choice.logprobs) if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._frame.whole("chat.completion", shapes, completed)

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


def _message_json(choice: Choice) -> dict[str, Any]:
    """`reasoning_content` and `tool_calls` are there only when the model thought or called."""
    text = "".join(choice.text)
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if choice.calls else ""), "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = "".join(choice.reasoning)
    if choice.calls:
        message["tool_calls"] = [_call_json(call.id, call.name, "".join(call.arguments)) for call in choice.calls]
    return message


def _call_json(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class CompletionShapes:
    def __init__(self, head: Head, include_usage: bool, tokenizer: Tokenizer) -> None:
        self._frame = _Frame("text_completion", head, include_usage)
        self._tokenizer = tokenizer

    def first(self, index: int, item: Event) -> bytes:
        return b""

    def event(self, index: int, item: Event) -> bytes:
        match item:
            case TextDelta(text=text, logprobs=logprobs):
                shown = orjson.dumps(self._logprobs(logprobs)) if logprobs else b"null"
                return self._choice(index, orjson.dumps(text), shown)
            case OutputFinished(finish_reason=reason):
                return self._choice(index, b'""', b"null", orjson.dumps(reason))
        return b""

    def usage(self, completed: Completed) -> bytes:
        return self._frame.usage(completed)

    def whole(self, choices: Sequence[Choice], completed: Completed) -> bytes:
        shapes = [
            {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": self._logprobs(choice.logprobs) if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return self._frame.whole("text_completion", shapes, completed)

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
