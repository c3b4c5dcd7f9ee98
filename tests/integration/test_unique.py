"""Unique keys after real crashes: free once the job has ended, held for as long as it has not."""

from __future__ import annotations

import threading

import pytest

from taskq import State
from tests.workers import Bench, eventually


def push(bench: Bench, *step: object, task: str = "act_briefly", **options: object):
    """A job under the one key of these tests; leases are 1.5 seconds."""
    return bench.send(task, list(step), unique="k", **options)


@pytest.mark.parametrize(
    ("task", "step"),
    [
        ("act_briefly", ["kill"]),
        ("act_briefly", ["exit", 3]),
        ("act_briefly", ["raise", "no"]),
        ("act_briefly", ["reject", "no"]),
        ("act_briefly", ["unencodable"]),
        ("act_hard", ["sleep", 60]),
        ("act_hard", ["stubborn", 60]),
    ],
)
def test_a_key_is_free_once_its_job_is_dead(bench: Bench, task: str, step: list[object]) -> None:
    with bench.working():
        first = push(bench, *step, task=task, max_retries=0)
        eventually(lambda: first.state is State.DEAD)
        second = push(bench, "return", 1, task=task)

        assert not second.deduplicated
        assert second.get(20) == 1


def test_a_worker_that_is_killed_holds_the_key_no_longer_than_its_lease_and_the_run_after(
    bench: Bench,
) -> None:
    """Nobody was marked to blame, so the job runs again, alone, and that run is what frees the key."""
    with bench.working() as doomed:
        first = push(bench, "sleep", 60)
        eventually(lambda: bench.ledger.starts()[first.id])
        doomed.kill_all()
        doomed.process.wait(10)
    assert push(bench, "return", 1) == first
    with bench.working():
        eventually(lambda: bench.ledger.starts()[first.id] == 2)
        first.cancel()
        eventually(first.ready)
        second = push(bench, "return", 1)

        assert not second.deduplicated
        assert second.get(20) == 1


def test_producers_that_race_store_one_job(bench: Bench) -> None:
    results = []
    start = threading.Barrier(8)

    def produce() -> None:
        start.wait()
        results.extend(push(bench, "return", 1) for _ in range(20))

    threads = [threading.Thread(target=produce) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({result.id for result in results}) == 1
    assert sum(not result.deduplicated for result in results) == 1
    assert bench.app.backend.size("tasks") == 1
