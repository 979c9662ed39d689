"""The Redis schema: every key in one place, its version, and the one way to connect.

A tenant's keys carry its id as the hash tag, so the one Lua call per ledger event stays in one slot of a cluster; the
registry's keys share the tag `{registry}`. All values are UTF-8 text: JSON records, decimal integers, hex digests.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError, TimeoutError

from tenants.model import SchemaMismatch, StoreUnavailable

SCHEMA_VERSION = 1
SCHEMA = "radixgate:schema"
EPOCH = "radixgate:epoch"
"""A random id of this Redis' data: gone after FLUSHALL, so everyone notices that the data was lost."""

TENANTS = "radixgate:{registry}:tenants"
"""Hash: tenant id -> Tenant."""
TENANT_NAMES = "radixgate:{registry}:tenant_names"
"""Hash: folded name -> tenant id."""
KEYS = "radixgate:{registry}:keys"
"""Hash: SHA-256 of the secret -> Key."""
KEY_DIGESTS = "radixgate:{registry}:key_digests"
"""Hash: key id -> SHA-256 of the secret."""
PLANS = "radixgate:{registry}:plans"
"""Hash: plan id -> Plan."""
PRICES = "radixgate:{registry}:prices"
"""Hash: price version id -> PriceVersion."""

_UNAVAILABLE = ("OOM", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "BUSY", "MISCONF", "NOREPLICAS", "TRYAGAIN", "UNBLOCKED")


def owner_keys(tenant_id: str) -> str:
    """Set: ids of the tenant's keys; of the administrators' for the empty tenant."""
    return f"radixgate:{{registry}}:keys_of:{tenant_id}"


def login_token(kind: str, digest: str) -> str:
    return f"radixgate:login:{kind}:{digest}"


def applied(tenant_id: str) -> str:
    """Hash: spool id -> last applied sequence of this tenant's events."""
    return f"radixgate:{{{tenant_id}}}:applied"


def ledger(tenant_id: str) -> str:
    """Stream of the tenant's events."""
    return f"radixgate:{{{tenant_id}}}:ledger"


def minute_usage(tenant_id: str, minute: int) -> str:
    """Hash: `class|key id|model` -> integer, for the minute that begins at 60 * `minute` seconds."""
    return f"radixgate:{{{tenant_id}}}:usage:{minute}"


def minutes(tenant_id: str) -> str:
    """Sorted set of the minutes that have usage."""
    return f"radixgate:{{{tenant_id}}}:minutes"


def seen_requests(tenant_id: str, hour: int) -> str:
    """Set: ids of requests that finished in this hour. The fence behind the sequence; it expires."""
    return f"radixgate:{{{tenant_id}}}:seen:{hour}"


def connect(url: str) -> Redis:
    """A client for `redis://`, `rediss://` or `unix://` URLs, with bounded waits."""
    return Redis.from_url(url, decode_responses=False, socket_timeout=10, socket_connect_timeout=5)


async def open_schema(redis: Redis) -> str:
    """Claim an empty Redis for this schema, or check that it has it; returns the epoch. Idempotent.

    Raises SchemaMismatch when it holds another version, StoreUnavailable when it does not answer.
    """
    with answering():
        await redis.set(SCHEMA, str(SCHEMA_VERSION), nx=True)
        found = text(await redis.get(SCHEMA))
        if found != str(SCHEMA_VERSION):
            raise SchemaMismatch(
                f"Redis holds {SCHEMA} = {found!r}, this version of radixgate reads {SCHEMA_VERSION}; "
                "use the matching version, or another Redis or database number"
            )
        await redis.set(EPOCH, secrets.token_hex(8), nx=True)
        return text(await redis.get(EPOCH))


@contextmanager
def answering() -> Iterator[None]:
    """Turns 'Redis is away' in all its forms into StoreUnavailable; other errors pass."""
    try:
        yield
    except RedisError as error:
        if not is_unavailable(error):
            raise
        raise StoreUnavailable(f"Redis does not answer ({type(error).__name__}: {error}); is it running?") from error
    except OSError as error:
        raise StoreUnavailable(f"Redis does not answer ({error}); is it running?") from error


def is_unavailable(error: BaseException) -> bool:
    """Whether waiting can help: no connection, read-only, out of memory, loading, failing over."""
    if isinstance(error, RedisConnectionError | TimeoutError | ReadOnlyError | OSError):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_UNAVAILABLE)


async def call(reply: Any) -> Any:
    """redis-py types a command as 'a value or an awaitable of one'; of an asyncio client it is always the latter."""
    return await reply


def text(value: bytes | str | None) -> str:
    """A reply as text, whether or not the client decodes."""
    return value.decode() if isinstance(value, bytes) else value or ""


@functools.cache
def lua(name: str) -> str:
    """The source of lua/<name>.lua."""
    return (Path(__file__).parent / "lua" / f"{name}.lua").read_text()
