"""Each bad request gets a clear typed error, bills nothing and leaves the server whole."""

import json

import pytest

from tests.end_to_end.server import Server

OK = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
LONG = "word " * 9000

BAD_BODIES = {
    "not JSON": (b"{", 400),
    "not an object": (b"[1]", 400),
    "not UTF-8": (b'{"model":"\xff"}', 400),
    "deeply nested": (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "lone surrogate": (json.dumps({**OK, "messages": [{"role": "user", "content": "\ud800"}]}).encode(), 400),
    "too large": (b'{"model":"' + b"x" * 50_000_000 + b'"}', 413),
    "no model": ({k: v for k, v in OK.items() if k != "model"}, 400),
    "unknown model": ({**OK, "model": "nope"}, 404),
    "model of a wrong type": ({**OK, "model": 3}, 400),
    "empty messages": ({**OK, "messages": []}, 400),
    "messages of a wrong type": ({**OK, "messages": "hi"}, 400),
    "temperature below zero": ({**OK, "temperature": -1}, 400),
    "no samples": ({**OK, "n": 0}, 400),
    "max_tokens zero": ({**OK, "max_tokens": 0}, 400),
    "max_tokens a string": ({**OK, "max_tokens": "5"}, 400),
    "longer than the model": ({**OK, "messages": [{"role": "user", "content": LONG}]}, 400),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_bad_body(server: Server, case: str) -> None:
    body, status = BAD_BODIES[case]
    answer = server.post("/v1/chat/completions", body, server.key("acme"))
    assert answer.status == status, answer.body[:300]
    error = answer.json["error"]
    assert error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]


def test_prompt_too_long_says_both_numbers(server: Server) -> None:
    error = server.chat("acme", LONG).json["error"]
    assert error["code"] == "context_length_exceeded" and "8192" in error["message"]


def test_an_empty_content_is_served_and_none_is_refused(server: Server) -> None:
    assert server.chat("acme", "", max_tokens=1).status == 200
    answer = server.chat("acme", None, max_tokens=1)
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages[0].content")
    assert "x-radixgate-cost-nano-usd" not in answer.headers


@pytest.mark.parametrize("key", [None, "rg-wrong", "", "not a key, clearly"])
def test_wrong_key(server: Server, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = server.request("POST", "/v1/chat/completions", json.dumps(OK).encode(), **headers)
    assert answer.status == 401 and answer.json["error"]["code"] == "invalid_api_key"


def test_revoked_key_stops_working(server: Server) -> None:
    created = json.loads(server.command("key", "create", "acme", "--json").stdout)
    assert server.post("/v1/chat/completions", OK, created["key"]).status == 200
    assert server.command("key", "revoke", created["record"]["id"]).returncode == 0
    for _ in range(50):
        if server.post("/v1/chat/completions", OK, created["key"]).status == 401:
            return
    raise AssertionError("the revoked key still works")


def test_unknown_route_and_wrong_method_have_the_shape_of_an_error(server: Server) -> None:
    for answer, status in (
        (server.get("/v1/nope", server.key("acme")), 404),
        (server.get("/v1/chat/completions", server.key("acme")), 405),
    ):
        assert answer.status == status and answer.json["error"]["message"]


def test_bad_requests_leave_the_engine_whole(server: Server) -> None:
    assert server.chat("acme", "Still there?", max_tokens=2).status == 200
    invariants = server.post("/admin/engines/smollm2-135m/invariants", {}, server.admin_key)
    assert invariants.json["ok"] is True, invariants.json
