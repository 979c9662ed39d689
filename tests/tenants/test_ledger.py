"""OPEN, PROGRESS, CLOSE: one event per request, whatever happens to its caller or its process."""

import asyncio
import errno
import os
from pathlib import Path

import pytest

from tenants import frames, records
from tenants.ledger import PROGRESS_S, PROGRESS_TOKENS, Ledger
from tenants.model import Status, TokenUsage
from tenants.records import OpenRecord, ProgressRecord
from tenants.recovery import adopt_orphans
from tenants.segments import SpoolFiles, end_of, read_all
from tenants.shipper import Shipper, Source
from tenants.spool import SpoolFull
from tests.tenants.support import (
    COST_NANO_USD,
    NOW_S,
    OUTPUT_NANO_USD,
    PRICE,
    PROMPT,
    Clock,
    book,
    booked,
    closing,
    opening,
    redis_client,
    rollup,
    run,
    running_ledger,
)


def records_of(path: Path) -> list[records.Record]:
    return [records.decode(frame.payload) for chunk in read_all(path, end_of(path)) for frame in chunk.frames]


def spool_of(data_dir: Path) -> Path:
    (path,) = (data_dir / "spool").iterdir()
    return path


def test_a_request_becomes_one_event_and_one_rollup(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        clock = Clock()
        async with running_ledger(tmp_path, redis_url, clock=clock, instance="i") as (ledger, redis):
            entry = await ledger.open(opening("r1", x_request_id="theirs", engine_boot_id="boot"))
            entry.admitted(PROMPT)
            entry.progress(0)
            clock.now_s += 2
            event = await entry.close(closing(10))
            assert await ledger.shipped(5)
            assert event.cost_nano_usd == COST_NANO_USD + 10 * OUTPUT_NANO_USD
            assert await booked(redis) == [
                {
                    "request_id": "r1",
                    "x_request_id": "theirs",
                    "tenant_id": "t_a",
                    "key_id": "k_1",
                    "model": "m",
                    "instance": "i",
                    "engine_boot_id": "boot",
                    "price_version": "pv_test",
                    "cost_nano_usd": event.cost_nano_usd,
                    "usage": {"cached_private": 32, "cached_public": 0, "written_unleased": 16, "written_leased": [],
                              "uncached": 2, "output": 10},
                    "status": "completed",
                    "finish_reason": "stop",
                    "timings": {"queue_s": 0.0, "prefill_s": 0.0, "decode_s": 0.0, "first_token_s": None,
                                "total_s": 0.0},
                    "started_at": NOW_S,
                    "finished_at": NOW_S + 2,
                    "sequence": 1,
                }
            ]  # fmt: skip
            assert await rollup(redis) == {
                "requests|k_1|m": 1,
                "cached_private|k_1|m": 32,
                "written_unleased|k_1|m": 16,
                "uncached|k_1|m": 2,
                "output|k_1|m": 10,
                "cost_nano_usd|k_1|m": event.cost_nano_usd,
            }

    run(main)


def test_open_is_on_the_disk_before_it_returns(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with running_ledger(tmp_path, redis_url) as (ledger, _):
            entry = await ledger.open(opening("r1"))
            (record,) = records_of(spool_of(tmp_path))
            assert record == entry.request
            assert isinstance(record, OpenRecord)
            assert record.price == PRICE

    run(main)


def test_progress_is_written_by_tokens_or_time(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        monotonic = Clock()
        async with running_ledger(tmp_path, redis_url, monotonic=monotonic) as (ledger, _):
            entry = await ledger.open(opening("r1"))
            with pytest.raises(RuntimeError, match="admitted"):
                entry.progress(0)
            entry.admitted(PROMPT)

            async def noted() -> list[int]:
                await (await ledger.open(opening(f"group {monotonic.now_s} {os.urandom(4).hex()}"))).close(closing())
                found = records_of(spool_of(tmp_path))
                return [record.usage.output for record in found if isinstance(record, ProgressRecord)]

            entry.progress(0)
            assert await noted() == [0]
            entry.progress(PROGRESS_TOKENS - 1)
            assert await noted() == [0]
            entry.progress(PROGRESS_TOKENS)
            assert await noted() == [0, 16]
            entry.progress(17)
            monotonic.now_s += PROGRESS_S
            entry.progress(18)
            assert await noted() == [0, 16, 18]
            entry.progress(100)
            await entry.close(closing(100))
            entry.progress(101)
            assert await noted() == [0, 16, 18]

    run(main)


def test_a_cancelled_close_is_booked(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with running_ledger(tmp_path, redis_url) as (ledger, redis):
            entry = await ledger.open(opening("r1"))
            task = asyncio.create_task(entry.close(closing(3, Status.CANCELLED)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await entry.close(closing(99)) == entry.event
            assert await ledger.shipped(5)
            (event,) = await booked(redis)
            assert (event["status"], event["usage"]["output"]) == ("cancelled", 3)

    run(main)


def test_a_cancelled_open_costs_nothing(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with running_ledger(tmp_path, redis_url) as (ledger, redis):
            task = asyncio.create_task(ledger.open(opening("r1")))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await book(ledger, "r2")
            assert await ledger.shipped(5)
            assert ledger.lag.open_requests == 0
            events = {event["request_id"]: event for event in await booked(redis)}
            assert (events["r1"]["status"], events["r1"]["cost_nano_usd"]) == ("cancelled", 0)

    run(main)


def test_a_request_without_a_tenant_or_open_already_is_refused(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with running_ledger(tmp_path, redis_url) as (ledger, _):
            with pytest.raises(ValueError, match="needs a tenant"):
                await ledger.open(opening("r1", tenant=""))
            await ledger.open(opening("r1"))
            with pytest.raises(ValueError, match="r1 is open already"):
                await ledger.open(opening("r1"))

    run(main)


def test_a_full_disk_refuses_new_requests_and_books_the_open_ones(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with running_ledger(tmp_path, redis_url) as (ledger, redis):
            entry = await ledger.open(opening("r1"))
            write_all = frames.write_all

            def full(fd: int, data: bytes) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            monkeypatch.setattr(frames, "write_all", full)
            with pytest.raises(SpoolFull):
                await ledger.open(opening("r2"))
            with pytest.raises(SpoolFull):
                await entry.close(closing(7))
            assert ledger.lag.unwritten == 1
            monkeypatch.setattr(frames, "write_all", write_all)
            await book(ledger, "r3")
            assert await ledger.shipped(5)
            assert [event["request_id"] for event in await booked(redis)] == ["r1", "r3"]

    run(main)


def test_stopping_closes_what_is_open_and_seals_the_spool(tmp_path: Path, redis_url: str) -> None:
    async def main() -> None:
        async with redis_client(redis_url) as redis:
            ledger = await Ledger.start(tmp_path, redis)
            entry = await ledger.open(opening("r1"))
            entry.admitted(PROMPT)
            entry.progress(0)
            entry.progress(5)
            await ledger.stop()
            (event,) = await booked(redis)
            assert (event["status"], event["usage"]["output"]) == ("aborted", 5)
        assert {file.name for file in spool_of(tmp_path).iterdir()} == {"00000001.seg", "lock", "sealed.json"}
        (orphan,) = adopt_orphans(tmp_path / "spool")
        assert (orphan.last, orphan.aborted) == ({"t_a": 1}, 0)
        orphan.files.close()

    run(main)


# --- after a crash ----------------------------------------------------------------------------------------------------


def crashed_spool(data_dir: Path, *records_left: records.Record) -> SpoolFiles:
    """What a process leaves behind that died after writing these records."""
    files = SpoolFiles.create(data_dir / "spool")
    files.append([records.encode(record) for record in records_left])
    files.sync()
    files.close()
    return files


def open_record(request_id: str) -> OpenRecord:
    return OpenRecord(
        request_id=request_id,
        x_request_id="",
        tenant_id="t_a",
        key_id="k_1",
        model="m",
        instance="i",
        engine_boot_id="boot",
        price=PRICE,
        started_at=NOW_S,
    )


def progress_record(request_id: str, output: int) -> ProgressRecord:
    usage = TokenUsage(cached_private=32, written_unleased=16, uncached=2, output=output)
    return ProgressRecord(request_id=request_id, usage=usage, time_s=NOW_S + output)


def close_record(request_id: str, sequence: int) -> records.Record:
    return records.close_event(
        open_record(request_id),
        PROMPT,
        Status.COMPLETED,
        finish_reason="stop",
        timings=closing().timings,
        finished_at=NOW_S,
        engine_boot_id="boot",
        sequence=sequence,
    )


def test_what_a_dead_process_left_open_is_closed_with_its_last_progress(tmp_path: Path, redis_url: str) -> None:
    left = [open_record("a"), open_record("b"), progress_record("b", 0), open_record("c"), close_record("c", 1)]
    crashed_spool(tmp_path, *left, progress_record("b", 40))

    async def main() -> None:
        async with running_ledger(tmp_path, redis_url) as (ledger, redis):
            assert await ledger.shipped(5)
            events = {event["request_id"]: event for event in await booked(redis)}
            assert {name: event["status"] for name, event in events.items()} == {
                "a": "aborted",
                "b": "aborted",
                "c": "completed",
            }
            assert events["a"]["cost_nano_usd"] == 0
            assert events["b"]["cost_nano_usd"] == COST_NANO_USD + 40 * OUTPUT_NANO_USD
            assert events["b"]["finished_at"] == NOW_S + 40
            assert (await rollup(redis))["errors|k_1|m"] == 2

    run(main)


def test_taking_over_twice_closes_once(tmp_path: Path) -> None:
    crashed_spool(tmp_path, open_record("a"))
    (first,) = adopt_orphans(tmp_path / "spool")
    (first.files.path / "sealed.json").unlink()  # as if it had died before it was sealed
    first.files.close()
    (second,) = adopt_orphans(tmp_path / "spool")
    assert (first.aborted, second.aborted, second.last) == (1, 0, {"t_a": 1})
    second.files.close()


def test_a_running_process_keeps_its_spool_and_an_empty_one_is_removed(tmp_path: Path) -> None:
    living = SpoolFiles.create(tmp_path / "spool")
    living.append([records.encode(open_record("a"))])
    SpoolFiles.create(tmp_path / "spool").close()
    assert adopt_orphans(tmp_path / "spool") == []
    assert [path.name for path in (tmp_path / "spool").iterdir()] == [living.id]
    living.close()


def test_a_lost_close_that_redis_has_is_not_booked_twice_nor_hides_another(tmp_path: Path, redis_url: str) -> None:
    """Two CLOSEs were shipped, then a bit of the second flipped on the disk; a third request was open at the crash."""
    left = [
        open_record("one"),
        close_record("one", 1),
        open_record("two"),
        close_record("two", 2),
        open_record("three"),
    ]
    path = crashed_spool(tmp_path, *left).path

    async def main() -> None:
        async with redis_client(redis_url) as redis:
            shipper = Shipper(redis)
            shipper.add(Source(path, lambda: end_of(path), {}))
            shipper.start()
            assert await shipper.caught_up(5)
            await shipper.stop()
        segment = path / "00000001.seg"
        data = bytearray(segment.read_bytes())
        data[data.rindex(b'"two"') + 1] ^= 1
        segment.write_bytes(data)
        async with running_ledger(tmp_path, redis_url) as (ledger, redis):
            assert await ledger.shipped(5)
            found = [(event["request_id"], event["status"]) for event in await booked(redis)]
            assert found == [("one", "completed"), ("two", "completed"), ("three", "aborted")]

    run(main)
