"""Health, readiness, metrics and the dashboard's way in."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from engine.null import NullEngine
from gateway.api.ops import readiness
from gateway.served import Models, ServedModel
from gateway.services import Services
from gateway.status import EngineStatus, Status, StatusFile, StatusReader
from tenants import store
from tenants.ledger import Ledger
from tests.gateway.support import LiveGateway


def test_health_and_readiness(gateway: LiveGateway):
    with httpx.Client(base_url=gateway.url) as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/readyz").json() == {"status": "ready", "message": "", "engines": {"tiny": "ready"}}


def test_readiness_follows_the_supervisor(tmp_path: Path):
    engine = NullEngine()
    loading = EngineStatus("m", "/s", stage="loading", fraction=0.5, message="reading weights")
    file = StatusFile(tmp_path / "status.json", Status("starting", "loading the model", "", engines={"m": loading}))
    status = StatusReader(file.path)
    models = Models([ServedModel("m", engine, status=status)])
    services = Services(tmp_path, store.connect("redis://127.0.0.1:1"), models, status)

    hello, engine.hello = engine.hello, None
    assert readiness(services) == {
        "status": "starting",
        "message": "loading the model",
        "engines": {"m": "loading (50%): reading weights"},
    }
    file.update_engine("m", up=True, stage="ready", message="")
    file.update(stage="ready", message="")
    assert readiness(services)["status"] == "degraded"
    engine.hello = hello
    assert readiness(services)["status"] == "ready"
    file.update(stage="draining")
    assert readiness(services)["status"] == "draining"


def test_a_full_disk_is_not_ready(gateway: LiveGateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Ledger, "has_room", False)
    with httpx.Client(base_url=gateway.url) as client:
        answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["message"]) == (503, "the disk under the ledger is full")


def test_a_client_that_leaves_while_it_sends_is_no_fault_of_ours(
    gateway: LiveGateway, caplog: pytest.LogCaptureFixture
):
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n"
        sock.sendall(f"{head}content-length: 1000\r\n\r\n{{".encode())
    with httpx.Client(base_url=gateway.url) as client:
        while not (lines := [line for line in client.get("/metrics").text.splitlines() if 'status="499"' in line]):
            pass  # the server has yet to notice
    assert any("chat_completions" in line for line in lines)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_metrics_count_what_was_booked(gateway: LiveGateway):
    def sample(name: str) -> float:
        with httpx.Client(base_url=gateway.url) as client:
            lines = client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    cost, cached = 'radixgate_cost_nano_usd_total{model="tiny"}', 'radixgate_tokens_total{class="cached_private"'
    before = sample(cost), sample(cached)
    usage = gateway.chat().json()["usage"]
    assert sample(cost) - before[0] == usage["cost_nano_usd"]
    assert sample(cached) - before[1] == 5
    assert sample('radixgate_engine_up{model="tiny"}') == 1
    assert sample('radixgate_http_requests_total{route="chat_completions",status="200"}') >= 1


# --- dashboard --------------------------------------------------------------------------------------------------------


@pytest.fixture
def browser(gateway: LiveGateway):
    with httpx.Client(base_url=gateway.url) as client:
        yield client


def test_a_one_time_link_opens_the_dashboard_once(gateway: LiveGateway, browser: httpx.Client):
    token = gateway.run(gateway.services.registry.create_dashboard_token()).reveal()
    entered = browser.get("/dashboard", params={"token": token})
    assert (entered.status_code, entered.headers["location"]) == (303, "/dashboard")
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie and "path=/dashboard" in cookie
    assert browser.get("/dashboard").status_code == 200
    with httpx.Client(base_url=gateway.url) as other:
        again = other.get("/dashboard", params={"token": token})
    assert again.status_code == 401 and "Administrator's key" in again.text and "set-cookie" not in again.headers


def test_a_key_opens_it_too_and_only_an_administrators(gateway: LiveGateway, browser: httpx.Client):
    assert browser.post("/dashboard/login", data={"key": gateway.key}).status_code == 401
    assert browser.post("/dashboard/login", data={"key": gateway.admin_key}).status_code == 303
    assert browser.get("/dashboard/data").status_code == 200


@pytest.mark.parametrize("cookie", [None, "nonsense"])
def test_no_data_without_a_session(gateway: LiveGateway, cookie):
    with httpx.Client(base_url=gateway.url, cookies={"radixgate_session": cookie} if cookie else {}) as client:
        assert client.get("/dashboard/data").status_code == 401
        assert client.get("/dashboard/data", headers={"x-api-key": gateway.key}).status_code == 403
        assert client.get("/dashboard/data", headers={"x-api-key": gateway.admin_key}).status_code == 200


def test_the_data_are_the_ledgers(gateway: LiveGateway):
    gateway.chat()
    events = gateway.booked()
    with gateway.http(gateway.admin_key) as client:
        data = client.get("/dashboard/data").json()
    acme = next(tenant for tenant in data["tenants"] if tenant["name"] == "acme")
    assert acme["requests"] == len(events)
    assert acme["cost_usd"] == f"{sum(event['cost_nano_usd'] for event in events) / 1e9:.9f}"
    assert acme["tokens"]["output"] == sum(event["usage"]["output"] for event in events)
    assert data["models"][0]["name"] == "tiny" and data["ready"]["status"] == "ready"


def test_the_page_allows_no_foreign_code(gateway: LiveGateway, browser: httpx.Client):
    browser.post("/dashboard/login", data={"key": gateway.admin_key})
    for path in ("/dashboard", "/dashboard/assets/dashboard.js", "/dashboard/assets/dashboard.css"):
        answer = browser.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert "http://" not in answer.text and "https://" not in answer.text and " style=" not in answer.text
