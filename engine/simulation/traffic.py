"""Random traffic that shares: tenants, conversations that grow, equal prompts in bursts, samples, opt-outs."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from engine.protocol import Sampling, Submit


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """Rates are chances per step; lengths are tokens."""

    arrivals: float = 0.35
    burst: float = 0.04
    max_burst: int = 6
    tenants: int = 3
    vocab_size: int = 50
    max_prompt: int = 120
    max_output: int = 40
    opt_out: float = 0.08
    samples: float = 0.1
    repeat: float = 0.6
    """How often a prompt begins like an earlier one of its tenant."""
    timeout: float = 0.02
    too_long: float = 0.01


class Traffic:
    """Makes Submits. Equal random sources make equal traffic."""

    def __init__(self, shape: TrafficShape, rng: random.Random) -> None:
        self.shape = shape
        self._rng = rng
        self._n = 0
        self._texts: dict[tuple[str, str], list[list[int]]] = {}

    def arrivals(self) -> list[Submit]:
        rng, shape = self._rng, self.shape
        if rng.random() < shape.burst:
            first = self._submit()
            return [first] + [self._again(first) for _ in range(rng.randrange(1, shape.max_burst))]
        return [self._submit()] if rng.random() < shape.arrivals else []

    def remember(self, submit: Submit, output: list[int]) -> None:
        """A later prompt may continue this conversation."""
        prompt = array("i")
        prompt.frombytes(submit.prompt_ids)
        self._texts.setdefault((submit.owner, submit.salt), []).append([*prompt, *output])

    def _submit(self) -> Submit:
        rng, shape = self._rng, self.shape
        self._n += 1
        owner = f"tenant-{rng.randrange(shape.tenants)}"
        salt = "salted" if rng.random() < 0.1 else ""
        prompt = self._tokens(10_000) if rng.random() < shape.too_long else self._prompt(owner, salt)
        sampling = Sampling(
            max_tokens=rng.randrange(1, shape.max_output),
            min_tokens=rng.choice((0, 0, 3)),
            seed=rng.choice((None, 7, rng.randrange(1000))),
            stop_token_ids=(rng.randrange(shape.vocab_size),) if rng.random() < 0.3 else (),
            ignore_eos=rng.random() < 0.3,
        )
        return Submit(
            f"r{self._n}",
            owner,
            array("i", prompt).tobytes(),
            sampling,
            n=rng.randrange(2, 5) if rng.random() < shape.samples else 1,
            salt=salt,
            use_cache=rng.random() >= shape.opt_out,
            priority=rng.choice((0, 0, 0, 1)),
            queue_timeout_s=rng.choice((0.0, 0.05, 2.0)) if rng.random() < shape.timeout else None,
        )

    def _again(self, first: Submit) -> Submit:
        """The same prompt, sent at the same time."""
        self._n += 1
        return Submit(f"r{self._n}", first.owner, first.prompt_ids, first.sampling, salt=first.salt)

    def _prompt(self, owner: str, salt: str) -> list[int]:
        rng, shape = self._rng, self.shape
        texts = self._texts.setdefault((owner, salt), [])
        head: list[int] = []
        if texts and rng.random() < shape.repeat:
            earlier = rng.choice(texts)
            head = earlier[: rng.choice((len(earlier), rng.randrange(len(earlier)) + 1))][: shape.max_prompt]
        tail = self._tokens(rng.randrange(0 if head else 1, 1 + shape.max_prompt // 3))
        prompt = [*head, *tail][: shape.max_prompt]
        texts.append(prompt)
        del texts[:-20]
        return prompt

    def _tokens(self, n: int) -> list[int]:
        return [self._rng.randrange(self.shape.vocab_size) for _ in range(n)]
