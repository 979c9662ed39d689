"""What a client is told when a request cannot be served: one type of error, in the shape of the API it called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 500: "internal_error"}


class ApiError(Exception):
    """A refusal that is safe to show: its message never holds a key, a prompt or a traceback.

    status: the HTTP status; in a stream that has begun the error travels as an event instead.
    code: stable and machine-readable; param: the name of the parameter at fault, as a path (`messages[0].content`).
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """The class of error as the OpenAI API names it."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        return orjson.dumps(self.body())


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400: the client must change the request."""
    return ApiError(400, code, message, param)


def unsupported(param: str, message: str | None = None) -> ApiError:
    """A 400 for a parameter that would change the answer and that this server cannot honour."""
    return ApiError(400, "unsupported_parameter", message or f"'{param}' is not supported by this server.", param)


def unavailable(message: str, code: str = "overloaded", retry_after_s: int = 1) -> ApiError:
    """A 503 that a client may retry after `retry_after_s` seconds."""
    return ApiError(503, code, message, headers={"retry-after": str(retry_after_s)})


def http_error(status: int, detail: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """The error for a status that the router itself decided (404, 405)."""
    return ApiError(status, _CODES.get(status, f"http_{status}"), detail, headers=headers)


INTERNAL_MESSAGE = "The server failed to process this request. Its id, in the x-request-id header, finds it in the log."


def internal_error() -> ApiError:
    return ApiError(500, "internal_error", INTERNAL_MESSAGE)
