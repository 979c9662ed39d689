"""The administrator's routes: tenants, keys, plans and usage under /admin.

Only an administrator's key opens them (Authorization: Bearer or x-api-key). Integers above 2^53 are strings in the
answers, since JavaScript cannot hold them; times are seconds since 1970.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import auth
from gateway.errors import ApiError, invalid, unavailable
from tenants import usage
from tenants.model import (
    TENANT_SCOPES,
    InvalidName,
    InvalidRange,
    Key,
    Scope,
    StoreUnavailable,
    Tenant,
    TenantExists,
    TenantsError,
    UnknownKey,
    UnknownPlan,
    UnknownTenant,
)
from tenants.pricing import DEMO_PLAN_ID, PriceBook, usd
from tenants.registry import Registry

DEFAULT_RANGE_S = 24 * 3600
_MAX_EXACT_JSON_INT = 2**53

Handler = Callable[[Request], Awaitable[Response]]
_Body = TypeVar("_Body")

_REFUSALS: dict[type[TenantsError], tuple[int, str]] = {
    InvalidName: (400, "invalid_value"),
    InvalidRange: (400, "invalid_value"),
    UnknownTenant: (404, "tenant_not_found"),
    UnknownKey: (404, "key_not_found"),
    UnknownPlan: (400, "plan_not_found"),
    TenantExists: (409, "tenant_exists"),
}


class NewTenant(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    plan: str = DEMO_PLAN_ID


class NewKey(msgspec.Struct, forbid_unknown_fields=True):
    name: str = "default"
    scopes: tuple[Scope, ...] = TENANT_SCOPES
    expires_at: float | None = None


def admin_routes(
    registry: Registry, prices: PriceBook, redis: Redis, *, clock: Callable[[], float] = time.time
) -> list[Route]:
    """Every route under /admin. `redis` is where the usage rollups are."""
    api = _Admin(registry, prices, redis, clock)
    # A name may hold a slash, so the bare tenant comes last.
    table: list[tuple[str, str, Handler]] = [
        ("POST", "/admin/tenants", api.create_tenant),
        ("GET", "/admin/tenants", api.list_tenants),
        ("POST", "/admin/tenants/{tenant:path}/disable", api.disable_tenant),
        ("POST", "/admin/tenants/{tenant:path}/enable", api.enable_tenant),
        ("POST", "/admin/tenants/{tenant:path}/keys", api.create_key),
        ("GET", "/admin/tenants/{tenant:path}/keys", api.list_keys),
        ("GET", "/admin/tenants/{tenant:path}", api.get_tenant),
        ("DELETE", "/admin/keys/{key_id}", api.revoke_key),
        ("GET", "/admin/plans", api.list_plans),
        ("GET", "/admin/usage", api.report_usage),
    ]
    return [Route(path, _guarded(registry, handler), methods=[method]) for method, path, handler in table]


class _Admin:
    def __init__(self, registry: Registry, prices: PriceBook, redis: Redis, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._prices = prices
        self._redis = redis
        self._clock = clock

    async def create_tenant(self, request: Request) -> Response:
        body = await _body(request, NewTenant)
        tenant, key, secret = await self._registry.create_tenant(body.name, plan_id=body.plan)
        return _json({"tenant": _tenant(tenant), "key": secret.reveal(), "key_id": key.id}, 201)

    async def list_tenants(self, request: Request) -> Response:
        return _json({"tenants": [_tenant(tenant) for tenant in await self._registry.list_tenants()]})

    async def get_tenant(self, request: Request) -> Response:
        return _json({"tenant": _tenant(await self._registry.get_tenant(request.path_params["tenant"]))})

    async def disable_tenant(self, request: Request) -> Response:
        return _json({"tenant": _tenant(await self._registry.disable_tenant(request.path_params["tenant"]))})

    async def enable_tenant(self, request: Request) -> Response:
        return _json({"tenant": _tenant(await self._registry.enable_tenant(request.path_params["tenant"]))})

    async def create_key(self, request: Request) -> Response:
        body = await _body(request, NewKey)
        if body.expires_at is not None and body.expires_at <= self._clock():
            raise invalid("The key would be expired at once: expires_at is in the past.", "expires_at")
        key, secret = await self._registry.create_key(
            request.path_params["tenant"], name=body.name, scopes=body.scopes, expires_at=body.expires_at
        )
        return _json({"key": secret.reveal(), "record": _key(key)}, 201)

    async def list_keys(self, request: Request) -> Response:
        keys = await self._registry.list_keys(request.path_params["tenant"])
        return _json({"keys": [_key(key) for key in keys]})

    async def revoke_key(self, request: Request) -> Response:
        return _json({"record": _key(await self._registry.revoke_key(request.path_params["key_id"]))})

    async def list_plans(self, request: Request) -> Response:
        plans = [
            {"id": plan.id, "name": plan.name, "versions": await self._prices.list_versions(plan.id)}
            for plan in await self._prices.list_plans()
        ]
        return _json({"plans": plans})

    async def report_usage(self, request: Request) -> Response:
        """Query: from, to (seconds since 1970 or ISO 8601, UTC unless it says otherwise; the last 24 hours),
        by (of tenant,key,model; tenant), bucket (1m, 1h, 1d or all; all), tenant (id or name; all).
        """
        query = request.query_params
        to_s = _time(query, "to", self._clock())
        from_s = _time(query, "from", max(0.0, to_s - DEFAULT_RANGE_S))
        by = [part for part in query.get("by", "tenant").split(",") if part]
        if "tenant" in query:
            tenants = [await self._registry.get_tenant(query["tenant"])]
        else:
            tenants = await self._registry.list_tenants()
        names = {tenant.id: tenant.name for tenant in tenants}
        report = await usage.report(self._redis, from_s, to_s, by=by, bucket=query.get("bucket", "all"), tenants=names)
        return _json(_report(report))


def _guarded(registry: Registry, handler: Handler) -> Handler:
    """`handler` for administrators only, its typed refusals turned into answers."""

    @functools.wraps(handler)
    async def guarded(request: Request) -> Response:
        try:
            await auth.admin(request, registry)
            return await handler(request)
        except StoreUnavailable as error:
            raise unavailable("The store of tenants cannot be read at the moment; try again shortly.") from error
        except TenantsError as error:
            if type(error) not in _REFUSALS:
                raise
            status, code = _REFUSALS[type(error)]
            raise ApiError(status, code, str(error)) from error

    return guarded


async def _body(request: Request, kind: type[_Body]) -> _Body:
    """The request's JSON as `kind`; an empty body counts as an empty object."""
    try:
        return msgspec.json.decode(await request.body() or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason, _, path = str(error).partition(" - at ")
        raise invalid(f"The body does not fit: {reason}.", path.strip("`").removeprefix("$.") or None) from error


def _time(query: Any, name: str, default: float) -> float:
    text = query.get(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise invalid(
            f"'{name}' is not a time: give seconds since 1970 or ISO 8601, such as 2026-11-30T12:00Z.", name
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _tenant(tenant: Tenant) -> dict[str, Any]:
    return dataclasses.asdict(tenant)


def _key(key: Key) -> dict[str, Any]:
    return dataclasses.asdict(key)


def _report(report: usage.Report) -> dict[str, Any]:
    return {
        "from_s": report.from_s,
        "to_s": report.to_s,
        "by": report.by,
        "bucket": report.bucket,
        "rows": [_group(row.group, report.tenant_names) | _totals(row.totals) for row in report.rows],
        "total": _totals(report.total),
    }


def _group(group: usage.Group, names: dict[str, str]) -> dict[str, Any]:
    parts = {"tenant": group.tenant_id, "key": group.key_id, "model": group.model}
    shown: dict[str, Any] = {name: value for name, value in parts.items() if value is not None}
    if group.tenant_id is not None:
        shown["tenant_name"] = names[group.tenant_id]
    return {"start_s": group.start_s, **shown}


def _totals(totals: usage.Totals) -> dict[str, Any]:
    """Tokens by billing class; the prompt is the sum of the first five."""
    return {
        "requests": _exact(totals.requests),
        "errors": _exact(totals.errors),
        "uncached_tokens": _exact(totals.uncached),
        "cached_private_tokens": _exact(totals.cached_private),
        "cached_public_tokens": _exact(totals.cached_public),
        "written_unleased_tokens": _exact(totals.written_unleased),
        "written_leased_tokens": {str(ttl_s): _exact(n) for ttl_s, n in sorted(totals.written_leased.items())},
        "prompt_tokens": _exact(totals.prompt),
        "output_tokens": _exact(totals.output),
        "cost_nano_usd": _exact(totals.cost_nano_usd),
        "cost_usd": usd(totals.cost_nano_usd),
    }


def _exact(number: int) -> int | str:
    """As JSON that survives JavaScript."""
    return number if abs(number) <= _MAX_EXACT_JSON_INT else str(number)
