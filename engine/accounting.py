"""What a request is billed for, and the engine's own totals that must agree with the bills."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from engine.protocol import Finished, PromptRecord
from engine.sequence import TOKEN_BYTES, Request

if TYPE_CHECKING:
    from radix_cache.cache import Holding, PrefixCache


def freeze_prompt(request: Request, holding: Holding, cache: PrefixCache, block_size: int) -> PromptRecord:
    """The prompt's bill at admission: what the holding found, what will enter the tree, and what will not.

    Written tokens are those of whole prompt blocks. One whole block may be computed and yet not kept: the last one of a
    prompt that the tree already holds in full, because the last token is always computed, into a private block.
    """
    n_prompt, cached = request.n_prompt, holding.cached_tokens
    if not request.submit.use_cache:
        return PromptRecord(uncached=n_prompt)
    whole = n_prompt // block_size * block_size
    written = max(whole - cached, 0)
    if written and n_prompt == whole and n_prompt - cached <= block_size:
        one_more = request.prompt_ids + bytes(TOKEN_BYTES)
        if cache.probe(request.namespace, one_more).cached_tokens >= whole:
            written = 0
    public = holding.cached_public_tokens
    return PromptRecord(cached - public, public, written_unleased=written, uncached=n_prompt - cached - written)


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine's start; they only grow. The token classes are the sums over every Finished."""

    requests: int = 0
    failed_requests: int = 0
    refused_requests: int = 0
    prompt_cached_private: int = 0
    prompt_cached_public: int = 0
    prompt_written_unleased: int = 0
    prompt_written_leased: int = 0
    prompt_uncached: int = 0
    output_tokens: int = 0
    late_stop_tokens: int = 0
    """Output tokens of a Finished that a Stop took back afterwards: bills = output_tokens - late_stop_tokens."""
    recovered_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    failed_steps: int = 0
    computed_tokens: int = 0
    """What the device did, recomputation included; not what is billed."""

    def add(self, finished: Finished) -> None:
        record = finished.prompt
        self.requests += 1
        self.failed_requests += finished.error is not None
        self.prompt_cached_private += record.cached_private
        self.prompt_cached_public += record.cached_public
        self.prompt_written_unleased += record.written_unleased
        self.prompt_written_leased += record.leased
        self.prompt_uncached += record.uncached
        self.output_tokens += sum(finished.output_tokens)
        self.recovered_tokens += finished.recovered_tokens
        self.preemptions += finished.preemptions

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
