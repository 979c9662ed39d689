"""Integer prices, one rounding, versions that never reprice the past."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.model import InvalidPrice, PlanExists, PriceOverlap, TokenUsage, UnknownPlan, UnknownPrice
from tenants.pricing import DEMO_PLAN_ID, DEMO_PRICES, MAX_PRICE_NANO_USD, PriceBook, Prices, usd
from tests.tenants.support import NOW_S, Clock, redis_client, run


def test_cached_tokens_are_not_billed_twice() -> None:
    """262,960 prompt tokens of which 257,955 cached, 1,744 out, at 1.25 / 0.625 / 10 USD per million."""
    prices = Prices(uncached=1_250_000_000, cached_read=625_000_000, output=10_000_000_000)
    usage = TokenUsage(cached_private=257_955, uncached=262_960 - 257_955, output=1_744)
    assert prices.cost_nano_usd(usage) == 184_918_125
    assert usd(184_918_125) == "0.184918125"


def test_every_class_has_its_price() -> None:
    prices = Prices(uncached=10**6, cached_read=10**8, public_read=10**10, write_unleased=10**12,
                    write_leased=((300, 10**14), (3600, 2 * 10**14)), output=3 * 10**14)  # fmt: skip
    usage = TokenUsage(2, 3, 4, ((300, 5), (3600, 6)), 7, 8)
    assert prices.cost_nano_usd(usage) == 7 + 200 + 30_000 + 4_000_000 + (5 + 12 + 24) * 10**8


def test_what_has_no_price_takes_the_nearest_one() -> None:
    prices = Prices(uncached=5_000_000, cached_read=1_000_000, output=0)
    assert prices.cost_nano_usd(TokenUsage(cached_public=3)) == 3
    assert prices.cost_nano_usd(TokenUsage(written_unleased=3)) == 15
    assert prices.cost_nano_usd(TokenUsage(written_leased=((300, 3),))) == 15


@pytest.mark.parametrize(("ttl_s", "price"), [(60, 7), (300, 7), (301, 9), (3600, 9), (86_400, 9)])
def test_a_lease_pays_for_the_shortest_listed_ttl_that_covers_it(ttl_s: int, price: int) -> None:
    prices = Prices(uncached=1, cached_read=1, output=1, write_leased=((300, 7), (3600, 9)))
    assert prices.of_lease(ttl_s) == price


@pytest.mark.parametrize(
    ("tokens", "cost"), [(0, 0), (1, 0), (499_999, 0), (500_000, 1), (1_499_999, 1), (1_500_000, 2)]
)
def test_a_cost_is_rounded_half_up(tokens: int, cost: int) -> None:
    assert Prices(uncached=1, cached_read=0, output=0).cost_nano_usd(TokenUsage(uncached=tokens)) == cost


@given(st.tuples(*[st.integers(0, 10**9)] * 4), st.tuples(*[st.integers(0, MAX_PRICE_NANO_USD)] * 3))
def test_a_cost_is_exact_and_rounded_once(tokens: tuple[int, int, int, int], price: tuple[int, int, int]) -> None:
    usage = TokenUsage(cached_private=tokens[0], written_unleased=tokens[1], uncached=tokens[2], output=tokens[3])
    exact = Fraction(tokens[0] * price[0] + (tokens[1] + tokens[2]) * price[1] + tokens[3] * price[2], 10**6)
    cost = Prices(uncached=price[1], cached_read=price[0], output=price[2]).cost_nano_usd(usage)
    assert exact - Fraction(1, 2) < cost <= exact + Fraction(1, 2)


@pytest.mark.parametrize("price", [-1, 1.5, True, "3", None, MAX_PRICE_NANO_USD + 1])
def test_a_price_is_a_whole_number_in_range(price: Any) -> None:
    with pytest.raises(InvalidPrice, match="uncached"):
        Prices(uncached=price, cached_read=0, output=0)


@pytest.mark.parametrize("leased", [((0, 1),), ((300, 1), (300, 2)), ((600, 1), (300, 2)), ((300, -1),), ((1.5, 1),)])
def test_lease_prices_are_listed_once_in_order(leased: Any) -> None:
    with pytest.raises(InvalidPrice):
        Prices(uncached=0, cached_read=0, output=0, write_leased=leased)


def test_the_demo_plan_costs_something(redis_url: str) -> None:
    async def main() -> None:
        async with redis_client(redis_url) as redis:
            book = PriceBook(redis)
            await book.ensure_demo_plan()
            await book.ensure_demo_plan()
            version = await book.at("any model", DEMO_PLAN_ID, 0.0)
            assert version.prices == DEMO_PRICES
            assert version.cost_nano_usd(TokenUsage(uncached=1)) == 150
            assert len(await book.list_versions(DEMO_PLAN_ID)) == 1

    run(main)


def test_a_version_holds_until_the_next_and_a_models_own_comes_first(redis_url: str) -> None:
    async def main() -> None:
        async with redis_client(redis_url) as redis:
            book = PriceBook(redis, clock=Clock())
            await book.create_plan("p", "Plan")
            prices = [Prices(uncached=n, cached_read=0, output=0) for n in range(3)]
            every = await book.add_version("p", "*", prices[0], 0)
            first = await book.add_version("p", "m", prices[1], 100)
            later = await book.add_version("p", "m", prices[2], int(NOW_S) + 60)
            found = [await book.at("m", "p", time_s) for time_s in (99.9, 100.0, NOW_S + 59.9, NOW_S + 60)]
            assert found == [every, first, first, later]
            other_process = PriceBook(redis)
            assert await other_process.at("m", "p", NOW_S + 60) == later

    run(main)


def test_versions_neither_overlap_nor_reprice_the_past(redis_url: str) -> None:
    async def main() -> None:
        async with redis_client(redis_url) as redis:
            clock = Clock()
            book = PriceBook(redis, clock=clock)
            prices = Prices(uncached=1, cached_read=0, output=0)
            with pytest.raises(UnknownPlan):
                await book.add_version("p", "m", prices, 0)
            await book.create_plan("p", "Plan")
            with pytest.raises(PlanExists):
                await book.create_plan("p", "Plan")
            with pytest.raises(UnknownPrice, match="'m'"):
                await book.at("m", "p", NOW_S)
            await book.add_version("p", "m", prices, 0)
            with pytest.raises(PriceOverlap):
                await book.add_version("p", "m", prices, int(NOW_S) - 1)
            await book.add_version("p", "m", prices, int(NOW_S) + 10)
            with pytest.raises(PriceOverlap):
                await book.add_version("p", "m", prices, int(NOW_S) + 10)

    run(main)
