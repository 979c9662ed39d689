"""`radixgate key`: create, list and revoke the keys of a tenant on a running server."""

from __future__ import annotations

import json

import click

from gateway.cli.client import call, segment
from gateway.cli.display import moment, table


@click.group(help="Keys of a tenant.")
def command() -> None: ...


@command.command(help="Create a further key of TENANT (its id or name). It is shown once.")
@click.argument("tenant")
@click.option("--name", default="default", show_default=True, help="What the key is for.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def create(tenant: str, name: str, as_json: bool) -> None:
    answer = call("POST", f"/admin/tenants/{segment(tenant)}/keys", body={"name": name})
    if as_json:
        click.echo(json.dumps(answer))
        return
    click.echo(f"key     {answer['key']}  (shown once; keep it)")
    click.echo(f"id      {answer['record']['id']}")


@command.command("list", help="The keys of TENANT (its id or name).")
@click.argument("tenant")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(tenant: str, as_json: bool) -> None:
    answer = call("GET", f"/admin/tenants/{segment(tenant)}/keys")
    if as_json:
        click.echo(json.dumps(answer))
        return
    rows = [
        [
            key["id"],
            key["name"],
            " ".join(key["scopes"]),
            moment(key["created_at"]),
            moment(key["expires_at"]) or "never",
            "active" if key["revoked_at"] is None else f"revoked {moment(key['revoked_at'])}",
        ]
        for key in answer["keys"]
    ]
    table(["id", "name", "scopes", "created", "expires", "state"], rows)


@command.command(help="Revoke the key with this id; it stops working within a second.")
@click.argument("key_id")
def revoke(key_id: str) -> None:
    answer = call("DELETE", f"/admin/keys/{segment(key_id)}")
    click.echo(f"{answer['record']['id']} ({answer['record']['name']}) is revoked")
