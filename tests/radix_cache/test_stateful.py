"""Random use of the whole store, against a naive model: a list of everything that was ever published."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix_cache.cache import PUBLIC, Namespace
from tests.radix_cache.harness import TRUNK, A, B, FakeEngine, Sequence, ids, namespace

BLOCK_SIZE = 4
NAMESPACES = [A, B, namespace("a", salt="s"), namespace("b", revision="r2"), TRUNK]
TOKENS = st.lists(st.integers(1, 2), max_size=15)


class Store(RuleBasedStateMachine):
    """Admissions, chunks, decodes, parallel samples, failed steps, cancellations, preemptions and flushes."""

    n_blocks = 14

    @initialize()
    def start(self) -> None:
        self.engine = FakeEngine(self.n_blocks, BLOCK_SIZE)
        self.published: list[tuple[Namespace, tuple[int, ...], int | None]] = []

    def planned(self, sequence: Sequence) -> bool:
        return any(sequence is chunk[0] for chunk in self.engine.plan.chunks)

    def idle(self) -> list[Sequence]:
        return [sequence for sequence in self.engine.sequences if not self.planned(sequence)]

    def expected_cached(self, ns: Namespace, tokens: list[int]) -> int:
        best = 0
        for owner, stored, fence in self.published:
            if owner != ns and owner != (PUBLIC, *ns[1:3], ""):
                continue
            shared = 0
            while shared < min(len(stored), len(tokens) - 1) and stored[shared] == tokens[shared]:
                shared += 1
            best = max(best, shared if fence is None else shared // BLOCK_SIZE * BLOCK_SIZE)
        return best

    @rule(ns=st.sampled_from(NAMESPACES), tokens=TOKENS, use_cache=st.integers(0, 5).map(bool))
    def admit(self, ns: Namespace, tokens: list[int], use_cache: bool) -> None:
        probe = self.engine.cache.probe(ns, ids(*tokens))
        sequence = self.engine.admit(ns, tokens, use_cache=use_cache)
        if sequence is not None:
            assert sequence.holding.cached_tokens == (probe.cached_tokens if use_cache else 0)
            assert sequence.holding.cached_public_tokens == (probe.cached_public_tokens if use_cache else 0)
        self.check_probe(ns, tokens, probe.cached_tokens)

    def check_probe(self, ns: Namespace, tokens: list[int], cached_tokens: int) -> None:
        assert cached_tokens <= self.expected_cached(ns, tokens)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), n_tokens=st.integers(1, 12), sampled=st.integers(1, 2))
    def schedule(self, data: st.DataObject, n_tokens: int, sampled: int) -> None:
        sequence = data.draw(st.sampled_from(self.idle()))
        if sequence.n_computed == len(sequence.tokens):
            sequence.tokens.append(sampled)
        n_tokens = min(n_tokens, len(sequence.tokens) - sequence.n_computed)
        before = sequence.holding.n_blocks
        if not self.engine.schedule(sequence, n_tokens):
            assert sequence.holding.n_blocks == before
            self.engine.discard(sequence)
        elif sequence.holding.node is not None:
            end = (sequence.n_computed + n_tokens) // BLOCK_SIZE * BLOCK_SIZE
            self.published.append((sequence.ns, tuple(sequence.tokens[:end]), self.engine.plan.step))

    @rule()
    def run(self) -> None:
        step = self.engine.plan.step
        self.engine.run()
        self.published = [(ns, stored, None if fence == step else fence) for ns, stored, fence in self.published]

    @rule()
    def fail(self) -> None:
        step = self.engine.plan.step
        self.engine.fail()
        self.published = [entry for entry in self.published if entry[2] != step]

    @precondition(lambda self: self.engine.plan.chunks)
    @rule(data=st.data(), succeeds=st.booleans())
    def cancel_while_the_step_runs(self, data: st.DataObject, succeeds: bool) -> None:
        sequence = data.draw(st.sampled_from(self.engine.plan.chunks))[0]
        table = sequence.holding.blocks.copy()
        self.finish(sequence)
        if sequence in self.engine.plan.copied:
            self.engine.plan.copied.remove(sequence)
        self.engine.plan.chunks = [chunk for chunk in self.engine.plan.chunks if chunk[0] is not sequence] + [
            (Sequence(sequence.ns, sequence.tokens, _Table(table), 0), start, end)  # type: ignore[arg-type]
            for other, start, end in self.engine.plan.chunks
            if other is sequence
        ]
        if succeeds:
            self.run()
        else:
            self.fail()

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), keep=st.integers(0, 3).map(bool))
    def finish_or_preempt(self, data: st.DataObject, keep: bool) -> None:
        sequence = data.draw(st.sampled_from(self.idle()))
        if keep:
            self.finish(sequence)
        else:
            self.engine.discard(sequence)

    def finish(self, sequence: Sequence) -> None:
        holding, n = sequence.holding, sequence.n_computed
        if holding.node is not None:
            whole = n // BLOCK_SIZE * BLOCK_SIZE
            sealed = 0 < whole < n != holding.copied_tokens
            end = n if sealed and self.engine.cache._pool.refs[holding.blocks[n // BLOCK_SIZE]] == 1 else whole
            self.published.append((sequence.ns, tuple(sequence.tokens[:end]), None))
        self.engine.release(sequence)

    @precondition(lambda self: any(not sequence.holding.copies for sequence in self.idle()))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        free = [sequence for sequence in self.idle() if not sequence.holding.copies]
        sequence = data.draw(st.sampled_from(free))
        twin = self.engine.cache.fork(sequence.holding)
        self.engine.sequences.append(Sequence(sequence.ns, list(sequence.tokens), twin, sequence.n_computed))

    @precondition(lambda self: not self.engine.plan.chunks)
    @rule(owner=st.sampled_from([None, "a", "b", PUBLIC]))
    def flush(self, owner: str | None) -> None:
        if self.n_blocks < 100:
            self.engine.cache.flush(owner)

    @rule(
        owner=st.sampled_from(["a", "b", PUBLIC]),
        reserve=st.sampled_from([0.0, 0.2]),
        ceiling=st.sampled_from([0.5, 1.0]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
    )
    def set_quota(self, owner: str, reserve: float, ceiling: float, weight: float) -> None:
        self.engine.cache.set_quota(owner, reserve=reserve, ceiling=ceiling, weight=weight)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        for sequence in list(self.engine.sequences):
            self.engine.release(sequence)
        self.engine.check()
        self.engine.cache.flush()
        self.engine.check()
        assert self.engine.cache.stats().free_blocks == self.n_blocks


class RoomyStore(Store):
    """Nothing is ever evicted: what was published must be found, to the token."""

    n_blocks = 2000

    def check_probe(self, ns: Namespace, tokens: list[int], cached_tokens: int) -> None:
        if not self.engine.plan.chunks:
            assert cached_tokens == self.expected_cached(ns, tokens)


class _Table:
    """The block table of a sequence that was cancelled while its step runs: the step still writes through it."""

    def __init__(self, blocks: object) -> None:
        self.blocks = blocks


EXAMPLES = int(os.environ.get("RADIXGATE_EXAMPLES", "60"))
PROFILE = settings(
    max_examples=EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    derandomize=EXAMPLES == 60,
    suppress_health_check=list(HealthCheck),
)
TestStore = Store.TestCase
TestStore.settings = PROFILE
TestRoomyStore = RoomyStore.TestCase
TestRoomyStore.settings = PROFILE
