"""Random traffic under faults, from a seed. The checks are in engine/simulation/driver.py; here is what is run."""

import logging

import pytest

from engine.settings import SchedulerSettings
from engine.simulation.driver import NO_FAULTS, FaultRates, Simulation, SimulationError, run
from engine.simulation.naive_cache import NaiveCache
from engine.simulation.traffic import TrafficShape
from radix_cache.cache import PrefixCache

pytestmark = pytest.mark.simulation


@pytest.fixture(autouse=True)
def quiet():
    """Failed steps are logged with their stacks; here they are the point."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_under_faults(seed):
    report = run(seed, 500, PrefixCache)
    assert report.requests > 0


@pytest.mark.parametrize("seed", range(100, 104))
def test_random_traffic_under_faults_on_the_naive_store(seed):
    run(seed, 200, NaiveCache)


@pytest.mark.parametrize("seed", range(200, 206))
def test_under_memory_pressure_everything_still_finishes(seed):
    settings = SchedulerSettings(
        n_blocks=40, block_size=4, max_model_len=2000, max_sequences=12, max_batch_tokens=24, max_passes=4
    )
    traffic = TrafficShape(arrivals=0.25, max_prompt=60, max_output=60, samples=0.3)
    report = run(seed, 500, PrefixCache, settings=settings, traffic=traffic)
    assert report.counters["preemptions"] > 20


@pytest.mark.parametrize("seed", range(300, 304))
def test_many_failing_steps(seed):
    report = run(seed, 400, PrefixCache, rates=FaultRates(failing=0.3, poison=0.05, nan=0.05))
    assert report.counters["failed_steps"] > 50


def test_a_seed_replays_exactly():
    assert run(7, 300, PrefixCache) == run(7, 300, PrefixCache)


def test_without_faults_nothing_fails():
    report = run(3, 500, PrefixCache, rates=NO_FAULTS, traffic=TrafficShape(timeout=0.0))
    assert report.counters["failed_requests"] == report.counters["failed_steps"] == 0


def test_a_lost_block_is_noticed_with_its_seed(monkeypatch):
    simulation = Simulation(11, PrefixCache)
    monkeypatch.setattr(simulation.cache, "release", lambda holding, ids, n_tokens: None)
    with pytest.raises(SimulationError, match="seed 11, step"):
        simulation.run(100)


def test_a_copy_that_is_not_made_is_noticed(monkeypatch):
    simulation = Simulation(12, PrefixCache)
    monkeypatch.setattr(simulation.runner, "_copy", lambda plan: None)
    with pytest.raises(SimulationError, match="reads a foreign token"):
        simulation.run(500)
