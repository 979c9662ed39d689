"""A whole Radixgate, started as a user starts it, for tests that speak to it from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RADIXGATE = Path(sys.executable).with_name("radixgate")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    """For what another process does in its own time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.05)


class Answer:
    """An HTTP answer whose status is never an exception."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    data_dir: Path
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def log_path(self) -> Path:
        return self.data_dir.with_name(self.data_dir.name + ".log")

    def key(self, tenant: str) -> str:
        return (self.data_dir / "keys" / f"{tenant}.key").read_text().strip()

    @property
    def admin_key(self) -> str:
        return (self.data_dir / "admin.key").read_text().strip()

    def start(self) -> Server:
        command = [RADIXGATE, "serve", "--port", str(self.port), "--data-dir", str(self.data_dir), *self.flags]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        return self

    def wait_ready(self, timeout_s: float = 150) -> Server:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"serve ended with {self.process.returncode}:\n{self.log[-4000:]}")
            try:
                if self.get("/readyz").status == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.log[-4000:]}")

    def stop(self) -> int:
        """SIGTERM, as an init system does it; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        """kill -9 of the supervisor alone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        request = urllib.request.Request(
            self.url + path, data=body, method=method, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read())

    def get(self, path: str, key: str | None = None) -> Answer:
        return self.request("GET", path, **({"authorization": f"Bearer {key}"} if key else {}))

    def post(self, path: str, body: Any, key: str | None = None, **headers: str) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        if key:
            headers["authorization"] = f"Bearer {key}"
        return self.request("POST", path, raw, content_type="application/json", **headers)

    def chat(self, tenant: str, content: str, **parameters: Any) -> Answer:
        body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": content}], "temperature": 0}
        return self.post("/v1/chat/completions", {**body, **parameters}, self.key(tenant))

    def command(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A client command against this server, with the admin key found through its data directory."""
        env = {**os.environ, "RADIXGATE_URL": self.url, "RADIXGATE_DATA_DIR": str(self.data_dir), **environment}
        return subprocess.run([RADIXGATE, *arguments], env=env, capture_output=True, text=True, timeout=60)

    def descendants(self) -> dict[int, str]:
        """Pid -> command line of every process that works on this data directory, the supervisor included."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if str(self.data_dir) in line:
                    found[int(entry.name)] = line
        return found
