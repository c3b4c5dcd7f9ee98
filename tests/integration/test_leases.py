"""Leases: prolonged, lost to another worker, or without an end but that of their worker."""

from __future__ import annotations

import os
import pathlib
import signal

import pytest

from taskq import State
from tests.workers import Bench, eventually


def told(bench: Bench) -> list[str]:
    return [line.event for line in bench.ledger.lines() if line.event.startswith("told")]


def runs(pid: int) -> bool:
    """Whether the process can still do anything."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("pool", ["process", "thread"])
def test_a_worker_that_lost_a_lease_is_told_and_writes_nothing(bench: Bench, pool: str) -> None:
    with bench.working("--pool", pool, "--concurrency", "2") as worker:
        step = ["tell", 60] if pool == "process" else ["until cancelled", 60]
        taken_over = bench.send("act_briefly", step, ["return", "other"])
        extended = bench.send("act_briefly", ["extend", 60, 1.0])
        eventually(lambda: "extended" in [line.event for line in bench.ledger.lines()])
        eventually(lambda: len(bench.ledger.starts()) == 2)
        job = bench.job(extended)
        eventually(lambda: _deadline(bench, job.id) - _deadline(bench, taken_over.id) > 30)
        os.kill(worker.pid, signal.SIGSTOP)
        with bench.app.worker():
            assert taken_over.get(20) == "other"
        assert bench.ledger.starts()[extended.id] == 1
        os.kill(worker.pid, signal.SIGCONT)
        worker.wait_for("job.lost")
        if pool == "process":
            eventually(lambda: told(bench) == ["told-lease-lost"])
        assert extended.get(20) == "extended"
        assert bench.send("act", ["return", "well"]).get(20) == "well"
        assert worker.stop() == 0

    assert taken_over.get(1) == "other"
    assert bench.job(taken_over).deliveries == 2
    assert bench.job(extended).deliveries == 1


@pytest.mark.parametrize("pool", ["process", "async"])
def test_a_coroutine_whose_lease_was_lost_is_cancelled(bench: Bench, pool: str) -> None:
    with bench.working("--pool", pool, "--concurrency", "2") as worker:
        result = bench.send("tell_async", 60)
        eventually(lambda: bench.ledger.starts()[result.id])
        os.kill(worker.pid, signal.SIGSTOP)
        with bench.app.worker(pool="async"):
            assert result.get(20) == "other"
        os.kill(worker.pid, signal.SIGCONT)
        worker.wait_for("job.lost")
        eventually(lambda: told(bench) == ["told-lease-lost"])
        assert worker.stop() == 0

    assert result.get(1) == "other"


def test_a_lease_without_end_ends_with_its_worker_only(bench: Bench) -> None:
    """Also where the next one has the same name, and the body holds the interpreter in C code."""
    with bench.working("--concurrency", "1", "--name", "same") as worker:
        result = bench.send("act_timeless", ["hog", 60], ["return", "again"])
        eventually(lambda: bench.ledger.starts()[result.id])
        (first,) = bench.ledger.lines()
        with bench.working("--concurrency", "1", "--name", "same"):
            assert bench.send("act", ["return", 1]).get(20) == 1
            assert not any(bench.app.backend.reclaim())
            os.kill(worker.pid, signal.SIGSTOP)
            assert not any(bench.app.backend.reclaim())
            worker.signal(signal.SIGKILL)
            assert result.get(20) == "again"
            assert not runs(first.pid)

    assert bench.ledger.starts()[result.id] == 2
    assert result.state is State.COMPLETED


def _deadline(bench: Bench, job_id: str) -> float:
    query = "SELECT deadline FROM job WHERE id = ?"
    return float(bench.app.backend._file.read(lambda db: db.execute(query, (job_id,)).fetchone())[0] or 0)
