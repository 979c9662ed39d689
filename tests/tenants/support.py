"""What the tests of this room share: an event to open, a clock to turn, and a Redis of one's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from tenants import store
from tenants.ledger import Ledger, OpenEvent
from tenants.model import CloseEvent, Status, TokenUsage
from tenants.pricing import ANY_MODEL, DEMO_PRICES, PriceVersion

PRICE = PriceVersion(id="pv_test", plan_id="demo", model=ANY_MODEL, effective_from=0, prices=DEMO_PRICES)
PROMPT = TokenUsage(cached_private=32, written_unleased=16, uncached=2)
NOW_S = 1_800_000_000.0


class Clock:
    """Stands still until it is turned."""

    def __init__(self, now_s: float = NOW_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def opening(request_id: str, tenant: str = "t_a", **fields: Any) -> OpenEvent:
    return OpenEvent(request_id=request_id, tenant_id=tenant, key_id="k_1", model="m", price=PRICE, **fields)


def closing(output: int = 10, status: Status = Status.COMPLETED, **fields: Any) -> CloseEvent:
    usage = TokenUsage(cached_private=32, written_unleased=16, uncached=2, output=output)
    return CloseEvent(usage, status, "stop", **fields)


COST_NANO_USD = 18 * 150 + 32 * 15
"""Of PROMPT."""
OUTPUT_NANO_USD = 600
"""Of one output token."""


@asynccontextmanager
async def redis_client(url: str) -> AsyncIterator[Redis]:
    redis = store.connect(url)
    try:
        await store.open_schema(redis)
        yield redis
    finally:
        await redis.aclose()


@asynccontextmanager
async def running_ledger(data_dir: Path, url: str, **options: Any) -> AsyncIterator[tuple[Ledger, Redis]]:
    async with redis_client(url) as redis:
        ledger = await Ledger.start(data_dir, redis, **options)
        try:
            yield ledger, redis
        finally:
            await ledger.stop(timeout_s=2.0)


async def book(ledger: Ledger, request_id: str, tenant: str = "t_a", output: int = 10) -> None:
    entry = await ledger.open(opening(request_id, tenant))
    entry.admitted(PROMPT)
    await entry.close(closing(output))


async def rollup(redis: Redis, tenant: str = "t_a") -> dict[str, int]:
    """All minutes of a tenant, summed by field."""
    sums: dict[str, int] = {}
    for minute in await redis.zrange(store.minutes(tenant), 0, -1):
        for name, amount in (await redis.hgetall(store.minute_usage(tenant, int(minute)))).items():
            sums[store.text(name)] = sums.get(store.text(name), 0) + int(amount)
    return sums


async def booked(redis: Redis, tenant: str = "t_a") -> list[dict[str, Any]]:
    """The events in the tenant's stream."""
    import json

    return [json.loads(fields[b"event"]) for _, fields in await redis.xrange(store.ledger(tenant))]


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(main())  # type: ignore[arg-type]
