"""One gateway worker: uvicorn on the listening socket that the supervisor bound and passed down.

Run as `python -m gateway.worker`; its settings are in the run directory, its status goes up a pipe.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import uvicorn

from gateway.app import create_app
from gateway.settings import Settings
from gateway.status import StatusReader

BEAT_S = 1.0
KEEP_ALIVE_S = 75
BACKLOG = 2048
_PR_SET_PDEATHSIG = 1


class Server(uvicorn.Server):
    """A uvicorn server that says when it is ready, beats, and leaves when its parent has."""

    def __init__(self, config: uvicorn.Config, status_fd: int, lifeline_fd: int) -> None:
        super().__init__(config)
        self._status_fd = status_fd
        self._lifeline_fd = lifeline_fd
        self._beats: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            asyncio.get_running_loop().add_reader(self._lifeline_fd, self._parent_gone)
            self._beats = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        self._say({"type": "ready"})
        while True:
            await asyncio.sleep(BEAT_S)
            self._say({"type": "beat", "steps": 0, "waiting_s": 0})

    def _say(self, message: dict[str, object]) -> None:
        try:
            os.write(self._status_fd, json.dumps(message).encode() + b"\n")
        except BlockingIOError:
            pass  # nobody reads just now; the next beat says the same
        except BrokenPipeError:
            self._parent_gone()

    def _parent_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._lifeline_fd)
        self.should_exit = True


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway.worker")
    parser.add_argument("--data-dir", type=Path, required=True)
    for name in ("--listen-fd", "--status-fd", "--lifeline-fd"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args(arguments)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.set_blocking(options.status_fd, False)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    settings = Settings.from_json((options.data_dir / "run" / "settings.json").read_text())
    config = uvicorn.Config(
        create_app(settings, StatusReader(settings.status_path)),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
    )
    listener = socket.socket(fileno=options.listen_fd)
    Server(config, options.status_fd, options.lifeline_fd).run(sockets=[listener])


if __name__ == "__main__":
    main()
