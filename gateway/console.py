"""What `radixgate serve` tells its terminal: progress as it happens, then how to begin. Plain lines when piped."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from gateway.first_run import Credentials

PLAIN_STEP = 0.25
"""Piped output shows a stage's progress in steps of this size."""


class Announcer(Protocol):
    """Where the supervisor's news go."""

    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def progress(self, name: str, stage: str, fraction: float | None) -> None: ...
    def end_progress(self) -> None:
        """No more progress will come."""

    def welcome(self, text: str) -> None:
        """Everything is up: the end of progress, and welcome_text."""


class PlainAnnouncer:
    """One line a piece of news."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[str, int]] = {}

    def say(self, text: str) -> None:
        try:
            print(text, flush=True)
        except OSError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the reader is gone; the server stays

    def warn(self, text: str) -> None:
        self.say(f"radixgate: warning: {text}")

    def progress(self, name: str, stage: str, fraction: float | None) -> None:
        step = int((fraction or 0) / PLAIN_STEP)
        if self._shown.get(name) != (stage, step):
            self._shown[name] = (stage, step)
            done = f" {fraction:.0%}" if fraction is not None else ""
            self.say(f"radixgate: {name}: {stage}{done}")

    def end_progress(self) -> None:
        self._shown.clear()

    def welcome(self, text: str) -> None:
        self.say(text)


class TerminalAnnouncer:
    """A live bar for each process that starts."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=True)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        self._console.print(f"warning: {text}", style="yellow", markup=False)

    def progress(self, name: str, stage: str, fraction: float | None) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        if self._bars is None:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = self._bars.add_task(name, total=None)
        total = None if fraction is None else 1.0
        self._bars.update(task, description=f"{name}: {stage}", completed=fraction or 0, total=total)

    def welcome(self, text: str) -> None:
        self.end_progress()
        for number, line in enumerate(text.splitlines()):
            heading = line and not line.startswith(" ")
            self._console.print(line, style=("bold green" if number == 0 else "bold") if heading else "", markup=False)

    def end_progress(self) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars = None
        self._tasks.clear()


def announcer() -> Announcer:
    return TerminalAnnouncer() if sys.stdout.isatty() else PlainAnnouncer()


class Welcome(NamedTuple):
    """What the first words of a ready server are made of."""

    url: str
    models: Sequence[str]
    data_dir: Path
    program: str
    """The path of the radixgate command that runs."""
    credentials: Credentials
    seconds: float


def welcome_text(welcome: Welcome) -> str:
    """URL, dashboard link, keys, a curl line to paste, and what comes next."""
    credentials = welcome.credentials
    lines = [
        f"Radixgate is ready at {welcome.url} after {welcome.seconds:.1f} s, serving {', '.join(welcome.models)}.",
        "",
        "Dashboard (this link works once, within 15 minutes):",
        f"  {welcome.url}/dashboard?token={credentials.dashboard_token}",
        "",
        "Keys:",
        f"  administrator  {credentials.admin_key}",
        *(f"  {name:<13}  {file}" for name, file in credentials.tenant_keys.items()),
        "",
    ]
    client = _client_command(welcome)
    if credentials.tenant_keys:
        file = next(iter(credentials.tenant_keys.values()))
        lines += [
            "Try it, twice: the second answer is partly served from the cache and costs less.",
            *_curl(welcome, file),
            "",
        ]
    else:
        lines += ["Make a tenant and its key:", f"  {client} tenant create NAME", ""]
    return "\n".join([*lines, "What it cost:", f"  {client} usage report", "", "Ctrl-C stops the server."])


def _curl(welcome: Welcome, key_file: Path) -> list[str]:
    question = "Why is the sky blue? Answer in one sentence."
    messages = [{"role": "user", "content": question}]
    # Greedy, so that the answer is the same from the cache and its price is the only thing that changes.
    body = json.dumps({"model": welcome.models[0], "messages": messages, "max_tokens": 60, "temperature": 0})
    return [
        f"  curl -s {welcome.url}/v1/chat/completions \\",
        f'    -H "Authorization: Bearer $(cat {shlex.quote(str(key_file))})" \\',
        "    -H 'Content-Type: application/json' \\",
        f"    -d {shlex.quote(body)}",
    ]


def _client_command(welcome: Welcome) -> str:
    """The client with what it needs to find this server, from the directory the server was started in."""
    variables = []
    if welcome.url != "http://127.0.0.1:8080":
        variables.append(f"RADIXGATE_URL={shlex.quote(welcome.url)}")
    if welcome.data_dir != Path.cwd() / ".radixgate":
        variables.append(f"RADIXGATE_DATA_DIR={shlex.quote(str(welcome.data_dir))}")
    return " ".join([*variables, shlex.quote(welcome.program)])
