"""A sequence from its queue to its end: what it holds of the cache on the way, and what is said about it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from engine.accounting import freeze_prompt
from engine.admission import Admission
from engine.fairness import FairQueue
from engine.plan import forking
from engine.protocol import Accepted, Delta, EngineError, Finished, PromptRecord
from engine.sequence import Request, SampledToken, Sequence, State
from engine.settings import SchedulerSettings

if TYPE_CHECKING:
    from radix_cache.cache import Holding, PrefixCache

StreamMessage = Accepted | Delta | Finished

seniority = attrgetter("seniority")


class Lifecycle:
    """Every request that has not finished, and the state of its sequences."""

    def __init__(self, cache: PrefixCache, settings: SchedulerSettings, clock: Callable[[], float]) -> None:
        self.cache = cache
        self.settings = settings
        self.clock = clock
        self.queue = FairQueue()
        self.admission = Admission(cache, self.queue, settings)
        self.running: list[Sequence] = []
        """In order of seniority."""
        self.requests: dict[str, Request] = {}
        self.messages: list[StreamMessage] = []
        self.stuck_at_blocks: int | None = None
        """Available blocks when an admission last failed for memory; with no more than that it would fail again."""

    def take_messages(self) -> list[StreamMessage]:
        messages, self.messages = self.messages, []
        return messages

    # --- on the way ---------------------------------------------------------------------------------------------------

    def start(self, sequence: Sequence, holding: Holding) -> None:
        """From the queue to the running ones, with the cached beginning of its tokens. Freezes the bill if it is the
        first time."""
        request = sequence.request
        self.queue.remove(sequence)
        self.admission.admitted(sequence)
        sequence.state = State.RUNNING
        sequence.holding = holding
        sequence.n_computed = sequence.n_ready = holding.cached_tokens
        insort(self.running, sequence, key=seniority)
        if request.record is None:
            request.record = freeze_prompt(request, holding, self.cache, self.settings.block_size)
            request.admitted_s = self.clock()
            self.queue.charge(request.owner, self.settings.weights.prompt(request.record))
        elif sequence.preemptions:
            request.recovered_tokens += holding.cached_tokens

    def accept(self, request: Request) -> None:
        assert request.record is not None and request.admitted_s is not None
        request.reported = True
        self.messages.append(Accepted(request.id, request.record, request.admitted_s - request.arrived_s))

    def fork(self, primary: Sequence, samples: list[Sequence]) -> None:
        """The prompt is computed: the further samples share its blocks, or wait for a slot."""
        assert primary.holding is not None
        for sample in samples:
            if len(self.running) < self.settings.max_sequences:
                sample.holding = self.cache.fork(primary.holding)
                sample.n_computed = sample.n_ready = primary.n_computed
                sample.forked = primary.forked = True
                sample.state = State.RUNNING
                insort(self.running, sample, key=seniority)
            else:
                sample.state = State.WAITING
                self.queue.put_back(sample)

    def receive(self, sequence: Sequence, sampled: SampledToken, now_s: float) -> None:
        request = sequence.request
        if sampled.error is not None:
            self.fail(sequence, sampled.error)
            # Attention state that is not finite would spoil every later hit, and nobody knows where it began.
            self.cache.flush(request.owner)
            return
        if request.first_token_s is None:
            request.first_token_s = now_s
        token = sampled.token_id
        sequence.tokens.append(token)
        self.queue.charge(request.owner, self.settings.weights.output)
        reason, stop_token_id = self._finish_reason(sequence, token)
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        self.messages.append(
            Delta(request.id, sequence.output_index, (token,), sequence.n_output, reason, stop_token_id, logprobs)
        )
        if reason is not None:
            self._finish(sequence, reason)

    def _finish_reason(self, sequence: Sequence, token: int) -> tuple[str | None, int | None]:
        """(reason, stop token), after `token` was appended."""
        sampling = sequence.request.sampling
        n_output = sequence.n_output
        if n_output > sampling.min_tokens:
            is_eos = token in self.settings.eos_token_ids and not sampling.ignore_eos
            if is_eos or token in sequence.request.stop_token_ids:
                return "stop", token
        n_tokens = len(sequence.tokens)
        if n_output >= sampling.max_tokens or n_tokens >= self.settings.max_model_len:
            return "length", None
        if n_tokens > self.settings.pool_tokens:
            return "length", None
        return None, None

    def fail(self, sequence: Sequence, message: str) -> None:
        """This output cannot be computed. Its request's other outputs go on, except those that wait for its prompt."""
        request = sequence.request
        request.error = EngineError("step_failed", message)
        for failed in (sequence, *forking(sequence)):
            if failed.holding is not None:
                self.cache.discard(failed.holding)
                failed.holding = None
            self.end(failed, "error")

    def give_up(self, sequence: Sequence) -> None:
        """The sequence has all memory to itself and it is not enough: its output, if it has one, ends here."""
        if sequence.n_output:
            self.end(sequence, "length")
        else:
            message = f"the prompt of {sequence.n_prompt} tokens does not fit in the KV memory that is left"
            self.cancel(sequence.request.id, EngineError("prompt_exceeds_pool", message))

    def end(self, sequence: Sequence, reason: str) -> None:
        """End an output by something other than its own last token."""
        if sequence.request.reported:
            self.messages.append(Delta(sequence.request.id, sequence.output_index, (), sequence.n_output, reason))
        self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.release(sequence)
        elif sequence.state is State.WAITING:
            self.queue.remove(sequence)
            self.admission.forget(sequence)
        sequence.state = State.FINISHED
        sequence.finish_reason = reason
        self.stuck_at_blocks = None
        request = sequence.request
        if all(other.state is State.FINISHED for other in request.sequences):
            self._finish_request(request)

    def _finish_request(self, request: Request) -> None:
        now_s = self.clock()
        admitted_s = now_s if request.admitted_s is None else request.admitted_s
        first_token_s = now_s if request.first_token_s is None else request.first_token_s
        self.messages.append(
            Finished(
                request.id,
                request.record_so_far() if request.reported else PromptRecord(),
                tuple(sequence.n_output for sequence in request.sequences),
                tuple(sequence.finish_reason or "" for sequence in request.sequences),
                queue_s=admitted_s - request.arrived_s,
                prefill_s=first_token_s - admitted_s,
                decode_s=now_s - first_token_s,
                preemptions=request.preemptions,
                recovered_tokens=request.recovered_tokens,
                error=request.error,
            )
        )
        del self.requests[request.id]

    def release(self, sequence: Sequence) -> None:
        if sequence.holding is not None:
            self.cache.release(sequence.holding, sequence.tokens, sequence.n_ready)
            sequence.holding = None

    def retreat(self, sequence: Sequence) -> None:
        """A failed step took away what the sequence had built on. What was not reported yet is taken back."""
        request = sequence.request
        assert sequence.holding is not None
        self.cache.discard(sequence.holding)
        sequence.holding = None
        if not request.reported and request.record is not None:
            self.queue.charge(request.owner, -self.settings.weights.prompt(request.record))
            request.record = request.admitted_s = None
        self.back_to_queue(sequence)

    def back_to_queue(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.n_computed = sequence.n_ready = 0
        sequence.forked = False
        sequence.state = State.WAITING
        self.queue.put_back(sequence)
        self.stuck_at_blocks = None

    def cancel(self, request_id: str, error: EngineError | None = None) -> None:
        """End all outputs of a request; with `error`, as failed. What was computed stays in the tree."""
        request = self.requests.get(request_id)
        if request is None:
            return
        request.error = error
        reason = "cancelled" if error is None else "error"
        for sequence in request.sequences:
            if sequence.state is not State.FINISHED:
                self.end(sequence, reason)
