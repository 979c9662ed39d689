"""Plans and prices: integers of nano-USD (1e-9 USD) per million tokens, one exact sum per event, rounded once.

A price version belongs to a plan and a model (or `*`, any model without prices of its own) and holds from
`effective_from` until the next version of the same plan and model. An event pins the version it used, so a later
version never reprices it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

import msgspec
from redis.asyncio import Redis

from tenants import store
from tenants.model import InvalidPrice, PlanExists, PriceOverlap, TokenUsage, UnknownPlan, UnknownPrice, clean_name
from tenants.store import call

NANO_USD = 10**9
TOKENS_PER_PRICE = 10**6
MAX_PRICE_NANO_USD = 10**15
"""A million USD per million tokens: with any usage that fits a model, sums stay far inside 63 bits."""
ANY_MODEL = "*"
DEMO_PLAN_ID = "demo"


def _check_price(name: str, price: object) -> None:
    if type(price) is not int or not 0 <= price <= MAX_PRICE_NANO_USD:
        raise InvalidPrice(
            f"{name} is {price!r}; a price is a whole number of nano-USD per million tokens from 0 to "
            f"{MAX_PRICE_NANO_USD} (0.15 USD is 150000000)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Nano-USD per million tokens by class. None takes the price named beside it. Raises InvalidPrice."""

    uncached: int
    cached_read: int
    output: int
    public_read: int | None = None
    """None: cached_read."""
    write_unleased: int | None = None
    """None: uncached."""
    write_leased: tuple[tuple[int, int], ...] = ()
    """(ttl_s, price), shortest first. A lease pays the price of the shortest listed TTL that covers it, or of the
    longest listed; without a list, the price of an unleased write."""

    def __post_init__(self) -> None:
        for name in ("uncached", "cached_read", "output", "public_read", "write_unleased"):
            value = getattr(self, name)
            if value is not None or name in ("uncached", "cached_read", "output"):
                _check_price(name, value)
        for ttl_s, price in self.write_leased:
            if type(ttl_s) is not int or ttl_s <= 0:
                raise InvalidPrice(f"a lease of {ttl_s!r} s has no price; give whole seconds above 0")
            _check_price(f"write_leased:{ttl_s}", price)
        ttls = [ttl_s for ttl_s, _ in self.write_leased]
        if ttls != sorted(set(ttls)):
            raise InvalidPrice(f"write_leased lists the TTLs {ttls}; list each once, shortest first")

    def of_lease(self, ttl_s: int) -> int:
        """The price of writing under a lease of `ttl_s` seconds."""
        for listed_s, price in self.write_leased:
            if ttl_s <= listed_s:
                return price
        return self.write_leased[-1][1] if self.write_leased else self.of_unleased()

    def of_unleased(self) -> int:
        return self.uncached if self.write_unleased is None else self.write_unleased

    def of_public(self) -> int:
        return self.cached_read if self.public_read is None else self.public_read

    def cost_nano_usd(self, usage: TokenUsage) -> int:
        """What the usage costs: an exact integer sum, rounded half up once."""
        total = (
            usage.uncached * self.uncached
            + usage.cached_private * self.cached_read
            + usage.cached_public * self.of_public()
            + usage.written_unleased * self.of_unleased()
            + sum(tokens * self.of_lease(ttl_s) for ttl_s, tokens in usage.written_leased)
            + usage.output * self.output
        )
        return (total + TOKENS_PER_PRICE // 2) // TOKENS_PER_PRICE


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceVersion:
    id: str
    plan_id: str
    model: str
    """A model's name, or ANY_MODEL."""
    effective_from: int
    """Seconds since 1970."""
    prices: Prices

    def cost_nano_usd(self, usage: TokenUsage) -> int:
        return self.prices.cost_nano_usd(usage)


@dataclass(frozen=True, slots=True)
class Plan:
    """A named price list that tenants refer to."""

    id: str
    name: str


DEMO_PRICES = Prices(
    uncached=150_000_000,
    cached_read=15_000_000,
    output=600_000_000,
    write_leased=((5 * 60, 187_500_000), (60 * 60, 300_000_000)),
)
"""0.15 USD per million uncached input tokens, a tenth of it for cached ones, 0.60 USD for output; writes under a lease
cost 1.25 times the input price for five minutes and twice for an hour."""


def usd(nano_usd: int) -> str:
    """An amount in USD with all nine decimals: 184918125 is `0.184918125`."""
    return f"{Decimal(nano_usd) / NANO_USD:.9f}"


class PriceBook:
    """Plans and price versions in Redis, read through a local copy at most `cache_ttl_s` old.

    Every method raises StoreUnavailable when Redis does not answer and there is no fresh copy.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        cache_ttl_s: float = 5.0,
    ) -> None:
        self._redis = redis
        self._clock = clock
        self._monotonic = monotonic
        self._cache_ttl_s = cache_ttl_s
        self._read_at = float("-inf")
        self._versions: dict[tuple[str, str], list[PriceVersion]] = {}

    async def at(self, model: str, plan_id: str, time_s: float) -> PriceVersion:
        """The version in force: the model's own latest that has begun, else the plan's for any model.

        Raises UnknownPrice.
        """
        await self._refresh()
        for name in (model, ANY_MODEL):
            for version in reversed(self._versions.get((plan_id, name), ())):
                if version.effective_from <= time_s:
                    return version
        raise UnknownPrice(f"plan {plan_id!r} has no price for model {model!r}; add a price version for it")

    async def create_plan(self, plan_id: str, name: str) -> Plan:
        """Raises InvalidName, PlanExists."""
        plan = Plan(clean_name(plan_id, "plan id"), clean_name(name, "plan name"))
        with store.answering():
            if not await call(self._redis.hsetnx(store.PLANS, plan.id, msgspec.json.encode(plan))):
                raise PlanExists(f"a plan {plan.id!r} exists")
        return plan

    async def list_plans(self) -> list[Plan]:
        with store.answering():
            records = await call(self._redis.hvals(store.PLANS))
        return sorted((msgspec.json.decode(record, type=Plan) for record in records), key=lambda plan: plan.id)

    async def list_versions(self, plan_id: str) -> list[PriceVersion]:
        """Every version of the plan, past ones included, by model and time."""
        await self._read()
        return [
            version for (plan, _), versions in sorted(self._versions.items()) if plan == plan_id for version in versions
        ]

    async def add_version(self, plan_id: str, model: str, prices: Prices, effective_from: int) -> PriceVersion:
        """Prices from a time on. The first version of a plan and model may begin in the past, since nothing was priced
        by it; a later one begins after the latest and not in the past.

        Raises UnknownPlan, PriceOverlap.
        """
        with store.answering():
            known = await call(self._redis.hexists(store.PLANS, plan_id))
        if not known:
            raise UnknownPlan(f"no plan has the id {plan_id[:100]!r}")
        await self._read()
        earlier = self._versions.get((plan_id, model))
        if earlier and effective_from < max(earlier[-1].effective_from + 1, int(self._clock())):
            raise PriceOverlap(
                f"a price of plan {plan_id!r} for {model!r} from {effective_from} on would change prices that "
                f"were already in force; begin after {max(earlier[-1].effective_from, int(self._clock()))}"
            )
        version = PriceVersion(
            id=f"pv_{secrets.token_hex(6)}", plan_id=plan_id, model=model, effective_from=effective_from, prices=prices
        )
        with store.answering():
            await call(self._redis.hset(store.PRICES, version.id, msgspec.json.encode(version)))
        await self._read()
        return version

    async def ensure_demo_plan(self) -> Plan:
        """The plan of the demo tenants, with DEMO_PRICES for any model. Idempotent."""
        try:
            plan = await self.create_plan(DEMO_PLAN_ID, "Demo")
        except PlanExists:
            plan = Plan(DEMO_PLAN_ID, "Demo")
        await self._read()
        if (DEMO_PLAN_ID, ANY_MODEL) not in self._versions:
            await self.add_version(DEMO_PLAN_ID, ANY_MODEL, DEMO_PRICES, effective_from=0)
        return plan

    async def _refresh(self) -> None:
        if self._monotonic() - self._read_at >= self._cache_ttl_s:
            await self._read()

    async def _read(self) -> None:
        read_at = self._monotonic()
        with store.answering():
            records = await call(self._redis.hvals(store.PRICES))
        versions: dict[tuple[str, str], list[PriceVersion]] = {}
        for version in (msgspec.json.decode(record, type=PriceVersion) for record in records):
            versions.setdefault((version.plan_id, version.model), []).append(version)
        for listed in versions.values():
            listed.sort(key=lambda version: (version.effective_from, version.id))
        self._versions, self._read_at = versions, read_at
