"""What applications test themselves with."""

from __future__ import annotations

import pytest

from taskq import State, TaskFailedError, TaskQ
from taskq.testing import drain, isolated

app = TaskQ("sqlite:////nowhere/never-opened.db")


@app.task
def double(number: int) -> int:
    return 2 * number


@app.task
def doubles(numbers: list[int]) -> None:
    for number in numbers:
        double.options(queue="others").delay(number)


@app.task(max_retries=2, default_retry_delay=60)
def fails() -> None:
    raise ValueError("as it should")


def test_jobs_run_on_the_spot_and_the_app_opens_nothing() -> None:
    with isolated(app) as bench:
        result = double.delay(21)
        assert result.state is State.PENDING
        assert bench.drain() == 1
        assert result.get(0) == 42
    with isolated(app):
        assert result.state is None


def test_what_a_job_pushes_runs_too() -> None:
    with isolated(app) as bench:
        doubles.delay([1, 2, 3])
        assert bench.drain() == 4
        assert [job.task.rpartition(".")[2] for job in bench.pushed] == [
            "doubles",
            "double",
            "double",
            "double",
        ]


def test_retries_and_countdowns_need_not_be_waited_for() -> None:
    with isolated(app) as bench:
        later = double.options(countdown=3600).delay(1)
        failing = fails.delay()
        assert drain(app) == 0
        assert bench.drain(scheduled=True) == 2
        assert later.get(0) == 2
        with pytest.raises(TaskFailedError, match="as it should"):
            failing.get(0)
        assert len(failing.attempts) == 3
