from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from taskq.backends.sqlite import schema
from taskq.backends.sqlite.connection import Database
from taskq.errors import SchemaError
from tests.contract.acts import job

NEXT = """
-- A later version: with a trigger, whose inner semicolons are no ends.
ALTER TABLE paused ADD COLUMN since REAL;
CREATE TRIGGER paused_since AFTER INSERT ON paused BEGIN
    UPDATE paused SET since = 1.5 WHERE name = new.name;
    UPDATE meta SET token = token + 1;
END;
"""


def database(path, scripts):
    return closing(Database(path, timeout=5.0, full=False, scripts=scripts))


def test_an_older_file_is_brought_up_to_date_with_what_is_in_it(backend, path):
    backend.push([job()])
    backend.pause("kept")
    backend.close()
    with database(path, [*schema.steps(), NEXT]) as newer:
        newer.write(lambda db: db.execute("INSERT INTO paused (what, name) VALUES ('queue', 'new')"))
        found = newer.read(lambda db: db.execute("SELECT name, since FROM paused ORDER BY 1").fetchall())
        assert found == [("kept", None), ("new", 1.5)]
        assert newer.read(lambda db: db.execute("SELECT count(*) FROM job").fetchone()) == (1,)


def test_a_step_that_fails_leaves_the_file_as_it_was(backend, path):
    backend.push([job()])
    backend.close()
    with (
        database(path, [*schema.steps(), NEXT + "SELECT no_such_column FROM job;\n"]) as newer,
        pytest.raises(Exception, match="no_such"),
    ):
        newer.read(lambda db: db.execute("SELECT 1"))
    with database(path, schema.steps()) as same:
        assert same.read(lambda db: db.execute("SELECT count(*) FROM job").fetchone()) == (1,)


def test_a_newer_file_is_refused(open_backend, path):
    with database(path, [*schema.steps(), NEXT]) as newer:
        newer.read(lambda db: db.execute("SELECT 1"))
    with pytest.raises(SchemaError, match="upgrade taskq"):
        open_backend().counts()


def test_a_database_of_something_else_is_refused_and_not_touched(open_backend, path):
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")
        other.commit()
    with pytest.raises(SchemaError, match="something else"):
        open_backend().push([job()])
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
        assert other.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_file_that_is_no_database_is_refused(open_backend, path, tmp_path):
    (tmp_path / "jobs.db").write_text("Dear diary, " * 100)
    with pytest.raises(SchemaError, match="not a SQLite database"):
        open_backend().counts()
