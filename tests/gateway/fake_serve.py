"""`radixgate serve` with fake children: the same supervisor, Valkey and printed words, up in half a second."""

import asyncio
import sys
from pathlib import Path

import click

from gateway import embedded_valkey, keeper
from gateway.cli.server_options import read_settings, server_options
from gateway.console import PlainAnnouncer
from gateway.failures import ServeError
from gateway.supervisor import Programs, Supervisor

CHILD = str(Path(__file__).with_name("fake_child.py"))


@click.command()
@server_options
def main(**options: object) -> None:
    keeper.FIRST_BACK_OFF_S = 0.05
    keeper.MIN_SILENCE_S = 0.5
    keeper.DUMP_S = 0.2
    embedded_valkey.PING_S = 0.2
    embedded_valkey.MISSED_PINGS = 1
    settings = read_settings(**options)
    programs = Programs(engine=(sys.executable, CHILD, "engine"), worker=(sys.executable, CHILD, "worker"))
    try:
        asyncio.run(Supervisor(settings, PlainAnnouncer(), radixgate="/opt/radixgate", programs=programs).run())
    except ServeError as error:
        click.echo(f"radixgate: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
