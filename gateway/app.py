"""The ASGI application of one worker: routes, what wraps them, and what lives as long as it does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request

from gateway.api import engines, models, openai, ops
from gateway.api.admin import admin_routes
from gateway.dashboard import page
from gateway.middleware import BodyLimit, Errors, Observed, RequestIds
from gateway.services import Services, services_from
from gateway.settings import Settings
from gateway.status import StatusReader

MAX_BODY_BYTES = 10 * 1024 * 1024


def create_app(settings: Settings, status: StatusReader) -> Starlette:
    """A worker's application. `settings.redis_url` must be set."""
    return application(services_from(settings, status))


def application(services: Services, *, max_body_bytes: int = MAX_BODY_BYTES) -> Starlette:
    """The application over given services, which it starts and stops."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await services.start()
        try:
            yield
        finally:
            await services.stop()

    app = Starlette(
        routes=[
            *openai.ROUTES,
            *models.ROUTES,
            *ops.ROUTES,
            *engines.ROUTES,
            *page.ROUTES,
            *engines.ROUTES,
            *admin_routes(services.registry, services.prices, services.redis),
        ],
        middleware=[
            Middleware(RequestIds),
            Middleware(Observed, metrics=services.metrics),
            Middleware(Errors),
            Middleware(BodyLimit, max_bytes=max_body_bytes),
        ],
        exception_handlers={HTTPException: _raise},
        lifespan=lifespan,
    )
    # A path with a slash too many is a 404 and not a redirect: clients would drop their key or body on the way.
    app.router.redirect_slashes = False
    app.state.services = services
    return app


async def _raise(request: Request, error: Exception) -> NoReturn:
    """The router's own errors (404, 405) take the same way as ours, to the Errors middleware."""
    raise error
