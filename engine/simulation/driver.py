"""Runs an engine loop on random traffic under faults, from one seed, and checks everything that must always hold.

Every request must finish, with exactly the tokens it gets when nothing disturbs it; the store's invariants hold after
every step; the engine's counters are the sums of its Finished; at the end all blocks are free or in the tree. Whatever
is wrong is a SimulationError that names the seed and the step, and the same seed fails the same way again.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.errors import Refused
from engine.loop import EngineLoop
from engine.protocol import Accepted, Delta, Finished, Submit
from engine.settings import SchedulerSettings
from engine.simulation.clock import VirtualClock
from engine.simulation.faults import Faults
from engine.simulation.model import ContextError, FakeRunner, FakeSampler, answer
from engine.simulation.traffic import Traffic, TrafficShape

DRAIN_STEPS = 20_000
EOS = frozenset({0})

CacheFactory = Callable[..., Any]


class SimulationError(AssertionError):
    """A law was broken."""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Chances per step."""

    failing: float = 0.02
    slow: float = 0.01
    cancel: float = 0.03
    stop: float = 0.03
    poison: float = 0.004
    nan: float = 0.004


NO_FAULTS = FaultRates(0, 0, 0, 0, 0, 0)


@dataclass(slots=True)
class _Client:
    """One request as its client sees it."""

    submit: Submit
    accepted: Accepted | None = None
    outputs: list[list[int]] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)
    finished: Finished | None = None
    cancelled: bool = False
    stops: dict[int, int] = field(default_factory=dict)
    culprit: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to."""

    requests: int
    refused: int
    steps: int
    counters: dict[str, int]
    seconds: float


class Simulation:
    """One engine, its clients and its faults. `cache` makes the store: PrefixCache, or the naive one."""

    def __init__(
        self,
        seed: int,
        cache: CacheFactory,
        *,
        settings: SchedulerSettings | None = None,
        traffic: TrafficShape | None = None,
        rates: FaultRates | None = None,
        check_every_steps: int = 1,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.settings = settings or self._draw_settings()
        self.traffic = Traffic(traffic or TrafficShape(), self.rng)
        self.rates = rates or FaultRates()
        self.faults = Faults(self.clock, self.rng)
        self.cache = cache(self.settings.n_blocks, self.settings.block_size, clock=self.clock)
        vocab_size = self.traffic.shape.vocab_size
        self.runner = FakeRunner(self.settings.n_blocks, self.settings.block_size, self.clock, faults=self.faults)
        self.loop = EngineLoop(self.cache, self.settings, self.runner, FakeSampler(vocab_size), clock=self.clock)
        self.clients: dict[str, _Client] = {}
        self.live: dict[str, _Client] = {}
        self.refused = 0
        self.steps = 0
        self._check_every_steps = check_every_steps

    def run(self, steps: int) -> Report:
        """`steps` steps with traffic, then as many as it takes to finish what is there."""
        for _ in range(steps):
            self._arrive()
            self._disturb()
            self._step()
        for _ in range(DRAIN_STEPS):
            if not self.loop.has_work:
                break
            self._step()
        self._check_end()
        counters = self.loop.counters.as_dict()
        return Report(len(self.clients), self.refused, self.steps, counters, self.clock.now_s)

    def submit(self, submit: Submit) -> None:
        self.clients[submit.request_id] = client = _Client(submit, outputs=[[] for _ in range(submit.n)])
        try:
            self.loop.submit(submit)
            self.live[submit.request_id] = client
        except Refused:
            self.refused += 1
            del self.clients[submit.request_id]

    # --- traffic and faults -------------------------------------------------------------------------------------------

    def _draw_settings(self) -> SchedulerSettings:
        rng = self.rng
        block_size = rng.choice((1, 2, 4, 8, 16))
        return SchedulerSettings(
            n_blocks=rng.choice((140, 180, 260, 400, 1000)) // block_size + 2,
            block_size=block_size,
            max_model_len=rng.choice((130, 150, 2000)),
            eos_token_ids=EOS,
            max_batch_tokens=rng.choice((12, 16, 48, 256)),
            max_sequences=rng.choice((2, 5, 8, 12)),
            max_waiting_per_tenant=rng.choice((4, 1000)),
            max_passes=rng.choice((1, 4, 8)),
            lookahead=rng.choice((1, 4, 16)),
        )

    def _arrive(self) -> None:
        for submit in self.traffic.arrivals():
            n_prompt = len(submit.prompt_ids) // 4
            culprit = False
            if self.rng.random() < self.rates.poison:
                self.faults.poisoned[submit.request_id] = self.rng.randrange(n_prompt + 10)
                culprit = True
            elif self.rng.random() < self.rates.nan:
                self.faults.nan[submit.request_id, self.rng.randrange(submit.n)] = n_prompt + self.rng.randrange(10)
                culprit = True
            self.submit(submit)
            if submit.request_id in self.clients:
                self.clients[submit.request_id].culprit = culprit

    def _disturb(self) -> None:
        rng = self.rng
        self.faults.draw(failing=self.rates.failing, slow=self.rates.slow)
        if self.live and rng.random() < self.rates.cancel:
            client = rng.choice(list(self.live.values()))
            client.cancelled = True
            self.loop.cancel(client.submit.request_id)
        if self.live and rng.random() < self.rates.stop:
            client = rng.choice(list(self.live.values()))
            index = rng.randrange(client.submit.n)
            if client.outputs[index] and index not in client.stops and not client.cancelled:
                n_tokens = rng.randrange(len(client.outputs[index]) + 1)
                client.stops[index] = n_tokens
                self.loop.stop(client.submit.request_id, index, n_tokens)

    # --- checks -------------------------------------------------------------------------------------------------------

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise SimulationError(f"seed {self.seed}, step {self.steps}: {message}")

    def _step(self) -> None:
        self.steps += 1
        if not self.loop.has_work:
            self.clock.advance(0.01)
            return
        before = self.runner.computed_tokens
        try:
            messages = self.loop.step()
        except ContextError as error:
            raise SimulationError(f"seed {self.seed}, step {self.steps}: {error}") from error
        if self.runner.computed_tokens == before:
            self.clock.advance(0.001)
        for message in messages:
            self._hear(message)
        if self.steps % self._check_every_steps == 0:
            self._check_step()

    def _check_step(self) -> None:
        try:
            self.loop.check_invariants()
        except Exception as error:
            raise SimulationError(f"seed {self.seed}, step {self.steps}: {error}") from error

    def _hear(self, message: Accepted | Delta | Finished) -> None:
        client = self.live.get(message.request_id)
        if client is None:
            raise SimulationError(f"seed {self.seed}: {message} after the end")
        if isinstance(message, Accepted):
            self._require(client.accepted is None, f"{message} a second time")
            self._require(message.prompt.prompt == len(client.submit.prompt_ids) // 4, f"{message} does not add up")
            self._require(message.prompt.cached < message.prompt.prompt, f"{message}: the last token is never cached")
            client.accepted = message
        elif isinstance(message, Delta):
            self._require(client.accepted is not None, f"{message} before Accepted")
            self._require(message.output_index not in client.ended, f"{message} after its output's end")
            output = client.outputs[message.output_index]
            output.extend(message.token_ids)
            del output[client.stops.get(message.output_index, len(output)) :]
            self._require(message.n_tokens == len(output), f"{message}: {len(output)} tokens were sent")
            if message.finish_reason is not None:
                client.ended[message.output_index] = message.finish_reason
        else:
            client.finished = message
            del self.live[message.request_id]
            self.runner.forget(message.request_id, client.submit.n)
            self._check_finished(client, message)
            self.traffic.remember(client.submit, client.outputs[0])

    def _check_finished(self, client: _Client, finished: Finished) -> None:
        name = client.submit.request_id
        billed = [min(len(output), client.stops.get(index, len(output))) for index, output in enumerate(client.outputs)]
        self._require(list(finished.output_tokens) == billed, f"{name}: {finished.output_tokens} billed, {billed} sent")
        code = finished.error.code if finished.error else None
        if code == "queue_timeout":
            self._require(client.accepted is None and not any(billed), f"{name} timed out after it began")
            return
        self._require(code is None or client.culprit, f"{name} is no culprit and failed: {finished.error}")
        if client.accepted is not None and not (client.cancelled or code):
            self._require(finished.prompt == client.accepted.prompt, f"{name}: the prompt's bill changed")
        for index, reason in enumerate(finished.finish_reasons):
            self._check_output(client, index, reason)

    def _check_output(self, client: _Client, index: int, reason: str) -> None:
        submit = client.submit
        prompt = array("i")
        prompt.frombytes(submit.prompt_ids)
        settings = self.settings
        room = min(settings.max_model_len, settings.pool_tokens + 1) - len(prompt)
        expected, end = answer(
            prompt,
            submit.sampling,
            index,
            vocab_size=self.traffic.shape.vocab_size,
            eos_token_ids=settings.eos_token_ids,
            max_tokens=min(submit.sampling.max_tokens, room),
        )
        got = client.outputs[index]
        self._require(got == expected[: len(got)], f"{submit.request_id}/{index}: {got} instead of {expected}")
        if reason in ("stop", "length") and index not in client.stops:
            self._require((got, reason) == (expected, end), f"{submit.request_id}/{index} ended early: {reason}")

    def _check_end(self) -> None:
        self._require(not self.live, f"requests never finished: {sorted(self.live)[:5]}")
        self._check_step()
        self._require(not self.loop.scheduler.holdings(), "a holding is left")
        available = self.cache.available_blocks
        self._require(available == self.settings.n_blocks, f"{self.settings.n_blocks - available} blocks leaked")
        counters = self.loop.counters
        finished = [client.finished for client in self.clients.values() if client.finished is not None]
        sums = {
            "requests": len(finished),
            "prompt_cached_private": sum(f.prompt.cached_private for f in finished),
            "prompt_cached_public": sum(f.prompt.cached_public for f in finished),
            "prompt_written_unleased": sum(f.prompt.written_unleased for f in finished),
            "prompt_written_leased": sum(f.prompt.leased for f in finished),
            "prompt_uncached": sum(f.prompt.uncached for f in finished),
            "output_tokens": sum(sum(f.output_tokens) for f in finished),
            "recovered_tokens": sum(f.recovered_tokens for f in finished),
            "preemptions": sum(f.preemptions for f in finished),
        }
        told = counters.as_dict()
        for name, total in sums.items():
            self._require(told[name] == total, f"counter {name} is {told[name]}, its Finished add up to {total}")


def run(seed: int, steps: int, cache: CacheFactory, **options: Any) -> Report:
    """A whole simulation. Raises SimulationError."""
    return Simulation(seed, cache, **options).run(steps)
