"""Any process may die or hang: the server comes back, and tenants, keys and usage are still there."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server import Answer, Server, eventually

pytestmark = pytest.mark.crash


@pytest.fixture
def small(tmp_path: Path, tiny_model: Path) -> Iterator[Server]:
    flags = ("--model", str(tiny_model), "--dtype", "float32", "--kv-blocks", "512", "--stall-s", "3")
    server = Server(tmp_path / "data", flags)
    yield server.start().wait_ready(60)
    server.stop()


def complete(server: Server, **parameters: object) -> Answer:
    body = {"model": "tiny-llama", "prompt": "One two three four five six seven.", "max_tokens": 4, "temperature": 0}
    return server.post("/v1/completions", {**body, **parameters}, server.key("acme"))


def requests_on_the_bill(server: Server) -> int:
    """-1 while the report cannot be had."""
    result = server.command("usage", "report", "--json")
    return sum(row["requests"] for row in json.loads(result.stdout)["rows"]) if result.returncode == 0 else -1


def pid_of(server: Server, part: str) -> int:
    """The newest process whose command line has `part`."""
    return max(pid for pid, line in server.descendants().items() if part in line)


def serves(server: Server) -> bool:
    try:
        return complete(server).status == 200
    except OSError:
        return False


def test_sigterm_ends_everything_and_a_restart_keeps_tenants_and_usage(small: Server) -> None:
    assert complete(small).status == 200
    assert small.stop() == 0
    assert small.descendants() == {}
    small.start().wait_ready(60)
    eventually(lambda: requests_on_the_bill(small) == 1)
    assert complete(small).status == 200


@pytest.mark.parametrize("part", ["engine.process", "valkey-server", "gateway.worker"])
def test_kill_9_of_a_child_is_mended_while_running(small: Server, part: str) -> None:
    assert complete(small).status == 200
    eventually(lambda: requests_on_the_bill(small) == 1)
    os.kill(pid_of(small, part), signal.SIGKILL)
    eventually(lambda: serves(small), 60)
    eventually(lambda: requests_on_the_bill(small) >= 2)


def test_kill_9_of_the_supervisor_leaves_nothing_that_blocks_the_next_start(small: Server) -> None:
    assert complete(small).status == 200
    small.kill()
    eventually(lambda: all("valkey" in line for line in small.descendants().values()), 20)
    small.start().wait_ready(60)
    eventually(lambda: requests_on_the_bill(small) == 1)
    assert complete(small).status == 200


def test_a_stopped_engine_gives_503_and_comes_back(small: Server) -> None:
    assert complete(small).status == 200
    answers: list[Answer] = []
    os.kill(pid_of(small, "engine.process"), signal.SIGSTOP)
    hanging = threading.Thread(target=lambda: answers.append(complete(small, max_tokens=1900, ignore_eos=True)))
    hanging.start()
    eventually(lambda: small.get("/readyz").status == 503)
    assert small.get("/readyz").json["engines"]["tiny-llama"] != "ready"
    hanging.join(30)
    assert [answer.status for answer in answers] == [503]
    assert answers[0].json["error"]["message"]
    eventually(lambda: serves(small), 60)


def test_a_client_that_leaves_in_mid_stream_pays_what_it_got_and_frees_its_blocks(small: Server) -> None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", small.port)
    body = json.dumps(
        {"model": "tiny-llama", "prompt": "a b c", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    )
    connection.request("POST", "/v1/completions", body, {"authorization": f"Bearer {small.key('acme')}"})
    answer = connection.getresponse()
    answer.read(2000)
    connection.close()
    answer.close()
    eventually(lambda: requests_on_the_bill(small) == 1)

    def idle() -> bool:
        result = small.post("/admin/engines/tiny-llama/invariants", {}, small.admin_key).json
        return result["ok"] and result["private_blocks"] == 0

    eventually(idle)
    (row,) = json.loads(small.command("usage", "report", "--json").stdout)["rows"]
    assert 0 < row["output_tokens"] < 1500


def test_a_second_server_on_the_same_data_is_refused(small: Server) -> None:
    second = Server(small.data_dir, small.flags)
    second.start()
    assert second.process is not None and second.process.wait(30) != 0
    assert str(small.process.pid) in second.log and "Traceback" not in second.log
    assert complete(small).status == 200


def test_a_port_in_use_is_named(small: Server, tmp_path: Path) -> None:
    second = Server(tmp_path / "other", small.flags, port=small.port)
    second.start()
    assert second.process is not None and second.process.wait(30) == 2
    assert str(small.port) in second.log and "Traceback" not in second.log


@pytest.mark.parametrize("source", ["no/such/model", "/no/such/model.gguf"])
def test_a_model_that_does_not_exist_is_refused_by_name(tmp_path: Path, source: str) -> None:
    server = Server(tmp_path / "data", ("--model", source))
    server.start()
    assert server.process is not None and server.process.wait(60) not in (0, None)
    assert source in server.log and "Traceback" not in server.log
    assert server.descendants() == {}


def test_a_data_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = Server(tmp_path / "file" / "data")
    with (tmp_path / "log").open("wb") as log:
        import subprocess

        from tests.end_to_end.server import RADIXGATE

        command = [RADIXGATE, "serve", "--port", str(server.port), "--data-dir", str(server.data_dir)]
        code = subprocess.run(command, stdout=log, stderr=log, timeout=30).returncode
    text = (tmp_path / "log").read_text()
    assert code not in (0, None) and str(server.data_dir) in text and "Traceback" not in text
