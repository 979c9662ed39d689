"""For operators and their tools: is it alive, is it ready, what does it count."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.client import EngineUnavailable, QueryFailed
from gateway import auth
from gateway.served import RETRY_AFTER_S, ServedModel
from gateway.services import Services, services_of

STATISTICS_TIMEOUT_S = 2.0


async def healthz(request: Request) -> Response:
    """This worker answers."""
    return _json({"status": "ok"})


async def readyz(request: Request) -> Response:
    """200 when requests can be served; else 503 with the stage and what each engine is doing."""
    report = readiness(services_of(request))
    if report["status"] == "ready":
        return _json(report)
    response = _json(report, 503)
    response.headers["retry-after"] = str(RETRY_AFTER_S)
    return response


def readiness(services: Services) -> dict[str, Any]:
    """`status` is ready or a stage. A server is ready when its supervisor says so, every engine is connected, and the
    ledger can take a request."""
    engines = {model.name: model.stage() for model in services.models}
    away = [name for name, state in engines.items() if state != "ready"]
    if services.status is not None:
        status = services.status.read()
        if not status.ready:
            return {"status": status.stage, "message": status.message, "engines": engines}
    if away:
        return {"status": "degraded", "message": f"not connected: {', '.join(away)}", "engines": engines}
    if services.fault is not None:
        return {"status": "degraded", "message": services.fault, "engines": engines}
    return {"status": "ready", "message": "", "engines": engines}


async def metrics(request: Request) -> Response:
    """In Prometheus' text format: to the same machine, or with an administrator's key.

    The totals are over all tenants, and one tenant must not read in them what another one does.
    """
    services = services_of(request)
    if not _is_local(request):
        await auth.admin(request, services.registry)
    for model, statistics in await engine_statistics(services):
        services.metrics.engine(model.name, statistics)
    return Response(services.metrics.render(), headers={"content-type": services.metrics.content_type})


async def engine_statistics(services: Services) -> list[tuple[ServedModel, dict[str, Any] | None]]:
    """What each engine says of itself; None where it does not answer."""

    async def ask(model: ServedModel) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(STATISTICS_TIMEOUT_S):
                return await model.engine.query("stats")
        except (EngineUnavailable, QueryFailed, TimeoutError):
            return None

    models = list(services.models)
    return list(zip(models, await asyncio.gather(*map(ask, models)), strict=True))


def _is_local(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


ROUTES = [
    Route("/healthz", healthz, methods=["GET"]),
    Route("/readyz", readyz, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]
