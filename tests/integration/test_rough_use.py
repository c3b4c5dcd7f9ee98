"""What tasks and operators do that no manual asks for: nothing is lost, nothing runs twice, everything says why."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading

import pytest

from taskq import State, TaskQ
from tests.integration.test_worker import Bench
from tests.workers import ACTING, eventually


@pytest.mark.parametrize("step", [["reject error"], ["reject surrogate"]])
def test_any_reason_for_a_rejection_can_be_told(bench: Bench, step: list[object]) -> None:
    with bench.working("--concurrency", "1"):
        result = bench.send("act", step)
        eventually(lambda: result.state is State.DEAD)

    assert bench.ledger.starts()[result.id] == 1
    assert result.attempts[0].error_type == "Reject"


def test_a_body_that_closes_everything_is_counted_and_ends(bench: Bench) -> None:
    with bench.working("--concurrency", "1"):
        result = bench.send("act", ["close everything"])
        eventually(lambda: result.state is State.DEAD, within=40)

    # Once as a suspect, then as often as its retries allow.
    assert len(result.attempts) == 4
    assert bench.ledger.starts()[result.id] <= 5


@pytest.mark.parametrize("step", [["fork"], ["fork and exit"]])
def test_a_copy_of_the_process_runs_no_jobs(bench: Bench, step: list[object]) -> None:
    with bench.working("--concurrency", "1"):
        before = [bench.send("act", ["return", number]) for number in range(100)]
        forking = bench.send("act", step)
        after = [bench.send("act", ["return", number]) for number in range(200)]
        assert forking.get(20) == "parent"
        assert [result.get(20) for result in before + after] == [*range(100), *range(200)]

    starts = bench.ledger.starts()
    assert {job_id: count for job_id, count in starts.items() if count > 1} == {}


def test_a_thread_that_a_task_leaves_behind_does_not_hold_up_the_end(bench: Bench) -> None:
    with bench.working("--shutdown-timeout", "600") as worker:
        assert bench.send("act", ["leave a thread"]).get(20) == "left"
        assert worker.stop() == 0


def test_a_worker_whose_log_nobody_reads_goes_on_and_ends(bench: Bench) -> None:
    reading, writing = os.pipe()
    environ = {**os.environ, "TASKQ_URL": bench.url, "TASKQ_X_LEDGER": str(bench.ledger.path)}
    results = [bench.send("act", ["return", number]) for number in range(2000)]
    worker = subprocess.Popen(
        [sys.executable, "-m", "taskq", "worker", "-A", str(ACTING), "--burst"], env=environ, stderr=writing
    )
    os.close(writing)

    assert worker.wait(60) == 0

    os.close(reading)
    assert all(result.state is State.COMPLETED for result in results)


def test_a_worker_without_a_place_to_log_works(bench: Bench) -> None:
    result = bench.send("act", ["return", 1])
    environ = {**os.environ, "TASKQ_URL": bench.url, "TASKQ_X_LEDGER": str(bench.ledger.path)}
    command = f"exec {sys.executable} -m taskq worker -A {ACTING} --burst 2>/dev/full"

    assert subprocess.run(["sh", "-c", command], env=environ, timeout=60, check=False).returncode == 0

    assert result.state is State.COMPLETED


def test_a_producer_notices_that_its_file_is_another(tmp_path: pathlib.Path) -> None:
    with TaskQ(f"sqlite:///{tmp_path}/jobs.db") as app:
        app.task(name="f")(len)
        app.send("f", [[1]])
        for file in tmp_path.glob("jobs.db*"):
            if file.is_file():
                file.unlink()
        result = app.send("f", [[1, 2]])
        assert result.state is State.PENDING
        assert app.backend.size("tasks") == 1


def test_a_paused_queue_is_not_drained(tmp_path: pathlib.Path) -> None:
    from taskq.testing import isolated

    app = TaskQ("memory://")
    f = app.task(name="f")(len)
    with isolated(app) as bench:
        f.delay([1])
        app.queue("tasks").pause()
        drained: list[int] = []
        thread = threading.Thread(target=lambda: drained.append(bench.drain()))
        thread.start()
        thread.join(10)
        assert drained == [0]
