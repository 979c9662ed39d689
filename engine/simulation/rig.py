"""A whole engine on a fake model, driven by hand: for tests that place every request and every step themselves."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from engine.errors import Refused
from engine.loop import EngineLoop
from engine.plan import StepPlan
from engine.protocol import Accepted, Delta, EngineError, Finished, PromptRecord, Sampling, Submit
from engine.sequence import Sequence
from engine.settings import SchedulerSettings
from engine.simulation.clock import VirtualClock
from engine.simulation.faults import Faults
from engine.simulation.model import FakeRunner, FakeSampler, StepCost, answer

VOCAB_SIZE = 1000
ENOUGH_STEPS = 10_000


class Rig:
    """`settings` are those of SchedulerSettings; a small engine by default. After every step the store's invariants are
    checked, and the runner checks what each sequence reads."""

    def __init__(self, cache: Callable[..., Any], *, cost: StepCost | None = None, **settings: Any) -> None:
        values: dict[str, Any] = {"n_blocks": 64, "block_size": 4, "max_model_len": 1000, "max_sequences": 16}
        self.settings = SchedulerSettings(**{**values, "max_batch_tokens": 64, **settings})
        self.clock = VirtualClock()
        self.faults = Faults(self.clock, random.Random(0))
        self.cache = cache(self.settings.n_blocks, self.settings.block_size, clock=self.clock)
        self.runner = _RecordingRunner(
            self.settings.n_blocks, self.settings.block_size, self.clock, cost=cost, faults=self.faults
        )
        self.loop = EngineLoop(self.cache, self.settings, self.runner, FakeSampler(VOCAB_SIZE), clock=self.clock)
        self.scheduler = self.loop.scheduler
        self.messages: list[Accepted | Delta | Finished] = []
        self.refusals: dict[str, EngineError] = {}
        self._prompts: dict[str, list[int]] = {}
        self._samplings: dict[str, Sampling] = {}

    # --- doing --------------------------------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt: Iterable[int],
        max_tokens: int = 4,
        *,
        owner: str = "acme",
        sampling: Sampling | None = None,
        **fields: Any,
    ) -> None:
        tokens = list(prompt)
        sampling = sampling or Sampling(max_tokens=max_tokens)
        self._prompts[request_id], self._samplings[request_id] = tokens, sampling
        try:
            self.loop.submit(Submit(request_id, owner, array("i", tokens).tobytes(), sampling, **fields))
        except Refused as refused:
            self.refusals[request_id] = EngineError(refused.code, refused.message)

    def step(self, n: int = 1) -> list[Accepted | Delta | Finished]:
        said: list[Accepted | Delta | Finished] = []
        for _ in range(n):
            said += self.loop.step()
            self.loop.check_invariants()
        self.messages += said
        return said

    def run(self) -> None:
        """Until nothing is left to do."""
        for _ in range(ENOUGH_STEPS):
            if not self.loop.has_work:
                return
            self.step()
        raise AssertionError(f"work is left after {ENOUGH_STEPS} steps: {self.scheduler.running}")

    def ask(self, request_id: str, prompt: Iterable[int], max_tokens: int = 4, **fields: Any) -> Finished:
        """One request, alone to its end."""
        self.submit(request_id, prompt, max_tokens, **fields)
        self.run()
        return self.finished(request_id)

    # --- looking ------------------------------------------------------------------------------------------------------

    @property
    def plans(self) -> list[StepPlan]:
        """What the runner was asked for, failed ones included."""
        return self.runner.plans

    def sequence(self, request_id: str, output_index: int = 0) -> Sequence:
        return self.scheduler.request(request_id).sequences[output_index]

    def accepted(self, request_id: str) -> Accepted:
        return next(m for m in self.messages if isinstance(m, Accepted) and m.request_id == request_id)

    def record(self, request_id: str) -> PromptRecord:
        return self.accepted(request_id).prompt

    def finished(self, request_id: str) -> Finished:
        return next(m for m in self.messages if isinstance(m, Finished) and m.request_id == request_id)

    def order_of(self, kind: type) -> list[str]:
        """Request ids in the order of their first message of that kind."""
        return list(dict.fromkeys(message.request_id for message in self.messages if isinstance(message, kind)))

    def output(self, request_id: str, output_index: int = 0) -> list[int]:
        """Tokens sent for one output."""
        deltas = [m for m in self.messages if isinstance(m, Delta) and m.request_id == request_id]
        return [token for delta in deltas if delta.output_index == output_index for token in delta.token_ids]

    def undisturbed(self, request_id: str, output_index: int = 0) -> list[int]:
        """Tokens the output has when it is computed alone, cold and in one piece."""
        sampling, prompt = self._samplings[request_id], self._prompts[request_id]
        tokens, _ = answer(
            prompt,
            sampling,
            output_index,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=self.settings.eos_token_ids,
            max_tokens=min(sampling.max_tokens, self.settings.max_model_len - len(prompt)),
        )
        return tokens


class _RecordingRunner(FakeRunner):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> Any:
        if plan.chunks:
            self.plans.append(plan)
        return super().execute(plan)
