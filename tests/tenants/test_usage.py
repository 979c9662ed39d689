"""Reports: sums of minutes, by time and by what is asked for; every edge of a range."""

import time

import pytest

from tenants import usage
from tenants.model import CloseEvent, InvalidRange, Status, TokenUsage
from tests.tenants.support import opening, redis_client, run, running_ledger

DAY_S = 86_400
MIDNIGHT_S = 1_800_057_600  # 2027-01-16 00:00 UTC
NAMES = {"t_a": "Acme", "t_b": "Beta"}


def report(redis_url: str, from_s: float, to_s: float, **options):
    async def main():
        async with redis_client(redis_url) as redis:
            return await usage.report(redis, from_s, to_s, **{"tenants": NAMES, **options})

    return run(main)


@pytest.fixture
def books(redis_url: str, tmp_path) -> str:
    """Acme: one request each 90 s before and at midnight, and one failed a minute later. Beta: one at midnight."""
    events = [
        ("t_a", "m", MIDNIGHT_S - 90, Status.COMPLETED, TokenUsage(uncached=10, output=1)),
        ("t_a", "m", MIDNIGHT_S, Status.COMPLETED, TokenUsage(cached_private=20, written_leased=((300, 7),), output=2)),
        ("t_a", "other|m", MIDNIGHT_S + 60, Status.FAILED, TokenUsage()),
        ("t_b", "m", MIDNIGHT_S, Status.CANCELLED, TokenUsage(cached_public=4, written_unleased=5, output=3)),
    ]

    async def main() -> None:
        async with running_ledger(tmp_path, redis_url) as (ledger, _):
            for number, (tenant, model, finished_at, status, tokens) in enumerate(events):
                request = opening(f"r{number}", tenant)
                fields = {name: getattr(request, name) for name in request.__slots__}
                entry = await ledger.open(type(request)(**{**fields, "model": model}))
                await entry.close(CloseEvent(tokens, status, finished_at=finished_at))
            assert await ledger.shipped(5)

    run(main)
    return redis_url


def rows(found: usage.Report) -> list[tuple[object, ...]]:
    return [(*row.group, row.totals.requests, row.totals.prompt, row.totals.output) for row in found.rows]


def test_tenants_are_summed(books: str) -> None:
    found = report(books, 0, MIDNIGHT_S + 3600)
    assert rows(found) == [(0, "t_a", None, None, 3, 37, 3), (0, "t_b", None, None, 1, 9, 3)]
    assert found.tenant_names == NAMES
    acme = found.rows[0].totals
    assert acme.fields() == [
        ("requests", 3),
        ("errors", 1),
        ("cached_private", 20),
        ("cached_public", 0),
        ("written_unleased", 0),
        ("uncached", 10),
        ("output", 3),
        ("written_leased:300", 7),
        ("cost_nano_usd", 10 * 150 + 20 * 15 + 1313 + 3 * 600),
    ]
    assert (found.total.requests, found.total.cost_nano_usd) == (4, 4913 + 4 * 15 + 5 * 150 + 3 * 600)


@pytest.mark.parametrize(
    ("bucket", "starts"),
    [
        ("1m", [MIDNIGHT_S - 120, MIDNIGHT_S, MIDNIGHT_S + 60]),
        ("1h", [MIDNIGHT_S - 3600, MIDNIGHT_S]),
        ("1d", [MIDNIGHT_S - DAY_S, MIDNIGHT_S]),
        ("all", [0]),
    ],
)
def test_buckets_begin_on_their_boundary(books: str, bucket: str, starts: list[int]) -> None:
    found = report(books, 0, MIDNIGHT_S + 3600, bucket=bucket, by=[])
    assert [row.group.start_s for row in found.rows] == starts
    assert sum(row.totals.requests for row in found.rows) == 4


def test_a_range_holds_its_first_minute_and_not_its_end(books: str) -> None:
    assert report(books, MIDNIGHT_S, MIDNIGHT_S + 60).total.requests == 2
    assert report(books, MIDNIGHT_S + 30, MIDNIGHT_S + 61).total.requests == 3
    assert report(books, MIDNIGHT_S - 60, MIDNIGHT_S).rows == []
    assert report(books, MIDNIGHT_S, MIDNIGHT_S).rows == []


def test_groups_combine(books: str) -> None:
    found = report(books, 0, MIDNIGHT_S + 3600, by=["model"])
    assert rows(found) == [(0, None, None, "m", 3, 46, 6), (0, None, None, "other|m", 1, 0, 0)]
    found = report(books, 0, MIDNIGHT_S + 3600, by=["tenant", "key", "model"], tenants={"t_b": "Beta"})
    assert rows(found) == [(0, "t_b", "k_1", "m", 1, 9, 3)]


@pytest.mark.parametrize(
    ("from_s", "to_s", "options", "why"),
    [
        (2, 1, {}, "before it begins"),
        (-1, 1, {}, "'from' is -1"),
        (0, float("inf"), {}, "'to' is inf"),
        (float("nan"), 1, {}, "'from' is nan"),
        (0, 1, {"bucket": "5m"}, "unknown bucket"),
        (0, 1, {"by": ["user"]}, "cannot group by user"),
        (0, 1, {"by": ["key", "key"]}, "at most once"),
    ],
)
def test_bad_ranges_are_refused(redis_url: str, from_s: float, to_s: float, options: dict, why: str) -> None:
    with pytest.raises(InvalidRange, match=why):
        report(redis_url, from_s, to_s, **options)


def test_the_present_is_included(books: str) -> None:
    assert report(books, 0, time.time()).rows == []
