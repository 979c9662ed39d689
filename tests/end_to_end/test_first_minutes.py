"""What a new user does first: the printed curl line, the same again, another tenant, the bill."""

import json
import os
import re
import subprocess

from tests.end_to_end.server import Server

STORY = "Here is a paragraph to summarise. " + "The lighthouse keeper counted the ships and wrote each one down. " * 8


def cached(answer) -> int:
    return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_printed_curl_line_pasted_twice_keeps_what_it_promises(server: Server) -> None:
    line = re.search(r"^\s*(curl (?:.*\\\n)*.*)", server.log, re.MULTILINE)
    assert line, server.log
    answers = []
    for _ in range(2):
        result = subprocess.run(["bash", "-c", line.group(1)], capture_output=True, text=True, timeout=120)
        answers.append(json.loads(result.stdout))
    first, second = answers
    assert second["choices"] == first["choices"] and first["choices"][0]["message"]["content"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1
    assert 0 < second["usage"]["cost_nano_usd"] < first["usage"]["cost_nano_usd"]


def test_the_second_of_two_equal_requests_hits_costs_less_and_says_the_same(server: Server) -> None:
    first, second = (server.chat("acme", STORY, max_tokens=12) for _ in range(2))
    assert (first.status, second.status) == (200, 200)
    assert cached(first) < cached(second) <= second.json["usage"]["prompt_tokens"] - 1
    assert second.json["choices"] == first.json["choices"]
    costs = [int(answer.headers["x-radixgate-cost-nano-usd"]) for answer in (first, second)]
    assert 0 < costs[1] < costs[0]


def test_another_tenant_never_hits(server: Server) -> None:
    secret = "Only the first tenant sends this. " + STORY[::-1]
    assert server.chat("acme", secret, max_tokens=2).status == 200
    own = server.chat("acme", secret, max_tokens=2)
    other = server.chat("globex", secret, max_tokens=2)
    template_only = server.chat("globex", "An unrelated question of the other tenant.", max_tokens=2)
    assert cached(own) > 100
    assert cached(other) <= cached(template_only) + 16


def test_usage_report_agrees_with_what_the_clients_were_told(server: Server) -> None:
    tenant = json.loads(server.command("tenant", "create", "Zephyr Ltd", "--json").stdout)
    answers = []
    for _ in range(3):
        body = {"model": "smollm2-135m", "prompt": STORY, "max_tokens": 5, "temperature": 0}
        answers.append(server.post("/v1/completions", body, tenant["key"]))
    told = sum(int(answer.headers["x-radixgate-cost-nano-usd"]) for answer in answers)
    row = usage_row(server, tenant["tenant"]["id"], requests=3)
    assert int(row["cost_nano_usd"]) == told
    assert row["output_tokens"] == sum(answer.json["usage"]["completion_tokens"] for answer in answers)
    assert row["cached_private_tokens"] == sum(cached(answer) for answer in answers)
    assert row["prompt_tokens"] == sum(answer.json["usage"]["prompt_tokens"] for answer in answers)


def usage_row(server: Server, tenant_id: str, requests: int) -> dict:
    """The tenant's row once `requests` events have reached Redis: shipping is asynchronous, so ask a few times."""
    for _ in range(100):
        report = json.loads(server.command("usage", "report", "--json").stdout)
        rows = [row for row in report["rows"] if row["tenant"] == tenant_id]
        if rows and rows[0]["requests"] == requests:
            return rows[0]
    raise AssertionError(f"no row with {requests} requests: {report}")


def test_key_files_are_private(server: Server) -> None:
    for path in [server.data_dir / "admin.key", *(server.data_dir / "keys").iterdir()]:
        assert os.stat(path).st_mode & 0o777 == 0o600, path


def test_client_commands_explain_a_wrong_key_and_an_absent_server(server: Server) -> None:
    wrong = server.command("tenant", "list", RADIXGATE_ADMIN_KEY="rg-admin-wrong")
    assert wrong.returncode != 0 and "key" in wrong.stderr and "Traceback" not in wrong.stderr
    absent = server.command("tenant", "list", RADIXGATE_URL="http://127.0.0.1:9")
    assert absent.returncode != 0 and "127.0.0.1:9" in absent.stderr and "Traceback" not in absent.stderr


def test_secrets_are_not_in_any_log(server: Server) -> None:
    secrets = [server.admin_key, server.key("acme"), server.key("globex")]
    logs = [server.log_path, *(server.data_dir / "logs").rglob("*")]
    for path in filter(os.path.isfile, logs):
        text = path.read_text(errors="replace")
        assert not any(secret in text for secret in secrets), path
