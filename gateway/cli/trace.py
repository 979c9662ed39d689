"""`radixgate trace replay`: hit rates of a trace for given sizes of the store, on the real tree and pool."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gateway.cli.display import table

if TYPE_CHECKING:
    from radix_cache.replay import ReplayResult

EXIT_BAD_TRACE = 5

Row = tuple[int | None, "ReplayResult"]
"""Capacity in blocks (None: never evict), and what came of it."""


@click.group(help="Recorded traffic.")
def command() -> None: ...


@command.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--blocks", default="1000,10000,infinite", show_default=True, help="Sizes of the store in blocks.")
@click.option("--policy", default="lru", show_default=True, help="Eviction policy.")
@click.option("--block-tokens", type=click.IntRange(1), default=512, show_default=True, help="Tokens in a block.")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="tokenizer.json for a trace of texts. [every byte is a token]",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the curve to this PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(
    file: Path,
    blocks: str,
    policy: str,
    block_tokens: int,
    tokenizer: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay the requests of FILE and print what part of their prompts would have been found.

    FILE holds JSON lines, gzipped or not: `hash_ids` and `input_length`, as the Mooncake traces have them, or `text`,
    `prompt` or `messages`. Every prompt is kept, outputs are not; only the unbroken prefix of a prompt can be found.
    """
    from radix_cache.eviction import POLICIES
    from radix_cache.replay import replay as run
    from radix_cache.trace import TraceError, read_trace, utf8_bytes

    if policy not in POLICIES:
        raise click.BadParameter(f"{policy!r} is none of {', '.join(sorted(POLICIES))}", param_hint="--policy")
    capacities = _capacities(blocks)
    try:
        with progress_bar(f"reading {file.name}") as progress:
            encode = _encoder(tokenizer) if tokenizer else utf8_bytes
            trace = read_trace(file, block_tokens=block_tokens, encode=encode, progress=progress)
    except TraceError as error:
        click.echo(f"radixgate: {error}", err=True)
        sys.exit(EXIT_BAD_TRACE)
    rows: list[Row] = []
    for capacity in capacities:
        with progress_bar(f"{_name(capacity)} blocks") as progress:
            rows.append((capacity, run(trace, capacity, block_tokens=block_tokens, policy=policy, progress=progress)))
    if plot:
        _plot(rows, f"{file.name}, {policy}", plot)
    _show(rows, file, policy, block_tokens, as_json)


def _capacities(text: str) -> list[int | None]:
    capacities: list[int | None] = []
    for part in text.split(","):
        name = part.strip().lower()
        if name in ("infinite", "inf"):
            capacities.append(None)
        elif name.isdigit() and int(name) > 0:
            capacities.append(int(name))
        else:
            raise click.BadParameter(f"{part!r} is neither a number of blocks nor 'infinite'", param_hint="--blocks")
    return capacities


def _encoder(path: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr while something is a terminal there; silence in a pipe."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)


def _name(capacity: int | None) -> str:
    return "infinite" if capacity is None else f"{capacity:,}"


def _show(rows: list[Row], file: Path, policy: str, block_tokens: int, as_json: bool) -> None:
    if as_json:
        results: list[dict[str, Any]] = [
            {
                "blocks": capacity,
                **result._asdict(),
                "block_hit_rate": result.block_hit_rate,
                "token_hit_rate": result.token_hit_rate,
            }
            for capacity, result in rows
        ]
        click.echo(json.dumps({"file": file.name, "policy": policy, "block_tokens": block_tokens, "results": results}))
        return
    click.echo(f"{file.name}: {rows[0][1].n_requests:,} requests, {rows[0][1].n_blocks:,} prompt blocks, {policy}")
    table(
        ["blocks", "hit rate by block", "by token"],
        [
            [_name(capacity), f"{result.block_hit_rate:.4f}", f"{result.token_hit_rate:.4f}"]
            for capacity, result in rows
        ],
        right_from=0,
    )


def _plot(rows: list[Row], title: str, path: Path) -> None:
    """Hit rate over capacity; the infinite store as a line that the curve rises to."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    finite = sorted((capacity, result.block_hit_rate) for capacity, result in rows if capacity is not None)
    if finite:
        axes.plot(*zip(*finite, strict=True), marker="o")
    for capacity, result in rows:
        if capacity is None:
            axes.axhline(result.block_hit_rate, linestyle="--", color="gray", label="infinite")
            axes.legend()
    axes.set(title=title, xlabel="store, blocks", ylabel="hit rate by block", xscale="log", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
