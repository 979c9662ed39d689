"""The dashboard: one page, its data as JSON, and the way in.

An administrator enters with the one-time token of a link or with a key; either becomes a session in an HttpOnly cookie.
Nothing here changes anything, so a cookie alone may read it.
"""

from __future__ import annotations

import functools
from importlib import resources
from urllib.parse import parse_qs

import orjson
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gateway import auth
from gateway.dashboard.feed import snapshot
from gateway.errors import ApiError, unavailable
from gateway.services import Services, services_of
from tenants.model import Secret, StoreUnavailable
from tenants.registry import DASHBOARD_SESSION_TTL_S

COOKIE = "radixgate_session"
LOGIN_TOKEN_TTL_S = 60
MAX_FORM_BYTES = 4096
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript"}


async def page(request: Request) -> Response:
    """The page for whoever has a session; a token in the query buys one; anyone else sees the way in."""
    services = services_of(request)
    try:
        if token := request.query_params.get("token"):
            session = await services.registry.redeem_dashboard_token(token)
            # Reloading a used link is fine for whoever has a session already; a redirect takes the token off the URL.
            if session is not None or await _has_session(request, services):
                return _enter(session)
            return _asset("login.html", 401)
        return _asset("index.html") if await _has_session(request, services) else _asset("login.html", 401)
    except StoreUnavailable as error:
        raise _unavailable() from error


async def login(request: Request) -> Response:
    """A form with an administrator's key, for a session."""
    services = services_of(request)
    body = await request.body()
    if len(body) > MAX_FORM_BYTES:
        raise ApiError(413, "request_too_large", f"A form of at most {MAX_FORM_BYTES} bytes was expected.")
    key = parse_qs(body.decode("utf-8", "replace")).get("key", [""])[0].strip()
    try:
        if await services.registry.authenticate_admin(key) is None:
            return _asset("login.html", 401)
        token = await services.registry.create_dashboard_token(LOGIN_TOKEN_TTL_S)
        return _enter(await services.registry.redeem_dashboard_token(token.reveal()))
    except StoreUnavailable as error:
        raise _unavailable() from error


async def data(request: Request) -> Response:
    """What the page shows, for a session or an administrator's key."""
    services = services_of(request)
    try:
        if not await _has_session(request, services):
            await auth.admin(request, services.registry)
        body = orjson.dumps(await snapshot(services))
    except StoreUnavailable as error:
        raise _unavailable() from error
    return Response(body, media_type="application/json", headers=_HEADERS)


async def asset(request: Request) -> Response:
    return _asset(request.path_params["name"])


async def _has_session(request: Request, services: Services) -> bool:
    session = request.cookies.get(COOKIE)
    return session is not None and await services.registry.has_dashboard_session(session)


def _enter(session: Secret | None) -> Response:
    response = RedirectResponse("/dashboard", 303, headers=_HEADERS)
    if session is not None:
        response.set_cookie(
            COOKIE, session.reveal(), max_age=DASHBOARD_SESSION_TTL_S, path="/dashboard", httponly=True, samesite="lax"
        )
    return response


def _asset(name: str, status: int = 200) -> Response:
    content = _assets().get(name)
    if content is None:
        raise ApiError(404, "not_found", "There is no such file.")
    return Response(content, status, media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)


@functools.cache
def _assets() -> dict[str, bytes]:
    folder = resources.files("gateway.dashboard") / "assets"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}


def _unavailable() -> ApiError:
    return unavailable("The dashboard cannot read its data at the moment; try again shortly.", "store_unavailable", 2)


ROUTES = [
    Route("/dashboard", page, methods=["GET"]),
    Route("/dashboard/login", login, methods=["POST"]),
    Route("/dashboard/data", data, methods=["GET"]),
    Route("/dashboard/assets/{name}", asset, methods=["GET"]),
]
