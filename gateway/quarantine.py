"""Keeps a request that may kill engines away from them: one that was in flight at two deaths rests for ten minutes.

Two equal requests of one tenant count as the same. The counts lie in Redis, so every worker sees them; it is asked only
while a death is recent, so on an ordinary day this costs nothing.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.protocol import Submit
from gateway.errors import ApiError

REST_S = 600
MAX_DEATHS = 2

log = logging.getLogger("radixgate.gateway")


def fingerprint(submit: Submit) -> str:
    """Equal for two requests of one owner with the same prompt and the same sampling."""
    digest = hashlib.sha256(repr((submit.owner, submit.sampling, submit.n, submit.salt)).encode())
    digest.update(submit.prompt_ids)
    return digest.hexdigest()


class Quarantine:
    def __init__(self, redis: Redis | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`redis` None keeps no counts: nothing is ever refused."""
        self._redis = redis
        self._clock = clock
        self._boot_ids: dict[str, str] = {}
        # Deaths before this process began are unknown to it.
        self._alert_until = clock() + REST_S

    def note_boot(self, model: str, boot_id: str) -> None:
        """Called with each request: a boot id that changed means that an engine died."""
        known = self._boot_ids.get(model)
        if known != boot_id:
            self._boot_ids[model] = boot_id
            self._alert_until = self._clock() + REST_S

    async def check(self, submit: Submit) -> None:
        """Raises ApiError when this request rests."""
        if self._redis is None or self._clock() >= self._alert_until:
            return
        try:
            deaths = await self._redis.get(_key(submit))
        except (RedisError, OSError):
            return
        if deaths is not None and int(deaths) >= MAX_DEATHS:
            raise ApiError(
                400,
                "request_quarantined",
                f"This request was being served at {int(deaths)} failures of the engine and is refused for up to "
                f"{REST_S // 60} minutes; change it, or try again later.",
                headers={"x-should-retry": "false"},
            )

    async def note_death(self, submit: Submit) -> None:
        """This request was in flight when its engine died."""
        self._alert_until = self._clock() + REST_S
        if self._redis is None:
            return
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.incr(_key(submit))
                pipe.expire(_key(submit), REST_S)
                await pipe.execute()
        except (RedisError, OSError) as error:
            log.warning("an engine's death was not counted against its requests: %s", type(error).__name__)


def _key(submit: Submit) -> str:
    return f"radixgate:quarantine:{fingerprint(submit)}"
