"""The contract suite: every test runs against every backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from taskq.clock import SYSTEM_CLOCK
from tests.contract.backends import CASES


def pytest_configure(config):
    config.addinivalue_line("markers", "needs(**capabilities): skipped where the backend declares otherwise")


def pytest_sessionfinish():
    for case in CASES:
        case.end()


@pytest.fixture(
    params=[pytest.param(case, marks=[pytest.mark.server(kind) for kind in case.servers]) for case in CASES],
    ids=lambda case: case.name,
)
def case(request):
    case = request.param
    for marker in request.node.iter_markers("needs"):
        for name, wanted in marker.kwargs.items():
            declared = getattr(case.capabilities, name)
            if declared != wanted:
                pytest.skip(f"{case.name} declares {name} = {declared!r}")
    return case


@pytest.fixture
def open_backend(case, tmp_path, clock):
    """Open the test's backend once more; all of them are closed at the end."""
    opened = []

    def open_(**options):
        opened.append(case.open(tmp_path, options.pop("clock", clock), **options))
        return opened[-1]

    yield open_
    for backend in opened:
        backend.close()
    case.leave(tmp_path)


@pytest.fixture
def backend(open_backend):
    return open_backend()


@pytest.fixture
def live(open_backend):
    """A backend on the machine's own clock, for tests in which somebody truly waits."""
    return open_backend(clock=SYSTEM_CLOCK)


@pytest.fixture
def consume(backend):
    """Open a consumer of ``backend``; all of them are closed at the end."""
    opened = []

    def open_(*queues, worker="worker-1", weights=None, of=None):
        weights = weights or dict.fromkeys(queues or ("tasks",), 1)
        opened.append((of or backend).consume(weights, worker))
        return opened[-1]

    yield open_
    for consumer in opened:
        consumer.close()


@pytest.fixture
def consumer(consume):
    return consume()


@pytest.fixture
def later(case, clock):
    """Let seconds pass."""
    return lambda seconds: case.pass_time(clock, seconds)


@pytest.fixture
def launch(case, tmp_path):
    """Start a process of ``program.py`` on the test's backend; what still runs at the end is killed."""
    started = []
    root = Path(__file__).parents[2]

    def start(command, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.program", command, case.url(tmp_path), *arguments],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
