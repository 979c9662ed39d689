"""How the commands print times and tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime


def moment(time_s: float | None) -> str:
    """A time in UTC to the second; empty for None."""
    if time_s is None:
        return ""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    total: Sequence[str] | None = None,
    right_from: int | None = None,
) -> None:
    """Print a table; columns from index `right_from` on hold numbers. Into a pipe it is as wide as it must be."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        widths = [max(map(len, column)) for column in zip(headers, *rows, *([total] if total else []), strict=True)]
        console = Console(highlight=False, width=2 * sum(widths) + 4 * len(widths))
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for index, header in enumerate(headers):
        numeric = right_from is not None and index >= right_from
        drawn.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))
    if total is not None:
        drawn.add_section()
        drawn.add_row(*map(Text, total), style="bold")
    console.print(drawn)
