"""What commands print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from taskq.clock import to_datetime


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    numeric = [bool(rows) and all(isinstance(row[at], int) for row in rows) for at in range(len(header))]
    for line in [list(header), *cells]:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        click.echo("  ".join(aligned).rstrip())


def as_json(value: Any) -> None:
    """One JSON document."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2, default=str))


def instant(timestamp: float | None) -> str:
    """A moment for people, to the second, in UTC; ``-`` where there is none."""
    return to_datetime(timestamp).strftime("%Y-%m-%d %H:%M:%SZ") if timestamp else "-"


def one_line(text: str | None, width: int = 80) -> str:
    """``text`` cut to a line."""
    line = " ".join((text or "").split())
    return line if len(line) <= width else line[: width - 1] + "…"
