"""`radixgate usage report`: what was used and what it cost, from a running server."""

from __future__ import annotations

import json
from typing import Any

import click

from gateway.cli.client import call
from gateway.cli.display import moment, table

_NUMBERS = (
    ("requests", "requests"),
    ("errors", "errors"),
    ("uncached", "uncached_tokens"),
    ("written", "written_tokens"),
    ("cached", "cached_tokens"),
    ("output", "output_tokens"),
)


@click.group(help="Usage and costs.")
def command() -> None: ...


@command.command(
    help="Requests, tokens by class and costs. Times are ISO 8601 (UTC unless they say so) or seconds since 1970."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; integers above 2^53 are strings.")
@click.option("--tenant", help="Only this tenant (its id or name).")
@click.option("--from", "from_", help="Begin.  [default: 24 hours before the end]")
@click.option("--to", help="End, not included.  [default: now]")
@click.option("--by", default="tenant,model", show_default=True, help="Group by any of tenant,key,model.")
@click.option(
    "--bucket",
    type=click.Choice(["1m", "1h", "1d", "all"]),
    default="all",
    show_default=True,
    help="Length of a row in time.",
)
def report(as_json: bool, tenant: str | None, from_: str | None, to: str | None, by: str, bucket: str) -> None:
    query = {"tenant": tenant, "from": from_, "to": to, "by": by, "bucket": bucket}
    answer = call("GET", "/admin/usage", query=query)
    if as_json:
        click.echo(json.dumps(answer))
        return
    click.echo(f"usage from {moment(answer['from_s'])} to {moment(answer['to_s'])} UTC")
    if not answer["rows"]:
        click.echo("nothing was used")
        return
    show_times = answer["bucket"] != "all"
    groups = (["from"] if show_times else []) + answer["by"]
    headers = [*groups, *(title for title, _ in _NUMBERS), "cost USD"]
    rows = [_cells(row, answer["by"], show_times) for row in answer["rows"]]
    total = [*(["total"] + [""] * (len(groups) - 1) if groups else []), *_numbers(answer["total"])]
    table(headers, rows, total=total if groups else None, right_from=len(groups))


def _cells(row: dict[str, Any], by: list[str], show_times: bool) -> list[str]:
    names = [row["tenant_name"] if part == "tenant" else row[part] for part in by]
    return [*([moment(row["start_s"])] if show_times else []), *names, *_numbers(row)]


def _numbers(totals: dict[str, Any]) -> list[str]:
    summed = {
        "written_tokens": int(totals["written_unleased_tokens"])
        + sum(map(int, totals["written_leased_tokens"].values())),
        "cached_tokens": int(totals["cached_private_tokens"]) + int(totals["cached_public_tokens"]),
    }
    return [f"{int(summed.get(name, totals.get(name, 0))):,}" for _, name in _NUMBERS] + [totals["cost_usd"]]
