"""A request inside the engine, and its sequences: one per output of `n`.

Token ids come in as bytes of little-endian int32 and stay so for the prefix store; a sequence keeps its own growing
array of them. `n_computed` counts the tokens whose attention state lies in the sequence's blocks.
"""

from __future__ import annotations

import sys
from array import array
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from engine.protocol import EngineError, PromptRecord, Submit, TokenLogprob

if TYPE_CHECKING:
    from radix_cache.cache import Holding, Namespace

TOKEN_BYTES = 4


class SampledToken(NamedTuple):
    """What the sampler picked for one row. `error` marks a row without a usable distribution (NaN): no token."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class State(Enum):
    WAITING = "waiting"
    """In its tenant's queue: new, preempted, or a further sample that found no slot."""
    FORKING = "forking"
    """A further sample, until the prompt it shares with output 0 is computed."""
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One output of a request: the prompt's tokens and those generated so far."""

    __slots__ = (
        "finish_reason",
        "forked",
        "holding",
        "n_computed",
        "n_prompt",
        "n_ready",
        "output_index",
        "preemptions",
        "request",
        "retreats",
        "scheduled_step",
        "seniority",
        "state",
        "tokens",
    )

    def __init__(self, request: Request, output_index: int, seniority: int) -> None:
        self.request = request
        self.output_index = output_index
        self.seniority = seniority
        """Order of arrival over all sequences of the engine: lower is older."""
        self.tokens = tokens_of(request.prompt_ids)
        self.n_prompt = len(self.tokens)
        self.n_computed = 0
        self.n_ready = 0
        """Like n_computed, less what still waits for a block copy: what may be given to the tree now."""
        self.holding: Holding | None = None
        self.state = State.WAITING if output_index == 0 else State.FORKING
        self.finish_reason: str | None = None
        self.forked = False
        """Shares blocks with another sample, and has to make them writable before it writes."""
        self.preemptions = 0
        self.retreats = 0
        """Times that failed block copies took its blocks away."""
        self.scheduled_step = 0
        """The last step that had a chunk of it."""

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.id}/{self.output_index} {self.state.value} "
            f"{self.n_computed}/{len(self.tokens)} tokens>"
        )


class Request:
    """What was submitted, what it was billed at admission, and when things happened to it."""

    __slots__ = (
        "admitted_s",
        "arrived_s",
        "error",
        "first_token_s",
        "id",
        "n_prompt",
        "n_prompt_computed",
        "namespace",
        "owner",
        "passes",
        "preemptions",
        "probed",
        "probed_at_step",
        "prompt_ids",
        "record",
        "recovered_tokens",
        "reported",
        "sampling",
        "sequences",
        "shared_blocks",
        "stop_token_ids",
        "submit",
    )

    def __init__(self, submit: Submit, namespace: Namespace, first_seniority: int, now_s: float) -> None:
        """Raises ValueError when the prompt's bytes are not whole int32s."""
        self.submit = submit
        self.id = submit.request_id
        self.owner = submit.owner
        self.namespace = namespace
        self.prompt_ids = submit.prompt_ids
        self.sampling = submit.sampling
        self.n_prompt = len(submit.prompt_ids) // TOKEN_BYTES
        self.n_prompt_computed = 0
        """The furthest that the prompt was ever computed; a preemption does not take it back."""
        self.stop_token_ids = frozenset(submit.sampling.stop_token_ids)
        self.arrived_s = now_s
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.record: PromptRecord | None = None
        """Frozen at first admission; only a failed fence, before anything was reported, takes it back."""
        self.reported = False
        self.error: EngineError | None = None
        self.preemptions = 0
        self.recovered_tokens = 0
        self.passes = 0
        """Admissions that went ahead of this request while it waited its turn."""
        self.probed = 0
        self.probed_at_step = -1
        self.shared_blocks: dict[Request, int] = {}
        """Whole blocks in common with the prompt of a request that is computing its own."""
        self.sequences = [Sequence(self, index, first_seniority + index) for index in range(submit.n)]

    @property
    def primary(self) -> Sequence:
        return self.sequences[0]

    def record_so_far(self) -> PromptRecord:
        """The prompt's bill if the request ended now: what was cached, and what was computed up to here.

        A client that leaves in mid-prefill does not pay for the rest. The tokens that stay out of the tree lie at the
        prompt's end, so they are the first to drop out.
        """
        record = self.record
        if record is None:
            return PromptRecord()
        if self.n_prompt_computed >= self.n_prompt:
            return record
        computed = max(self.n_prompt_computed - record.cached, 0)
        written = min(record.written_unleased, computed)
        return PromptRecord(
            record.cached_private,
            record.cached_public,
            written_unleased=written,
            uncached=min(record.uncached, computed - written),
        )


def tokens_of(ids: bytes) -> array[int]:
    """The token ids of a little-endian int32 byte string. Raises ValueError when it is not a whole number of them."""
    tokens = array("i")
    tokens.frombytes(ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
