"""The numbers behind the dashboard."""

from __future__ import annotations

import time
from typing import Any

from gateway.api.ops import engine_statistics, readiness
from gateway.services import Services
from tenants import usage
from tenants.pricing import usd
from tenants.usage import Totals

WINDOW_S = 3600
_KV = ("total_blocks", "free_blocks", "private_blocks", "tree_blocks")


async def snapshot(services: Services) -> dict[str, Any]:
    """The last hour's usage in all and by tenant, and each engine's blocks. Raises StoreUnavailable.

    Money is text: JavaScript's numbers are not exact above 2^53.
    """
    now_s = time.time()
    names = {tenant.id: tenant.name for tenant in await services.registry.list_tenants()}
    report = await usage.report(services.redis, now_s - WINDOW_S, now_s + 60, by=["tenant"], tenants=names)
    lag = services.ledger.lag
    return {
        "time_s": now_s,
        "window_s": WINDOW_S,
        "ready": readiness(services),
        "total": _totals(report.total),
        "tenants": [{"name": names[row.group.tenant_id or ""], **_totals(row.totals)} for row in report.rows],
        "models": [
            {"name": model.name, "up": statistics is not None, **_engine(statistics or {})}
            for model, statistics in await engine_statistics(services)
        ],
        "ledger": {"unshipped_bytes": lag.unshipped_bytes, "open_requests": lag.open_requests},
    }


def _totals(totals: Totals) -> dict[str, Any]:
    return {
        "requests": totals.requests,
        "errors": totals.errors,
        "tokens": {
            "cached": totals.cached,
            "written": totals.written,
            "uncached": totals.uncached,
            "output": totals.output,
        },
        "hit_rate": totals.cached / totals.prompt if totals.prompt else None,
        "cost_usd": usd(totals.cost_nano_usd),
    }


def _engine(statistics: dict[str, Any]) -> dict[str, Any]:
    cache = statistics.get("cache")
    blocks = {name: cache[name] for name in _KV if name in cache} if isinstance(cache, dict) else {}
    return {"running": statistics.get("running"), "queue": statistics.get("queue"), "blocks": blocks}
