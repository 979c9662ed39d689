"""The `radixgate` command. Subcommands are imported when they are used, so that every one of them starts at once."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import click


class Subcommand(NamedTuple):
    module: str
    """Has the click command as `command`."""
    summary: str


SUBCOMMANDS = {
    "serve": Subcommand("gateway.cli.serve", "Serve models to tenants."),
    "tenant": Subcommand("gateway.cli.tenant", "Create, list and disable tenants."),
    "key": Subcommand("gateway.cli.key", "Create, list and revoke keys."),
    "usage": Subcommand("gateway.cli.usage", "What tenants used and what it cost."),
    "trace": Subcommand("gateway.cli.trace", "Replay recorded traffic: hit rate by size of the store."),
    "config": Subcommand("gateway.cli.config", "Show the settings and where each comes from."),
    "doctor": Subcommand("gateway.cli.doctor", "Check this machine and this installation."),
}


class LazyGroup(click.Group):
    """Knows its subcommands by name and summary; imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = SUBCOMMANDS.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = importlib.import_module(entry.module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in SUBCOMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in SUBCOMMANDS and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}{_nearest(args[0])}")
        return super().resolve_command(ctx, args)


def _nearest(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(SUBCOMMANDS)}"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="radixgate")
def main() -> None:
    """Radixgate: a prompt-caching gateway. Many tenants, one paged KV cache, and a bill for what the cache really did.

    Client commands speak to RADIXGATE_URL (http://127.0.0.1:8080) with RADIXGATE_ADMIN_KEY, or with the key in
    admin.key of RADIXGATE_DATA_DIR (.radixgate).
    """


if __name__ == "__main__":
    main()
