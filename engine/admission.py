"""Which waiting sequence goes next: turns within a tenant, single flight, skip and age."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from engine.fairness import FairQueue, Tenant
from engine.plan import Chunk
from engine.sequence import Request, Sequence
from engine.settings import SchedulerSettings

if TYPE_CHECKING:
    from radix_cache.cache import Namespace, PrefixCache


class Admission:
    """Order of admission. It starts nothing and holds nothing of the cache."""

    def __init__(self, cache: PrefixCache, queue: FairQueue, settings: SchedulerSettings) -> None:
        self._cache = cache
        self._queue = queue
        self._settings = settings
        self._skipped: dict[Sequence, None] = {}
        """Due, but there was no memory for them; oldest skip first."""

    def candidates(self, tenant: Tenant, step: int) -> list[Sequence]:
        """The tenant's sequences in the order in which they may be tried now.

        Those that ran before come first, in order of seniority, and alone: a newcomer would only take the memory that
        they wait for. Among the oldest `lookahead` others the first that was passed over too often goes first, then
        priority, then the longest cached prefix, then seniority.
        """
        if due := self._due():
            return [due] if due.request.owner == tenant.owner else []
        if tenant.resuming:
            return list(tenant.resuming.values())
        window = tenant.oldest_waiting(self._settings.lookahead)
        for sequence in window:
            self._refresh_probe(sequence.request, step)
        window.sort(key=self._rank)
        return window

    def _rank(self, sequence: Sequence) -> tuple[int, int, int, int]:
        request = sequence.request
        if request.passes >= self._settings.max_passes:
            return (0, 0, 0, sequence.seniority)
        return (1, -request.submit.priority, -request.probed, sequence.seniority)

    def _refresh_probe(self, request: Request, step: int) -> None:
        stale = step - request.probed_at_step >= self._settings.probe_every_steps
        if request.submit.use_cache and (stale or request.probed_at_step < 0):
            request.probed = self._cache.probe(request.namespace, request.prompt_ids).cached_tokens
            request.probed_at_step = step

    # --- skip and age -------------------------------------------------------------------------------------------------

    def skip(self, sequence: Sequence) -> None:
        """It was its turn and it did not fit."""
        self._skipped.setdefault(sequence)

    def admitted(self, sequence: Sequence) -> None:
        """The sequence left its queue to run: whoever it went ahead of ages by one."""
        self._skipped.pop(sequence, None)
        passed = set(self._skipped)
        for other in self._queue.tenant(sequence.request.owner).waiting.values():
            if other.seniority > sequence.seniority:
                break
            passed.add(other)
        for other in passed:
            other.request.passes += 1
        sequence.request.passes = 0
        sequence.request.shared_blocks.clear()

    def forget(self, sequence: Sequence) -> None:
        """The sequence left its queue to end."""
        self._skipped.pop(sequence, None)

    def _due(self) -> Sequence | None:
        """The skipped sequence for which the queue drains, if one was passed too often."""
        for sequence in self._skipped:
            if sequence.request.passes >= self._settings.max_passes:
                return sequence
        return None


class Leaders:
    """The running sequences of one step that compute a prompt others may share. Single flight asks it."""

    def __init__(self, settings: SchedulerSettings, step: int) -> None:
        self._settings = settings
        self._step = step
        self._by_namespace: defaultdict[Namespace, list[Sequence]] = defaultdict(list)

    def add(self, sequence: Sequence) -> None:
        if sequence.request.submit.use_cache:
            self._by_namespace[sequence.request.namespace].append(sequence)

    def waits_for_one(self, request: Request, planned: Mapping[Sequence, Chunk]) -> bool:
        """Whether the request's next blocks are about to be published by a sequence that computes them.

        Waiting is the cheaper way as long as the leader runs: both would share one step's tokens, and what is left for
        the leader to compute of the shared part is never more than what the follower would compute of it. A leader that
        has stalled is not waited for.
        """
        if not request.submit.use_cache:
            return False
        for leader in self._by_namespace.get(request.namespace, ()):
            if self._step - leader.scheduled_step > self._settings.leader_stall_steps:
                continue
            computed = planned[leader].end if leader in planned else leader.n_computed
            here = max(computed, request.probed) // self._settings.block_size
            if self._shared_blocks(request, leader.request) > here:
                return True
        return False

    def _shared_blocks(self, request: Request, leader: Request) -> int:
        """Whole blocks that the request could take from the leader's prompt, less the last token: it is computed."""
        shared = request.shared_blocks.get(leader)
        if shared is None:
            mine = np.frombuffer(request.prompt_ids, np.int32)
            theirs = np.frombuffer(leader.prompt_ids, np.int32)
            n = min(len(mine) - 1, len(theirs))
            differs = np.flatnonzero(mine[:n] != theirs[:n])
            shared = (int(differs[0]) if len(differs) else n) // self._settings.block_size
            request.shared_blocks[leader] = shared
        return shared
