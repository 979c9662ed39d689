"""At least once from the spool, exactly once in Redis: replays, lost replies, a Redis that forgets or is away."""

import asyncio
import shutil
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from tenants import store
from tenants.ledger import Ledger
from tenants.model import TokenUsage
from tenants.pricing import Prices, PriceVersion
from tenants.segments import end_of
from tenants.shipper import BATCH_EVENTS, Shipper, Source
from tests.tenants.support import (
    COST_NANO_USD,
    OUTPUT_NANO_USD,
    book,
    booked,
    closing,
    opening,
    redis_client,
    rollup,
    run,
    running_ledger,
)

EVENT_NANO_USD = COST_NANO_USD + 10 * OUTPUT_NANO_USD


async def written_spool(data_dir: Path, n_events: int, tenants: int = 1) -> Path:
    """A spool with events that no Redis has seen."""
    ledger = await Ledger.start(data_dir, store.connect(f"unix://{data_dir}/none"))
    await asyncio.gather(*(book(ledger, f"r{number}", f"t_{number % tenants}") for number in range(n_events)))
    await ledger.stop(timeout_s=0.0)
    (path,) = (data_dir / "spool").iterdir()
    return path


async def replay(redis, path: Path) -> None:
    """Ship a whole spool from its first byte."""
    shipper = Shipper(redis)
    shipper.add(Source(path, lambda: end_of(path), {}))
    shipper.start()
    assert await shipper.caught_up(10)
    await shipper.stop()


async def assert_booked_once(redis, tenant: str, n_events: int) -> None:
    assert len({event["request_id"] for event in await booked(redis, tenant)}) == n_events
    assert await redis.xlen(store.ledger(tenant)) == n_events
    sums = await rollup(redis, tenant)
    assert sums["requests|k_1|m"] == n_events
    assert sums["cost_nano_usd|k_1|m"] == n_events * EVENT_NANO_USD


def test_the_same_spool_replayed_twice_counts_once(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        path = await written_spool(tmp_path, 1000, tenants=3)
        async with redis_client(redis_url) as redis:
            for _ in range(2):
                await replay(redis, path)
                for tenant, n_events in (("t_0", 334), ("t_1", 333), ("t_2", 333)):
                    await assert_booked_once(redis, tenant, n_events)
                    # The sequence alone is enough; the ids are the fence behind it.
                    await redis.delete("none", *await redis.keys(f"*{{{tenant}}}:seen:*"))

    run(main)


def test_an_event_whose_predecessor_is_missing_leaves_no_trace(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        path = await written_spool(tmp_path, 3)
        async with redis_client(redis_url) as redis:
            source = Source(path, lambda: end_of(path), {})
            source.fill()
            shipper = Shipper(redis)
            assert await shipper._send(source.spool_id, source.batch[1:]) == [-1, -1]
            assert await redis.keys("*{t_0}*") == []
            assert await shipper._send(source.spool_id, source.batch) == [1, 1, 1]
            assert await shipper._send(source.spool_id, source.batch[1:]) == [0, 0]

    run(main)


def test_a_copy_of_a_spool_under_another_id_counts_once(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        path = await written_spool(tmp_path, 10)
        copy = path.with_name("f" * 32)
        shutil.copytree(path, copy)
        async with redis_client(redis_url) as redis:
            await replay(redis, path)
            await replay(redis, copy)
            await assert_booked_once(redis, "t_0", 10)

    run(main)


@pytest.mark.parametrize("n_answered", [0, 1, BATCH_EVENTS])
def test_a_lost_reply_is_sent_again_and_counts_once(tmp_path: Path, redis_url: str, n_answered: int) -> None:
    """Redis applied the batch, and the connection broke before all of it was answered."""

    async def main() -> None:
        path = await written_spool(tmp_path, 2 * BATCH_EVENTS + 5)
        async with redis_client(redis_url) as redis:
            shipper = Shipper(redis)
            send, losses = shipper._send, [n_answered]

            async def lossy_send(spool_id, batch):
                replies = await send(spool_id, batch)
                if losses and len(replies) > losses[0]:
                    replies[losses.pop() :] = [RedisConnectionError("closed")] * (len(replies) - n_answered)
                return replies

            shipper._send = lossy_send  # type: ignore[method-assign]
            shipper.add(Source(path, lambda: end_of(path), {}))
            shipper.start()
            assert await shipper.caught_up(10)
            await shipper.stop()
            await assert_booked_once(redis, "t_0", 2 * BATCH_EVENTS + 5)

    run(main)


def test_flushall_is_refilled_at_the_next_event_and_when_idle(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with running_ledger(tmp_path, redis_url) as (ledger, redis):
            await asyncio.gather(*(book(ledger, f"r{number}", f"t_{number % 2}") for number in range(600)))
            assert await ledger.shipped(5)
            await redis.flushall()
            await book(ledger, "next", "t_0")
            assert await ledger.shipped(5)
            await assert_booked_once(redis, "t_0", 301)
            await assert_booked_once(redis, "t_1", 300)
            await redis.flushall()
            assert await ledger.shipped(5)  # checks what Redis has, as the shipper does by itself when idle
            await assert_booked_once(redis, "t_0", 301)
            await assert_booked_once(redis, "t_1", 300)
            assert await redis.get(store.SCHEMA) == b"1"

    run(main)


def test_an_idle_shipper_looks_by_itself(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        path = await written_spool(tmp_path, 5)
        async with redis_client(redis_url) as redis:
            shipper = Shipper(redis, check_s=0.01)
            shipper.add(Source(path, lambda: end_of(path), {}))
            shipper.start()
            assert await shipper.caught_up(5)
            await redis.flushall()
            async with asyncio.timeout(5):
                while await redis.xlen(store.ledger("t_0")) < 5:
                    await asyncio.sleep(0.01)
            await shipper.stop()
            await assert_booked_once(redis, "t_0", 5)

    run(main)


def test_a_redis_that_went_back_in_time_gets_what_it_misses(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with running_ledger(tmp_path, redis_url) as (ledger, redis):
            await asyncio.gather(*(book(ledger, f"early {number}") for number in range(10)))
            assert await ledger.shipped(5)
            snapshot = {key: await redis.dump(key) for key in await redis.keys("*")}
            await asyncio.gather(*(book(ledger, f"late {number}") for number in range(10)))
            assert await ledger.shipped(5)
            async with redis.pipeline(transaction=True) as pipe:
                pipe.flushall()
                for key, value in snapshot.items():
                    pipe.restore(key, 0, value)
                pipe.xlen(store.ledger("t_a"))
                assert (await pipe.execute())[-1] == 10
            assert await ledger.shipped(5)
            await assert_booked_once(redis, "t_a", 20)

    run(main)


def test_an_orphans_events_are_refilled_too(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        await written_spool(tmp_path, 7)
        for _ in range(2):
            async with running_ledger(tmp_path, redis_url) as (ledger, redis):
                assert await ledger.shipped(5)
                await assert_booked_once(redis, "t_0", 7)
                await redis.flushall()
                assert await ledger.shipped(5)
                await assert_booked_once(redis, "t_0", 7)

    run(main)


def test_while_redis_is_away_requests_are_booked_and_the_lag_shows(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        away = store.connect(f"unix://{tmp_path}/none")
        ledger = await Ledger.start(tmp_path, away)
        await book(ledger, "r1")
        assert not await ledger.shipped(0.2)
        lag = ledger.lag
        assert lag.unshipped_bytes > 0
        assert lag.oldest_age_s > 0
        assert lag.last_error is not None
        (tmp_path / "none").symlink_to(redis_url.removeprefix("unix://"))
        assert await ledger.shipped(10)
        assert ledger.lag == (0, 0.0, 0, 0, None)
        await ledger.stop()
        async with redis_client(redis_url) as redis:
            await assert_booked_once(redis, "t_a", 1)

    run(main)


@pytest.mark.parametrize("refusal", ["maxmemory 1", "min-replicas-to-write 1"])
def test_a_redis_that_cannot_write_is_waited_for(tmp_path: Path, redis_url: str, refusal: str) -> None:
    async def main() -> None:
        name, value = refusal.split()
        async with running_ledger(tmp_path, redis_url) as (ledger, redis):
            await redis.config_set(name, value)
            try:
                await book(ledger, "r1")
                assert not await ledger.shipped(0.2)
                assert ledger.lag.last_error is not None
            finally:
                await redis.config_set(name, "0")
            assert await ledger.shipped(10)
            await assert_booked_once(redis, "t_a", 1)

    run(main)


def test_scripts_that_redis_forgot_are_loaded_again(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with running_ledger(tmp_path, redis_url) as (ledger, redis):
            for number in range(3):
                await redis.script_flush()
                await book(ledger, f"r{number}")
                assert await ledger.shipped(5)
            await assert_booked_once(redis, "t_a", 3)

    run(main)


def test_integers_above_2_to_the_53_stay_exact(tmp_path: Path, redis_url: str) -> None:
    price = PriceVersion(id="pv_dear", plan_id="p", model="*", effective_from=0,
                         prices=Prices(uncached=10**15, cached_read=0, output=1_000_001))  # fmt: skip

    async def main() -> None:
        async with running_ledger(tmp_path, redis_url) as (ledger, redis):
            for number in range(2):
                request = opening(f"r{number}")
                entry = await ledger.open(type(request)(**{**_fields(request), "price": price}))
                await entry.close(closing(1).__class__(TokenUsage(uncached=9_007_200, output=1), closing().status))
            assert await ledger.shipped(5)
            assert [event["cost_nano_usd"] for event in await booked(redis)] == [9_007_200_000_000_001] * 2
            assert (await rollup(redis))["cost_nano_usd|k_1|m"] == 18_014_400_000_000_002

    run(main)


def _fields(request) -> dict:
    return {name: getattr(request, name) for name in request.__slots__}


def test_events_missing_from_a_damaged_spool_do_not_stop_the_others(
    tmp_path: Path, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        path = await written_spool(tmp_path, 5)
        segment = path / "00000001.seg"
        data = bytearray(segment.read_bytes())
        closes = [data.index(b'"request_id":"r%d","x_request_id":"","tenant_id":"t_0","key_id":"k_1","model":"m",'
                             b'"instance"' % number, data.rindex(b"RGSPOOL") ) for number in (1, 2)]  # fmt: skip
        for offset in closes:
            last = data.rindex(data[offset : offset + 17])
            data[last + 3] ^= 1
        segment.write_bytes(data)
        async with redis_client(redis_url) as redis:
            await replay(redis, path)
            assert await redis.xlen(store.ledger("t_0")) == 3
            assert "damaged bytes" in caplog.text
            assert "of tenant t_0 are missing" in caplog.text

    run(main)


def test_every_key_of_an_event_is_in_the_tenants_slot(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with running_ledger(tmp_path, redis_url) as (ledger, redis):
            await book(ledger, "r1", "t_slot")
            assert await ledger.shipped(5)
            keys = [key.decode() for key in await redis.keys("*t_slot*")]
            assert len(keys) == 5
            assert all("{t_slot}" in key for key in keys)
            assert 0 < await redis.ttl(next(key for key in keys if ":seen:" in key)) <= 24 * 3600

    run(main)
