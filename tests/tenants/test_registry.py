"""Tenants and keys: one name each, a secret seen once, revocation within a second."""

import asyncio
import hashlib
import logging

import pytest

from tenants import store
from tenants.model import (
    InvalidName,
    SchemaMismatch,
    Scope,
    StoreUnavailable,
    TenantExists,
    UnknownKey,
    UnknownPlan,
    UnknownTenant,
)
from tenants.pricing import PriceBook
from tenants.registry import Registry
from tests.tenants.support import Clock, redis_client, run


def registry_test(redis_url, body, **options):
    async def main() -> None:
        async with redis_client(redis_url) as redis:
            await PriceBook(redis).ensure_demo_plan()
            await body(redis, Registry(redis, **options))

    run(main)


def test_a_tenant_has_a_key_that_names_it(redis_url: str) -> None:
    async def body(redis, registry: Registry) -> None:
        tenant, key, secret = await registry.create_tenant("Acme")
        principal = await registry.authenticate(secret.reveal())
        assert principal is not None
        assert (principal.tenant_id, principal.tenant_name, principal.key_id) == (tenant.id, "Acme", key.id)
        assert principal.plan_id == "demo"
        assert await registry.list_tenants() == [tenant]
        assert await registry.get_tenant(tenant.id) == await registry.get_tenant("ACME") == tenant
        assert secret.reveal().startswith("rg-")
        assert len(secret.reveal()) == 3 + 43  # 256 bits in base64

    registry_test(redis_url, body)


def test_two_tenants_never_share_a_name(redis_url: str) -> None:
    async def body(redis, registry: Registry) -> None:
        results = await asyncio.gather(*(registry.create_tenant("Acme") for _ in range(10)), return_exceptions=True)
        assert sum(isinstance(result, TenantExists) for result in results) == 9
        with pytest.raises(TenantExists, match="'ａｃｍｅ' is taken by tenant t_"):
            await registry.create_tenant("ａｃｍｅ")
        assert len(await registry.list_tenants()) == 1
        assert await redis.hlen(store.KEYS) == 1

    registry_test(redis_url, body)


def test_what_is_unknown_is_said_so(redis_url: str) -> None:
    async def body(redis, registry: Registry) -> None:
        with pytest.raises(UnknownTenant, match="'nobody'"):
            await registry.create_key("nobody")
        with pytest.raises(UnknownPlan, match="'gold'"):
            await registry.create_tenant("Acme", plan_id="gold")
        with pytest.raises(InvalidName):
            await registry.create_tenant("a\nb")
        with pytest.raises(UnknownKey) as refused:
            await registry.revoke_key("rg-a-secret-typed-by-mistake")
        assert "by-mistake" not in str(refused.value)
        assert await registry.list_tenants() == []

    registry_test(redis_url, body)


@pytest.mark.parametrize("secret", ["", "rg-", "rg-unknown", "sk-other", "rg-" + "x" * 10_000, "rg-\ud800", "rg-\x00"])
def test_a_malformed_or_unknown_key_is_nobody(redis_url: str, secret: str) -> None:
    async def body(redis, registry: Registry) -> None:
        await registry.create_tenant("Acme")
        assert await registry.authenticate(secret) is None
        assert await registry.authenticate_admin(secret) is None

    registry_test(redis_url, body)


def test_a_revoked_key_stops_here_at_once_and_elsewhere_within_a_second(redis_url: str) -> None:
    async def body(redis, registry: Registry) -> None:
        monotonic = Clock()
        elsewhere = Registry(redis, monotonic=monotonic)
        _, key, secret = await registry.create_tenant("Acme")
        _, other = await registry.create_key("Acme", name="other")
        assert await elsewhere.authenticate(secret.reveal()) is not None
        revoked = await registry.revoke_key(key.id)
        assert await registry.revoke_key(key.id) == revoked
        assert await registry.authenticate(secret.reveal()) is None
        monotonic.now_s += 0.999
        assert await elsewhere.authenticate(secret.reveal()) is not None
        monotonic.now_s += 0.001
        assert await elsewhere.authenticate(secret.reveal()) is None
        assert await registry.authenticate(other.reveal()) is not None
        assert [key.revoked_at is None for key in await registry.list_keys("Acme")] == [False, True]

    registry_test(redis_url, body)


def test_a_key_ends_at_its_expiry_even_while_cached(redis_url: str) -> None:
    clock = Clock()

    async def body(redis, registry: Registry) -> None:
        await registry.create_tenant("Acme")
        _, secret = await registry.create_key("Acme", expires_at=clock.now_s + 10)
        assert await registry.authenticate(secret.reveal()) is not None
        clock.now_s += 10
        assert await registry.authenticate(secret.reveal()) is None

    registry_test(redis_url, body, clock=clock)


def test_a_disabled_tenants_keys_do_not_work(redis_url: str) -> None:
    async def body(redis, registry: Registry) -> None:
        tenant, _, secret = await registry.create_tenant("Acme")
        await registry.disable_tenant("Acme")
        assert await registry.authenticate(secret.reveal()) is None
        await registry.enable_tenant(tenant.id)
        assert await registry.authenticate(secret.reveal()) is not None

    registry_test(redis_url, body)


def test_an_admin_key_is_no_tenants_key_and_the_reverse(redis_url: str) -> None:
    async def body(redis, registry: Registry) -> None:
        key, admin = await registry.create_admin_key("ops")
        _, _, secret = await registry.create_tenant("Acme")
        found = await registry.authenticate_admin(admin.reveal())
        assert found is not None
        assert (found.key_id, found.scopes) == (key.id, (Scope.ADMIN,))
        assert admin.reveal().startswith("rg-admin-")
        assert await registry.authenticate(admin.reveal()) is None
        assert await registry.authenticate_admin(secret.reveal()) is None
        assert await registry.list_admin_keys() == [key]
        with pytest.raises(InvalidName, match="scopes"):
            await registry.create_key("Acme", scopes=[Scope.ADMIN])

    registry_test(redis_url, body)


def test_redis_holds_digests_and_no_secret(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body(redis, registry: Registry) -> None:
        with caplog.at_level(logging.DEBUG):
            _, _, secret = await registry.create_tenant("Acme")
            _, admin = await registry.create_admin_key()
            await registry.authenticate(secret.reveal())
        stored = ""
        for key in await redis.keys("*"):
            kind = await redis.type(key)
            value = await (
                redis.hgetall(key) if kind == b"hash" else redis.smembers(key) if kind == b"set" else redis.get(key)
            )
            stored += f"{key} {value}"
        for text in (secret.reveal(), admin.reveal()):
            assert hashlib.sha256(text.encode()).hexdigest() in stored
            assert text not in stored
            assert text not in caplog.text

    registry_test(redis_url, body)


def test_a_cached_key_needs_no_redis(redis_url: str) -> None:
    async def body(redis, registry: Registry) -> None:
        _, _, secret = await registry.create_tenant("Acme")
        await registry.authenticate(secret.reveal())
        before = (await redis.info("commandstats")).get("cmdstat_evalsha", {"calls": 0})["calls"]
        for _ in range(100):
            assert await registry.authenticate(secret.reveal()) is not None
        assert (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"] == before

    registry_test(redis_url, body, monotonic=Clock())


def test_a_dashboard_token_opens_one_session(redis_url: str) -> None:
    async def body(redis, registry: Registry) -> None:
        token = await registry.create_dashboard_token(ttl_s=60)
        sessions = await asyncio.gather(*(registry.redeem_dashboard_token(token.reveal()) for _ in range(5)))
        session = next(found for found in sessions if found is not None)
        assert sum(found is not None for found in sessions) == 1
        assert await registry.has_dashboard_session(session.reveal())
        assert not await registry.has_dashboard_session(token.reveal())
        assert not await registry.has_dashboard_session("guess")
        assert await registry.redeem_dashboard_token("guess") is None
        expiring = await registry.create_dashboard_token(ttl_s=60)
        assert (
            0
            < await redis.ttl(store.login_token("token", hashlib.sha256(expiring.reveal().encode()).hexdigest()))
            <= 60
        )

    registry_test(redis_url, body)


def test_another_schema_is_refused_by_name(redis_url: str) -> None:
    async def main() -> None:
        redis = store.connect(redis_url)
        await redis.set(store.SCHEMA, "7")
        with pytest.raises(SchemaMismatch, match="radixgate:schema = '7', this version of radixgate reads 1"):
            await store.open_schema(redis)
        assert await redis.keys("*") == [store.SCHEMA.encode()]
        await redis.aclose()

    run(main)


def test_a_redis_that_is_away_is_said_so(tmp_path) -> None:
    async def main() -> None:
        redis = store.connect(f"unix://{tmp_path}/none")
        registry = Registry(redis)
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await registry.authenticate("rg-x")
        with pytest.raises(StoreUnavailable):
            await store.open_schema(redis)

    run(main)
