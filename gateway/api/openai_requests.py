"""What a client may send to the OpenAI routes, and what of it this server takes.

Three kinds of parameters: those of the structs below are honoured; those that do not change the answer are accepted and
named in the answer's `x-radixgate-ignored`; everything else would change the answer, or is unknown, and is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec

from engine.protocol import Hello, Sampling
from gateway.api.bodies import convert
from gateway.api.openai_caching import PromptCacheOptions
from gateway.errors import ApiError, invalid, unsupported

MAX_N = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 1000
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_SALT_CHARS = 256
MAX_PROMPTS = 128
DEFAULT_COMPLETION_TOKENS = 16

_INT64 = 2**63


ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    include_obfuscation: bool = False


class CommonBody(msgspec.Struct, kw_only=True):
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    logit_bias: dict[str, float] = msgspec.field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    service_tier: ServiceTier | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    cache_salt: str | None = None
    use_cache: bool = True
    ignored: tuple[str, ...] = ()
    """Names of what was sent and has no effect here."""

    @property
    def include_usage(self) -> bool:
        return self.stream and self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatBody(CommonBody, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class CompletionBody(CommonBody, kw_only=True):
    prompt: str | list[Any]
    best_of: int | None = None
    logprobs: int | None = None


Kind = TypeVar("Kind", bound=CommonBody)

_HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    )
)
_INERT: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "echo": (False,),
    "suffix": ("",),
}
"""Parameters that this server cannot honour, with the values that ask for nothing."""
_UNSUPPORTED = frozenset(
    (
        "audio",
        "web_search_options",
        "moderation",
        "chat_template",
        "documents",
        "truncate_prompt_tokens",
        "prompt_logprobs",
        "use_beam_search",
        "length_penalty",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "priority",
        "logits_processors",
        "bad_words",
        "allowed_token_ids",
    )
)


def read(body: dict[str, Any], kind: type[Kind], cache_salt_header: str | None = None) -> Kind:
    """The body as a checked `kind`. Raises ApiError naming the first parameter that is at fault."""
    fields = {field.name for field in msgspec.structs.fields(kind)} - {"ignored"}
    ignored = []
    for name, value in body.items():
        if name in _HARMLESS:
            if value is not None:
                ignored.append(name)
        elif name not in fields and value is not None:
            _refuse_unless_inert(name, value)
    call = convert({name: value for name, value in body.items() if name in fields}, kind)
    call.ignored = tuple(sorted(ignored))
    call.cache_salt = _salt(call.cache_salt, cache_salt_header)
    _check(call)
    if isinstance(call, ChatBody):
        _check_chat(call)
    elif isinstance(call, CompletionBody):
        _check_completion(call)
    return call


def _refuse_unless_inert(name: str, value: Any) -> None:
    if name in _INERT:
        if not any(type(value) is type(inert) and value == inert for inert in _INERT[name]):
            raise unsupported(name)
    elif name in _UNSUPPORTED:
        raise unsupported(name)
    else:
        shown = name if len(name) <= 100 else name[:100] + "..."
        raise ApiError(400, "unknown_parameter", f"Unknown parameter: '{shown}'.", shown)


# --- checks -----------------------------------------------------------------------------------------------------------


def _within(param: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise invalid(f"Invalid '{param}': {value!r:.40} is not between {low} and {high}.", param)


def _check(call: CommonBody) -> None:
    _within("n", call.n, 1, MAX_N)
    _within("temperature", call.temperature, 0, 2)
    _within("top_p", call.top_p, 0, 1)
    if call.top_p == 0:
        raise invalid("Invalid 'top_p': it must be above 0.", "top_p")
    _within("top_k", call.top_k, -1, _INT64 - 1)
    _within("min_p", call.min_p, 0, 1)
    _within("presence_penalty", call.presence_penalty, -2, 2)
    _within("frequency_penalty", call.frequency_penalty, -2, 2)
    _within("repetition_penalty", call.repetition_penalty, 0.01, 100)
    if call.seed is not None:
        _within("seed", call.seed, -_INT64, _INT64 - 1)
    _check_stops(call)
    if call.max_tokens is not None:
        _within("max_tokens", call.max_tokens, 1, _INT64 - 1)
    _within("min_tokens", call.min_tokens, 0, _INT64 - 1)
    if call.metadata is not None and (
        len(call.metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in call.metadata.items())
    ):
        raise invalid("Invalid 'metadata': at most 16 pairs, of 64 and 512 characters.", "metadata")
    if call.stream_options is not None and not call.stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")


def _check_stops(call: CommonBody) -> None:
    if len(call.stops) > MAX_STOPS:
        raise invalid(f"Invalid 'stop': {len(call.stops)} strings; the limit is {MAX_STOPS}.", "stop")
    for stop in call.stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid(f"Invalid 'stop': a stop string has 1 to {MAX_STOP_CHARS} characters.", "stop")
    if len(call.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"Invalid 'stop_token_ids': the limit is {MAX_STOP_TOKEN_IDS} ids.", "stop_token_ids")
    if len(call.logit_bias) > MAX_LOGIT_BIAS:
        raise invalid(f"Invalid 'logit_bias': the limit is {MAX_LOGIT_BIAS} tokens.", "logit_bias")


def _check_chat(call: ChatBody) -> None:
    if call.max_completion_tokens is not None:
        _within("max_completion_tokens", call.max_completion_tokens, 1, _INT64 - 1)
        if call.max_tokens is not None and call.max_tokens != call.max_completion_tokens:
            raise invalid("'max_tokens' and 'max_completion_tokens' differ; send one of them.", "max_tokens")
    if call.top_logprobs is not None:
        _within("top_logprobs", call.top_logprobs, 0, 20)
        if not call.logprobs:
            raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    if call.continue_final_message and call.add_generation_prompt:
        raise invalid(
            "'add_generation_prompt' begins a new message and 'continue_final_message' does not: send one of them.",
            "continue_final_message",
        )


def _check_completion(call: CompletionBody) -> None:
    if call.logprobs is not None:
        _within("logprobs", call.logprobs, 0, 5)
    if call.best_of is not None and call.best_of != call.n:
        raise unsupported("best_of", "'best_of' other than 'n' is not supported by this server.")


def _salt(in_body: str | None, in_header: str | None) -> str:
    if in_body and in_header and in_body != in_header:
        raise invalid("'cache_salt' and the header X-Cache-Salt differ; send one of them.", "cache_salt")
    salt = in_body or in_header or ""
    if len(salt) > MAX_SALT_CHARS:
        raise invalid(f"Invalid 'cache_salt': the limit is {MAX_SALT_CHARS} characters.", "cache_salt")
    return salt


# --- what needs the model ---------------------------------------------------------------------------------------------


def sampling(call: CommonBody, hello: Hello, n_prompt: int) -> Sampling:
    """How the engine is to pick tokens. Raises ApiError.

    A request for more tokens than fit beside the prompt ends at the model's length with finish reason `length`.
    """
    left = max(1, hello.max_model_len - n_prompt)
    if isinstance(call, ChatBody):
        wanted = call.max_tokens or call.max_completion_tokens or left
        logprobs = (call.top_logprobs or 0) if call.logprobs else None
    else:
        wanted = call.max_tokens or DEFAULT_COMPLETION_TOKENS
        logprobs = call.logprobs if isinstance(call, CompletionBody) else None
    if call.min_tokens > wanted:
        raise invalid(f"Invalid 'min_tokens': {call.min_tokens} is above the limit of {wanted} tokens.", "min_tokens")
    _check_ids("stop_token_ids", call.stop_token_ids, hello.vocab_size)
    max_tokens = min(wanted, left)
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min(call.min_tokens, max_tokens),
        temperature=call.temperature,
        top_p=call.top_p,
        top_k=0 if call.top_k == -1 else min(call.top_k, hello.vocab_size),
        min_p=call.min_p,
        presence_penalty=call.presence_penalty,
        frequency_penalty=call.frequency_penalty,
        repetition_penalty=call.repetition_penalty,
        seed=call.seed,
        logit_bias=_logit_bias(call.logit_bias, hello.vocab_size),
        stop_token_ids=tuple(call.stop_token_ids),
        ignore_eos=call.ignore_eos,
        logprobs=logprobs,
    )


def _logit_bias(given: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias = []
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise invalid(f"Invalid 'logit_bias': {key[:20]!r} is no token id below {vocab_size}.", "logit_bias")
        _within("logit_bias", value, -100, 100)
        bias.append((int(key), float(value)))
    return tuple(sorted(bias))


def _check_ids(param: str, ids: Iterable[Any], vocab_size: int) -> None:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise invalid(f"Invalid '{param}': {token_id!r:.40} is no token id below {vocab_size}.", param)


def prompts_of(call: CompletionBody, vocab_size: int) -> list[str | array[int]]:
    """The prompts of a completion: texts, or token ids. Raises ApiError."""
    given = call.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid("Invalid 'prompt': the list is empty.", "prompt")
    if all(type(item) is int for item in given):
        _check_ids("prompt", given, vocab_size)
        return [array("i", given)]
    if len(given) > MAX_PROMPTS:
        raise invalid(f"Invalid 'prompt': {len(given)} prompts; the limit is {MAX_PROMPTS}.", "prompt")
    prompts: list[str | array[int]] = []
    for index, item in enumerate(given):
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item:
            _check_ids(f"prompt[{index}]", item, vocab_size)
            prompts.append(array("i", item))
        else:
            raise invalid(
                f"Invalid 'prompt[{index}]': send a string, a list of strings, token ids, or a list of those.",
                f"prompt[{index}]", "invalid_type",
            )  # fmt: skip
    return prompts
