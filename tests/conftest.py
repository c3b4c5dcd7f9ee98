"""What every test may use: a clock that stands still, and patience for facts."""

from __future__ import annotations

import os
import threading
import time

import pytest

from taskq.clock import FrozenClock
from tests import servers


def eventually(fact, *, within=10.0):
    """Wait until ``fact()`` is truthy and return it; fail after ``within`` seconds."""
    end = time.monotonic() + within
    pause = threading.Event()
    while True:
        value = fact()
        if value:
            return value
        if time.monotonic() > end:
            pytest.fail(f"not within {within} s: {getattr(fact, '__name__', fact)}")
        pause.wait(0.005)


@pytest.fixture
def clock():
    return FrozenClock()


# -- tests that need a server ---------------------------------------------------------


def pytest_configure(config):
    config.addinivalue_line("markers", "server(kind): needs that server; see tests.servers")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Those of one server run in one process: some of them stop it, or let it refuse."""
    for item in items:
        kinds = _kinds(item)
        if kinds:
            item.add_marker(pytest.mark.xdist_group("-".join(kinds)))


def pytest_collection_finish(session):
    """Where tests are spread by group, each must bear its group in its name, or they are spread as they come."""
    if getattr(session.config.option, "loadgroup", False):
        ungrouped = [item.nodeid for item in session.items if _kinds(item) and "@" not in item.nodeid]
        assert not ungrouped, f"pytest-xdist does not group with this pytest: {ungrouped[0]}"


def pytest_runtest_setup(item):
    for kind in _kinds(item):
        if servers.url(kind) is None:
            why = f"no {kind}: python -m tests.servers up {kind}"
            if os.environ.get("TASKQ_REQUIRE_SERVERS"):
                pytest.fail(why, pytrace=False)
            pytest.skip(why)


def pytest_terminal_summary(terminalreporter):
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    absent = sorted(kind for kind in servers.KINDS if any(f"no {kind}:" in why for why in skipped))
    if absent:
        terminalreporter.write_line(
            f"without {', '.join(absent)}: python -m tests.servers up {' '.join(absent)}"
        )


def _kinds(item):
    return sorted(mark.args[0] for mark in item.iter_markers("server"))
