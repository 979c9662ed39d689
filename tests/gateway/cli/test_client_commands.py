"""The commands that speak to a running server: what they print, and how they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli import key, tenant, usage

ROOT = Path(__file__).parents[3]
ADMIN_KEY = "rg-admin-test"


class Server:
    """Answers as it is told and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str | None, Any]] = []
        self.status, self.answer = 200, b"{}"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                request = (
                    self.command,
                    self.path,
                    self.headers.get("authorization"),
                    json.loads(body) if body else None,
                )
                outer.asked.append(request)
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(outer.answer)

            do_GET = do_POST = do_DELETE = handle_any

            def log_message(self, *args: object) -> None: ...

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def answers(self, status: int, answer: Any) -> None:
        self.status = status
        self.answer = answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    server = Server()
    monkeypatch.setenv("RADIXGATE_URL", server.url)
    monkeypatch.setenv("RADIXGATE_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    yield server
    server.close()


def invoke(group: Any, *arguments: str) -> Result:
    return CliRunner().invoke(group.command, list(arguments))


TENANT = {"id": "t_1", "name": "Acme", "plan_id": "demo", "created_at": 1_800_000_000.0, "disabled_at": None}
KEY = {"id": "k_1", "tenant_id": "t_1", "name": "ci", "scopes": ["usage"], "created_at": 0.0, "revoked_at": None,
       "expires_at": None}  # fmt: skip
TOTALS = {
    "requests": 1234, "errors": 0, "uncached_tokens": 10, "cached_private_tokens": 1000, "cached_public_tokens": 5,
    "written_unleased_tokens": 7, "written_leased_tokens": {"300": 3}, "prompt_tokens": 1025, "output_tokens": 9,
    "cost_nano_usd": 1, "cost_usd": "0.000000001",
}  # fmt: skip


def test_tenant_create_prints_the_key_once(server: Server) -> None:
    server.answers(201, {"tenant": TENANT, "key": "rg-new", "key_id": "k_1"})
    assert invoke(tenant, "create", "Acme").output == "tenant  Acme (t_1)\nkey     rg-new  (shown once; keep it)\n"
    assert server.asked == [("POST", "/admin/tenants", f"Bearer {ADMIN_KEY}", {"name": "Acme"})]
    answer = json.loads(invoke(tenant, "create", "Acme", "--json").output)
    assert (answer["tenant"], answer["key"]) == (TENANT, "rg-new")


def test_lists_are_tables_that_a_pipe_does_not_break(server: Server) -> None:
    server.answers(200, {"tenants": [{**TENANT, "name": "A" * 100}]})
    lines = invoke(tenant, "list").output.splitlines()
    assert lines[0].split() == ["tenant", "id", "plan", "created", "state"]
    assert lines[1].split() == ["A" * 100, "t_1", "demo", "2027-01-15", "08:00:00", "active"]
    server.answers(200, {"keys": [KEY, {**KEY, "revoked_at": 60.0}]})
    result = invoke(key, "list", "Acme & Söhne/x")
    assert server.asked[-1][1] == "/admin/tenants/Acme%20%26%20S%C3%B6hne%2Fx/keys"
    assert result.output.splitlines()[1].split() == ["k_1", "ci", "usage", "1970-01-01", "00:00:00", "never", "active"]
    assert "revoked 1970-01-01 00:01:00" in result.output


def test_markup_in_a_name_is_only_text(server: Server) -> None:
    server.answers(200, {"tenants": [{**TENANT, "name": "[red]x[/red] [link=a]"}]})
    assert "[red]x[/red] [link=a]" in invoke(tenant, "list").output


def test_keys_are_created_and_revoked(server: Server) -> None:
    server.answers(201, {"key": "rg-new", "record": KEY})
    assert "rg-new" in invoke(key, "create", "Acme", "--name", "ci").output
    assert server.asked[-1][3] == {"name": "ci"}
    server.answers(200, {"record": KEY})
    assert invoke(key, "revoke", "k_1").output == "k_1 (ci) is revoked\n"
    assert server.asked[-1][:2] == ("DELETE", "/admin/keys/k_1")


def test_usage_report_shows_every_nano_usd(server: Server) -> None:
    row = {"start_s": 1_800_000_000, "tenant": "t_1", "tenant_name": "Acme", "model": "m", **TOTALS}
    report = {"from_s": 0, "to_s": 60, "by": ["tenant", "model"], "bucket": "1h", "rows": [row],
              "total": {**TOTALS, "cost_nano_usd": str(2**60), "cost_usd": "1152921504.606846976"}}  # fmt: skip
    server.answers(200, report)
    result = invoke(usage, "report", "--bucket", "1h", "--from", "2027-01-15", "--tenant", "Acme")
    lines = [line.split() for line in result.output.splitlines()]
    numbers = ["1,234", "0", "10", "10", "1,005", "9"]
    assert lines[0] == ["usage", "from", "1970-01-01", "00:00:00", "to", "1970-01-01", "00:01:00", "UTC"]
    titles = "from tenant model requests errors uncached written cached output cost USD"
    assert lines[1] == titles.split()
    assert lines[2] == ["2027-01-15", "08:00:00", "Acme", "m", *numbers, "0.000000001"]
    assert lines[-1] == ["total", *numbers, "1152921504.606846976"]
    assert server.asked[0][1] == "/admin/usage?tenant=Acme&from=2027-01-15&by=tenant%2Cmodel&bucket=1h"
    assert json.loads(invoke(usage, "report", "--json").output) == report


def test_no_usage_is_said_so(server: Server) -> None:
    server.answers(200, {"from_s": 0, "to_s": 60, "by": ["tenant"], "bucket": "all", "rows": [], "total": TOTALS})
    assert "nothing was used" in invoke(usage, "report").output


@pytest.mark.parametrize(
    ("status", "answer", "exit_code", "says"),
    [
        (
            401,
            {"error": {"message": "Incorrect API key provided."}},
            4,
            "does not take this admin key: Incorrect API key",
        ),
        (403, {"error": {"message": "Not yours."}}, 4, "RADIXGATE_ADMIN_KEY"),
        (409, {"error": {"message": "the name 'Acme' is taken"}}, 5, "the name 'Acme' is taken"),
        (
            503,
            {"error": {"message": "starting: loading the model, 40 %"}},
            6,
            "is not ready: starting: loading the model",
        ),
        (503, b"busy", 6, "the server answered 503"),
        (500, {"error": None}, 6, "the server answered 500"),
        (200, b"<html>", 3, "is not a radixgate server"),
    ],
)
def test_what_the_server_refuses_is_one_line(
    server: Server, status: int, answer: Any, exit_code: int, says: str
) -> None:
    server.answers(status, answer)
    result = invoke(tenant, "create", "Acme")
    assert result.exit_code == exit_code
    assert says in result.output
    assert len(result.output.splitlines()) == 1
    assert ADMIN_KEY not in result.output


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:1", "no radixgate server at http://127.0.0.1:1"),
        ("ftp://x", "RADIXGATE_URL is 'ftp://x'"),
        ("http://127.0.0.1:99999", "RADIXGATE_URL is"),
        ("nonsense", "RADIXGATE_URL is 'nonsense'"),
    ],
)
def test_no_server_there(monkeypatch: pytest.MonkeyPatch, url: str, says: str) -> None:
    monkeypatch.setenv("RADIXGATE_URL", url)
    monkeypatch.setenv("RADIXGATE_ADMIN_KEY", ADMIN_KEY)
    result = invoke(tenant, "list")
    assert (result.exit_code, says in result.output) == (3, True)


def test_the_key_comes_from_the_data_directory(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server.answers(200, {"tenants": []})
    monkeypatch.delenv("RADIXGATE_ADMIN_KEY")
    result = invoke(tenant, "list")
    assert result.exit_code == 4
    assert "no admin key: .radixgate/admin.key does not exist" in result.output
    monkeypatch.setenv("RADIXGATE_DATA_DIR", str(tmp_path))
    (tmp_path / "admin.key").write_text("rg-admin-file\n")
    assert invoke(tenant, "list").exit_code == 0
    assert server.asked[-1][2] == "Bearer rg-admin-file"
    for broken in ("", "a b", "x\ny", "ключ"):
        (tmp_path / "admin.key").write_text(broken)
        result = invoke(tenant, "list")
        assert (result.exit_code, "does not hold an admin key" in result.output) == (4, True)


def test_the_commands_load_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "redis", "starlette", "uvicorn", "numpy", "rich", "msgspec", "asyncio")
    script = (
        "import sys, gateway.cli.tenant, gateway.cli.key, gateway.cli.usage; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
