"""`radixgate serve`: the composition root of a running server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click

from gateway.cli.server_options import read_settings, server_options


@click.command()
@server_options
def command(**options: Any) -> None:
    """Serve models to tenants, until Ctrl-C.

    Settings come from these flags, over RADIXGATE_* in the environment, over radixgate.toml, over defaults; `radixgate
    config show` prints them. Exit codes: 2 a setting or the port, 3 the data directory, 4 a model or a process that
    does not start, 5 not enough memory, 6 Redis.
    """
    from gateway.cli.environment import conflicting_package
    from gateway.cli.memory_fit import check_fit
    from gateway.console import announcer
    from gateway.failures import ServeError
    from gateway.setting_values import has_password
    from gateway.supervisor import Supervisor

    settings = read_settings(**options)
    news = announcer()
    if options["redis_url"] and has_password(options["redis_url"]):
        news.warn("the password in --redis-url is visible to every user of this machine; use RADIXGATE_REDIS_URL")
    try:
        conflict = conflicting_package()
        if conflict is not None:
            raise ServeError(conflict)
        check_fit(settings)
        asyncio.run(Supervisor(settings, news, radixgate=str(Path(sys.argv[0]).absolute())).run())
    except ServeError as error:
        click.echo(f"radixgate: {error}", err=True)
        sys.exit(error.exit_code)
