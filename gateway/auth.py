"""Who is asking: the key in the request, as `Authorization: Bearer` or `x-api-key`."""

from __future__ import annotations

from starlette.requests import HTTPConnection

from gateway.errors import ApiError, unavailable
from tenants.model import Admin, Principal, Scope, StoreUnavailable
from tenants.registry import Registry


def key_in(connection: HTTPConnection) -> str | None:
    """The secret that the request carries; None when there is none, or none that is well-formed."""
    authorization = connection.headers.get("authorization")
    if authorization is not None:
        scheme, _, secret = authorization.partition(" ")
        return secret.strip() or None if scheme.lower() == "bearer" else None
    return connection.headers.get("x-api-key", "").strip() or None


async def tenant(connection: HTTPConnection, registry: Registry, scope: Scope = Scope.INFERENCE) -> Principal:
    """The tenant whose key this is. Raises ApiError: 401 without a usable key, 403 when the key may not do this."""
    secret = key_in(connection)
    if secret is None:
        raise _unauthorized("No API key was given: send it as 'Authorization: Bearer rg-...' or in 'x-api-key'.")
    try:
        principal = await registry.authenticate(secret)
        if principal is None and await registry.authenticate_admin(secret) is not None:
            raise ApiError(403, "wrong_kind_of_key", "An administrator's key cannot be used here: use a tenant's key.")
    except StoreUnavailable as error:
        raise _unchecked() from error
    if principal is None:
        raise _unauthorized("Incorrect API key provided: it is unknown, revoked or expired.")
    if scope not in principal.scopes:
        raise ApiError(403, "insufficient_scope", f"This API key lacks the scope '{scope}'.")
    return principal


async def admin(connection: HTTPConnection, registry: Registry) -> Admin:
    """The administrator whose key this is. Raises ApiError: 401 without a usable key, 403 for a tenant's."""
    secret = key_in(connection)
    if secret is None:
        raise _unauthorized("No administrator's key was given: send it as 'Authorization: Bearer rg-admin-...'.")
    try:
        found = await registry.authenticate_admin(secret)
        if found is None and await registry.authenticate(secret) is not None:
            raise ApiError(403, "wrong_kind_of_key", "This needs an administrator's key, not a tenant's.")
    except StoreUnavailable as error:
        raise _unchecked() from error
    if found is None:
        raise _unauthorized("Incorrect API key provided: it is unknown, revoked or expired.")
    return found


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})


def _unchecked() -> ApiError:
    return unavailable("API keys cannot be checked at the moment; try again shortly.", "store_unavailable", 2)
