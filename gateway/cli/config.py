"""`radixgate config`: the settings that a server started here and now would have."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from gateway.cli.server_options import read_settings, server_options
from gateway.setting_layers import describe


@click.group()
def command() -> None:
    """Show the settings and where each comes from."""


@command.command()
@server_options
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def show(as_json: bool, **options: Any) -> None:
    """Print each setting, its value and its origin; passwords are hidden."""
    rows = describe(read_settings(**options))
    if as_json:
        click.echo(json.dumps([dict(zip(("setting", "value", "origin"), row, strict=True)) for row in rows], indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table("Setting", "Value", "Origin", box=None, header_style="bold")
        for row in rows:
            table.add_row(*(Text(cell, style="dim" if row[2] == "default" else "") for cell in row))
        Console().print(table)
    else:
        for row in rows:
            click.echo("\t".join(row))
