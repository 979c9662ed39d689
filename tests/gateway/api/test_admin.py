"""The administrator's routes: what they do, what they refuse, and that only an administrator gets in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware

from gateway.api.admin import admin_routes
from gateway.middleware import Errors, RequestIds
from tenants import store
from tenants.ledger import Ledger, OpenEvent
from tenants.model import CloseEvent, Status, TokenUsage
from tenants.pricing import PriceBook
from tenants.registry import Registry


class Api:
    """A client of the routes, with an administrator's key unless it is given another."""

    def __init__(self, http: httpx.AsyncClient, registry: Registry, redis: Any, admin_key: str) -> None:
        self.http, self.registry, self.redis, self.admin_key = http, registry, redis, admin_key

    async def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {self.admin_key}", **options.pop("headers", {})}
        response = await self.http.request(method, path, json=body, headers=headers, **options)
        return response.status_code, response.json()


@asynccontextmanager
async def serving(redis_url: str) -> AsyncIterator[Api]:
    redis = store.connect(redis_url)
    await store.open_schema(redis)
    registry, prices = Registry(redis), PriceBook(redis)
    await prices.ensure_demo_plan()
    _, secret = await registry.create_admin_key()
    app = Starlette(
        routes=admin_routes(registry, prices, redis), middleware=[Middleware(RequestIds), Middleware(Errors)]
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Api(http, registry, redis, secret.reveal())
    await redis.aclose()


@pytest.fixture
def with_api(redis_url: str) -> Callable[[Callable[[Api], Awaitable[None]]], None]:
    def run(body: Callable[[Api], Awaitable[None]]) -> None:
        async def main() -> None:
            async with serving(redis_url) as api:
                await body(api)

        asyncio.run(main())

    return run


def test_a_tenant_is_created_with_a_working_key(with_api) -> None:
    async def body(api: Api) -> None:
        status, answer = await api("POST", "/admin/tenants", {"name": "Acme"})
        assert status == 201
        assert answer["tenant"]["name"] == "Acme"
        principal = await api.registry.authenticate(answer["key"])
        assert principal is not None
        assert (principal.tenant_id, principal.key_id) == (answer["tenant"]["id"], answer["key_id"])
        assert await api("GET", "/admin/tenants") == (200, {"tenants": [answer["tenant"]]})
        assert await api("GET", "/admin/tenants/acme") == (200, {"tenant": answer["tenant"]})

    with_api(body)


def test_keys_are_created_listed_and_revoked(with_api) -> None:
    async def body(api: Api) -> None:
        await api("POST", "/admin/tenants", {"name": "Acme"})
        status, answer = await api("POST", "/admin/tenants/Acme/keys", {"name": "ci", "scopes": ["usage"]})
        assert status == 201
        assert (await api.registry.authenticate(answer["key"])).scopes == ("usage",)
        status, bare = await api("POST", "/admin/tenants/Acme/keys")
        assert (status, bare["record"]["name"]) == (201, "default")
        status, listed = await api("GET", "/admin/tenants/Acme/keys")
        assert [key["name"] for key in listed["keys"]] == ["default", "ci", "default"]
        assert answer["key"] not in str(listed)
        status, revoked = await api("DELETE", f"/admin/keys/{answer['record']['id']}")
        assert (status, revoked["record"]["revoked_at"] is not None) == (200, True)
        assert await api.registry.authenticate(answer["key"]) is None

    with_api(body)


@pytest.mark.parametrize("name", ["Acme/Söhne & Co", "株式会社", "100% ?#"])
def test_a_tenant_is_found_by_any_name(with_api, name: str) -> None:
    async def body(api: Api) -> None:
        _, answer = await api("POST", "/admin/tenants", {"name": name})
        segment = quote(name, safe="")
        assert await api("GET", f"/admin/tenants/{segment}") == (200, {"tenant": answer["tenant"]})
        assert len((await api("GET", f"/admin/tenants/{segment}/keys"))[1]["keys"]) == 1

    with_api(body)


def test_a_disabled_tenant_is_out_until_enabled(with_api) -> None:
    async def body(api: Api) -> None:
        _, answer = await api("POST", "/admin/tenants", {"name": "Acme"})
        _, disabled = await api("POST", "/admin/tenants/Acme/disable")
        assert disabled["tenant"]["disabled_at"] is not None
        assert await api.registry.authenticate(answer["key"]) is None
        assert await api("POST", "/admin/tenants/Acme/enable") == (200, {"tenant": answer["tenant"]})

    with_api(body)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("POST", "/admin/tenants", {"name": "acme"}, 409, "tenant_exists", None),
        ("POST", "/admin/tenants", {"name": "a\nb"}, 400, "invalid_value", None),
        ("POST", "/admin/tenants", {"name": "x" * 10_000}, 400, "invalid_value", None),
        ("POST", "/admin/tenants", {"name": 7}, 400, "invalid_value", "name"),
        ("POST", "/admin/tenants", {}, 400, "invalid_value", None),
        ("POST", "/admin/tenants", [], 400, "invalid_value", None),
        ("POST", "/admin/tenants", {"name": "b", "price": 3}, 400, "invalid_value", None),
        ("POST", "/admin/tenants", {"name": "b", "plan": "gold"}, 400, "plan_not_found", None),
        ("GET", "/admin/tenants/nobody", None, 404, "tenant_not_found", None),
        ("GET", "/admin/tenants/nobody/keys", None, 404, "tenant_not_found", None),
        ("POST", "/admin/tenants/Acme/keys", {"scopes": ["admin"]}, 400, "invalid_value", None),
        ("POST", "/admin/tenants/Acme/keys", {"scopes": ["root"]}, 400, "invalid_value", "scopes[0]"),
        ("POST", "/admin/tenants/Acme/keys", {"expires_at": 1}, 400, "invalid_value", "expires_at"),
        ("DELETE", "/admin/keys/k_none", None, 404, "key_not_found", None),
        ("GET", "/admin/usage?from=soon", None, 400, "invalid_value", "from"),
        ("GET", "/admin/usage?from=2&to=1", None, 400, "invalid_value", None),
        ("GET", "/admin/usage?from=nan", None, 400, "invalid_value", None),
        ("GET", "/admin/usage?bucket=5m", None, 400, "invalid_value", None),
        ("GET", "/admin/usage?by=user", None, 400, "invalid_value", None),
        ("GET", "/admin/usage?tenant=nobody", None, 404, "tenant_not_found", None),
    ],
)
def test_bad_input_is_refused(
    with_api, method: str, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    async def main(api: Api) -> None:
        await api("POST", "/admin/tenants", {"name": "Acme"})
        answered, answer = await api(method, path, body)
        assert (answered, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)

    with_api(main)


@pytest.mark.parametrize("content", [b"{", b'"\xff"', b'{"name": "\\ud800"}', b"[" * 100_000, b"\x00"])
def test_a_body_that_is_not_json_is_refused(with_api, content: bytes) -> None:
    async def main(api: Api) -> None:
        headers = {"authorization": f"Bearer {api.admin_key}"}
        response = await api.http.post("/admin/tenants", content=content, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")

    with_api(main)


def test_only_an_administrator_gets_in(with_api) -> None:
    async def body(api: Api) -> None:
        _, answer = await api("POST", "/admin/tenants", {"name": "Acme"})
        routes = [
            ("GET", "/admin/tenants"),
            ("POST", "/admin/tenants"),
            ("GET", "/admin/usage"),
            ("GET", "/admin/plans"),
            ("DELETE", "/admin/keys/k_1"),
            ("POST", "/admin/tenants/Acme/keys"),
        ]
        for method, path in routes:
            for key, status in ((answer["key"], 403), ("rg-admin-wrong", 401), ("", 401)):
                response = await api.http.request(method, path, headers={"authorization": f"Bearer {key}"})
                assert response.status_code == status, (method, path)
                assert answer["key"] not in response.text
        response = await api.http.get("/admin/tenants", headers={"x-api-key": api.admin_key})
        assert response.status_code == 200

    with_api(body)


def test_usage_is_reported_by_group(with_api, tmp_path: Path) -> None:
    async def body(api: Api) -> None:
        _, answer = await api("POST", "/admin/tenants", {"name": "Acme"})
        tenant_id = answer["tenant"]["id"]
        price = await PriceBook(api.redis).at("m", "demo", 0)
        ledger = await Ledger.start(tmp_path, api.redis)
        for number, tokens in enumerate([TokenUsage(uncached=2), TokenUsage(0, 1, 0, ((300, 4),), 0, 3)]):
            request = OpenEvent(
                request_id=f"r{number}", tenant_id=tenant_id, key_id=answer["key_id"], model="m", price=price
            )
            entry = await ledger.open(request)
            await entry.close(CloseEvent(tokens, Status.COMPLETED, finished_at=1_800_000_000.0 + 3600 * number))
        assert await ledger.shipped(5)
        await ledger.stop()
        status, report = await api(
            "GET",
            "/admin/usage?from=2027-01-15T08:00Z&to=2027-01-15T10:00:00%2B00:00&bucket=1h&by=tenant,model&tenant=acme",
        )
        assert status == 200
        assert (report["from_s"], report["to_s"]) == (1_800_000_000, 1_800_007_200)
        assert report["rows"] == [
            {
                "start_s": 1_800_000_000,
                "tenant": tenant_id,
                "tenant_name": "Acme",
                "model": "m",
                "requests": 1,
                "errors": 0,
                "uncached_tokens": 2,
                "cached_private_tokens": 0,
                "cached_public_tokens": 0,
                "written_unleased_tokens": 0,
                "written_leased_tokens": {},
                "prompt_tokens": 2,
                "output_tokens": 0,
                "cost_nano_usd": 300,
                "cost_usd": "0.000000300",
            },
            {
                "start_s": 1_800_003_600,
                "tenant": tenant_id,
                "tenant_name": "Acme",
                "model": "m",
                "requests": 1,
                "errors": 0,
                "uncached_tokens": 0,
                "cached_private_tokens": 0,
                "cached_public_tokens": 1,
                "written_unleased_tokens": 0,
                "written_leased_tokens": {"300": 4},
                "prompt_tokens": 5,
                "output_tokens": 3,
                "cost_nano_usd": 15 + 750 + 1800,
                "cost_usd": "0.000002565",
            },
        ]
        assert (report["total"]["requests"], report["total"]["cost_nano_usd"]) == (2, 2865)
        assert (await api("GET", "/admin/usage?from=0&to=1"))[1]["rows"] == []

    with_api(body)


def test_integers_beyond_javascript_are_text(with_api) -> None:
    async def body(api: Api) -> None:
        _, answer = await api("POST", "/admin/tenants", {"name": "Acme"})
        tenant_id = answer["tenant"]["id"]
        await api.redis.zadd(store.minutes(tenant_id), {"30000000": 30_000_000})
        fields = {"requests|k|m": 2**53, "cost_nano_usd|k|m": 2**53 + 1}
        await api.redis.hset(store.minute_usage(tenant_id, 30_000_000), mapping=fields)
        _, report = await api("GET", "/admin/usage?from=0&to=1900000000")
        assert (report["total"]["requests"], report["total"]["cost_nano_usd"]) == (2**53, "9007199254740993")
        assert report["total"]["cost_usd"] == "9007199.254740993"

    with_api(body)


def test_plans_show_their_prices(with_api) -> None:
    async def body(api: Api) -> None:
        _, answer = await api("GET", "/admin/plans")
        (plan,) = answer["plans"]
        (version,) = plan["versions"]
        assert (plan["id"], version["prices"]["uncached"], version["prices"]["output"]) == (
            "demo",
            150_000_000,
            600_000_000,
        )

    with_api(body)
