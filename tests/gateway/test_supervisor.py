"""The supervisor as its users meet it: it starts, it says no in words, it ends in order."""

import asyncio
import fcntl
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from gateway.supervisor import cancel_all
from tests.gateway.fake_server import FakeServer, alive, eventually

MakeServer = Callable[..., FakeServer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeServer]:
    servers: list[FakeServer] = []

    def build(*flags: str, folder: str = "data", **arguments: object) -> FakeServer:
        servers.append(FakeServer(tmp_path / folder, flags, **arguments))
        return servers[-1]

    yield build
    for server in servers:
        if server.process is not None and server.process.poll() is None:
            server.stop()


# --- start ------------------------------------------------------------------------------------------------------------


def test_a_first_start_creates_private_keys_and_says_how_to_begin(make: MakeServer) -> None:
    server = make().start().wait_ready()
    for name in ("admin.key", "keys/acme.key", "keys/globex.key"):
        path = server.data_dir / name
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text().startswith("rg-admin-" if name == "admin.key" else "rg-")
        assert str(path) in server.log
        assert path.read_text().strip() not in server.log
    assert (server.data_dir / "run").stat().st_mode & 0o777 == 0o700
    assert re.search(rf"http://127.0.0.1:{server.port}/dashboard\?token=[\w-]{{43}}\n", server.log)
    assert re.search(rf"^  curl -s http://127.0.0.1:{server.port}/v1/chat/completions", server.log, re.MULTILINE)
    assert f"RADIXGATE_DATA_DIR={server.data_dir} /opt/radixgate usage report" in server.log


def test_the_keys_that_are_written_work_and_the_second_start_keeps_them(make: MakeServer) -> None:
    server = make().start().wait_ready()
    first = {path: path.read_text() for path in (server.data_dir / "keys").iterdir()}
    admin = (server.data_dir / "admin.key").read_text()
    assert server.stop() == 0
    server.start().wait_ready()
    assert {path: path.read_text() for path in (server.data_dir / "keys").iterdir()} == first
    assert (server.data_dir / "admin.key").read_text() == admin
    tenants = redis_of(server).hvals("radixgate:{registry}:tenants")
    assert sorted(json.loads(tenant)["name"] for tenant in tenants) == ["acme", "globex"]


def test_a_start_that_was_cut_short_is_made_good(make: MakeServer) -> None:
    """The tenant is there and its key file is not: it gets another key. A file that opens nothing is replaced."""
    server = make().start().wait_ready()
    server.stop()
    (server.data_dir / "keys" / "acme.key").unlink()
    (server.data_dir / "admin.key").write_text("rg-admin-of-another-redis\n")
    server.start().wait_ready()
    keys = redis_of(server)
    for name in ("keys/acme.key", "admin.key"):
        digest = hashlib.sha256((server.data_dir / name).read_text().strip().encode()).hexdigest()
        assert keys.hexists("radixgate:{registry}:keys", digest)
    assert keys.hlen("radixgate:{registry}:tenants") == 2


def test_the_port_answers_503_with_the_stage_until_everything_is_ready(make: MakeServer) -> None:
    server = make()
    server.behave("die")  # the engine never gets ready, and each attempt takes its time
    server.start()
    eventually(lambda: "worker 0: ready" in server.log)
    assert server.http_status() == 503
    assert server.wait_end() == 4


def test_ready_means_that_the_first_request_is_answered(make: MakeServer) -> None:
    server = make("--workers", "2").start().wait_ready()
    assert server.http_status() == 200
    assert server.status["stage"] == "ready"
    assert server.status["engines"]["smollm2-135m"]["up"] is True
    assert sorted(server.pids) == ["engine-smollm2-135m", "valkey", "valkey-guard", "worker-0", "worker-1"]


def test_the_engine_gets_the_settings(make: MakeServer) -> None:
    server = make("--kv-memory", "1GiB", "--dtype", "float32", "--max-sequences", "8").start().wait_ready()
    flags = json.loads((server.data_dir / "logs" / "flags-smollm2-135m").read_text())
    del flags["--status-fd"], flags["--lifeline-fd"]
    assert flags == {
        "--model": "smollm2-135m",
        "--source": "smollm2-135m",
        "--data-dir": str(server.data_dir),
        "--socket": str(server.data_dir / "run" / "engine-smollm2-135m.sock"),
        "--kv-memory": str(2**30),
        "--block-size": "16",
        "--max-batch-tokens": "512",
        "--max-sequences": "8",
        "--dtype": "float32",
        "--drain-s": "30.0",
    }


def test_each_model_has_an_engine_of_its_own(make: MakeServer) -> None:
    server = make("--model", "smollm2-135m", "--model", "owner/Other-Model").start().wait_ready()
    assert sorted(server.status["engines"]) == ["other-model", "smollm2-135m"]
    assert {"engine-other-model", "engine-smollm2-135m"} < set(server.pids)


def test_a_long_data_directory_gets_short_sockets(make: MakeServer) -> None:
    server = make(folder="a" * 90).start().wait_ready()
    socket_path = Path(server.status["redis_url"].removeprefix("unix://"))
    assert len(str(socket_path)) <= 100
    assert socket_path.parent.stat().st_mode & 0o777 == 0o700
    assert server.stop() == 0
    assert not socket_path.parent.exists()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named_and_nothing_is_started(make: MakeServer) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        server = make(port=holder.getsockname()[1]).start()
        assert server.wait_end() == 2
    assert f"port {server.port} on 127.0.0.1 is in use" in server.log
    assert "Traceback" not in server.log
    assert not (server.data_dir / "run" / "children.json").exists()


def test_a_second_server_on_the_same_data_is_refused_with_the_pid_of_the_first(make: MakeServer) -> None:
    first = make().start().wait_ready()
    second = make()
    second.data_dir = first.data_dir
    log = first.log
    second.start()
    assert second.wait_end() == 3
    assert f"in use by another server (pid {first.process.pid})" in second.log
    assert "is ready at" in log and first.http_status() == 200


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: path.write_text(""), "cannot be written"),
        (lambda path: (path / "sub").mkdir(parents=True), "is not a data directory of radixgate: it holds 'sub'"),
        (lambda path: (path.mkdir(), (path / "format").write_text("99\n")), "has format '99'"),
        (lambda path: (path.mkdir(), (path / "run").write_text("")), "cannot be written"),
    ],
    ids=["a file", "somebody else's", "another version", "a file within"],
)
def test_a_data_directory_that_cannot_be_used_is_refused_by_name(
    make: MakeServer, prepare: Callable, words: str
) -> None:
    server = make()
    prepare(server.data_dir)
    assert server.start().wait_end() == 3
    assert words in server.log and str(server.data_dir) in server.log and "Traceback" not in server.log


def test_a_data_directory_below_a_file_is_refused(make: MakeServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = make(folder="file/data")
    log = tmp_path / "log"
    with log.open("wb") as output:
        from tests.gateway.fake_server import FAKE_SERVE

        command = [sys.executable, str(FAKE_SERVE), "--port", "0", "--data-dir", str(server.data_dir)]
        assert subprocess.run(command, stdout=output, stderr=output, timeout=20).returncode == 3
    assert "a part of the path is a file" in log.read_text()


def test_a_model_that_cannot_be_served_ends_the_start_with_its_words(make: MakeServer) -> None:
    server = make()
    server.behave("fail")
    assert server.start().wait_end() == 4
    assert "there is no model 'nowhere'" in server.log and "Traceback" not in server.log
    assert server.engine_starts() == 1
    assert server.pids == {}


def test_an_engine_that_dies_at_every_start_is_given_up_with_its_log(make: MakeServer) -> None:
    server = make()
    server.behave("die")
    assert server.start().wait_end() == 4
    assert server.engine_starts() == 3
    assert "exit code 7" in server.log and "the fake engine dies early" in server.log


def test_a_redis_that_does_not_answer_is_named_without_its_password(make: MakeServer) -> None:
    server = make("--redis-url", "redis://user:hunter2@127.0.0.1:1/0").start()
    assert server.wait_end() == 6
    assert "redis://user:***@127.0.0.1:1/0 does not answer" in server.log and "hunter2" not in server.log


def test_an_external_redis_is_used_and_its_eviction_policy_is_warned_of(make: MakeServer) -> None:
    other = make(folder="other").start().wait_ready()
    redis_of(other).config_set("maxmemory-policy", "allkeys-lru")
    server = make("--redis-url", other.status["redis_url"]).start().wait_ready()
    assert "maxmemory-policy allkeys-lru" in server.log
    assert "valkey" not in server.pids
    assert (server.data_dir / "admin.key").read_text() != (other.data_dir / "admin.key").read_text()


# --- stop -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything_in_order(make: MakeServer, number: int) -> None:
    server = make().start().wait_ready()
    pids = server.pids
    server.process.send_signal(number)
    assert server.wait_end() == 0
    assert not any(map(alive, pids.values()))
    assert server.status["stage"] == "stopped"
    with pytest.raises(ConnectionRefusedError):
        server.http_status()


def test_the_lock_goes_with_the_server(make: MakeServer) -> None:
    server = make().start().wait_ready()
    server.stop()
    with (server.data_dir / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_second_signal_does_not_wait_for_a_worker_that_drains(make: MakeServer) -> None:
    server = make("--drain-s", "600").start().wait_ready()
    os.kill(server.pids["worker-0"], signal.SIGSTOP)
    server.process.send_signal(signal.SIGINT)
    eventually(lambda: "radixgate: stopping" in server.log)
    server.process.send_signal(signal.SIGINT)
    assert server.wait_end() == 0


def test_a_cancellation_that_a_library_loses_is_repeated() -> None:
    lost = []

    async def loses_the_first() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as cancelled:
            lost.append(cancelled)
        await asyncio.Event().wait()

    async def main() -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(loses_the_first()) for _ in range(2)]
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await cancel_all(tasks)
        return tasks

    assert all(task.cancelled() for task in asyncio.run(main())) and len(lost) == 2


def redis_of(server: FakeServer) -> redis.Redis:
    return redis.Redis.from_url(server.status["redis_url"])
