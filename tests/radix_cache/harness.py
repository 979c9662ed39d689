"""An engine without a model, to test the store: it keeps, per slot of every block, which context was written there.

The content of a slot is the tuple of all token ids up to and including its token, which is what attention state stands
for. So "every sequence reads exactly its own context" and "the tree holds what its edges say" can be compared exactly.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from radix_cache.cache import PUBLIC, BlockCopy, Holding, Namespace, PrefixCache

Context = tuple[int, ...]


def namespace(owner: str, *, revision: str = "r1", adapter: str = "", salt: str = "") -> Namespace:
    return (owner, revision, adapter, salt)


A, B, TRUNK = namespace("a"), namespace("b"), namespace(PUBLIC)


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


@dataclass(eq=False)
class Sequence:
    ns: Namespace
    tokens: list[int]
    holding: Holding
    n_computed: int


@dataclass
class Plan:
    step: int
    chunks: list[tuple[Sequence, int, int]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    copied: set[Sequence] = field(default_factory=set)


class FakeEngine:
    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.cache = PrefixCache(n_blocks, block_size)
        self.block_size = block_size
        self.kv: list[list[Context | None]] = [[None] * block_size for _ in range(n_blocks)]
        self.sequences: list[Sequence] = []
        self.plan = Plan(1)

    def admit(self, ns: Namespace, tokens: list[int], *, use_cache: bool = True) -> Sequence | None:
        holding = self.cache.acquire(ns, ids(*tokens), use_cache=use_cache)
        if holding is None:
            return None
        sequence = Sequence(ns, list(tokens), holding, holding.cached_tokens)
        self.sequences.append(sequence)
        return sequence

    def schedule(self, sequence: Sequence, n_tokens: int) -> bool:
        """Plan the next n_tokens of the sequence; all but its blocks' content is as if they were computed."""
        start, end = sequence.n_computed, sequence.n_computed + n_tokens
        copies = self.cache.make_writable(sequence.holding, start)
        if copies is None:
            return False
        if copies:
            self.plan.copied.add(sequence)
            self.plan.copies += copies
        if not self.cache.extend(sequence.holding, end):
            return False
        if sequence.holding.copies:
            self.plan.copied.add(sequence)
            self.plan.copies += sequence.holding.copies
            sequence.holding.copies = []
        self.cache.publish(sequence.holding, ids(*sequence.tokens), end, self.plan.step)
        self.plan.chunks.append((sequence, start, end))
        return True

    def run(self) -> None:
        """The step succeeds: copies (all sources first), then writes; then every sequence reads its own context."""
        plan, self.plan = self.plan, Plan(self.plan.step + 1)
        sources = [self.kv[copy.source][: copy.n_tokens] for copy in plan.copies]
        for copy, content in zip(plan.copies, sources, strict=True):
            self.kv[copy.target] = content + [None] * (self.block_size - copy.n_tokens)
        tables = {sequence: sequence.holding.blocks.tolist() for sequence, _, _ in plan.chunks}
        for sequence, start, end in plan.chunks:
            for position in range(start, end):
                block = tables[sequence][position // self.block_size]
                self.kv[block][position % self.block_size] = tuple(sequence.tokens[: position + 1])
        for sequence, _, end in plan.chunks:
            sequence.n_computed = end
        self.cache.confirm(plan.step)
        for sequence, _, _ in plan.chunks:
            self.check_reads(sequence)
        self.check_tree()

    def fail(self) -> list[Sequence]:
        """The step fails: nothing was copied or written. Sequences whose copies were lost are given up."""
        plan, self.plan = self.plan, Plan(self.plan.step + 1)
        revoked = self.cache.revoke(plan.step)
        hit = [sequence for sequence in self.sequences if sequence.holding in revoked]
        assert len(hit) == len(revoked)
        for sequence in hit:
            sequence.n_computed = min(sequence.n_computed, sequence.holding.published_tokens)
        for sequence in plan.copied - set(hit):
            self.discard(sequence)
        self.check_tree()
        return hit

    def release(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.cache.release(sequence.holding, ids(*sequence.tokens), sequence.n_computed)

    def discard(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.cache.discard(sequence.holding)

    def serve(self, ns: Namespace, tokens: list[int], *, use_cache: bool = True) -> int:
        """A whole request in one step. Returns its cached tokens."""
        sequence = self.admit(ns, tokens, use_cache=use_cache)
        assert sequence is not None
        assert self.schedule(sequence, len(tokens) - sequence.n_computed)
        self.run()
        self.release(sequence)
        self.check()
        return sequence.holding.cached_tokens

    def check(self) -> None:
        self.cache.check_invariants([sequence.holding for sequence in self.sequences])

    def check_reads(self, sequence: Sequence) -> None:
        for position in range(sequence.n_computed):
            block = sequence.holding.blocks[position // self.block_size]
            got = self.kv[block][position % self.block_size]
            assert got == tuple(sequence.tokens[: position + 1]), f"token {position} of {sequence.tokens} reads {got}"

    def check_tree(self) -> None:
        """Every computed block of the tree holds the context that its edge says."""
        todo = [(root, ()) for root in self.cache._tree.roots.values()]
        while todo:
            node, context = todo.pop()
            tokens = np.frombuffer(node.edge[: node.n_bytes], np.int32).tolist()
            blocks = np.frombuffer(node.blocks, np.int32)
            if node.fence is None:
                for i in range(len(tokens)):
                    got = self.kv[blocks[i // self.block_size]][i % self.block_size]
                    assert got == (*context, *tokens[: i + 1]), f"the tree offers {got} as {(*context, *tokens)}"
            for kids in (node.children, *(node.branches or {}).values()):
                todo += [(child, (*context, *tokens)) for child in (kids or {}).values()]
