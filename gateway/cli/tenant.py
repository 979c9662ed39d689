"""`radixgate tenant`: create and list tenants on a running server."""

from __future__ import annotations

import json

import click

from gateway.cli.client import call, segment
from gateway.cli.display import moment, table


@click.group(help="Tenants of a running server.")
def command() -> None: ...


@command.command(help="Create a tenant and its first key. The key is shown once.")
@click.argument("name")
@click.option("--plan", help="The price plan.  [default: demo]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def create(name: str, plan: str | None, as_json: bool) -> None:
    body = {"name": name} if plan is None else {"name": name, "plan": plan}
    answer = call("POST", "/admin/tenants", body=body)
    if as_json:
        click.echo(json.dumps(answer))
        return
    click.echo(f"tenant  {answer['tenant']['name']} ({answer['tenant']['id']})")
    click.echo(f"key     {answer['key']}  (shown once; keep it)")


@command.command("list", help="All tenants.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    answer = call("GET", "/admin/tenants")
    if as_json:
        click.echo(json.dumps(answer))
        return
    rows = [
        [
            tenant["name"],
            tenant["id"],
            tenant["plan_id"],
            moment(tenant["created_at"]),
            "active" if tenant["disabled_at"] is None else f"disabled {moment(tenant['disabled_at'])}",
        ]
        for tenant in answer["tenants"]
    ]
    table(["tenant", "id", "plan", "created", "state"], rows)


@command.command(help="Refuse every key of TENANT (its id or name) from now on.")
@click.argument("tenant")
def disable(tenant: str) -> None:
    call("POST", f"/admin/tenants/{segment(tenant)}/disable")
    click.echo(f"{tenant} is disabled")


@command.command(help="Undo `disable`.")
@click.argument("tenant")
def enable(tenant: str) -> None:
    call("POST", f"/admin/tenants/{segment(tenant)}/enable")
    click.echo(f"{tenant} is enabled")
