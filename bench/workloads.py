"""Fixed workloads for a completions API: prompts of random single-token words, so that their lengths are known.

A workload is a list of clients; a client is a list of turns, sent one after another; clients run at the same time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

Words = Callable[[random.Random, int], str]


@dataclass(frozen=True, slots=True)
class Turn:
    text: str
    """Appended to the client's transcript; the whole transcript is the prompt."""
    n_output: int
    fresh: bool = True
    """Start a new transcript instead of continuing the last one."""


Client = list[Turn]


def _spread(turns: list[Turn], n_clients: int) -> list[Client]:
    return [turns[i::n_clients] for i in range(n_clients)]


def shared_prompt(rng: random.Random, words: Words) -> list[Client]:
    """A system prompt of 1,000 tokens before 32 questions, 8 at a time, 64 tokens out."""
    system = words(rng, 1000)
    return _spread([Turn(system + "\n\n" + words(rng, 60), 64) for _ in range(32)], 8)


def conversations(rng: random.Random, words: Words) -> list[Client]:
    """6 conversations of 5 turns that resend their transcript, 48 tokens out a turn."""
    return [
        [Turn(words(rng, 300 if turn == 0 else 50) + "\n", 48, fresh=turn == 0) for turn in range(5)] for _ in range(6)
    ]


def no_sharing(rng: random.Random, words: Words) -> list[Client]:
    """24 prompts of 500 tokens with nothing in common, 8 at a time, 64 tokens out."""
    return _spread([Turn(words(rng, 500), 64) for _ in range(24)], 8)


def single_user(rng: random.Random, words: Words) -> list[Client]:
    """4 requests one after another, 128 tokens in, 128 out."""
    return [[Turn(words(rng, 128), 128) for _ in range(4)]]


def mixed_lengths(rng: random.Random, words: Words) -> list[Client]:
    """40 prompts of 100 tokens, 16 at a time, output lengths lognormal between 4 and 256."""
    lengths = [min(256, max(4, int(rng.lognormvariate(math.log(48), 1.0)))) for _ in range(40)]
    return _spread([Turn(words(rng, 100), n) for n in lengths], 16)


def herd(rng: random.Random, words: Words) -> list[Client]:
    """48 requests at once with the same 2,000 tokens before 20 of their own, 16 tokens out."""
    common = words(rng, 2000)
    return [[Turn(common + words(rng, 20), 16)] for _ in range(48)]


def branches(rng: random.Random, words: Words) -> list[Client]:
    """16 requests at once in 4 groups: 500 tokens common to all, 500 to the group, 30 own, 128 out."""
    trunk = words(rng, 500)
    groups = [trunk + "\n" + words(rng, 500) for _ in range(4)]
    return [[Turn(group + "\n" + words(rng, 30), 128)] for group in groups for _ in range(4)]


WORKLOADS: dict[str, Callable[[random.Random, Words], list[Client]]] = {
    workload.__name__: workload
    for workload in (shared_prompt, conversations, no_sharing, single_user, mixed_lengths, herd, branches)
}
