"""GET /v1/models: what can be asked for in `model`."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import auth
from gateway.served import ServedModel
from gateway.services import services_of


async def list_models(request: Request) -> Response:
    services = services_of(request)
    await auth.tenant(request, services.registry)
    models = [_model(model, name) for model in services.models for name in (model.name, *model.aliases)]
    return _json({"object": "list", "data": models})


async def get_model(request: Request) -> Response:
    services = services_of(request)
    await auth.tenant(request, services.registry)
    name = request.path_params["name"]
    return _json(_model(services.models.get(name), name))


def _model(model: ServedModel, name: str) -> dict[str, Any]:
    hello = model.engine.hello
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "radixgate",
        "max_model_len": hello.max_model_len if hello else None,
    }


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    # A hub id holds a slash.
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
]
