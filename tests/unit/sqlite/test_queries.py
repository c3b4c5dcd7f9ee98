from __future__ import annotations

import re
import sqlite3
from contextlib import closing

import pytest

from taskq.backends.sqlite import queries, schema
from taskq.job import State

STATEMENTS = {
    name: text
    for name, text in vars(queries).items()
    if name.isupper() and isinstance(text, str) and name[0] != "_" and "COLUMNS" not in name
}
STATEMENTS |= {f"PURGE_{state.name}": text for state, text in queries.PURGE_WAITING.items()}
STATEMENTS |= {f"LIST_{state.name}": found[0] for state, found in queries.LISTINGS.items()}
STATEMENTS |= {f"LIST_{state.name}_AFTER": found[1] for state, found in queries.LISTINGS.items()}


@pytest.fixture(scope="module")
def db():
    with closing(sqlite3.connect(":memory:")) as db:
        for script in schema.steps():
            db.executescript(script)
        yield db


def plan(db, statement):
    names = re.findall(r":(\w+)", statement)
    values = dict.fromkeys(names) if names else [None] * statement.count("?")
    return [row[-1] for row in db.execute(f"EXPLAIN QUERY PLAN {statement}", values)]


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_statement_reads_all_jobs(db, name):
    steps = plan(db, STATEMENTS[name])

    assert [step for step in steps if step.startswith("SCAN job") and "USING" not in step] == []


@pytest.mark.parametrize("name", ["CLAIM", "STAGE", "RETIRE", "RETIRE_OLDEST", "OVERDUE", "TOO_LATE", "DEAD"])
def test_what_comes_in_order_is_not_sorted(db, name):
    assert "TEMP B-TREE" not in " ".join(plan(db, STATEMENTS[name]))


def test_listings_read_one_slice(db):
    for state in State:
        for statement in queries.LISTINGS[state][:2]:
            steps = " ".join(plan(db, statement))
            assert state is State.RESERVED or "TEMP B-TREE" not in steps, state
