"""The administrator's view of the engines: what each says of itself, a check of its memory, a flush of its cache."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.client import EngineUnavailable, QueryFailed
from gateway import auth
from gateway.api.ops import engine_statistics
from gateway.errors import ApiError, unavailable
from gateway.services import services_of
from tenants.model import UnknownTenant

QUERY_TIMEOUT_S = 30.0


async def list_engines(request: Request) -> Response:
    """Each engine's Hello and statistics; both null while it is away."""
    services = services_of(request)
    await auth.admin(request, services.registry)
    engines = [
        {
            "name": model.name,
            "stage": model.stage(),
            "hello": asdict(model.engine.hello) if model.engine.hello else None,
            "stats": statistics,
        }
        for model, statistics in await engine_statistics(services)
    ]
    return _json({"engines": engines})


async def check_invariants(request: Request) -> Response:
    """`ok`, what is wrong if it is not, and the block counts, taken between two steps."""
    return _json(await _query(request, "invariants", {}))


async def flush(request: Request) -> Response:
    """Drop what the cache keeps and no running request uses; of one tenant with ?tenant=ID. Returns `blocks`."""
    services = services_of(request)
    argument = {}
    if "tenant" in request.query_params:
        await auth.admin(request, services.registry)
        try:
            argument["owner"] = (await services.registry.get_tenant(request.query_params["tenant"])).id
        except UnknownTenant as error:
            raise ApiError(404, "tenant_not_found", str(error), "tenant") from error
    return _json(await _query(request, "flush", argument))


async def _query(request: Request, kind: str, argument: dict[str, Any]) -> dict[str, Any]:
    services = services_of(request)
    await auth.admin(request, services.registry)
    model = services.models.get(request.path_params["model"])
    try:
        async with asyncio.timeout(QUERY_TIMEOUT_S):
            return await model.engine.query(kind, argument)
    except (EngineUnavailable, TimeoutError):
        raise unavailable(f"The engine of {model.name} does not answer: {model.stage()}.", "model_not_ready") from None
    except QueryFailed as error:
        raise ApiError(500, "engine_error", f"The engine could not answer: {error}") from error


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


ROUTES = [
    Route("/admin/engines", list_engines, methods=["GET"]),
    Route("/admin/engines/{model}/invariants", check_invariants, methods=["POST"]),
    Route("/admin/engines/{model}/flush", flush, methods=["POST"]),
]
