"""Memory for running sequences, and who gives it up when it runs out."""

from __future__ import annotations

from collections import defaultdict

from engine.draft import StepDraft
from engine.lifecycle import Lifecycle
from engine.sequence import Sequence


class Room:
    """Blocks for the tokens of a step."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._cache = life.cache
        self._settings = life.settings

    def spoken_for_blocks(self) -> int:
        """Blocks that a newcomer may not count on: what running prompts still need, and one more for each running
        sequence to grow into."""
        spoken_for = len(self._life.running)
        for sequence in self._life.running:
            assert sequence.holding is not None
            missing = self._settings.blocks_for(len(sequence.tokens) + 1) - sequence.holding.n_blocks
            if missing > 0:
                spoken_for += missing
        return spoken_for

    def extend(self, sequence: Sequence, n_tokens: int, draft: StepDraft) -> bool:
        """Room for n_tokens in all, and leave to write from n_computed on. False: no block for it."""
        holding = sequence.holding
        assert holding is not None
        # For a prompt always: the cache counts a lookup when its first blocks are taken.
        grows = holding.n_blocks * self._settings.block_size < n_tokens or not sequence.n_output
        if grows and not self._cache.extend(holding, n_tokens):
            return False
        if sequence.forked:
            copies = self._cache.make_writable(holding, sequence.n_computed)
            if copies is None:
                return False
            if copies:
                sequence.n_ready -= sequence.n_ready % self._settings.block_size
                draft.add_copies(sequence, copies)
            sequence.forked = False
        return True

    def make_room(self, sequence: Sequence, n_tokens: int, draft: StepDraft) -> bool:
        """Like extend, at the cost of others or of the sequence itself. False: it cannot run in this step.

        The oldest sequence is never preempted, so it always gets on; when even an empty pool is too small for it, its
        output ends here.
        """
        while not self.extend(sequence, n_tokens, draft):
            victim = self._victim(draft)
            if victim is not None:
                self._preempt(victim, draft)
                if victim is sequence:
                    return False
            elif len(self._life.running) == 1:
                self._life.give_up(sequence)
                return False
            else:
                return False
        return True

    def _victim(self, draft: StepDraft) -> Sequence | None:
        """The youngest sequence of the tenant that holds most of the pool for its weight.

        Not the oldest of all, and none that has published blocks in this step: others may have matched them. One that
        was preempted too often is spared while there is another.
        """
        candidates = [sequence for sequence in self._life.running[1:] if sequence not in draft.fences]
        fresh = [sequence for sequence in candidates if sequence.preemptions < self._settings.max_preemptions]
        candidates = fresh or candidates
        if not candidates:
            return None
        held_blocks: defaultdict[str, int] = defaultdict(int)
        for sequence in self._life.running:
            assert sequence.holding is not None
            held_blocks[sequence.request.owner] += sequence.holding.n_blocks
        owners = {sequence.request.owner for sequence in candidates}
        owner = max(owners, key=lambda owner: (held_blocks[owner] / self._life.queue.tenant(owner).weight, owner))
        return next(sequence for sequence in reversed(candidates) if sequence.request.owner == owner)

    def _preempt(self, sequence: Sequence, draft: StepDraft) -> None:
        """Give its blocks up; what it computed stays in the tree as long as it may."""
        draft.drop(sequence)
        sequence.preemptions += 1
        sequence.request.preemptions += 1
        self._life.release(sequence)
        self._life.back_to_queue(sequence)
