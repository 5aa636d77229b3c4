"""What commands print: a table for people, the same rows as plain lines in a pipe, or JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["age", "as_json", "is_terminal", "json_line", "record", "say", "table"]


def is_terminal() -> bool:
    """Whether a person is looking."""
    return sys.stdout.isatty()


def say(line: str) -> None:
    """One line on standard output."""
    sys.stdout.write(line + "\n")


def as_json(value: object) -> None:
    """One JSON document on standard output; times in RFC 3339, durations in seconds."""
    say(json.dumps(value, default=_plain, ensure_ascii=False, indent=2 if is_terminal() else None))


def json_line(value: object) -> str:
    """One JSON document without a line break in it."""
    return json.dumps(value, default=_plain, ensure_ascii=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """A table, or the line `empty` when there is no row. Cells are shown as they are, never as markup."""
    if not rows:
        say(f"{title}: {empty}")
        return
    cells = [[_cell(value) for value in row] for row in rows]
    if is_terminal():
        shown = Table(*columns, title=title, title_justify="left", title_style="bold")
        for row in cells:
            shown.add_row(*(Text(cell) for cell in row))
        Console().print(shown)
        return
    say(title)
    widths = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
    for row in [list(columns), *cells]:
        say("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def record(title: str, fields: Mapping[str, object]) -> None:
    """Names and values, one a line."""
    say(title)
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        say(f"  {name.ljust(width)}  {_cell(value)}")


def age(seconds: float) -> str:
    """A duration as people say it: 12 s, 4 min, 3 h, 2 d."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case timedelta():
            return age(value.total_seconds())
        case datetime():
            return value.isoformat(sep=" ", timespec="seconds")
        case _:
            return str(value)


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return round(value.total_seconds(), 3)
        case UUID():
            return str(value)
        case _:
            raise TypeError(type(value).__name__)
