"""Throughput and latency of a running server over the workloads, with other servers measured in turn in the same run.

    python -m bench.serve                                       starts a Radixgate of its own, with the built-in model
    python -m bench.serve --url http://127.0.0.1:8080 --key-file .radixgate/keys/acme.key
    python -m bench.serve --peer vllm=http://127.0.0.1:8000     the same workloads, run by run, against a peer

Only one server is under load at any moment. Ratios are taken run by run and their median is shown, since a shared
machine drifts. Output lengths are forced with ignore_eos and min_tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from bench.workloads import WORKLOADS, Client, Words

READY_TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    url: str
    model: str
    key: str


@dataclass
class Result:
    wall_s: float = 0.0
    n_output: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.n_output / self.wall_s


def single_token_words(tokenizer: Tokenizer) -> Words:
    """Makes texts of n words that are one token each, from a byte-level vocabulary (where Ġ stands for a space)."""
    plain_words = (token[1:] for token in tokenizer.get_vocab() if token.startswith("Ġ"))
    vocabulary = sorted(word for word in plain_words if word.isascii() and word.isalpha() and word.islower())
    return lambda rng, n: "".join(" " + rng.choice(vocabulary) for _ in range(n))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def run_client(http: httpx.AsyncClient, target: Target, client: Client, result: Result) -> None:
    transcript = ""
    for turn in client:
        transcript = turn.text if turn.fresh else transcript + turn.text
        transcript += await one_request(http, target, transcript, turn.n_output, result)


async def one_request(http: httpx.AsyncClient, target: Target, prompt: str, n_output: int, result: Result) -> str:
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": n_output,
        "min_tokens": n_output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, last_s = "", time.perf_counter()
    start_s = last_s
    headers = {"authorization": f"Bearer {target.key}"}
    async with http.stream("POST", target.url + "/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{target.name}: {answer.status_code} {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(f"{target.name}: {line[:300]}")
            if any(choice.get("text") for choice in event.get("choices", ())):
                now_s = time.perf_counter()
                (result.gaps_s if text else result.first_token_s).append(now_s - (last_s if text else start_s))
                last_s = now_s
                text += event["choices"][0]["text"]
            if usage := event.get("usage"):
                result.n_output += usage["completion_tokens"]
                result.n_prompt += usage["prompt_tokens"]
                result.n_cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return text


async def measure(target: Target, clients: Sequence[Client]) -> Result:
    result = Result()
    limits = httpx.Limits(max_connections=len(clients))
    async with httpx.AsyncClient(timeout=900, limits=limits) as http:
        start_s = time.perf_counter()
        try:
            await asyncio.gather(*(run_client(http, target, client, result) for client in clients))
        except httpx.TransportError as error:
            raise SystemExit(f"{target.name} at {target.url} does not answer: {error}") from None
        result.wall_s = time.perf_counter() - start_s
    return result


def row(name: str, target: Target, results: Sequence[Result], ratio: float | None) -> str:
    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    first_ms = 1e3 * median(statistics.median(r.first_token_s) for r in results)
    gap_ms = 1e3 * median(statistics.median(r.gaps_s) if r.gaps_s else float("nan") for r in results)
    hit = median(r.n_cached / r.n_prompt for r in results)
    speed = median(r.tokens_per_s for r in results)
    cells = f"{name:<14} {target.name:<12} {speed:9.1f} {first_ms:9.0f} {gap_ms:9.1f} {hit:7.1%}"
    return cells + (f" {ratio:8.2f}" if ratio is not None else "")


@contextlib.contextmanager
def own_server() -> Iterator[tuple[Target, Path]]:
    """A Radixgate with the built-in model, with data that lasts as long as the run, and its tokenizer.json."""
    with tempfile.TemporaryDirectory(prefix="rg-bench-") as folder, (Path(folder) / "log").open("wb") as log:
        data_dir = Path(folder) / "data"
        port = str(free_port())
        command = [str(Path(sys.executable).with_name("radixgate")), "serve", "--port", port, "--data-dir", data_dir]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(url + "/readyz").status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server does not start:\n{(Path(folder) / 'log').read_text()[-2000:]}")
                time.sleep(0.2)
            key = (data_dir / "keys" / "acme.key").read_text().strip()
            yield Target("radixgate", url, "smollm2-135m", key), next(data_dir.glob("models/*/tokenizer.json"))
        finally:
            process.terminate()
            process.wait(60)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a Radixgate that runs already")
    parser.add_argument("--key-file", type=Path, help="the tenant's key, with --url")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=URL", help="another server; several allowed"
    )
    parser.add_argument("--peer-model", default="m", help="what the peers call the model")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of the model, with --url")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which of " + ", ".join(WORKLOADS))
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args(arguments)
    unknown = set(options.workloads.split(",")) - set(WORKLOADS)
    if unknown:
        parser.error(f"no workload {', '.join(sorted(unknown))}")
    with contextlib.ExitStack() as stack:
        if options.url is None:
            own, tokenizer = stack.enter_context(own_server())
        elif options.key_file is None or options.tokenizer is None:
            parser.error("--url needs --key-file and --tokenizer")
        else:
            own = Target("radixgate", options.url.rstrip("/"), options.model, options.key_file.read_text().strip())
            tokenizer = options.tokenizer
        peers = [Target(*peer.split("=", 1), options.peer_model, "none") for peer in options.peer]
        words = single_token_words(Tokenizer.from_file(str(tokenizer)))
        compare([own, *peers], options.workloads.split(","), options.repetitions, words)


def compare(targets: Sequence[Target], names: Sequence[str], repetitions: int, words: Words) -> None:
    print(f"{'workload':<14} {'server':<12} {'tok/s':>9} {'TTFT ms':>9} {'gap ms':>9} {'hit':>7}    ratio")
    for target in targets:
        asyncio.run(measure(target, WORKLOADS["mixed_lengths"](random.Random(99), words)[:4]))
    for name in names:
        results: list[list[Result]] = [[] for _ in targets]
        for repetition in range(repetitions):
            clients = WORKLOADS[name](random.Random(f"{name} {repetition}"), words)
            for target, runs in zip(targets, results, strict=True):
                runs.append(asyncio.run(measure(target, clients)))
        for target, runs in zip(targets, results, strict=True):
            pairs = zip(results[0], runs, strict=True)
            ratio = statistics.median(own.tokens_per_s / peer.tokens_per_s for own, peer in pairs)
            print(row(name, target, runs, None if runs is results[0] else ratio), flush=True)


if __name__ == "__main__":
    main()
