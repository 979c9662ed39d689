"""What wraps every request: its id, its body limit, and the promise that every failure is an answer in the API's shape.

Pure ASGI: a wrapper that runs the application in a task of its own would hide the client's disconnect from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
import traceback

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError, http_error, internal_error
from gateway.metrics import Metrics

log = logging.getLogger("radixgate.gateway")

_SANE_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# A refused upload is still read for a while: a socket closed over unread data is reset, and the answer with it.
LINGER_BYTES = 64 * 1024 * 1024
LINGER_S = 5.0


def mint_request_id() -> str:
    return "req_" + secrets.token_hex(12)


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower-case) name."""
    return next((value for key, value in scope["headers"] if key == name), None)


def request_id_of(scope: Scope) -> str:
    return str(scope["state"]["request_id"])


class RequestIds:
    """Gives each request an id, the client's own when it is sane, and writes it on the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        sane = given is not None and _SANE_REQUEST_ID.fullmatch(given)
        request_id = given.decode() if sane and given is not None else mint_request_id()
        # The lifespan's state is shared by all requests: extend a copy.
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        await self.app(scope, receive, send_with_id)


class Errors:
    """Turns whatever the application raises into an answer, or ends an answer that has begun.

    What is not an ApiError is logged by type and place only: an exception's message may quote a prompt.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except ClientDisconnect:
            return  # nobody is there to answer, and nothing has gone wrong here
        except Exception as raised:
            error = _shown(raised, scope)
            if started:
                # Half an answer is out. Returning now makes the server close the connection, so that nobody takes it
                # for a whole one.
                log.warning("request %s: its answer was cut off: %s", request_id_of(scope), error.code)
                return
            for message in error_messages(error):
                await send(message)


def _shown(raised: Exception, scope: Scope) -> ApiError:
    if isinstance(raised, ApiError):
        return raised
    if isinstance(raised, HTTPException):
        return http_error(raised.status_code, raised.detail, raised.headers)
    frames = traceback.extract_tb(raised.__traceback__)[-4:]
    where = " <- ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    log.error("request %s: %s at %s", request_id_of(scope), type(raised).__name__, where)
    return internal_error()


def error_messages(error: ApiError) -> tuple[Message, Message]:
    """The error as the start and the body of an answer."""
    body = error.json()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()]
    start: Message = {"type": "http.response.start", "status": error.status, "headers": headers}
    return start, {"type": "http.response.body", "body": body}


class Observed:
    """Counts and times every answer by the name of its endpoint."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 499

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            endpoint = getattr(scope.get("endpoint"), "__name__", "none")
            self.metrics.answered(endpoint, status, time.monotonic() - began)


class BodyLimit:
    """Answers 413 to a body over `max_bytes`, by its declared length or, failing that, while it is read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self.max_bytes:
            await self._refuse(receive, send)
            return
        seen, started = 0, False

        async def receive_counted() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self.max_bytes:
                    raise _BodyTooLarge
            return message

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive_counted, send_and_note)
        except _BodyTooLarge:
            if started:
                raise
            await self._refuse(receive, send)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        message = f"The request body is larger than this server's limit of {self.max_bytes} bytes."
        start, body = error_messages(ApiError(413, "request_too_large", message, headers={"connection": "close"}))
        await send(start)
        await send({**body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await _discard(receive, LINGER_BYTES)
        await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive, limit_bytes: int) -> None:
    dropped = 0
    while dropped < limit_bytes:
        message = await receive()
        dropped += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


class _BodyTooLarge(Exception):
    pass
