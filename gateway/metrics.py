"""What the gateway counts, in Prometheus' terms. One registry per application: nothing global."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from gateway.accounting import Usage
from tenants.model import Status

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._http_requests = Counter(
            "radixgate_http_requests_total", "Answered HTTP requests.", ["route", "status"], registry=registry
        )
        self._http_seconds = Histogram(
            "radixgate_http_request_seconds", "From request to the end of its answer.", ["route"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.requests = Counter(
            "radixgate_requests_total", "Settled generations.", ["model", "status"], registry=registry
        )
        self.tokens = Counter(
            "radixgate_tokens_total", "Booked tokens by billing class.", ["model", "class"], registry=registry
        )
        self.cost = Counter(
            "radixgate_cost_nano_usd_total", "Booked cost in nano-USD (1e-9 USD).", ["model"], registry=registry
        )
        self.first_token_seconds = Histogram(
            "radixgate_time_to_first_token_seconds", "From a request's opening to its first token.", ["model"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._engine = Gauge(
            "radixgate_engine", "The engine's own statistics, as it last reported them.", ["model", "statistic"],
            registry=registry,
        )  # fmt: skip
        self._engine_up = Gauge("radixgate_engine_up", "Whether the engine is connected.", ["model"], registry=registry)

    def settled(self, model: str, status: Status, usage: Usage, first_token_s: float | None) -> None:
        """One generation was booked."""
        if first_token_s is not None:
            self.first_token_seconds.labels(model).observe(first_token_s)
        self.requests.labels(model, status.value).inc()
        self.cost.labels(model).inc(usage.cost_nano_usd)
        for name, tokens in usage.tokens.classes():
            if tokens:
                self.tokens.labels(model, name).inc(tokens)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """One HTTP request was answered."""
        self._http_requests.labels(route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def engine(self, model: str, statistics: Mapping[str, Any] | None) -> None:
        """An engine's answer to `stats`, or None when it is away."""
        self._engine_up.labels(model).set(statistics is not None)
        for name, value in _numbers(statistics or {}, ""):
            self._engine.labels(model, name).set(value)

    def render(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)


def _numbers(statistics: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Every number with its path; what belongs to single owners is left out, so that tenants stay unnamed."""
    for name, value in statistics.items():
        if isinstance(value, Mapping):
            if name != "owners":
                yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value
