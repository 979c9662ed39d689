"""The ledger against a model of it: any order of requests, crashes, restarts and losses of Redis' data."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tenants import store
from tenants.ledger import Entry, Ledger
from tenants.model import CloseEvent, Status, TokenUsage
from tests.tenants.support import PRICE, PROMPT, booked, opening, rollup

TENANTS = ["t_a", "t_b", "t_c"]
_url = ""


@pytest.fixture(autouse=True)
def _redis(redis_url: str) -> None:
    global _url
    _url = redis_url


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.data_dir = Path(tempfile.mkdtemp(prefix="ledger-"))
        self.redis = store.connect(_url)
        self.entries: dict[str, Entry] = {}
        self.handed: dict[str, int | None] = {}
        self.expected: dict[str, tuple[str, Status, int, bool]] = {}
        """Request id -> tenant, status, output, whether the prompt was computed."""
        self.n_requests = 0
        self.runner.run(self._start(flush=True))

    async def _start(self, *, flush: bool = False) -> None:
        if flush:
            await self.redis.flushall()
        self.ledger = await Ledger.start(self.data_dir, self.redis, monotonic=lambda: 0.0)

    def teardown(self) -> None:
        self.runner.run(self._end())
        self.runner.close()
        shutil.rmtree(self.data_dir)

    async def _end(self) -> None:
        await self._stop()
        await self._agree()
        await self.redis.aclose()

    async def _stop(self) -> None:
        for request_id in list(self.entries):
            self._expect_aborted(request_id, self.handed[request_id])
        await self.ledger.stop()

    def _expect_aborted(self, request_id: str, output: int | None) -> None:
        tenant = self.entries.pop(request_id).request.tenant_id
        self.expected[request_id] = (tenant, Status.ABORTED, output or 0, output is not None)

    @rule(tenant=st.sampled_from(TENANTS))
    def open(self, tenant: str) -> None:
        self.n_requests += 1
        request_id = f"r{self.n_requests}"
        self.entries[request_id] = self.runner.run(self.ledger.open(opening(request_id, tenant)))
        self.entries[request_id].admitted(PROMPT)
        self.handed[request_id] = None

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), more=st.integers(0, 40))
    def progress(self, data: st.DataObject, more: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.entries)))
        self.handed[request_id] = (self.handed[request_id] or 0) + more

        async def progress() -> None:
            self.entries[request_id].progress(self.handed[request_id] or 0)

        self.runner.run(progress())

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), status=st.sampled_from([Status.COMPLETED, Status.CANCELLED, Status.FAILED]))
    def close(self, data: st.DataObject, status: Status) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.entries)))
        entry = self.entries.pop(request_id)
        output = self.handed[request_id] or 0
        usage = TokenUsage(PROMPT.cached_private, 0, PROMPT.written_unleased, (), PROMPT.uncached, output)
        self.runner.run(entry.close(CloseEvent(usage, status)))
        self.expected[request_id] = (entry.request.tenant_id, status, output, True)

    @rule()
    def restart(self) -> None:
        self.runner.run(self._stop())
        self.runner.run(self._start())

    @rule()
    def crash(self) -> None:
        """The process goes; what the disk has stays. Its last PROGRESS decides what its open requests cost."""

        async def crash() -> None:
            self.ledger._shipper.wake.set()
            await self.ledger._shipper.stop()
            noted = {name: entry._noted_tokens for name, entry in self.entries.items()}
            await self.ledger._spool.close(lambda files: None)
            for orphan in self.ledger._adopted:
                orphan.files.close()
            for request_id in list(self.entries):
                self._expect_aborted(request_id, None if self.handed[request_id] is None else noted[request_id])

        self.runner.run(crash())
        self.runner.run(self._start())

    @rule()
    def redis_loses_everything(self) -> None:
        self.runner.run(self.redis.flushall())

    @rule()
    def redis_loses_a_tenant(self) -> None:
        async def lose() -> None:
            keys = [key for key in await self.redis.keys("*") if b"{t_a}" in key]
            if keys:
                await self.redis.delete(*keys)

        self.runner.run(lose())

    @invariant()
    def redis_agrees(self) -> None:
        self.runner.run(self._agree())

    async def _agree(self) -> None:
        if self.ledger._shipper._stopping is False:
            assert await self.ledger.shipped(10)
        for tenant in TENANTS:
            events = {event["request_id"]: event for event in await booked(self.redis, tenant)}
            assert len(events) == await self.redis.xlen(store.ledger(tenant))
            expected = {name: facts for name, facts in self.expected.items() if facts[0] == tenant}
            assert events.keys() == expected.keys()
            total = 0
            for name, (_, status, output, computed) in expected.items():
                usage = TokenUsage(PROMPT.cached_private, 0, PROMPT.written_unleased, (), PROMPT.uncached, output)
                cost = PRICE.cost_nano_usd(usage if computed else TokenUsage())
                assert (events[name]["status"], events[name]["cost_nano_usd"]) == (status, cost)
                total += cost
            sums = await rollup(self.redis, tenant)
            assert sums.get("requests|k_1|m", 0) == len(expected)
            assert sums.get("cost_nano_usd|k_1|m", 0) == total


TestLedgerAgainstItsModel = LedgerMachine.TestCase
TestLedgerAgainstItsModel.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
