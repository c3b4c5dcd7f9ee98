"""Limits, and what bodies may raise: the worker goes on, and every job ends as it should."""

from __future__ import annotations

import pytest

from taskq import State
from taskq.errors import TaskFailedError
from tests.workers import Bench, eventually

pytestmark = pytest.mark.slow


def test_a_child_that_has_grown_is_replaced(bench: Bench) -> None:
    with bench.working("--concurrency", "1", "--max-memory-per-child", "100") as worker:
        for result in [bench.send("act", ["grow", 60]) for _ in range(3)]:
            result.get(20)
        told = worker.wait_for("child.retired")
        assert told["reason"] == "memory"
        assert bench.send("act", ["return", 1]).get(20) == 1
        # A replacement is small again.
        eventually(lambda: bench.send("act", ["return", 1]).get(20) and len(pids(bench)) > 1)

    assert set(bench.ledger.starts().values()) == {1}


def pids(bench: Bench) -> set[int]:
    return {line.pid for line in bench.ledger.lines()}


@pytest.mark.parametrize("pool", ["process", "async"])
def test_a_coroutine_that_blocks_its_loop_past_its_limit_is_ended_and_others_are_not_blamed(
    bench: Bench, pool: str
) -> None:
    with bench.working("--pool", pool, "--concurrency", "1" if pool == "process" else "10") as worker:
        neighbours = [bench.send("act_async", 1.5) for _ in range(5)]
        eventually(lambda: len(bench.ledger.starts()) == 5)
        result = bench.send("block_hard", 60)
        with pytest.raises(TaskFailedError, match="TimeLimitExceeded"):
            result.get(20)
        for neighbour in neighbours:
            assert neighbour.get(20) == 1.5
        assert worker.wait_for("child.killed")["reason"] == "time limit"

    assert len(result.attempts) == 1
    jobs = [bench.job(neighbour) for neighbour in neighbours]
    assert {(job.attempts, job.losses, job.deliveries) for job in jobs} == {(0, 0, 2)}


def test_a_stubborn_body_that_was_cancelled_is_ended(bench: Bench) -> None:
    with bench.working("--concurrency", "1"):
        result = bench.send("act", ["stubborn", 60])
        eventually(lambda: bench.ledger.starts()[result.id])
        result.cancel()
        eventually(result.ready)
        assert bench.send("act", ["return", 1]).get(20) == 1

    assert result.state is State.CANCELLED
    assert bench.job(result).attempts == 0


@pytest.mark.parametrize("pool", ["process", "solo"])
def test_a_clean_up_that_fails_during_shutdown_counts_for_nothing(bench: Bench, pool: str) -> None:
    with bench.working("--pool", pool, "--shutdown-timeout", "0.2") as worker:
        results = [bench.send("act", ["fail when interrupted", 60], max_retries=0)]
        if pool == "process":
            results.append(bench.send("fail_async_when_interrupted", 60))
        eventually(lambda: len(bench.ledger.starts()) == len(results))
        assert worker.stop() == 0

    for result in results:
        job = bench.job(result)
        assert (job.state, job.attempts, job.history) == (State.PENDING, 0, ())


@pytest.mark.parametrize("pool", ["process", "async"])
def test_coroutines_that_cancel_themselves_or_leave_bombs_harm_no_other(bench: Bench, pool: str) -> None:
    with bench.working("--pool", pool, "--concurrency", "1"):
        here = bench.send("cancel_yourself", True)
        later = bench.send("cancel_yourself", False)
        behind = bench.send("exit_behind")
        after = [bench.send("act_async", 0.01) for _ in range(20)]
        with pytest.raises(TaskFailedError, match="CancelledError"):
            here.get(20)
        later.get(20)
        assert behind.get(20) == "still here"
        assert [result.get(20) for result in after] == [0.01] * 20

    assert {bench.ledger.starts()[result.id] for result in after} == {1}


@pytest.mark.parametrize("pool", ["process", "thread", "solo"])
def test_whatever_a_body_raises_is_recorded_and_the_worker_lives(bench: Bench, pool: str) -> None:
    expected = {
        "two arguments": "tests.acting.TwoArgumentsError: this and that",
        "a lock": "ValueError: ('holds', <unlocked _thread.lock object",
        "reduce": "tests.acting.IrreducibleError: alone",
        "local": "tests.acting.LocalError: from inside a function",
        "group": "ExceptionGroup: several (2 sub-exceptions)",
        "exit": "SystemExit: 7",
        "interrupt": "KeyboardInterrupt",
        "long": "ValueError: xxx",
        "surrogates": "ValueError: ? \x00 \U0001f600",
        "str": "tests.acting.UnspeakableError: (its __str__ raised RuntimeError)",
        "fatal str": "tests.acting.FatalError: (its __str__ raised SystemExit)",
    }
    with bench.working("--pool", pool, "--concurrency", "1"):
        results = {kind: bench.send("act", ["poison", kind], max_retries=1) for kind in expected}
        for result in results.values():
            eventually(result.ready)
        assert bench.send("act", ["return", "alive"]).get(20) == "alive"
        assert len(pids(bench)) == 1  # nothing died of it

    for kind, error in expected.items():
        job = bench.job(results[kind])
        assert job.state is State.DEAD
        runs = 1 if kind in {"exit", "interrupt"} else 2  # what is no Exception is not retried by itself
        assert (job.attempts, len(job.history)) == (runs, runs), kind
        assert (job.error or "").startswith(error), kind
        assert len(job.error or "") < 3_000
        assert all("perform" in attempt.traceback for attempt in job.history)
        assert all(len(attempt.traceback) < 20_000 for attempt in job.history)


def test_a_job_that_is_too_late_ends_cancelled(bench: Bench) -> None:
    late = bench.send("act", ["return", 1], expires=0.05)
    eventually(lambda: bench.app.backend.housekeep() is not None or late.ready())
    with bench.working("--concurrency", "1"):
        also_late = bench.send("act", ["return", 1], countdown=0.2, expires=0.1)
        eventually(lambda: late.ready() and also_late.ready())

    for result in (late, also_late):
        assert (result.state, bench.job(result).error) == (State.CANCELLED, "expired")
    assert bench.ledger.starts()[late.id] == 0
