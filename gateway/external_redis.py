"""Is the Redis that --redis-url names one that a ledger can be kept in?"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, RedisError

from gateway.failures import RedisUnusable
from gateway.setting_values import redact_url
from tenants.store import connect

MIN_VERSION = (7, 0)


async def check(url: str) -> list[str]:
    """Warnings for the operator. Raises RedisUnusable when it does not answer or is too old."""
    shown = redact_url(url)
    try:
        redis = connect(url)
    except (ValueError, RedisError) as error:
        raise RedisUnusable(f"the Redis URL {shown} cannot be used: {error}") from None
    try:
        await redis.ping()
        info: dict[str, Any] = await redis.info()
    except AuthenticationError:
        raise RedisUnusable(f"Redis at {shown} refuses the user or password; check the URL") from None
    except (RedisError, OSError) as error:
        raise RedisUnusable(f"Redis at {shown} does not answer: {error}; start it, or leave --redis-url out") from None
    finally:
        await redis.aclose()
    return judge(info, shown)


def judge(info: dict[str, Any], shown: str) -> list[str]:
    """Warnings for what INFO says. Raises RedisUnusable when the version is too old."""
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < MIN_VERSION:
        raise RedisUnusable(f"Redis at {shown} has version {version}; 7.0 or later is needed (Valkey too)")
    warnings = []
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        warnings.append(
            f"Redis at {shown} has maxmemory-policy {policy}: it may drop usage and keys when memory is short; "
            "set it to noeviction"
        )
    if not int(info.get("aof_enabled", 0)):
        warnings.append(f"Redis at {shown} has no append-only file: a restart of it may lose usage; set appendonly yes")
    return warnings


async def answers(redis: Redis) -> bool:
    """Whether it answers now."""
    try:
        await redis.ping()
    except (RedisError, OSError):
        return False
    return True
