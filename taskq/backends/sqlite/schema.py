"""The tables, their version, and the way from one version to the next."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Final

from taskq.errors import SchemaError

#: Says, in the file's header, whose it is: the letters ``tskq``.
APPLICATION_ID: Final = 0x74736B71


def steps() -> list[str]:
    """Scripts in order; step *n* brings version *n* to *n + 1*, from an empty file on."""
    return [resources.files(__package__ or "").joinpath("schema.sql").read_text(encoding="utf-8")]


def is_current(db: sqlite3.Connection, version: int) -> bool:
    """Whether nothing is to be done. Raises ``SchemaError`` where the file is not ours, or is from the future."""
    with _one_view(db):
        (application, found), has_tables = _header(db), _has_tables(db)
    if application == APPLICATION_ID and found > version:
        raise SchemaError(
            f"the file has layout version {found}, this taskq knows {version}; upgrade taskq to open it"
        )
    if application == 0 and found == 0 and not has_tables:
        return False
    if application != APPLICATION_ID:
        raise SchemaError("the file is a database of something else; give taskq a file of its own")
    return found == version


def migrate(db: sqlite3.Connection, scripts: Sequence[str]) -> None:
    """Bring the file to the latest version. To be called inside a write transaction: all of it or nothing."""
    if is_current(db, len(scripts)):
        return
    _, found = _header(db)
    for script in scripts[found:]:
        for statement in _statements(script):
            db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {len(scripts)}")


@contextlib.contextmanager
def _one_view(db: sqlite3.Connection) -> Iterator[None]:
    """Read several things as they were at one moment: another process may be making the tables just now."""
    if db.in_transaction:
        yield
        return
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.execute("COMMIT")


def _header(db: sqlite3.Connection) -> tuple[int, int]:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return application, version


def _has_tables(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


def _statements(script: str) -> Iterator[str]:
    # ``executescript`` would commit first.
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
