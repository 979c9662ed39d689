"""What the scheduler may do. One place for its numbers, each with its unit."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.fairness import CostWeights


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Raises ValueError for a combination that cannot work."""

    n_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    revision: str = ""
    """Of the weights, dtype and KV dtype; part of every namespace."""
    max_batch_tokens: int = 512
    """Of one step, decodes included."""
    max_sequences: int = 64
    """That run at once."""
    max_waiting_per_tenant: int = 1024
    max_passes: int = 8
    """Admissions that may go ahead of a request before its turn comes first."""
    lookahead: int = 16
    """The oldest requests of a tenant among which the longest cached prefix goes first."""
    probe_every_steps: int = 8
    """How long a waiting request's predicted cached prefix is believed."""
    max_preemptions: int = 3
    """Of one sequence, while there is another victim."""
    max_retreats: int = 3
    """Times that a sequence may lose its blocks to failed block copies before it is the one that fails."""
    leader_stall_steps: int = 4
    """A follower stops waiting for a leader that has not run for so many steps."""
    weights: CostWeights = field(default_factory=CostWeights)

    def __post_init__(self) -> None:
        for name in ("n_blocks", "block_size", "max_model_len", "max_batch_tokens", "max_sequences", "lookahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if self.max_batch_tokens < self.max_sequences:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}, below max_sequences of {self.max_sequences}: "
                "a step must hold one token of every running sequence; raise the one or lower the other"
            )

    @property
    def pool_tokens(self) -> int:
        return self.n_blocks * self.block_size

    def blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)
