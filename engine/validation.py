"""What no model can run, refused at the door: a request that passes cannot make a step throw by its fields alone.

Whether a request fits the model's length and the pool is the scheduler's to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from engine.protocol import EngineError, Sampling, Submit

MAX_OUTPUTS = 128
MAX_LOGPROBS = 128
MAX_ID_LENGTH = 256


def refusal(submit: Submit, vocab_size: int) -> EngineError | None:
    """The first thing that is wrong with the request, or None."""
    message = next(_faults(submit, vocab_size), None)
    return None if message is None else EngineError("invalid_request", message)


def _faults(submit: Submit, vocab_size: int) -> Iterator[str]:
    if not 0 < len(submit.request_id) <= MAX_ID_LENGTH:
        yield f"request_id has {len(submit.request_id)} characters; expected 1 to {MAX_ID_LENGTH}"
    if not submit.owner:
        yield "owner is empty"
    if not 1 <= submit.n <= MAX_OUTPUTS:
        yield f"n is {submit.n}; expected 1 to {MAX_OUTPUTS}"
    if submit.queue_timeout_s is not None and not 0 <= submit.queue_timeout_s < math.inf:
        yield f"queue_timeout_s is {submit.queue_timeout_s}; expected a number of seconds, 0 or more"
    yield from _prompt_faults(submit, vocab_size)
    yield from _sampling_faults(submit.sampling, vocab_size)


def _prompt_faults(submit: Submit, vocab_size: int) -> Iterator[str]:
    if not submit.prompt_ids or len(submit.prompt_ids) % 4:
        yield f"prompt_ids has {len(submit.prompt_ids)} bytes; expected one or more int32 token ids"
        return
    ids = np.frombuffer(submit.prompt_ids, "<i4")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        yield f"prompt_ids go from {low} to {high}; the model's vocabulary from 0 to {vocab_size - 1}"
    for breakpoint_ in submit.breakpoints:
        if not 0 < breakpoint_.offset_tokens <= len(ids) or breakpoint_.ttl_s <= 0:
            yield f"{breakpoint_} does not lie in a prompt of {len(ids)} tokens, or lasts no time"


def _sampling_faults(sampling: Sampling, vocab_size: int) -> Iterator[str]:
    if sampling.max_tokens < 0:
        yield f"max_tokens is {sampling.max_tokens}; expected 0 (the prompt alone) or more"
    if sampling.min_tokens < 0:
        yield f"min_tokens is {sampling.min_tokens}; expected 0 or more"
    for name, low, high in (
        ("temperature", 0.0, 1e6),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -1e6, 1e6),
        ("frequency_penalty", -1e6, 1e6),
        ("repetition_penalty", 1e-6, 1e6),
    ):
        value = getattr(sampling, name)
        if not low <= value <= high:
            yield f"{name} is {value}; expected {low:g} to {high:g}"
    if sampling.top_k < 0:
        yield f"top_k is {sampling.top_k}; expected 0 (off) or more"
    if sampling.seed is not None and not -(2**63) <= sampling.seed < 2**64:
        yield "seed does not fit in 64 bits"
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        yield f"logprobs is {sampling.logprobs}; expected 0 to {MAX_LOGPROBS}"
    for token_id, bias in sampling.logit_bias:
        if not 0 <= token_id < vocab_size or not math.isfinite(bias):
            yield f"logit_bias of {bias} for token {token_id}; expected a finite number and an id below {vocab_size}"
