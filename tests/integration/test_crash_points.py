"""Processes killed at each point of a job's life: another brings it to its one right end, with the right counts."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

import pytest

from taskq import State
from tests.workers import Bench, Worker, eventually


class Counts(NamedTuple):
    """What is left of a job's life."""

    starts: int
    attempts: int
    losses: int
    deliveries: int
    errors: tuple[str, ...]


def counts(bench: Bench, result: object) -> Counts:
    job = bench.job(result)
    errors = tuple(attempt.error_type for attempt in job.history)
    return Counts(bench.ledger.starts()[job.id], job.attempts, job.losses, job.deliveries, errors)


#: Where its supervisor lives on, it knows what a child had begun, and gives the rest to another.
CHILD_KILLED = {
    "running": Counts(1, 1, 0, 2, ("WorkerLost",)),
    # The body has ended, its outcome is gone with the child, and nobody knows what killed that.
    "ran": Counts(2, 0, 1, 2, ()),
    "settled": Counts(1, 0, 0, 1, ()),
    "acked": Counts(1, 0, 0, 1, ()),
}
#: Where it does not, nobody knows what ran that had not been marked: a loss that counts for nothing.
WORKER_KILLED = {
    "reserved": Counts(1, 0, 1, 2, ()),
    "running": Counts(1, 0, 1, 2, ()),
    "ran": Counts(2, 0, 1, 2, ()),
    "settled": Counts(1, 0, 0, 1, ()),
    "acked": Counts(1, 0, 0, 1, ()),
}


def crashed(bench: Bench) -> bool:
    return (bench.ledger.path.parent / "crashed").exists()


def crash_at(bench: Bench, point: str, victim: str) -> dict[str, str]:
    return {
        "CRASH_AT": point,
        "VICTIM": victim,
        "CRASHED": str(bench.ledger.path.parent / "crashed"),
    }


@pytest.mark.parametrize("point", CHILD_KILLED)
def test_a_child_killed_at(bench: Bench, point: str) -> None:
    result = bench.send("act_briefly", ["return", 7])
    with bench.working("--concurrency", "1", faults=crash_at(bench, point, "child")) as worker:
        if point == "acked":
            assert result.get(20) == 7
            bench.send("act", ["return", 8])  # the next trip to the backend
        eventually(lambda: crashed(bench), about=worker)
        assert result.get(20) == 7
        assert bench.send("act", ["return", 9]).get(20) == 9

    assert counts(bench, result) == CHILD_KILLED[point]


def test_a_child_killed_with_a_job_that_it_has_not_begun(bench: Bench) -> None:
    with bench.working("--concurrency", "1") as worker:
        assert bench.send("act", ["return", 1]).get(20) == 1
        child = next(iter(bench.ledger.lines())).pid
        os.kill(child, signal.SIGSTOP)
        result = bench.send("act_briefly", ["return", 7])
        eventually(lambda: result.state is State.RESERVED)
        os.kill(child, signal.SIGKILL)
        assert result.get(20) == 7
        worker.wait_for("child.died")

    assert counts(bench, result) == Counts(1, 0, 0, 1, ())


@pytest.mark.parametrize("victim", ["supervisor", "group"])
@pytest.mark.parametrize("point", WORKER_KILLED)
def test_a_worker_killed_at(bench: Bench, point: str, victim: str) -> None:
    result = bench.send("act_briefly", ["return", 7])
    worker: Worker
    with bench.working("--concurrency", "1", faults=crash_at(bench, point, victim)) as worker:
        assert worker.process.wait(20) == -signal.SIGKILL
        eventually(lambda: not worker.children())

    with bench.app.worker(concurrency=1):
        assert result.get(20) == 7
        assert bench.send("act", ["return", 9]).get(20) == 9

    assert counts(bench, result) == WORKER_KILLED[point]
