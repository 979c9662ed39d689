"""The supervisor in a process of its own, with fake engines and workers, as the tests hold it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FAKE_SERVE = Path(__file__).with_name("fake_serve.py")
ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(condition: Callable[[], Any], timeout_s: float = 15) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class FakeServer:
    data_dir: Path
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        return self.data_dir.with_name(self.data_dir.name + ".log")

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def start(self) -> FakeServer:
        command = [sys.executable, str(FAKE_SERVE), "--port", str(self.port), "--data-dir", str(self.data_dir)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RADIXGATE_")}
        environment["PYTHONPATH"] = str(ROOT)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *self.flags], stdout=log, stderr=log, env=environment, cwd=self.data_dir.parent
            )
        return self

    def wait_ready(self) -> FakeServer:
        def ready() -> bool:
            assert self.process is not None and self.process.poll() is None, self.log
            return "is ready at" in self.log

        eventually(ready, 30)
        return self

    def wait_end(self) -> int:
        assert self.process is not None
        return self.process.wait(20)

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait_end()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.wait_end()

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.data_dir / "run" / "status.json").read_text())

    @property
    def pids(self) -> dict[str, int]:
        """Name -> pid of the children that the supervisor recorded."""
        records = json.loads((self.data_dir / "run" / "children.json").read_text())
        return {name: pid for name, (pid, _) in records.items()}

    def http_status(self) -> int:
        """Of an answer of the (fake) worker."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            return int(connection.recv(4096).split()[1])

    def engine_starts(self, model: str = "smollm2-135m") -> int:
        return (self.data_dir / "logs" / "starts").read_text().splitlines().count(model)

    def behave(self, behaviour: str, model: str = "smollm2-135m") -> None:
        """How the fake engine of that model behaves from now on."""
        folder = self.data_dir / "models"
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "part"
        part.write_text(behaviour)
        part.replace(folder / f"behave-{model}")
