"""The backend refuses for a while: outcomes are kept, work goes on by itself, memory stays flat, probes tell."""

from __future__ import annotations

import pathlib
import urllib.error
import urllib.request

import pytest

from tests.chaos.away import resident
from tests.workers import Bench, Worker, eventually

pytestmark = pytest.mark.slow


def answers(port: int) -> tuple[int, str]:
    """What the probe says."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=5) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("pool", ["process", "solo"])
def test_outcomes_survive_a_refusal_and_work_resumes(bench: Bench, pool: str, tmp_path: pathlib.Path) -> None:
    refuse, port = tmp_path / "refuse", free_port()
    probe = tmp_path / "probe"
    arguments = ("--probe-port", str(port), "--probe-file", str(probe), "--probe-patience", "1")
    faults = {"REFUSE": str(refuse)}
    with bench.working("--pool", pool, "--concurrency", "1", *arguments, faults=faults) as worker:
        eventually(lambda: answers(port)[0] == 200)
        eventually(probe.exists)
        result = bench.send("act", ["sleep", 0.5], max_retries=0)
        retried = bench.send("act", ["raise", "once"], ["return", "twice"], max_retries=1)
        eventually(lambda: bench.ledger.starts()[result.id])
        refuse.touch()
        eventually(lambda: bench.ledger.ends()[result.id])
        worker.wait_for("backend.unavailable")
        eventually(lambda: answers(port)[0] == 503)
        assert "backend" in answers(port)[1]
        touched = probe.stat().st_mtime
        memory = _push_through(bench, worker, 3_000)
        assert probe.stat().st_mtime == touched
        refuse.unlink()

        assert result.get(20) == 0.5
        assert retried.get(20) == "twice"
        assert bench.send("act", ["return", "resumed"]).get(30) == "resumed"
        eventually(lambda: answers(port)[0] == 200)
        eventually(lambda: probe.stat().st_mtime > touched)
        assert worker.events("backend.available")
        assert worker.stop() == 0

    assert bench.ledger.starts()[result.id] == 1
    assert memory < 4_000  # KiB


def _push_through(bench: Bench, worker: Worker, count: int) -> int:
    """Push while the worker is refused; how much it grows."""
    before = resident(worker.pid)
    bench.app.enqueue_many(bench.app.tasks["count"].s(number) for number in range(count))
    return resident(worker.pid) - before


def test_a_task_that_reports_without_end_does_not_fill_the_memory(
    bench: Bench, tmp_path: pathlib.Path
) -> None:
    refuse = tmp_path / "refuse"
    with bench.working("--concurrency", "1", faults={"REFUSE": str(refuse)}) as worker:
        first = bench.send("act", ["chatter", 0.3])
        first.get(20)
        before = resident(worker.pid)
        result = bench.send("act", ["chatter", 2.5])
        eventually(lambda: bench.ledger.starts()[result.id])
        refuse.touch()
        eventually(lambda: bench.ledger.ends()[result.id])
        grown = resident(worker.pid) - before
        refuse.unlink()
        result.get(20)

    assert grown < 2_000  # KiB; 5,000 reports would be twice as much
