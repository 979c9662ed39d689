"""Tenants and their keys in Redis.

A secret is `rg-` (a tenant's key) or `rg-admin-` (an administrator's) and 256 random bits; Redis holds its SHA-256
only. Whoever creates a key gets the Secret once, and there is no way to read it again.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
from redis.asyncio import Redis

from tenants import store
from tenants.model import (
    TENANT_SCOPES,
    Admin,
    InvalidName,
    Key,
    Principal,
    Scope,
    Secret,
    Tenant,
    TenantExists,
    UnknownKey,
    UnknownPlan,
    UnknownTenant,
    clean_name,
    name_key,
)
from tenants.pricing import DEMO_PLAN_ID
from tenants.store import call

KEY_PREFIX = "rg-"
ADMIN_KEY_PREFIX = "rg-admin-"
MAX_SECRET_CHARS = 200
CACHED_KEYS = 10_000
DASHBOARD_LINK_TTL_S = 15 * 60
DASHBOARD_SESSION_TTL_S = 12 * 60 * 60


class _Record(NamedTuple):
    key: Key
    tenant: Tenant | None
    read_at: float


class Registry:
    """Every method raises StoreUnavailable when Redis does not answer.

    Args:
        clock: seconds since 1970, for creation, expiry and revocation.
        monotonic: seconds of a clock that never goes back, for the local cache.
        cache_ttl_s: how stale a cached key may be; a revocation takes effect within it on every process.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        cache_ttl_s: float = 1.0,
    ) -> None:
        self._redis = redis
        self._clock = clock
        self._monotonic = monotonic
        self._cache_ttl_s = cache_ttl_s
        self._cache: OrderedDict[str, _Record] = OrderedDict()
        self._create_tenant = redis.register_script(store.lua("create_tenant"))
        self._authenticate = redis.register_script(store.lua("authenticate"))

    # --- tenants ------------------------------------------------------------------------------------------------------

    async def create_tenant(self, name: str, *, plan_id: str = DEMO_PLAN_ID) -> tuple[Tenant, Key, Secret]:
        """A new tenant and its first key. Raises InvalidName, UnknownPlan, TenantExists."""
        tenant = Tenant(_new_id("t"), clean_name(name, "tenant name"), plan_id, self._clock())
        key, secret, digest = self._new_key(tenant.id, "default", TENANT_SCOPES, KEY_PREFIX, None)
        with store.answering():
            if not await call(self._redis.hexists(store.PLANS, plan_id)):
                raise UnknownPlan(f"no plan has the id {plan_id[:100]!r}")
            holder = await self._create_tenant(
                keys=[store.TENANTS, store.TENANT_NAMES, store.KEYS, store.KEY_DIGESTS, store.owner_keys(tenant.id)],
                args=[tenant.id, _json(tenant), name_key(tenant.name), key.id, digest, _json(key)],
            )
        if store.text(holder) != tenant.id:
            raise TenantExists(f"the name {tenant.name!r} is taken by tenant {store.text(holder)}; choose another name")
        return tenant, key, secret

    async def list_tenants(self) -> list[Tenant]:
        """All tenants, oldest first, disabled ones included."""
        with store.answering():
            records = await call(self._redis.hvals(store.TENANTS))
        return sorted((_tenant(record) for record in records), key=lambda tenant: (tenant.created_at, tenant.id))

    async def get_tenant(self, id_or_name: str) -> Tenant:
        """By id, else by name in any spelling that reads the same. Raises UnknownTenant."""
        with store.answering():
            record = await call(self._redis.hget(store.TENANTS, id_or_name))
            if record is None:
                tenant_id = await call(self._redis.hget(store.TENANT_NAMES, name_key(id_or_name)))
                record = tenant_id and await call(self._redis.hget(store.TENANTS, store.text(tenant_id)))
        if not record:
            raise UnknownTenant(f"no tenant has the id or name {id_or_name[:100]!r}")
        return _tenant(record)

    async def disable_tenant(self, id_or_name: str) -> Tenant:
        """None of its keys works from now on (<= cache_ttl_s elsewhere). Idempotent. Raises UnknownTenant."""
        tenant = await self.get_tenant(id_or_name)
        return await self._put_tenant(replace(tenant, disabled_at=tenant.disabled_at or self._clock()))

    async def enable_tenant(self, id_or_name: str) -> Tenant:
        """Undo disable_tenant. Raises UnknownTenant."""
        return await self._put_tenant(replace(await self.get_tenant(id_or_name), disabled_at=None))

    async def _put_tenant(self, tenant: Tenant) -> Tenant:
        with store.answering():
            await call(self._redis.hset(store.TENANTS, tenant.id, _json(tenant)))
        self._cache.clear()
        return tenant

    # --- keys ---------------------------------------------------------------------------------------------------------

    async def create_key(
        self,
        tenant: str,
        *,
        name: str = "default",
        scopes: Sequence[Scope] = TENANT_SCOPES,
        expires_at: float | None = None,
    ) -> tuple[Key, Secret]:
        """A further key of a tenant given by id or name. Raises UnknownTenant, InvalidName."""
        if not scopes or not set(scopes) <= set(TENANT_SCOPES):
            raise InvalidName(f"scopes of a tenant's key are {', '.join(TENANT_SCOPES)}; got {list(scopes)}")
        owner = await self.get_tenant(tenant)
        return await self._add_key(owner.id, name, tuple(scopes), KEY_PREFIX, expires_at)

    async def create_admin_key(self, name: str = "admin", *, expires_at: float | None = None) -> tuple[Key, Secret]:
        """A key for the administrative routes; it cannot be used for inference. Raises InvalidName."""
        return await self._add_key("", name, (Scope.ADMIN,), ADMIN_KEY_PREFIX, expires_at)

    async def list_keys(self, tenant: str) -> list[Key]:
        """The tenant's keys, oldest first, revoked ones included. Raises UnknownTenant."""
        return await self._keys_of((await self.get_tenant(tenant)).id)

    async def list_admin_keys(self) -> list[Key]:
        return await self._keys_of("")

    async def revoke_key(self, key_id: str) -> Key:
        """The key stops working here at once and elsewhere within cache_ttl_s. Idempotent. Raises UnknownKey."""
        with store.answering():
            digest = store.text(await call(self._redis.hget(store.KEY_DIGESTS, key_id)))
            record = digest and await call(self._redis.hget(store.KEYS, digest))
            if not record:
                # What was given may be a secret typed by mistake: it must not be repeated.
                raise UnknownKey("no key has this id; ids begin with k_ and are listed by `radixgate key list`")
            key = _key(record)
            if key.revoked_at is None:
                key = replace(key, revoked_at=self._clock())
                await call(self._redis.hset(store.KEYS, digest, _json(key)))
        self._cache.pop(digest, None)
        return key

    async def _add_key(
        self, tenant_id: str, name: str, scopes: tuple[Scope, ...], prefix: str, expires_at: float | None
    ) -> tuple[Key, Secret]:
        key, secret, digest = self._new_key(tenant_id, name, scopes, prefix, expires_at)
        with store.answering():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(store.KEYS, digest, _json(key))
                pipe.hset(store.KEY_DIGESTS, key.id, digest)
                pipe.sadd(store.owner_keys(tenant_id), key.id)
                await pipe.execute()
        return key, secret

    def _new_key(
        self, tenant_id: str, name: str, scopes: tuple[Scope, ...], prefix: str, expires_at: float | None
    ) -> tuple[Key, Secret, str]:
        secret = prefix + secrets.token_urlsafe(32)
        key = Key(_new_id("k"), tenant_id, clean_name(name, "key name"), scopes, self._clock(), None, expires_at)
        return key, Secret(secret), _digest(secret)

    async def _keys_of(self, tenant_id: str) -> list[Key]:
        with store.answering():
            key_ids = sorted(map(store.text, await call(self._redis.smembers(store.owner_keys(tenant_id)))))
            if not key_ids:
                return []
            digests = [digest for digest in await call(self._redis.hmget(store.KEY_DIGESTS, key_ids)) if digest]
            records = await call(self._redis.hmget(store.KEYS, [store.text(digest) for digest in digests]))
        return sorted((_key(record) for record in records if record), key=lambda key: (key.created_at, key.id))

    # --- authentication -----------------------------------------------------------------------------------------------

    async def authenticate(self, secret: str) -> Principal | None:
        """Who a tenant's key stands for; None when it is unknown, revoked, expired, an administrator's, or its tenant
        is disabled. At most cache_ttl_s stale.
        """
        record = await self._find(secret)
        if record is None or record.tenant is None or record.tenant.disabled_at is not None:
            return None
        key, tenant = record.key, record.tenant
        return Principal(tenant.id, tenant.name, tenant.plan_id, key.id, key.scopes)

    async def authenticate_admin(self, secret: str) -> Admin | None:
        """Who an administrator's key stands for; None when it is unknown, revoked, expired or a tenant's."""
        record = await self._find(secret)
        if record is None or Scope.ADMIN not in record.key.scopes:
            return None
        return Admin(record.key.id, record.key.name, record.key.scopes)

    async def _find(self, secret: str) -> _Record | None:
        """The usable key of this secret. Unknown ones are not cached: a new key works at once, and guessing keys
        cannot fill the cache.
        """
        if not secret.startswith(KEY_PREFIX) or len(secret) > MAX_SECRET_CHARS:
            return None
        digest = _digest(secret)
        record = self._cache.get(digest)
        if record is None or self._monotonic() - record.read_at >= self._cache_ttl_s:
            record = await self._read(digest)
        return record if record is not None and record.key.usable(self._clock()) else None

    async def _read(self, digest: str) -> _Record | None:
        read_at = self._monotonic()
        with store.answering():
            reply = await self._authenticate(keys=[store.KEYS, store.TENANTS], args=[digest])
        self._cache.pop(digest, None)
        if not reply:
            return None
        record = _Record(_key(reply[0]), _tenant(reply[1]) if reply[1] else None, read_at)
        self._cache[digest] = record
        if len(self._cache) > CACHED_KEYS:
            self._cache.popitem(last=False)
        return record

    # --- dashboard ----------------------------------------------------------------------------------------------------

    async def create_dashboard_token(self, ttl_s: int = DASHBOARD_LINK_TTL_S) -> Secret:
        """A token for a link that opens the dashboard once."""
        return await self._create_login("token", ttl_s)

    async def redeem_dashboard_token(
        self, token: str, *, session_ttl_s: int = DASHBOARD_SESSION_TTL_S
    ) -> Secret | None:
        """A session for a token's first use; None for an unknown, used or expired one."""
        with store.answering():
            found = await self._redis.getdel(store.login_token("token", _digest(token)))
        return await self._create_login("session", session_ttl_s) if found is not None else None

    async def has_dashboard_session(self, session: str) -> bool:
        with store.answering():
            return bool(await self._redis.exists(store.login_token("session", _digest(session))))

    async def _create_login(self, kind: str, ttl_s: int) -> Secret:
        secret = secrets.token_urlsafe(32)
        with store.answering():
            await self._redis.set(store.login_token(kind, _digest(secret)), "admin", ex=ttl_s)
        return Secret(secret)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(8)}"


def _json(record: Tenant | Key) -> bytes:
    return msgspec.json.encode(record)


def _tenant(record: bytes | str) -> Tenant:
    return msgspec.json.decode(record, type=Tenant)


def _key(record: bytes | str) -> Key:
    return msgspec.json.decode(record, type=Key)
