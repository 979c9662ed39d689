"""Stands in for an engine (`engine BEHAVIOUR ...`) or a gateway worker (`worker ...`): speaks the status pipe, no more.

An engine's behaviour is the content of the file `<data dir>/behave-<model>`, so that a test can change it between
restarts: ok, fail, die, stall.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path


def say(fd: int, **message: object) -> None:
    os.write(fd, json.dumps(message).encode() + b"\n")


def end_with_parent(lifeline_fd: int) -> None:
    def watch() -> None:
        os.read(lifeline_fd, 1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def options() -> dict[str, str]:
    words = sys.argv[2:]
    return dict(zip(words[::2], words[1::2], strict=True))


def engine(flags: dict[str, str]) -> None:
    status_fd, data_dir = int(flags["--status-fd"]), Path(flags["--data-dir"])
    end_with_parent(int(flags["--lifeline-fd"]))
    signal.signal(signal.SIGUSR1, lambda *_: print("stacks of the fake engine", flush=True))
    with (data_dir / "logs" / "starts").open("a") as starts:
        starts.write(flags["--model"] + "\n")
    (data_dir / "logs" / f"flags-{flags['--model']}").write_text(json.dumps(flags))
    file = data_dir / "models" / f"behave-{flags['--model']}"
    behaviour = file.read_text() if file.exists() else "ok"
    if behaviour == "die":
        print("the fake engine dies early", flush=True)
        sys.exit(7)
    say(status_fd, type="progress", stage="loading weights", fraction=0.5)
    if behaviour == "fail":
        say(status_fd, type="failed", code="model_not_found", message="there is no model 'nowhere'")
        sys.exit(3)
    say(status_fd, type="ready")
    while True:
        waiting_s = 99 if file.exists() and file.read_text() == "stall" else 0
        say(status_fd, type="beat", steps=1, waiting_s=waiting_s)
        time.sleep(0.05)


def worker(flags: dict[str, str]) -> None:
    """Answers every request with the status file, 200 when that says ready, as the real one's /readyz does."""
    status_fd, data_dir = int(flags["--status-fd"]), Path(flags["--data-dir"])
    end_with_parent(int(flags["--lifeline-fd"]))
    listener = socket.socket(fileno=int(flags["--listen-fd"]))
    say(status_fd, type="ready")

    def beat() -> None:
        while True:
            say(status_fd, type="beat", steps=0, waiting_s=0)
            time.sleep(0.5)

    threading.Thread(target=beat, daemon=True).start()
    while True:
        connection, _ = listener.accept()
        connection.recv(4096)
        body = (data_dir / "run" / "status.json").read_bytes()
        code = 200 if json.loads(body)["stage"] == "ready" else 503
        connection.sendall(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (code, len(body), body))
        connection.close()


if __name__ == "__main__":
    {"engine": engine, "worker": worker}[sys.argv[1]](options())
