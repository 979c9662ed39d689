"""The step loop's body: schedule, run, sample, publish; and what to do when a step throws.

One thread drives it. `probe` and `stats` may be called from another one while a step runs: they take the lock, which is
held only while the scheduler and the tree change, never while the model runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from engine.accounting import EngineCounters
from engine.errors import Refused
from engine.plan import Chunk, StepPlan
from engine.protocol import EngineError, Finished, Submit
from engine.scheduler import Scheduler, StreamMessage
from engine.sequence import SampledToken, Sequence

if TYPE_CHECKING:
    from engine.settings import SchedulerSettings
    from radix_cache.cache import PrefixCache

REMEMBERED_REQUESTS = 4096

log = logging.getLogger(__name__)


class Runner(Protocol):
    def execute(self, plan: StepPlan) -> Any:
        """Make the plan's copies, then compute its chunks; a plan without chunks only copies. Returns logits
        [rows, vocab], the last row of every chunk with samples=True, in plan order, as an array that a list of rows can
        index. May raise anything: the KV memory of the plan's chunks is then undefined, every other block is as it was.
        """


class Sampler(Protocol):
    def sample(self, logits: Any, sequences: list[Sequence]) -> Many[SampledToken]:
        """One token a sequence; row i of the logits belongs to sequences[i]. Changes nothing of the sequences."""


class EngineLoop:
    """Everything between a Submit and its Finished, on one thread."""

    def __init__(
        self,
        cache: PrefixCache,
        settings: SchedulerSettings,
        runner: Runner,
        sampler: Sampler,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = Scheduler(cache, settings, clock)
        self.counters = EngineCounters()
        self.last_step_finished_at = clock()
        """On the given clock, in seconds."""
        self._cache = cache
        self._revision = settings.revision
        self._runner = runner
        self._sampler = sampler
        self._clock = clock
        self._lock = threading.Lock()
        self._finished: OrderedDict[str, list[int]] = OrderedDict()
        """Output tokens of the last finished requests, for a Stop that crosses the Finished on its way."""

    # --- the loop's thread, between two steps -------------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        """Raises engine.errors.Refused."""
        try:
            with self._lock:
                self.scheduler.add(submit)
        except Refused:
            self.counters.refused_requests += 1
            raise

    def cancel(self, request_id: str, error: EngineError | None = None) -> None:
        """End a request; with `error`, as failed."""
        with self._lock:
            self.scheduler.cancel(request_id, error)

    def stop(self, request_id: str, output_index: int, n_tokens: int) -> None:
        with self._lock:
            self.scheduler.stop(request_id, output_index, n_tokens)
            outputs = self._finished.get(request_id)
            if outputs is not None and 0 <= output_index < len(outputs) and 0 <= n_tokens < outputs[output_index]:
                self.counters.late_stop_tokens += outputs[output_index] - n_tokens
                outputs[output_index] = n_tokens

    def step(self) -> list[StreamMessage]:
        """One forward pass, or none when nothing can run. Returns all there is to say, in order."""
        with self._lock:
            plan = self.scheduler.schedule()
            messages = self.scheduler.take_messages()
        if plan is not None:
            messages += self._run(plan)
        for message in messages:
            if isinstance(message, Finished):
                self._note_finished(message)
        self.last_step_finished_at = self._clock()
        return messages

    def check_invariants(self) -> dict[str, Any]:
        """Raises radix_cache's InvariantError, naming what is wrong."""
        with self._lock:
            self._cache.check_invariants(self.scheduler.holdings())
            return self._cache_stats()

    def flush(self, owner: str | None = None) -> int:
        """Drop what the tree keeps of one owner, or of all, and no sequence uses. Returns blocks."""
        with self._lock:
            return self._cache.flush(owner)

    # --- any thread ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def n_waiting(self) -> int:
        return self.scheduler.queue.n_waiting

    @property
    def n_running(self) -> int:
        return len(self.scheduler.running)

    def probe(self, owner: str, prompt_ids: bytes, salt: str = "") -> int:
        """How many tokens of this prompt are resident for this owner. Changes nothing."""
        with self._lock:
            return self._cache.probe((owner, self._revision, "", salt), prompt_ids).cached_tokens

    def stats(self) -> dict[str, Any]:
        """Counters since the engine's start, and the cache's own."""
        with self._lock:
            return {**self.counters.as_dict(), "cache": self._cache_stats()}

    def _cache_stats(self) -> dict[str, Any]:
        stats: Any = self._cache.stats()
        return dict(stats._asdict()) if hasattr(stats, "_asdict") else asdict(stats)

    # --- running a plan -----------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan, *, again: bool = False) -> list[StreamMessage]:
        """Execute the plan; when it throws, its halves, until the culprit is alone. A lone chunk gets one more try
        (`again`), so what was no fault of its own does not end it."""
        self.counters.steps += 1
        copied = not plan.copies
        try:
            if plan.copies:
                # Apart from the chunks: once they have begun to write, a copy's source may be gone.
                self._runner.execute(StepPlan(plan.step, [], plan.copies))
                copied = True
            sampled = self._execute(StepPlan(plan.step, plan.chunks, []))
        except Exception as error:
            self.counters.failed_steps += 1
            log.exception("step %d of %d chunks failed", plan.step, len(plan.chunks))
            return self._run_halves(plan, error, copied=copied, last_try=again)
        self.counters.computed_tokens += plan.n_tokens
        with self._lock:
            return self.scheduler.complete(plan, sampled)

    def _execute(self, plan: StepPlan) -> Many[SampledToken]:
        logits = self._runner.execute(plan)
        rows = plan.rows()
        if not rows.sequences:
            return []
        if rows.indices[-1] + 1 < len(rows.indices):
            logits = logits[rows.indices]
        return self._sampler.sample(logits, rows.sequences)

    def _run_halves(self, plan: StepPlan, error: Exception, *, copied: bool, last_try: bool) -> list[StreamMessage]:
        with self._lock:
            self.scheduler.fail(plan, copied=copied)
            if last_try and len(plan.chunks) == 1 and copied:
                self.scheduler.fail_sequence(plan.chunks[0].sequence, f"{type(error).__name__}: {error}")
            messages = self.scheduler.take_messages()
        if last_try and len(plan.chunks) == 1:
            return messages
        for half in _halves(plan.chunks):
            with self._lock:
                retry = self.scheduler.retry(half)
            if retry is not None:
                messages += self._run(retry, again=True)
        return messages

    def _note_finished(self, finished: Finished) -> None:
        self.counters.add(finished)
        self._finished[finished.request_id] = list(finished.output_tokens)
        if len(self._finished) > REMEMBERED_REQUESTS:
            self._finished.popitem(last=False)


def _halves(chunks: list[Chunk]) -> list[list[Chunk]]:
    middle = len(chunks) // 2
    return [half for half in (chunks[:middle], chunks[middle:]) if half]
