"""Which tokens the next forward pass computes. Pure: no torch, no threads, the clock is injected.

A step holds every running sequence's next token first, then chunks of prompts up to the token budget. Whose prompt goes
next is decided by the tenants' virtual counters; a running prompt of a tenant goes before its waiting ones. A prompt's
whole blocks are published in the tree when the step that computes them is planned, behind a fence that complete()
confirms and fail() revokes, so equal prompts in one step are computed once; nothing of a request is reported before its
first fence is confirmed.

One step is in flight at a time: schedule, then complete or fail. Between them nothing else may be called.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from engine.admission import Leaders
from engine.draft import StepDraft
from engine.errors import Refused
from engine.fairness import Tenant, lowest
from engine.lifecycle import Lifecycle, StreamMessage, seniority
from engine.plan import Chunk, StepPlan, forking
from engine.protocol import EngineError, Submit
from engine.room import Room
from engine.sequence import Request, SampledToken, Sequence, State
from engine.settings import SchedulerSettings

if TYPE_CHECKING:
    from radix_cache.cache import Holding, PrefixCache


class Scheduler:
    """Owns every request from add() to its Finished, and all that it holds of the cache."""

    def __init__(self, cache: PrefixCache, settings: SchedulerSettings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.cache = cache
        self._clock = clock
        self._life = Lifecycle(cache, settings, clock)
        self._room = Room(self._life)
        self.queue = self._life.queue
        self.running = self._life.running
        """In order of seniority."""
        self._deadlines: list[tuple[float, int, Request]] = []
        self._step = 0
        self._fence = 0
        self._next_seniority = 0
        self._draft: StepDraft | None = None

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, submit: Submit) -> Request:
        """Queue a request. Raises Refused when it can never run here, or when its tenant's queue is full."""
        settings = self.settings
        if submit.request_id in self._life.requests:
            raise Refused("invalid_request", f"request id {submit.request_id!r} is in use")
        namespace = (submit.owner, settings.revision, "", submit.salt)
        request = Request(submit, namespace, self._next_seniority, self._clock())
        if request.n_prompt == 0:
            raise Refused("invalid_request", "the prompt is empty; expected one token or more")
        if request.n_prompt + 1 > settings.max_model_len:
            raise Refused(
                "context_length_exceeded",
                f"the prompt has {request.n_prompt} tokens, and with the one to generate that is more than the model's "
                f"context of {settings.max_model_len} tokens; shorten it",
            )
        if request.n_prompt + 1 > settings.pool_tokens:
            raise Refused(
                "prompt_exceeds_pool",
                f"the prompt has {request.n_prompt} tokens, and with the one to generate that is more than the KV "
                f"memory of {settings.pool_tokens} tokens; shorten it or start the server with more --kv-memory",
            )
        if len(self.queue.tenant(submit.owner).waiting) >= settings.max_waiting_per_tenant:
            raise Refused(
                "queue_full",
                f"{settings.max_waiting_per_tenant} requests of this tenant wait already; try again later",
            )
        self._next_seniority += submit.n
        self._life.requests[request.id] = request
        self.queue.add(request.primary)
        if submit.queue_timeout_s is not None:
            deadline_s = request.arrived_s + submit.queue_timeout_s
            heapq.heappush(self._deadlines, (deadline_s, request.primary.seniority, request))
        self._life.stuck_at_blocks = None
        return request

    def cancel(self, request_id: str, error: EngineError | None = None) -> None:
        """End all outputs of a request; with `error`, as failed. What was computed stays in the tree. Unknown requests
        are ignored."""
        self._life.cancel(request_id, error)

    def fail_sequence(self, sequence: Sequence, message: str) -> None:
        """This output cannot be computed. Its request's other outputs go on, except those that wait for its prompt."""
        self._life.fail(sequence, message)

    def stop(self, request_id: str, output_index: int, n_tokens: int) -> None:
        """The output ended after n_tokens tokens: bill and publish no further. Unknown requests are ignored."""
        request = self._life.requests.get(request_id)
        if request is None or not 0 <= output_index < len(request.sequences):
            return
        sequence = request.sequences[output_index]
        if sequence.n_output == 0 or sequence.finish_reason in ("cancelled", "error"):
            return
        del sequence.tokens[sequence.n_prompt + max(n_tokens, 0) :]
        sequence.n_ready = min(sequence.n_ready, len(sequence.tokens))
        if sequence.state is State.FINISHED:
            sequence.finish_reason = "stop"
        else:
            self._life.end(sequence, "stop")

    @property
    def has_work(self) -> bool:
        return bool(self._life.requests or self._life.messages)

    def take_messages(self) -> list[StreamMessage]:
        """What there is to say, in order."""
        return self._life.take_messages()

    def request(self, request_id: str) -> Request:
        """Raises KeyError when it is unknown or has finished."""
        return self._life.requests[request_id]

    def holdings(self) -> list[Holding]:
        return [sequence.holding for sequence in self.running if sequence.holding is not None]

    # --- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next forward pass; None when nothing can run."""
        self._expire()
        self._step += 1
        self._draft = draft = StepDraft(self._step, self.settings.max_batch_tokens, Leaders(self.settings, self._step))
        prompts = self._plan_decodes(draft)
        self._plan_prompts(draft, prompts)
        if not draft.chunks:
            self._draft = None
            return None
        return draft.plan()

    def complete(self, plan: StepPlan, sampled: Many[SampledToken]) -> list[StreamMessage]:
        """The step ran. `sampled` answers plan.rows(). Returns all there is to say now."""
        now_s = self._clock()
        tokens = dict(zip(plan.rows().sequences, sampled, strict=True))
        failed = [sequence for sequence, token in tokens.items() if token.error is not None]
        hit = self._settle_fences(failed).difference(failed)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence in hit:
                continue
            request = sequence.request
            sequence.n_computed = sequence.n_ready = chunk.end
            request.n_prompt_computed = max(request.n_prompt_computed, min(chunk.end, sequence.n_prompt))
            if not request.reported:
                self._life.accept(request)
            if chunk.samples:
                samples = [] if tokens[sequence].error else forking(sequence)
                self._life.fork(sequence, samples)
                for taker in (sequence, *samples):
                    self._life.receive(taker, tokens[taker], now_s)
            elif request.sampling.max_tokens == 0 and chunk.end == sequence.n_prompt:
                for taker in request.sequences:
                    self._life.end(taker, "length")
        return self.take_messages()

    def fail(self, plan: StepPlan, *, copied: bool = True) -> None:
        """The step did not run: nothing that it was to compute is in the tree any more.

        Sequences that had built on it are rolled back to their queues; the others stay as they were before the step, to
        be run again by retry(). Without `copied`, the block copies were not made either, and what needed them is rolled
        back too.
        """
        draft = self._taken_draft()
        self._revoke(draft.fences.values(), draft)
        if copied:
            return
        for sequence in draft.copies:
            if sequence.state is State.RUNNING:
                sequence.retreats += 1
                if sequence.retreats > self.settings.max_retreats:
                    self._life.fail(sequence, "its KV blocks could not be copied")
                else:
                    self._life.retreat(sequence)

    def retry(self, chunks: Many[Chunk]) -> StepPlan | None:
        """A new step of those chunks of a failed one whose sequences still run. They may begin earlier than before."""
        self._step += 1
        self._draft = draft = StepDraft(self._step, 0, Leaders(self.settings, self._step))
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.state is State.RUNNING and self._room.extend(sequence, chunk.end, draft):
                start = sequence.n_computed
                again = Chunk(sequence, start, chunk.end - start, chunk.samples)
                draft.add(again)
                self._publish(again, draft)
        if draft.chunks:
            return draft.plan()
        self._draft = None
        return None

    # --- planning -----------------------------------------------------------------------------------------------------

    def _plan_decodes(self, draft: StepDraft) -> dict[Tenant, list[Sequence]]:
        """Plan every running sequence's next token, oldest first. Returns the prompts that are not computed yet."""
        prompts: defaultdict[Tenant, list[Sequence]] = defaultdict(list)
        for sequence in list(self.running):
            if sequence.state is not State.RUNNING:
                continue  # preempted for an older one
            n_tokens = len(sequence.tokens)
            if n_tokens - sequence.n_computed > 1 or n_tokens == sequence.n_prompt:
                prompts[self.queue.tenant(sequence.request.owner)].append(sequence)
                draft.leaders.add(sequence)
            elif self._room.make_room(sequence, n_tokens, draft):
                draft.add(Chunk(sequence, n_tokens - 1, 1, True))
        return prompts

    def _plan_prompts(self, draft: StepDraft, prompts: dict[Tenant, list[Sequence]]) -> None:
        """Spend the rest of the budget on prompts, running and waiting, of the tenant whose turn it is."""
        exhausted: set[Tenant] = set()
        stuck_at = self._life.stuck_at_blocks
        stuck = bool(self.running) and stuck_at is not None and self.cache.available_blocks <= stuck_at
        full = len(self.running) >= self.settings.max_sequences
        waiting = self.queue.with_waiting() if self.queue.n_waiting and not (stuck or full) else []
        while draft.budget_tokens > 0:
            tenant = lowest({*prompts, *waiting}, exhausted)
            if tenant is None:
                return
            if running := prompts.get(tenant):
                sequence = running.pop(0)
                if sequence.state is State.RUNNING:
                    self._plan_chunk(sequence, draft)
            elif tenant not in waiting or not self._admit_one(tenant, draft):
                exhausted.add(tenant)

    def _plan_chunk(self, sequence: Sequence, draft: StepDraft) -> None:
        """As many of the sequence's pending tokens as budget and memory allow, which may be none."""
        start, wanted = sequence.n_computed, len(sequence.tokens)
        end = min(wanted, start + draft.budget_tokens)
        if sequence is self.running[0]:
            if not self._room.make_room(sequence, end, draft):
                return
        elif not self._room.extend(sequence, end, draft):
            assert sequence.holding is not None
            blocks = sequence.holding.n_blocks + self.cache.available_blocks
            end = min(end, blocks * self.settings.block_size)
            if end <= start or not self._room.extend(sequence, end, draft):
                return
        chunk = Chunk(sequence, start, end - start, end == wanted and sequence.request.sampling.max_tokens > 0)
        draft.add(chunk)
        self._publish(chunk, draft)

    def _publish(self, chunk: Chunk, draft: StepDraft) -> None:
        """Make the chunk's whole prompt blocks matchable, behind a fence of their own."""
        sequence = chunk.sequence
        holding = sequence.holding
        assert holding is not None
        block_size = self.settings.block_size
        n_tokens = min(chunk.end, sequence.n_prompt) // block_size * block_size
        fills_a_block = n_tokens > chunk.start // block_size * block_size
        if not sequence.request.submit.use_cache or not (fills_a_block or sequence in draft.copies):
            return
        self._fence += 1
        if fills_a_block:
            draft.fences[sequence] = self._fence
            self._life.stuck_at_blocks = None
        # With nothing to publish this still tells the cache that the copies go with this step.
        self.cache.publish(holding, sequence.request.prompt_ids, n_tokens, self._fence)

    def _admit_one(self, tenant: Tenant, draft: StepDraft) -> bool:
        """Admit the tenant's next sequence that may and can run. False: none."""
        if len(self.running) >= self.settings.max_sequences:
            return False
        skipped = None
        spoken_for_blocks = self._room.spoken_for_blocks()
        for sequence in self._life.admission.candidates(tenant, draft.step):
            if draft.leaders.waits_for_one(sequence.request, draft.chunks):
                continue
            if self._admit(sequence, spoken_for_blocks, draft):
                return True
            if sequence.state is State.FINISHED:
                continue
            skipped = skipped or sequence
            self._life.stuck_at_blocks = self.cache.available_blocks
            if sequence.request.record is not None:
                break
        if skipped is not None:
            self._life.admission.skip(skipped)
        return False

    def _admit(self, sequence: Sequence, spoken_for_blocks: int, draft: StepDraft) -> bool:
        """Take blocks for the sequence and plan its first chunk. False: not enough memory now."""
        request, settings = sequence.request, self.settings
        needed_blocks = min(settings.blocks_for(len(sequence.tokens) + 1), settings.n_blocks) + spoken_for_blocks
        if self.running and needed_blocks - request.probed // settings.block_size > self.cache.available_blocks:
            return False
        holding = self._acquire(sequence, len(sequence.tokens), needed_blocks)
        if holding is None and not self.running:
            # All memory is this sequence's, but the source of a block copy may be what it lacks: do without the copy.
            found = self.cache.probe(request.namespace, sequence.tokens).cached_tokens
            whole = found // settings.block_size * settings.block_size
            holding = self._acquire(sequence, whole + 1, needed_blocks)
            if holding is None:
                self._life.give_up(sequence)
        if holding is None:
            return False
        self._life.start(sequence, holding)
        if holding.copies:
            sequence.n_ready -= sequence.n_ready % settings.block_size
            draft.add_copies(sequence, holding.copies)
            holding.copies = []
        draft.leaders.add(sequence)
        draft.started.add(sequence)
        self._plan_chunk(sequence, draft)
        return True

    def _acquire(self, sequence: Sequence, n_tokens: int, needed_blocks: int) -> Holding | None:
        """Hold what the tree has of the first n_tokens, if what is missing to needed_blocks can be had as well."""
        request = sequence.request
        ids = sequence.tokens if n_tokens == len(sequence.tokens) else sequence.tokens[:n_tokens]
        holding = self.cache.acquire(request.namespace, ids, use_cache=request.submit.use_cache)
        # Until its copy is made, the source of one cannot be evicted.
        if holding is not None and needed_blocks - holding.n_blocks > self.cache.available_blocks - len(holding.copies):
            self.cache.discard(holding)
            return None
        return holding

    # --- fences -------------------------------------------------------------------------------------------------------

    def _taken_draft(self) -> StepDraft:
        draft, self._draft = self._draft, None
        if draft is None:
            raise RuntimeError("no step is in flight: schedule() or retry() comes first")
        return draft

    def _revoke(self, fences: Iterable[int], draft: StepDraft) -> set[Sequence]:
        """Take the fences' blocks out of the tree. Returns the sequences that lost blocks.

        One that had matched such blocks when it was admitted goes back to its queue; the others, which were to compute
        them, keep what the tree still holds of their beginning and go on from there.
        """
        holdings = {id(holding) for fence in fences for holding in self.cache.revoke(fence)}
        hit = {sequence for sequence in self.running if id(sequence.holding) in holdings} if holdings else set()
        for sequence in sorted(hit, key=seniority):
            assert sequence.holding is not None
            left = sequence.holding.published_tokens
            matched = sequence.n_computed // self.settings.block_size * self.settings.block_size
            if sequence in draft.started and left < matched:
                self._life.retreat(sequence)
            else:
                sequence.n_computed = sequence.n_ready = min(sequence.n_computed, left)
        return hit

    def _settle_fences(self, failed: list[Sequence]) -> set[Sequence]:
        """Confirm what the step computed; revoke what sequences without a usable result had published. Returns the
        sequences that lost blocks by it."""
        draft = self._taken_draft()
        culprits = [draft.fences.pop(sequence) for sequence in failed if sequence in draft.fences]
        hit = self._revoke(culprits, draft) if culprits else set()
        for fence in draft.fences.values():
            self.cache.confirm(fence)
        return hit

    def _expire(self) -> None:
        """End the requests that waited for admission longer than they wanted to."""
        now_s = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, _, request = heapq.heappop(self._deadlines)
            if request.record is None and self._life.requests.get(request.id) is request:
                waited = f"the request waited {now_s - request.arrived_s:.1f} s to be admitted"
                message = f"{waited}, longer than its limit of {request.submit.queue_timeout_s:g} s"
                self._life.cancel(request.id, EngineError("queue_timeout", message))
