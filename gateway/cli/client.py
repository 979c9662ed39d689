"""The HTTP client of the commands that speak to a running server. Standard library only: it starts fast."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import click

DEFAULT_URL = "http://127.0.0.1:8080"
TIMEOUT_S = 30.0

UNREACHABLE, NOT_ALLOWED, REFUSED, NOT_READY = 3, 4, 5, 6


class ClientError(click.ClickException):
    """What went wrong and what to do, for the terminal.

    Exit codes: 3 no server there, 4 no key or a wrong one, 5 the server refused the request, 6 the server is starting
    or cannot serve now.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]


def call(method: str, path: str, *, query: dict[str, str | None] | None = None, body: Any = None) -> Any:
    """The server's JSON answer. Raises ClientError."""
    url = os.environ.get("RADIXGATE_URL") or DEFAULT_URL
    given = {name: value for name, value in (query or {}).items() if value is not None}
    target = path + ("?" + urlencode(given) if given else "")
    status, answer = _exchange(url, method, target, admin_key(), None if body is None else json.dumps(body).encode())
    if 200 <= status < 300:
        return answer
    message = _message(answer) or f"the server answered {status}"
    if status in (401, 403):
        raise ClientError(f"the server at {url} does not take this admin key: {message} {_KEY_HELP}", NOT_ALLOWED)
    if status == 503:
        raise ClientError(f"the server at {url} is not ready: {message}", NOT_READY)
    raise ClientError(message, NOT_READY if status >= 500 else REFUSED)


_KEY_HELP = "Set RADIXGATE_ADMIN_KEY, or RADIXGATE_DATA_DIR to the server's data directory."


def admin_key() -> str:
    """From RADIXGATE_ADMIN_KEY, else the file admin.key of RADIXGATE_DATA_DIR (.radixgate). Raises ClientError."""
    given = os.environ.get("RADIXGATE_ADMIN_KEY", "").strip()
    if given:
        return _printable(given, "RADIXGATE_ADMIN_KEY")
    path = Path(os.environ.get("RADIXGATE_DATA_DIR") or ".radixgate") / "admin.key"
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        raise ClientError(f"no admin key: {path} does not exist. {_KEY_HELP}", NOT_ALLOWED) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ClientError(f"the admin key in {path} cannot be read: {reason}. {_KEY_HELP}", NOT_ALLOWED) from None
    return _printable(text, str(path))


def _printable(key: str, where: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ClientError(f"{where} does not hold an admin key (rg-admin-...)", NOT_ALLOWED)
    return key


def _exchange(url: str, method: str, target: str, key: str, body: bytes | None) -> tuple[int, Any]:
    connection, prefix = _connect(url)
    headers = {"authorization": f"Bearer {key}", "accept": "application/json"}
    if body is not None:
        headers["content-type"] = "application/json"
    try:
        connection.request(method, prefix + target, body, headers)
        response = connection.getresponse()
        text = response.read()
    except ssl.SSLError as error:
        raise ClientError(f"no TLS connection to {url}: {error.reason or error}", UNREACHABLE) from None
    except (OSError, http.client.HTTPException) as error:
        reason = "it did not answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise ClientError(
            f"no radixgate server at {url} ({reason}). Start one with `radixgate serve`, or set RADIXGATE_URL.",
            UNREACHABLE,
        ) from None
    finally:
        connection.close()
    try:
        return response.status, json.loads(text) if text else None
    except ValueError:
        if 200 <= response.status < 300:
            raise ClientError(f"what answers at {url} is not a radixgate server", UNREACHABLE) from None
        return response.status, None


def _connect(url: str) -> tuple[http.client.HTTPConnection, str]:
    """A connection that ignores proxy settings, and the path before every target."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or parts.scheme not in ("http", "https"):
        raise ClientError(f"RADIXGATE_URL is {url!r}; expected something like {DEFAULT_URL}", UNREACHABLE)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(host, port, timeout=TIMEOUT_S), parts.path.rstrip("/")


def _message(answer: Any) -> str | None:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else None


def segment(text: str) -> str:
    """`text` as one segment of a path."""
    return quote(text, safe="")
