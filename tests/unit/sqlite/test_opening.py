"""Many who open a new file at once."""

from __future__ import annotations

import contextlib
import sqlite3
import threading

from taskq.backends import from_url
from taskq.backends.sqlite import schema


def test_a_new_file_can_be_opened_by_many_at_once(tmp_path):
    failures = []

    def open_(url, together):
        backend = from_url(url)
        together.wait()
        try:
            backend.counts()
        except Exception as error:  # noqa: BLE001
            failures.append(error)
        backend.close()

    for number in range(40):
        together = threading.Barrier(4)
        arguments = (f"sqlite:///{tmp_path}/{number}.db", together)
        threads = [threading.Thread(target=open_, args=arguments) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert failures == []


def test_a_file_that_another_is_just_making_is_not_taken_for_a_strangers(tmp_path):
    """The owner's mark and the tables are looked at as of one moment, whatever is committed between."""
    path = tmp_path / "jobs.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")

        class Meanwhile(sqlite3.Connection):
            """Lets the other process make its tables after the first look."""

            def execute(self, sql, *parameters):
                found = super().execute(sql, *parameters)
                if sql == "PRAGMA user_version" and not other.execute("PRAGMA user_version").fetchone()[0]:
                    other.execute("BEGIN IMMEDIATE")
                    schema.migrate(other, schema.steps())
                    other.execute("COMMIT")
                return found

        with contextlib.closing(sqlite3.connect(path, isolation_level=None, factory=Meanwhile)) as db:
            assert not schema.is_current(db, 1)
            assert schema.is_current(db, 1)
