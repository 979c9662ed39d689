"""What was used and what it cost, from the minute rollups; hours and days are sums of minutes. Days are UTC."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from redis.asyncio import Redis

from tenants import store
from tenants.model import InvalidRange
from tenants.store import call

GROUPS = ("tenant", "key", "model")
BUCKETS = {"1m": 60, "1h": 3600, "1d": 86_400, "all": 0}
_MINUTES_PER_READ = 200
_MAX_TIME_S = 253_402_300_800
"""The year 10000."""


class Group(NamedTuple):
    """What a row is about. A part that was not asked for is None."""

    start_s: int
    """Begin of the bucket, seconds since 1970."""
    tenant_id: str | None
    key_id: str | None
    model: str | None


@dataclass(slots=True)
class Totals:
    """Sums of integers; nothing is rounded here."""

    requests: int = 0
    errors: int = 0
    cached_private: int = 0
    cached_public: int = 0
    written_unleased: int = 0
    written_leased: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """ttl_s -> tokens."""
    uncached: int = 0
    output: int = 0
    cost_nano_usd: int = 0

    def add(self, name: str, amount: int) -> None:
        """Add to the rollup field of this name, as the shipper wrote it."""
        if name.startswith("written_leased:"):
            self.written_leased[int(name.partition(":")[2])] += amount
        else:
            setattr(self, name, getattr(self, name) + amount)

    def merge(self, other: Totals) -> None:
        for name, amount in other.fields():
            self.add(name, amount)

    def fields(self) -> list[tuple[str, int]]:
        leased = [(f"written_leased:{ttl_s}", tokens) for ttl_s, tokens in sorted(self.written_leased.items())]
        names = ("requests", "errors", "cached_private", "cached_public", "written_unleased", "uncached", "output")
        return [*((name, getattr(self, name)) for name in names), *leased, ("cost_nano_usd", self.cost_nano_usd)]

    @property
    def cached(self) -> int:
        return self.cached_private + self.cached_public

    @property
    def written(self) -> int:
        return self.written_unleased + sum(self.written_leased.values())

    @property
    def prompt(self) -> int:
        return self.cached + self.written + self.uncached


class Row(NamedTuple):
    group: Group
    totals: Totals


@dataclass(frozen=True, slots=True)
class Report:
    from_s: int
    to_s: int
    by: tuple[str, ...]
    bucket: str
    rows: list[Row]
    """By time, then by group."""
    total: Totals
    tenant_names: dict[str, str]
    """Name of every tenant that has a row, by id."""


async def report(
    redis: Redis,
    from_s: float,
    to_s: float,
    *,
    by: Sequence[str] = ("tenant",),
    bucket: str = "all",
    tenants: dict[str, str],
) -> Report:
    """Usage that ended in [from_s, to_s), in whole minutes: the minute of `from_s` up to, not with, that of `to_s`
    (rounded up). A range without usage has no rows.

    `tenants` names the tenants to look at, id -> name. Raises InvalidRange, StoreUnavailable.
    """
    first, last = _minute_range(from_s, to_s)
    if bucket not in BUCKETS:
        raise InvalidRange(f"unknown bucket {bucket!r}; choose from {', '.join(BUCKETS)}")
    if not set(by) <= set(GROUPS) or len(set(by)) != len(by):
        raise InvalidRange(f"cannot group by {','.join(by)}; choose each at most once from {', '.join(GROUPS)}")
    sums: dict[Group, Totals] = defaultdict(Totals)
    for tenant_id in tenants:
        with store.answering():
            found = await call(redis.zrange(store.minutes(tenant_id), first, last - 1, byscore=True))
            minutes = [int(member) for member in found]
            for start in range(0, len(minutes), _MINUTES_PER_READ):
                await _add_minutes(
                    redis, tenant_id, minutes[start : start + _MINUTES_PER_READ], by, bucket, first, sums
                )
    total = Totals()
    for totals in sums.values():
        total.merge(totals)
    rows = sorted((Row(group, totals) for group, totals in sums.items()), key=lambda row: _order(row.group, tenants))
    names = {row.group.tenant_id: tenants[row.group.tenant_id] for row in rows if row.group.tenant_id is not None}
    return Report(first * 60, last * 60, tuple(by), bucket, rows, total, names)


async def _add_minutes(
    redis: Redis,
    tenant_id: str,
    minutes: list[int],
    by: Sequence[str],
    bucket: str,
    first: int,
    sums: dict[Group, Totals],
) -> None:
    async with redis.pipeline(transaction=False) as pipe:
        for minute in minutes:
            pipe.hgetall(store.minute_usage(tenant_id, minute))
        rollups = await pipe.execute()
    for minute, rollup in zip(minutes, rollups, strict=True):
        width_s = BUCKETS[bucket]
        start_s = minute * 60 // width_s * width_s if width_s else first * 60
        for name, amount in rollup.items():
            kind, key_id, model = store.text(name).split("|", 2)
            group = Group(
                start_s,
                tenant_id if "tenant" in by else None,
                key_id if "key" in by else None,
                model if "model" in by else None,
            )
            sums[group].add(kind, int(amount))


def _minute_range(from_s: float, to_s: float) -> tuple[int, int]:
    for name, value in (("from", from_s), ("to", to_s)):
        if not 0 <= value <= _MAX_TIME_S:
            raise InvalidRange(f"'{name}' is {value}; expected seconds since 1970")
    if to_s < from_s:
        raise InvalidRange(f"the range ends ({to_s:.0f}) before it begins ({from_s:.0f}); swap 'from' and 'to'")
    return int(from_s // 60), math.ceil(to_s / 60)


def _order(group: Group, names: dict[str, str]) -> tuple[int, str, str, str, str]:
    tenant_id = group.tenant_id or ""
    return group.start_s, names.get(tenant_id, ""), tenant_id, group.key_id or "", group.model or ""
