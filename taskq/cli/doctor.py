"""``taskq doctor``: where things are, what is in force, and what is wrong with it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from taskq import __version__
from taskq.cli.apps import app_option, app_spec, open_app
from taskq.errors import TaskQError
from taskq.settings import described

if TYPE_CHECKING:
    from taskq.app import TaskQ


class Finding(NamedTuple):
    """One line of the report."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    detail: str


@click.command()
@app_option()
def doctor() -> None:
    """Say where jobs are kept, which settings are in force, and what is wrong."""
    app = open_app()
    findings = list(_findings(app))
    for finding in findings:
        click.echo(f"{finding.level:<5}{finding.subject:<10}{finding.detail}")
    click.echo("\nsettings in force:")
    for name, value in described(app.settings).items():
        click.echo(f"  {name:<22}{'-' if value is None or value == '' else value}")
    if any(finding.level == "fail" for finding in findings):
        raise SystemExit(1)


def _findings(app: TaskQ) -> Iterator[Finding]:
    yield Finding("ok", "taskq", f"{__version__} on Python {platform.python_version()}, {platform.system()}")
    spec = app_spec()
    if spec:
        yield Finding("ok", "app", f"{spec}: {len(app.tasks)} tasks")
    yield _reachable(app)
    if app.settings.backend == "sqlite":
        import sqlite3

        yield library(sqlite3.sqlite_version)
        yield from _files(pathlib.Path(app.backend.location))


def _reachable(app: TaskQ) -> Finding:
    try:
        queues = app.backend.counts()
    except TaskQError as error:
        return Finding("fail", "backend", f"{app.settings.backend} at {app.backend.location}: {error}")
    return Finding("ok", "backend", f"{app.settings.backend} at {app.backend.location}, {len(queues)} queues")


#: The first release with the fix of each maintained line; every other one before 3.51.3 lacks it.
_FIXED = {(3, 44): 6, (3, 50): 7}


def library(version: str) -> Finding:
    """Whether this SQLite may corrupt a database whose WAL is reset while another process commits."""
    parts = tuple(int(part) for part in version.split("."))
    fixed = parts >= (3, 51, 3) or parts[2] >= _FIXED.get((parts[0], parts[1]), 1_000)
    if fixed:
        return Finding("ok", "sqlite", version)
    return Finding(
        "warn",
        "sqlite",
        f"{version} can corrupt a database in a rare race of checkpoint and commit (fixed in 3.51.3, 3.50.7, "
        "3.44.6); taskq checkpoints in a way that avoids it, other programs on the same file may not",
    )


def _files(path: pathlib.Path) -> Iterator[Finding]:
    yield Finding("ok", "file", f"{path}, {_size(path)}, schema {_schema(path)}")
    wal = path.with_name(path.name + "-wal")
    big = wal.exists() and wal.stat().st_size > 256 * 1024 * 1024
    yield Finding(
        "warn" if big else "ok", "wal", f"{_size(wal)}" + (": is any worker running?" if big else "")
    )
    bells = path.with_name(path.name + ".bells")
    place = bells if bells.exists() else path.parent
    if os.access(place, os.W_OK | os.X_OK):
        yield Finding("ok", "bells", f"{bells} can be written")
    else:
        yield Finding("fail", "bells", f"{place} cannot be written: idle workers will wake late")


def _size(path: pathlib.Path) -> str:
    return f"{path.stat().st_size:,} bytes" if path.exists() else "not there yet"


def _schema(path: pathlib.Path) -> str:
    if not path.exists():
        return "none yet"
    import sqlite3

    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        return f"unreadable ({error})"
    return str(version)
