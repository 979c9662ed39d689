"""Whatever is sent, the answer is typed, names the parameter, and neither bills nor leaks anything."""

from __future__ import annotations

import json
import socket

import pytest

from tests.gateway.support import PROMPT, LiveGateway

OK = {"model": "tiny", "messages": PROMPT, "max_tokens": 1}
SECRET_PROMPT = "zebra crossing 4711"


def without(name: str) -> dict:
    return {key: value for key, value in OK.items() if key != name}


def content(value: object) -> dict:
    return {**OK, "messages": [{"role": "user", "content": value}]}


def message(role: str = "user", **fields: object) -> dict:
    return {**OK, "messages": [{"role": role, "content": "x", **fields}]}


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def tool(**function: object) -> dict:
    return {**OK, "tools": [{"type": "function", "function": {"name": "f", **function}}]}


def allowed(mode: str, *tools: object) -> dict:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def nested_schema(depth: int) -> dict:
    return {"not": nested_schema(depth - 1)} if depth else {}


def marked(breakpoint_: object) -> dict:
    return content([{"type": "text", "text": "x", "prompt_cache_breakpoint": breakpoint_}])


TOOL = named("f")
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ALLOWED = "tool_choice.allowed_tools"
PART = "messages[0].content[0].prompt_cache_breakpoint"

BODIES = [
    # body, status, code, param
    (b"", 400, "invalid_json", None),
    (b"{", 400, "invalid_json", None),
    (b"[1]", 400, "invalid_json", None),
    (b"null", 400, "invalid_json", None),
    (b'"text"', 400, "invalid_json", None),
    (b'{"model": "\xff"}', 400, "invalid_json", None),
    (b"\xef\xbb\xbf{}", 400, "invalid_json", None),
    (b'{"messages":' + b"[" * 40_000 + b"]" * 40_000 + b"}", 400, "invalid_json", None),
    (b'{"a":' * 15_000 + b"1" + b"}" * 15_000, 400, "invalid_json", None),
    (json.dumps(content("\ud800")).encode(), 400, "invalid_type", "messages[0].content"),
    (b'{"model":"tiny","messages":[],"temperature":NaN}', 400, "invalid_type", "temperature"),
    (b'{"model":"tiny","messages":[],"logit_bias":{"1":-Infinity}}', 400, "invalid_type", "logit_bias.1"),
    (b'{"model":"tiny","messages":[],"top_p":1e999}', 400, "invalid_type", "top_p"),
    (without("model"), 400, "missing_required_parameter", "model"),
    (without("messages"), 400, "missing_required_parameter", "messages"),
    ({**OK, "model": None}, 400, "missing_required_parameter", "model"),
    ({**OK, "model": 3}, 400, "invalid_type", "model"),
    ({**OK, "model": "nope"}, 404, "model_not_found", "model"),
    ({**OK, "messages": []}, 400, "empty_array", "messages"),
    ({**OK, "messages": "hi"}, 400, "invalid_type", "messages"),
    ({**OK, "messages": ["hi"]}, 400, "invalid_type", "messages[0]"),
    ({**OK, "messages": [{"content": "hi"}]}, 400, "invalid_value", "messages[0].role"),
    ({**OK, "messages": [{"role": "pope", "content": "hi"}]}, 400, "invalid_value", "messages[0].role"),
    ({**OK, "messages": [{"role": ["user"], "content": "hi"}]}, 400, "invalid_value", "messages[0].role"),
    (content(7), 400, "invalid_type", "messages[0].content"),
    (content([7]), 400, "invalid_type", "messages[0].content[0]"),
    (content([{"type": "text", "text": None}]), 400, "invalid_type", "messages[0].content[0].text"),
    (content([{"type": "image_url", "image_url": {}}]), 400, "unsupported_parameter", "messages[0].content[0].type"),
    (content("refuse me"), 400, "template_error", "messages"),
    (message("tool"), 400, "missing_required_parameter", "messages[0].tool_call_id"),
    (message(tool_call_id=1), 400, "invalid_type", "messages[0].tool_call_id"),
    (message(name=1), 400, "invalid_type", "messages[0].name"),
    (message(audio={"id": "a"}), 400, "unsupported_parameter", "messages[0].audio"),
    (message(tool_calls=[CALL]), 400, "invalid_value", "messages[0].tool_calls"),
    (message("assistant", tool_calls="x"), 400, "invalid_type", "messages[0].tool_calls"),
    (message("assistant", tool_calls=["x"]), 400, "invalid_type", "messages[0].tool_calls[0]"),
    (message("assistant", tool_calls=[{"function": {"name": 1}}]), 400, "invalid_type", "messages[0].tool_calls[0]"),
    (message("assistant", tool_calls=[{**CALL, "id": 1}]), 400, "invalid_type", "messages[0].tool_calls[0].id"),
    (message("assistant", tool_calls=[{"function": {"name": "f", "arguments": {}}}]), 400, "invalid_type",
     "messages[0].tool_calls[0].function.arguments"),
    (message("assistant", reasoning_content=[]), 400, "invalid_type", "messages[0].reasoning_content"),
    ({**OK, "messages": [{"role": "user", "colour": 1}]}, 400, "unknown_parameter", "messages[0].colour"),
    ({**OK, "temperature": -1}, 400, "invalid_value", "temperature"),
    ({**OK, "temperature": 2.1}, 400, "invalid_value", "temperature"),
    ({**OK, "temperature": "1"}, 400, "invalid_type", "temperature"),
    ({**OK, "temperature": True}, 400, "invalid_type", "temperature"),
    ({**OK, "top_p": 0}, 400, "invalid_value", "top_p"),
    ({**OK, "top_p": 1.1}, 400, "invalid_value", "top_p"),
    ({**OK, "top_k": -2}, 400, "invalid_value", "top_k"),
    ({**OK, "top_k": 1.5}, 400, "invalid_type", "top_k"),
    ({**OK, "min_p": 2}, 400, "invalid_value", "min_p"),
    ({**OK, "presence_penalty": 3}, 400, "invalid_value", "presence_penalty"),
    ({**OK, "frequency_penalty": -3}, 400, "invalid_value", "frequency_penalty"),
    ({**OK, "repetition_penalty": 0}, 400, "invalid_value", "repetition_penalty"),
    ({**OK, "n": 0}, 400, "invalid_value", "n"),
    ({**OK, "n": 129}, 400, "invalid_value", "n"),
    ({**OK, "n": 10**30}, 400, "invalid_type", "n"),
    ({**OK, "seed": 2**63}, 400, "invalid_value", "seed"),
    ({**OK, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({**OK, "max_tokens": "5"}, 400, "invalid_type", "max_tokens"),
    ({**OK, "max_completion_tokens": 0}, 400, "invalid_value", "max_completion_tokens"),
    ({**OK, "max_completion_tokens": 2}, 400, "invalid_value", "max_tokens"),
    ({**OK, "min_tokens": 5}, 400, "invalid_value", "min_tokens"),
    ({**OK, "stop": ""}, 400, "invalid_value", "stop"),
    ({**OK, "stop": ["a"] * 5}, 400, "invalid_value", "stop"),
    ({**OK, "stop": [1]}, 400, "invalid_type", "stop[0]"),
    ({**OK, "stop": "x" * 1001}, 400, "invalid_value", "stop"),
    ({**OK, "stop_token_ids": [10**6]}, 400, "invalid_value", "stop_token_ids"),
    ({**OK, "stop_token_ids": [-1]}, 400, "invalid_value", "stop_token_ids"),
    ({**OK, "logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias"),
    ({**OK, "logit_bias": {"-1": 1}}, 400, "invalid_value", "logit_bias"),
    ({**OK, "logit_bias": {"²": 1}}, 400, "invalid_value", "logit_bias"),
    ({**OK, "logit_bias": {"1": 101}}, 400, "invalid_value", "logit_bias"),
    ({**OK, "logit_bias": {str(10**9): 1}}, 400, "invalid_value", "logit_bias"),
    ({**OK, "top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
    ({**OK, "logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
    ({**OK, "stream": "yes"}, 400, "invalid_type", "stream"),
    ({**OK, "stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
    ({**OK, "stream_options": {"include_usage": 1}}, 400, "invalid_type", "stream_options.include_usage"),
    ({**OK, "metadata": {"a": 1}}, 400, "invalid_type", "metadata[...]"),
    ({**OK, "cache_salt": "x" * 257}, 400, "invalid_value", "cache_salt"),
    ({**OK, "tools": "x"}, 400, "invalid_type", "tools"),
    ({**OK, "tools": ["x"]}, 400, "invalid_type", "tools[0]"),
    ({**OK, "tools": [{"type": "function"}]}, 400, "missing_required_parameter", "tools[0].function"),
    ({**OK, "tools": [{"type": "custom", "custom": {}}]}, 400, "unsupported_parameter", "tools[0].type"),
    ({**OK, "tools": [{"type": "spoon"}]}, 400, "invalid_value", "tools[0].type"),
    (tool(name=None), 400, "invalid_type", "tools[0].function.name"),
    (tool(name="has space"), 400, "invalid_value", "tools[0].function.name"),
    (tool(name="x" * 65), 400, "invalid_value", "tools[0].function.name"),
    (tool(description=1), 400, "invalid_type", "tools[0].function.description"),
    (tool(strict="yes"), 400, "invalid_type", "tools[0].function.strict"),
    (tool(parameters=[]), 400, "invalid_type", "tools[0].function.parameters"),
    (tool(parameters={"type": "array"}), 400, "invalid_value", "tools[0].function.parameters.type"),
    (tool(parameters={"properties": []}), 400, "invalid_type", "tools[0].function.parameters.properties"),
    (tool(parameters={"properties": {"a": 1}}), 400, "invalid_type", "tools[0].function.parameters.properties.a"),
    (tool(parameters={"properties": {"a": {"type": "str"}}}), 400, "invalid_value",
     "tools[0].function.parameters.properties.a.type"),
    (tool(parameters={"required": "a"}), 400, "invalid_type", "tools[0].function.parameters.required"),
    (tool(parameters={"anyOf": {}}), 400, "invalid_type", "tools[0].function.parameters.anyOf"),
    (tool(parameters={"properties": {"a": {"enum": 1}}}), 400, "invalid_type",
     "tools[0].function.parameters.properties.a.enum"),
    (tool(parameters=nested_schema(40)), 400, "invalid_value",
     "tools[0].function.parameters" + ".not" * 32),
    ({**OK, "tools": [TOOL, TOOL]}, 400, "invalid_value", "tools"),
    ({**OK, "tools": [named(f"f{i}") for i in range(129)]}, 400, "invalid_value", "tools"),
    ({**OK, "tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
    ({**OK, "tools": [TOOL], "tool_choice": "maybe"}, 400, "invalid_value", "tool_choice"),
    ({**OK, "tools": [TOOL], "tool_choice": 1}, 400, "invalid_type", "tool_choice"),
    ({**OK, "tools": [TOOL], "tool_choice": {"type": "spoon"}}, 400, "invalid_value", "tool_choice"),
    ({**OK, "tools": [TOOL], "tool_choice": {"type": "function"}}, 400, "invalid_type", "tool_choice"),
    ({**OK, "tools": [TOOL], "tool_choice": named("g")}, 400, "invalid_value", "tool_choice"),
    ({**OK, "tools": [TOOL], "tool_choice": allowed("often", TOOL)}, 400, "invalid_value", f"{ALLOWED}.mode"),
    ({**OK, "tools": [TOOL], "tool_choice": allowed("auto")}, 400, "invalid_type", f"{ALLOWED}.tools"),
    ({**OK, "tools": [TOOL], "tool_choice": allowed("auto", 1)}, 400, "invalid_type", f"{ALLOWED}.tools[0]"),
    ({**OK, "parallel_tool_calls": "no"}, 400, "invalid_type", "parallel_tool_calls"),
    ({**OK, "functions": [{"name": "f"}]}, 400, "unsupported_parameter", "functions"),
    (marked([]), 400, "invalid_type", PART),
    (marked({}), 400, "invalid_value", f"{PART}.mode"),
    (marked({"mode": "implicit"}), 400, "invalid_value", f"{PART}.mode"),
    (marked({"mode": "explicit", "ttl": "5m"}), 400, "invalid_value", f"{PART}.ttl"),
    (marked({"mode": "explicit", "ttl": 1800}), 400, "invalid_value", f"{PART}.ttl"),
    (marked({"mode": "explicit", "x": 1}), 400, "unknown_parameter", f"{PART}.x"),
    ({**OK, "prompt_cache_options": []}, 400, "invalid_type", "prompt_cache_options"),
    ({**OK, "prompt_cache_options": {"mode": "sometimes"}}, 400, "invalid_type", "prompt_cache_options.mode"),
    ({**OK, "prompt_cache_options": {"ttl": "12h"}}, 400, "invalid_type", "prompt_cache_options.ttl"),
    ({**OK, "prompt_cache_options": {"x": 1}}, 400, "invalid_type", "prompt_cache_options"),
    ({**OK, "prompt_cache_retention": "1h"}, 400, "invalid_type", "prompt_cache_retention"),
    ({**OK, "prompt_cache_key": 1}, 400, "invalid_type", "prompt_cache_key"),
    ({**OK, "safety_identifier": {}}, 400, "invalid_type", "safety_identifier"),
    ({**OK, "store": "yes"}, 400, "invalid_type", "store"),
    ({**OK, "service_tier": "first"}, 400, "invalid_type", "service_tier"),
    ({**OK, "metadata": {"k" * 65: "v"}}, 400, "invalid_value", "metadata"),
    ({**OK, "metadata": {"k": "v" * 513}}, 400, "invalid_value", "metadata"),
    ({**OK, "metadata": {str(i): "" for i in range(17)}}, 400, "invalid_value", "metadata"),
    ({**OK, "continue_final_message": True}, 400, "invalid_value", "continue_final_message"),
    ({**OK, "continue_final_message": True, "add_generation_prompt": True}, 400, "invalid_value",
     "continue_final_message"),
    ({**OK, "chat_template_kwargs": {"messages": []}}, 400, "invalid_value", "chat_template_kwargs.messages"),
    ({**OK, "chat_template_kwargs": {"enable_thinking": False}}, 400, "invalid_value",
     "chat_template_kwargs.enable_thinking"),
    ({**OK, "reasoning_effort": "extreme"}, 400, "invalid_type", "reasoning_effort"),
    ({**OK, "response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
    ({**OK, "echo": True}, 400, "unsupported_parameter", "echo"),
    ({**OK, "reasoning_effort": "high"}, 400, "unsupported_parameter", "reasoning_effort"),
    ({**OK, "ignored": ["x"]}, 400, "unknown_parameter", "ignored"),
    ({**OK, "temprature": 1}, 400, "unknown_parameter", "temprature"),
    (content("word " * 300), 400, "context_length_exceeded", "messages"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status", "code", "param"), BODIES, ids=[f"{row[2]}-{row[3]}-{i}" for i, row in enumerate(BODIES)]
)
def test_chat(gateway: LiveGateway, body, status, code, param):
    answer = gateway.post(body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert error["param"] == param, error
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert answer.headers["x-request-id"]
    assert gateway.engine.submitted == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [{}]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [[1], [True]]}, "prompt[1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "word " * 300}, "prompt"),
        ({"prompt": [1] * 256}, "prompt"),
    ],
)
def test_completions(gateway: LiveGateway, body, param):
    answer = gateway.post({"model": "tiny", **body}, "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert gateway.engine.submitted == []


def test_one_token_less_than_too_long_is_served(gateway: LiveGateway):
    assert gateway.post({"model": "tiny", "prompt": [1] * 255}, "/v1/completions").status_code == 200
    assert gateway.engine.submitted[-1].sampling.max_tokens == 1


def test_context_length_names_both_numbers(gateway: LiveGateway):
    error = gateway.post({"model": "tiny", "prompt": [1] * 300}, "/v1/completions").json()["error"]
    assert "256" in error["message"] and "300" in error["message"]


# --- size -------------------------------------------------------------------------------------------------------------


def test_a_declared_length_over_the_limit_is_refused_without_the_body(gateway: LiveGateway):
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50000000\r\n\r\n{")
        answer = b""
        while not answer.endswith(b"}}"):
            answer += sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413") and b"request_too_large" in answer


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_too_much_can_read_why(gateway: LiveGateway, chunked: bool):
    big = b'{"model": "' + b"x" * 5_000_000 + b'"}'
    with gateway.http() as client:
        answer = client.post("/v1/chat/completions", content=iter([big]) if chunked else big)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
    assert answer.headers["x-request-id"]


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Basic cmc6eA=="},
        {"authorization": "Bearer rg-wrong"},
        {"authorization": "Bearer sk-123"},
        {"authorization": b"Bearer \xff\xfe"},
        {"authorization": "Bearer rg-" + "x" * 5000},
        {"x-api-key": "rg-wrong"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models"])
def test_keys_that_do_not_work(gateway: LiveGateway, headers, path):
    with gateway.http() as client:
        client.headers.pop("authorization")
        answer = client.request("GET" if path.endswith("models") else "POST", path, headers=headers, json=OK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_x_api_key_works(gateway: LiveGateway):
    with gateway.http() as client:
        client.headers.pop("authorization")
        assert client.get("/v1/models", headers={"x-api-key": gateway.key}).status_code == 200


def test_a_revoked_key_stops_working(gateway: LiveGateway):
    registry = gateway.services.registry
    key, secret = gateway.run(registry.create_key(gateway.tenant_id))
    with gateway.http(secret.reveal()) as client:
        assert client.get("/v1/models").status_code == 200
        gateway.run(registry.revoke_key(key.id))
        assert client.get("/v1/models").status_code == 401


def test_the_administrators_key_is_of_another_kind(gateway: LiveGateway):
    with gateway.http(gateway.admin_key) as client:
        answer = client.post("/v1/chat/completions", json=OK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_kind_of_key")


# --- routes, ids and what is never shown ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nope", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1//models", 404, "not_found"),
        ("GET", "/dashboard/assets/..%2fpage.py", 404, "not_found"),
    ],
)
def test_routes_that_are_not_there(gateway: LiveGateway, method, path, status, code):
    with gateway.http() as client:
        answer = client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-request-id"]
    assert (answer.headers.get("allow") is not None) == (status == 405)


@pytest.mark.parametrize(
    ("given", "kept"), [("my-id.1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)]
)
def test_request_ids(gateway: LiveGateway, given, kept):
    with gateway.http() as client:
        shown = client.get("/healthz", headers={"x-request-id": given}).headers["x-request-id"]
    assert (shown == given) if kept else shown.startswith("req_")


def test_a_failure_of_our_own_shows_and_logs_no_prompt(gateway: LiveGateway, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError(f"cannot serve {SECRET_PROMPT}")

    monkeypatch.setattr(gateway.engine, "submit", broken)
    answer = gateway.post({**OK, "messages": [{"role": "user", "content": SECRET_PROMPT}]}, x_request_id="find-me")
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert SECRET_PROMPT not in answer.text + caplog.text and "RuntimeError" in caplog.text and "find-me" in caplog.text


def test_no_key_in_the_log(gateway: LiveGateway, caplog):
    caplog.set_level("DEBUG", "radixgate.gateway")
    gateway.chat(max_tokens=1)
    assert gateway.key not in caplog.text and gateway.key not in json.dumps(gateway.booked())
