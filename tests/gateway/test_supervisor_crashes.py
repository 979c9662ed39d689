"""Any part may be killed or hang at any time: it is replaced while we run, and cleared away at the next start."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.gateway.fake_server import FakeServer, alive, eventually

pytestmark = pytest.mark.crash
ENGINE = "engine-smollm2-135m"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    server = FakeServer(tmp_path / "data", ("--stall-s", "1", "--drain-s", "1"))
    yield server.start().wait_ready()
    server.stop()


def redis_of(server: FakeServer) -> redis.Redis:
    return redis.Redis.from_url(server.status["redis_url"])


@pytest.mark.parametrize("name", [ENGINE, "worker-0", "valkey", "valkey-guard"])
def test_a_child_that_is_killed_is_replaced(server: FakeServer, name: str) -> None:
    redis_of(server).set("kept", "yes")
    redis_of(server).waitaof(1, 0, 1000)
    killed = server.pids[name]
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: server.pids.get(name, killed) != killed and server.status["stage"] == "ready")
    assert server.http_status() == 200
    assert redis_of(server).get("kept") == b"yes"


def test_while_an_engine_is_away_the_server_says_so(server: FakeServer) -> None:
    server.behave("die")
    os.kill(server.pids[ENGINE], signal.SIGKILL)
    status = eventually(lambda: status if (status := server.status)["stage"] == "degraded" else None)
    assert status["engines"]["smollm2-135m"]["up"] is False
    assert "smollm2-135m" in status["message"]
    assert server.http_status() == 503
    eventually(lambda: server.engine_starts() >= 5)  # it had been ready once: no giving up
    server.behave("ok")
    eventually(lambda: server.status["stage"] == "ready")
    assert server.status["engines"]["smollm2-135m"]["restarts"] >= 4


def test_an_engine_whose_work_waits_is_dumped_and_replaced(server: FakeServer) -> None:
    stalled = server.pids[ENGINE]
    server.behave("stall")
    eventually(lambda: not alive(stalled))
    server.behave("ok")
    eventually(lambda: server.status["stage"] == "ready" and server.pids[ENGINE] != stalled)
    assert "work has waited 99 s without a finished step" in server.log
    assert "stacks of the fake engine" in (server.data_dir / "logs" / f"{ENGINE}.log").read_text()


@pytest.mark.parametrize("name", [ENGINE, "worker-0", "valkey"])
def test_a_stopped_child_is_replaced(server: FakeServer, name: str) -> None:
    stopped = server.pids[name]
    os.kill(stopped, signal.SIGSTOP)
    eventually(lambda: not alive(stopped))
    eventually(lambda: server.pids.get(name, stopped) != stopped and server.status["stage"] == "ready")
    assert ("Redis is away" if name == "valkey" else "it has said nothing for 1 s") in server.log


def test_when_the_supervisor_is_killed_everything_ends_and_the_next_start_serves_again(server: FakeServer) -> None:
    redis_of(server).set("kept", "yes")
    pids = server.pids
    server.kill()
    eventually(lambda: not any(map(alive, pids.values())), 5)
    server.start().wait_ready()
    assert server.http_status() == 200
    assert redis_of(server).get("kept") == b"yes"


def test_no_two_children_share_a_lifeline(server: FakeServer) -> None:
    """One that sets it non-blocking, as event loops do, would make the others' reads fail."""
    pipes = [lifeline_of(pid) for name, pid in server.pids.items() if name != "valkey"]
    assert len(set(pipes)) == len(pipes) == 3


def lifeline_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    number = words[words.index("--lifeline-fd") + 1] if "--lifeline-fd" in words else "0"
    return os.readlink(f"/proc/{pid}/fd/{number}")


def test_leftovers_of_a_killed_supervisor_are_cleared_away_and_valkey_is_adopted(server: FakeServer) -> None:
    """Without their lifeline's reader (stopped, or killed as the guard), children outlive the supervisor."""
    pids = server.pids
    redis_of(server).set("kept", "yes")
    os.kill(pids[ENGINE], signal.SIGSTOP)
    os.kill(pids["valkey-guard"], signal.SIGSTOP)
    server.kill()
    os.kill(pids["valkey-guard"], signal.SIGKILL)
    server.start().wait_ready()
    assert not alive(pids[ENGINE])
    assert alive(pids["valkey"]) and server.pids["valkey"] == pids["valkey"]
    assert redis_of(server).get("kept") == b"yes"
    # And it is as much ours as one that we started: restarted when it dies, ended with us.
    os.kill(pids["valkey"], signal.SIGKILL)
    eventually(lambda: server.pids["valkey"] != pids["valkey"] and server.status["redis_up"])
    last = server.pids
    assert server.stop() == 0
    assert not any(map(alive, last.values()))


def test_an_adopted_valkey_ends_with_the_server(server: FakeServer) -> None:
    pids = server.pids
    os.kill(pids["valkey-guard"], signal.SIGSTOP)
    server.kill()
    os.kill(pids["valkey-guard"], signal.SIGKILL)
    server.start().wait_ready()
    assert server.pids["valkey"] == pids["valkey"]
    server.kill()
    eventually(lambda: not alive(pids["valkey"]), 5)


def test_a_hanging_valkey_of_an_earlier_run_is_ended_not_adopted(server: FakeServer) -> None:
    pids = server.pids
    for name in ("valkey-guard", "valkey"):
        os.kill(pids[name], signal.SIGSTOP)
    server.kill()
    os.kill(pids["valkey-guard"], signal.SIGKILL)
    server.start().wait_ready()
    assert not alive(pids["valkey"])
    assert server.pids["valkey"] != pids["valkey"]
