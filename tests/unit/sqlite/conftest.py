from __future__ import annotations

import pytest

from taskq.backends.sqlite import SQLiteBackend
from taskq.clock import SYSTEM_CLOCK


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "jobs.db")


@pytest.fixture
def open_backend(path):
    opened = []

    def open_(path=path, clock=SYSTEM_CLOCK, **options):
        opened.append(SQLiteBackend(path, clock=clock, **options))
        return opened[-1]

    yield open_
    for backend in opened:
        backend.close()


@pytest.fixture
def backend(open_backend):
    return open_backend()
