"""Under load with clients that leave, three books agree: what clients were told, the ledger, the engine's counters."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.server import Server, eventually

N_CLIENTS = 16
MIN_REQUESTS = 8
"""Of each client, however slow the machine is."""
TENANTS = ("acme", "globex")
CLASSES = {
    "uncached_tokens": "prompt_uncached",
    "cached_private_tokens": "prompt_cached_private",
    "cached_public_tokens": "prompt_cached_public",
    "written_unleased_tokens": "prompt_written_unleased",
}


@dataclass
class Told:
    """What the clients of one tenant saw."""

    requests: int = 0
    left: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_nano_usd: int = 0
    bad: list[str] = field(default_factory=list)


async def one_request(client: httpx.AsyncClient, model: str, key: str, rng: random.Random, told: Told) -> None:
    """A streamed completion of random length over a few shared beginnings; one in four leaves in the middle."""
    shared = f"Conversation {rng.randrange(4)}. " + "The same words again and again. " * rng.randrange(1, 12)
    own = " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(1, 40)))
    body = {
        "model": model,
        "prompt": shared + own,
        "max_tokens": rng.randrange(1, 60),
        "temperature": rng.choice([0, 0.8]),
        "n": rng.choice([1, 1, 1, 2]),
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": rng.choice([None, " the", "e"]),
    }
    leave_after = rng.randrange(0, 12) if rng.random() < 0.25 else None
    headers = {"authorization": f"Bearer {key}"}
    told.requests += 1
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            told.bad.append(f"{answer.status_code} {(await answer.aread())[:200]!r}")
            return
        n_events = 0
        async for line in answer.aiter_lines():
            if n_events == leave_after:
                told.left += 1
                return
            if not line.startswith("data: {"):
                continue
            n_events += 1
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                told.bad.append(line[:200])
            if usage := event.get("usage"):
                told.prompt_tokens += usage["prompt_tokens"]
                told.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
                told.output_tokens += usage["completion_tokens"]
                told.cost_nano_usd += int(usage["cost_nano_usd"])


async def load(server: Server, model: str, seconds: float) -> dict[str, Told]:
    told = {tenant: Told() for tenant in TENANTS}
    deadline = time.monotonic() + seconds

    async def client_loop(index: int) -> None:
        rng, tenant = random.Random(index), TENANTS[index % 2]
        n_sent = 0
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            while n_sent < MIN_REQUESTS or time.monotonic() < deadline:
                await one_request(client, model, server.key(tenant), rng, told[tenant])
                n_sent += 1

    await asyncio.gather(*map(client_loop, range(N_CLIENTS)))
    return told


def usage_rows(server: Server) -> dict[str, dict]:
    rows = json.loads(server.command("usage", "report", "--json").stdout)["rows"]
    return {row["tenant_name"]: row for row in rows}


def settled(server: Server, requests: int) -> bool:
    return sum(row["requests"] for row in usage_rows(server).values()) == requests


def assert_books_agree(server: Server, model: str, told: dict[str, Told]) -> None:
    assert not any(one.bad for one in told.values()), [one.bad[:3] for one in told.values()]
    eventually(lambda: settled(server, sum(one.requests for one in told.values())), 60)
    rows = usage_rows(server)
    for tenant, one in told.items():
        row = rows[tenant]
        row_cached = row["cached_private_tokens"] + row["cached_public_tokens"]
        assert 0 < one.left < one.requests == row["requests"]
        # Who left was told nothing, and pays for what was computed.
        assert int(row["cost_nano_usd"]) >= one.cost_nano_usd > 0
        assert row["prompt_tokens"] >= one.prompt_tokens and row["output_tokens"] >= one.output_tokens
        assert row_cached >= one.cached_tokens > 0
    (engine,) = server.get("/admin/engines", server.admin_key).json["engines"]
    stats = engine["stats"]
    for ledger_name, engine_name in CLASSES.items():
        assert sum(row[ledger_name] for row in rows.values()) == stats[engine_name], ledger_name
    assert sum(row["output_tokens"] for row in rows.values()) == stats["output_tokens"] - stats["late_stop_tokens"]
    check = server.post(f"/admin/engines/{model}/invariants", {}, server.admin_key).json
    assert check["ok"] is True and check["private_blocks"] == check["locked_blocks"] == 0, check
    assert check["free_blocks"] + check["tree_blocks"] == check["total_blocks"]


def run(data_dir: Path, model: str, flags: tuple[str, ...], seconds: float) -> None:
    server = Server(data_dir, flags)
    try:
        server.start().wait_ready()
        assert_books_agree(server, model, asyncio.run(load(server, model, seconds)))
    finally:
        server.stop()


def test_three_books_agree_in_a_pool_too_small_for_all(tmp_path: Path, tiny_model: Path) -> None:
    flags = ("--model", str(tiny_model), "--dtype", "float32", "--kv-blocks", "90")
    run(tmp_path / "data", "tiny-llama", flags, seconds=8)


@pytest.mark.soak
def test_three_books_agree_after_two_minutes_of_the_real_model(tmp_path: Path) -> None:
    run(tmp_path / "data", "smollm2-135m", ("--kv-memory", "64MiB"), seconds=120)
