"""What a Redis that the operator names must be."""

import pytest

from gateway.external_redis import judge
from gateway.failures import RedisUnusable

GOOD = {"redis_version": "7.2.4", "maxmemory_policy": "noeviction", "aof_enabled": 1}


def test_a_good_one_gets_no_warning() -> None:
    assert judge(GOOD, "redis://h") == []


@pytest.mark.parametrize("version", ["6.2.14", "5.0", "0"])
def test_one_that_is_too_old_is_refused(version: str) -> None:
    with pytest.raises(RedisUnusable, match=f"redis://h has version {version}; 7.0 or later is needed"):
        judge({**GOOD, "redis_version": version}, "redis://h")


def test_what_may_lose_usage_is_warned_of() -> None:
    warnings = judge({**GOOD, "maxmemory_policy": "allkeys-lru", "aof_enabled": 0}, "redis://h")
    assert ["maxmemory-policy allkeys-lru" in warnings[0], "no append-only file" in warnings[1]] == [True, True]
