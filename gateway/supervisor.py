"""`radixgate serve`: owns Valkey, one engine per model and the gateway workers, from the first moment to the last.

Start: lock the data directory, end what an earlier run left, bind the port, start the workers (they answer 503 with the
stage), then Redis and the engines side by side. Stop: accept no more, drain the workers, then engines, then Valkey.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway import external_redis, first_run
from gateway.console import Announcer, Welcome, welcome_text
from gateway.data_dir import open_data_dir
from gateway.embedded_valkey import NAME as VALKEY
from gateway.embedded_valkey import EmbeddedValkey
from gateway.failures import RedisUnusable
from gateway.keeper import ChildState, Keeper
from gateway.listening import bind, url_of
from gateway.processes import Children, end_leftover, leftovers
from gateway.settings import ModelSettings, Settings
from gateway.status import EngineStatus, Status, StatusFile
from tenants.model import SchemaMismatch, StoreUnavailable
from tenants.store import connect

log = logging.getLogger("radixgate.supervisor")

PYTHON = (sys.executable, "-P")
"""-P: a folder named like one of ours in the current directory is not ours."""
REDIS_CHECK_S = 1.0
ENGINE_STOP_S = 10.0
WORKER_GRACE_S = 5.0
"""What a worker has, beyond the drain time, to close its books."""
FIRST_ANSWER_S = 20.0
RECANCEL_S = 0.1


@dataclass(frozen=True)
class Programs:
    """The command lines that the children's begin with."""

    engine: tuple[str, ...] = (*PYTHON, "-m", "engine.process")
    worker: tuple[str, ...] = (*PYTHON, "-m", "gateway.worker")


class Supervisor:
    """One run of the server.

    Args:
        radixgate: the path of the command that printed advice should name.
        programs: what to start as children.
    """

    def __init__(
        self,
        settings: Settings,
        announcer: Announcer,
        *,
        radixgate: str = "radixgate",
        programs: Programs | None = None,
    ) -> None:
        self._settings = settings
        self._announcer = announcer
        self._radixgate = radixgate
        self._programs = programs or Programs()
        self._started_s = time.monotonic()
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._redis_opened = asyncio.Event()
        self._was_ready = False
        self._stopping = False
        self._redis_up = False
        self._engines: list[Keeper] = []
        self._workers: list[Keeper] = []
        self._valkey: EmbeddedValkey | None = None

    async def run(self) -> None:
        """Until SIGTERM, SIGINT or SIGHUP. Raises ServeError when it cannot start or go on. Leaves nothing running."""
        os.umask(0o077)  # whatever we or our children write is ours alone
        self._data = open_data_dir(self._settings.data_dir)
        try:
            left = leftovers(self._data.run)
            for name, pid in left.items():
                if name != VALKEY:
                    await asyncio.to_thread(end_leftover, pid)
            self._listener = bind(self._settings.host, self._settings.port)
            self._port = self._listener.getsockname()[1]
            _raise_file_limit()
            self._children = Children(self._data.run)
            try:
                await self._serve(left)
            finally:
                self._children.close()
                self._listener.close()
        finally:
            self._data.close()

    async def _serve(self, left: dict[str, int]) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._ask_to_stop)
        redis_url = self._settings.redis_url
        if redis_url is None:
            self._valkey = EmbeddedValkey(self._data, self._children)
            redis_url = self._valkey.url
        self._redis_url = redis_url
        self._status = StatusFile(self._data.run / "status.json", self._initial_status())
        _write_private(self._data.run / "settings.json", self._worker_settings().to_json())
        self._announcer.say(f"radixgate: starting; {self._url} answers 503 with the stage until it is ready")
        self._workers = [self._worker(number) for number in range(self._settings.workers)]
        self._engines = [self._engine(model) for model in self._settings.models]
        try:
            await self._until_stopped(left)
        finally:
            self._announcer.end_progress()
            await self._stop()

    async def _until_stopped(self, left: dict[str, int]) -> None:
        """Runs every part; the first one that fails ends the others and is raised."""
        keepers = (keeper.run() for keeper in (*self._workers, *self._engines))
        parts = (*keepers, self._prepare(left), self._watch_redis(), self._stop_asked.wait())
        self._tasks = [asyncio.ensure_future(part) for part in parts]
        pending: set[asyncio.Future[Any]] = set(self._tasks)
        while not self._stop_asked.is_set():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    # --- start --------------------------------------------------------------------------------------------------------

    async def _prepare(self, left: dict[str, int]) -> None:
        """Redis, the first run's credentials, the wait for everybody, the welcome."""
        credentials = await self._open_redis(left)
        self._redis_opened.set()
        for keeper in (*self._workers, *self._engines):
            await keeper.ready.wait()
        self._was_ready = True
        self._judge()
        await self._first_answer()
        models = [model.name for model in self._settings.models]
        seconds = time.monotonic() - self._started_s
        self._announcer.welcome(
            welcome_text(Welcome(self._url, models, self._data.path, self._radixgate, credentials, seconds))
        )

    async def _open_redis(self, left: dict[str, int]) -> first_run.Credentials:
        if self._valkey is not None:
            self._announcer.progress("valkey", "starting", None)
            await self._valkey.start(left)
        else:
            for warning in await external_redis.check(self._redis_url):
                self._announcer.warn(warning)
        redis = connect(self._redis_url)
        try:
            credentials = await first_run.prepare(redis, self._data.path)
        except SchemaMismatch as error:
            raise RedisUnusable(str(error)) from None
        except StoreUnavailable as error:
            raise RedisUnusable(f"{error} (while the keys of the first start were written)") from None
        finally:
            await redis.aclose()
        self._set_redis_up(True)
        if self._valkey is not None:
            self._announcer.progress("valkey", "ready", 1.0)
        return credentials

    async def _first_answer(self) -> None:
        """Wait until /readyz says 200: the welcome's curl line must work the moment it is printed."""
        deadline = time.monotonic() + FIRST_ANSWER_S
        while time.monotonic() < deadline:
            if await _status_code(self._connect_host, self._port, "/readyz") == 200:
                return
            await asyncio.sleep(0.05)
        self._announcer.warn(f"{self._url}/readyz does not answer 200 yet; see {self._data.logs}")

    # --- while it runs ------------------------------------------------------------------------------------------------

    async def _watch_redis(self) -> None:
        await self._redis_opened.wait()
        if self._valkey is not None:
            await self._valkey.watch(self._set_redis_up)
            return
        redis = connect(self._redis_url)
        try:
            while True:
                self._set_redis_up(await external_redis.answers(redis))
                await asyncio.sleep(REDIS_CHECK_S)
        finally:
            await redis.aclose()

    def _set_redis_up(self, up: bool) -> None:
        if self._redis_up and not up:
            self._announcer.warn("Redis is away; usage is kept on disk until it is back")
        if self._was_ready and up and not self._redis_up:
            self._announcer.say("radixgate: Redis answers again")
        self._redis_up = up
        self._status.update(redis_up=up)
        self._judge()

    def _engine_changed(self, name: str, state: ChildState) -> None:
        self._status.update_engine(
            name,
            up=state.up,
            stage=state.stage,
            fraction=state.fraction,
            message=state.message,
            pid=state.pid,
            restarts=state.restarts,
        )
        self._child_changed(name, state)
        self._judge()

    def _child_changed(self, name: str, state: ChildState) -> None:
        if self._stopping or self._stop_asked.is_set():
            return  # that the parts end is no news, and would stand before the reason
        if state.stage == "restarting":
            self._announcer.warn(f"{name}: {state.message}")
        elif not self._was_ready:
            self._announcer.progress(name, state.stage, 1.0 if state.up else state.fraction)
        elif state.up and state.restarts:
            self._announcer.say(f"radixgate: {name} is ready again")

    def _judge(self) -> None:
        """The stage of the whole server, from its parts."""
        if self._status.current.draining:
            return
        away = [engine for engine in self._status.current.engines.values() if not engine.up]
        parts = [f"{engine.name}: {engine.message or engine.stage}" for engine in away]
        if not self._redis_up:
            parts.append("Redis is away" if self._was_ready else "Redis is starting")
        if not self._was_ready:
            self._status.update(stage="starting", message="; ".join(parts) or "the gateway is starting")
        else:
            self._status.update(stage="degraded" if parts else "ready", message="; ".join(parts))

    # --- stop ---------------------------------------------------------------------------------------------------------

    def _ask_to_stop(self) -> None:
        if self._stop_asked.is_set():
            self._hurry.set()
        self._stop_asked.set()

    async def _stop(self) -> None:
        """Everything ends, in order, each within its time."""
        self._stopping = True
        if self._stop_asked.is_set():
            self._announcer.say("radixgate: stopping; requests in flight may end (signal again to hurry)")
        self._status.update(stage="draining", message="the server is stopping")
        self._listener.close()
        drain_s = self._settings.drain_s + WORKER_GRACE_S
        await asyncio.gather(*(worker.stop(drain_s, self._hurry) for worker in self._workers))
        await asyncio.gather(*(engine.stop(ENGINE_STOP_S, self._hurry) for engine in self._engines))
        await cancel_all(self._tasks)
        if self._valkey is not None:
            await self._valkey.stop()
        self._status.update(stage="stopped", message="the server has stopped")
        if self._stop_asked.is_set():
            self._announcer.say("radixgate: stopped")

    # --- the children's command lines ---------------------------------------------------------------------------------

    def _engine(self, model: ModelSettings) -> Keeper:
        return Keeper(
            f"engine-{model.file_name}",
            lambda status_fd, lifeline_fd: self._engine_command(model, status_fd, lifeline_fd),
            self._children,
            self._data.logs / f"engine-{model.file_name}.log",
            stall_s=self._settings.stall_s,
            on_change=lambda state: self._engine_changed(model.name, state),
        )

    def _worker(self, number: int) -> Keeper:
        return Keeper(
            f"worker-{number}",
            self._worker_command,
            self._children,
            self._data.logs / f"worker-{number}.log",
            stall_s=self._settings.stall_s,
            on_change=lambda state: self._child_changed(f"worker {number}", state),
            pass_fds=(self._listener.fileno(),),
        )

    def _engine_command(self, model: ModelSettings, status_fd: int, lifeline_fd: int) -> Sequence[str]:
        settings = self._settings
        flags = {
            "--model": model.name,
            "--source": model.source,
            "--data-dir": self._data.path,
            "--socket": self._data.socket(f"engine-{model.file_name}"),
            "--status-fd": status_fd,
            "--lifeline-fd": lifeline_fd,
            "--kv-memory": model.kv_memory,
            "--kv-blocks": model.kv_blocks,
            "--block-size": settings.block_size,
            "--max-batch-tokens": settings.max_batch_tokens,
            "--max-sequences": settings.max_sequences,
            "--max-model-len": model.max_model_len,
            "--dtype": model.dtype,
            "--device": model.device,
            "--drain-s": settings.drain_s,
        }
        given = ((flag, str(value)) for flag, value in flags.items() if value is not None)
        return [*self._programs.engine, *(word for pair in given for word in pair)]

    def _worker_command(self, status_fd: int, lifeline_fd: int) -> Sequence[str]:
        return [
            *self._programs.worker,
            *("--data-dir", str(self._data.path)),
            *("--listen-fd", str(self._listener.fileno())),
            *("--status-fd", str(status_fd)),
            *("--lifeline-fd", str(lifeline_fd)),
        ]

    def _initial_status(self) -> Status:
        engines = {
            model.name: EngineStatus(model.name, str(self._data.socket(f"engine-{model.file_name}")))
            for model in self._settings.models
        }
        return Status("starting", "the server is starting", self._redis_url, engines=engines)

    def _worker_settings(self) -> Settings:
        return replace(self._settings, data_dir=self._data.path, port=self._port, redis_url=self._redis_url)

    @property
    def _url(self) -> str:
        return url_of(self._settings.host, self._port)

    @property
    def _connect_host(self) -> str:
        return self._url.removeprefix("http://").rpartition(":")[0].strip("[]")


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Ends when all of them have. A library may lose a cancellation that meets its own timeout, so it is repeated."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=RECANCEL_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _status_code(host: str, port: int, path: str) -> int | None:
    """The HTTP status of a GET; None when there is no answer."""
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                words = (await reader.readline()).split()
            finally:
                writer.close()
        return int(words[1])
    except (OSError, TimeoutError, ValueError, IndexError):
        return None


def _write_private(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    part.replace(path)


def _raise_file_limit() -> None:
    """Each stream holds a descriptor: take what the system allows. Inherited by the children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
