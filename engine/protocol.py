"""The messages between a gateway worker and an engine process. Standard library only.

A frame is a little-endian u32 byte count followed by that many bytes: a u32 length of the JSON text, the JSON text,
then the binary attachments. The JSON text is `[[message name, field values ...], attachment lengths]`; a `bytes` field
(token ids as little-endian int32) stands in the JSON as the index of its attachment. Fields are positional, so both
ends must speak the same PROTOCOL_VERSION: the engine's Hello carries it and the client refuses another.

One request's life: Submit -> Accepted (the prompt's bill, frozen) -> Delta ... -> Finished. A request that cannot be
served gets Finished with an error and no Accepted.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 256 * 1024 * 1024


class ProtocolError(Exception):
    """The peer sent bytes that are not a message of this version."""


# --- gateway -> engine ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to pick tokens. Zero or one switches a filter off, as in the vendors' APIs."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives to report per token: None reports nothing, 0 the chosen token alone."""


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The exact end of a reusable prefix, to be kept resident for ttl_s seconds after each read."""

    offset_tokens: int
    ttl_s: int


@dataclass(frozen=True, slots=True)
class Submit:
    request_id: str
    owner: str
    prompt_ids: bytes
    sampling: Sampling
    n: int = 1
    salt: str = ""
    """Narrows the owner's namespace; equal salts share."""
    use_cache: bool = True
    priority: int = 0
    queue_timeout_s: float | None = None
    breakpoints: tuple[Breakpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop string ended this output after n_tokens tokens: bill and publish no further."""

    request_id: str
    output_index: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client left. The engine frees the request's blocks and answers Finished with reason `cancelled`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Read-only: how much of this prompt is resident for this owner?"""

    probe_id: int
    owner: str
    prompt_ids: bytes
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Query:
    """An operator's question, off the hot path. Kinds: stats, invariants, flush."""

    query_id: int
    kind: str
    argument: dict[str, Any]


# --- engine -> gateway ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on every connection."""

    protocol_version: int
    model: str
    model_dir: str
    revision: str
    """Digest of the weights, dtype and KV dtype: prompts of different revisions never share blocks."""
    boot_id: str
    pid: int
    block_size: int
    n_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """Where each prompt token's attention state came from. Frozen at first admission; the bill is made from it.

    The five parts add up to the prompt; cached <= prompt - 1.
    """

    cached_private: int = 0
    cached_public: int = 0
    written_unleased: int = 0
    written_leased: tuple[tuple[int, int], ...] = ()
    """(ttl_s, tokens) pairs, one a class."""
    uncached: int = 0
    """Computed, and not kept in the tree."""

    @property
    def cached(self) -> int:
        return self.cached_private + self.cached_public

    @property
    def leased(self) -> int:
        return sum(tokens for _, tokens in self.written_leased)

    @property
    def written(self) -> int:
        return self.written_unleased + self.leased

    @property
    def prompt(self) -> int:
        return self.cached + self.written + self.uncached


@dataclass(frozen=True, slots=True)
class Accepted:
    request_id: str
    prompt: PromptRecord
    queue_s: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one output. `n_tokens` counts all of the output's tokens so far, these included."""

    request_id: str
    output_index: int
    token_ids: tuple[int, ...]
    n_tokens: int
    finish_reason: str | None = None
    """Set on the output's last Delta: stop, length, cancelled or error."""
    stop_token_id: int | None = None
    """The last id is this stop token: it counts as an output token and is not part of the text."""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineError:
    """Codes: context_length_exceeded, prompt_exceeds_pool, queue_full, queue_timeout, quarantined, step_failed,
    engine_died, draining, invalid_request, slow_client."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last message of a request: its totals."""

    request_id: str
    prompt: PromptRecord
    output_tokens: tuple[int, ...]
    """Billed tokens per output, after truncation by Stop."""
    finish_reasons: tuple[str, ...]
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preemptions: int = 0
    recovered_tokens: int = 0
    """Tokens found in the tree again after a preemption: shown, never billed."""
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    probe_id: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    query_id: int
    value: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """All that one step has to say to one connection, in order: one frame instead of many."""

    messages: tuple[Accepted | Delta | Finished, ...]


Message = Submit | Stop | Cancel | Probe | Query | Hello | Accepted | Delta | Finished | ProbeResult | Answer | Batch


# --- codec ------------------------------------------------------------------------------------------------------------

_RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (
        *(Submit, Stop, Cancel, Probe, Query, Hello, Accepted, Delta, Finished, ProbeResult, Answer, Batch),
        *(Sampling, Breakpoint, PromptRecord, TokenLogprob, EngineError),
    )
}
_MESSAGES = frozenset(record.__name__ for record in get_args(Message))
_FIELDS = {record: tuple(field.name for field in fields(record)) for record in _RECORDS.values()}
_HINTS = {record: tuple(get_type_hints(record)[name] for name in _FIELDS[record]) for record in _RECORDS.values()}
_U32 = struct.Struct("<I")


def encode(message: Message) -> bytes:
    """The message as one frame."""
    attachments: list[bytes] = []
    body = _plain(message, attachments)
    text = json.dumps([body, [len(part) for part in attachments]], separators=(",", ":"), allow_nan=False).encode()
    size = _U32.size + len(text) + sum(map(len, attachments))
    return b"".join((_U32.pack(size), _U32.pack(len(text)), text, *attachments))


class Decoder:
    """Turns a byte stream into messages: feed it what the socket gave, take what is complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Every message that `data` completes. Raises ProtocolError; the stream is unusable afterwards."""
        self._buffer += data
        while len(self._buffer) >= _U32.size:
            (size,) = _U32.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
            if len(self._buffer) < _U32.size + size:
                return
            frame = bytes(memoryview(self._buffer)[_U32.size : _U32.size + size])
            del self._buffer[: _U32.size + size]
            yield _decode_frame(frame)


def _decode_frame(frame: bytes) -> Message:
    try:
        (text_size,) = _U32.unpack_from(frame)
        body, sizes = json.loads(frame[_U32.size : _U32.size + text_size])
        attachments, start = [], _U32.size + text_size
        for size in sizes:
            attachments.append(frame[start : start + size])
            start += size
        if start != len(frame):
            raise ProtocolError(f"attachments end at byte {start} of a frame of {len(frame)}")
        if body[0] not in _MESSAGES:
            raise ProtocolError(f"unknown message {body[0]!r}")
        return cast(Message, _record(body, attachments))
    except (ValueError, TypeError, IndexError, KeyError, struct.error) as error:
        raise ProtocolError(f"not a message: {error}") from error


def _plain(value: Any, attachments: list[bytes]) -> Any:
    names = _FIELDS.get(type(value))
    if names is not None:
        return [type(value).__name__, *(_plain(getattr(value, name), attachments) for name in names)]
    if isinstance(value, tuple):
        return [_plain(item, attachments) for item in value]
    if isinstance(value, bytes):
        attachments.append(value)
        return len(attachments) - 1
    return value


def _record(body: list[Any], attachments: list[bytes]) -> Any:
    record = _RECORDS[body[0]]
    hints = _HINTS[record]
    if len(body) != len(hints) + 1:
        raise ProtocolError(f"{body[0]} has {len(body) - 1} fields instead of {len(hints)}")
    return record(*(_typed(value, hint, attachments) for value, hint in zip(body[1:], hints, strict=True)))


def _typed(value: Any, hint: Any, attachments: list[bytes]) -> Any:
    """`value` as parsed from JSON, checked against and turned into the field's type."""
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        members = get_args(hint)
        if value is None and NoneType in members:
            return None
        if isinstance(value, list) and value and value[0] in _RECORDS and _RECORDS[value[0]] in members:
            return _record(value, attachments)
        return _typed(value, next(member for member in members if member is not NoneType), attachments)
    if origin is tuple:
        if not isinstance(value, list):
            raise ProtocolError(f"expected a list, got {value!r:.80}")
        members = get_args(hint)
        if len(members) == 2 and members[1] is Ellipsis:
            return tuple(_typed(item, members[0], attachments) for item in value)
        return tuple(_typed(item, member, attachments) for item, member in zip(value, members, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise ProtocolError(f"expected an object, got {value!r:.80}")
        return value
    if hint in _FIELDS:
        if _RECORDS.get(value[0]) is not hint:
            raise ProtocolError(f"expected {hint.__name__}, got {value[0]!r}")
        return _record(value, attachments)
    if hint is bytes:
        return attachments[value]
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ProtocolError(f"expected {hint.__name__}, got {value!r:.80}")
    return value
