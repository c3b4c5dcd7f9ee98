"""Whole groups killed again and again: who did it ends dead, and nobody else pays for it."""

from __future__ import annotations

import dataclasses

import pytest

from taskq import State
from taskq.job import new_id
from tests.workers import Bench, eventually

pytestmark = pytest.mark.slow


def test_a_job_that_kills_its_whole_group_ends_dead_and_its_neighbours_do_not(bench: Bench) -> None:
    neighbours = [bench.send("act_briefly", ["return", n]) for n in range(100)]
    crasher = bench.send("act_briefly", ["kill group"], max_retries=1)
    neighbours += [bench.send("act_briefly", ["return", n]) for n in range(100)]

    killed = 0
    while not crasher.ready():
        with bench.working("--concurrency", "2", "--log-level", "warning") as worker:
            eventually(lambda worker=worker: worker.process.poll() is not None or crasher.ready())
            killed += worker.process.poll() is not None
    with bench.working("--concurrency", "2", "--burst") as worker:
        assert worker.wait() == 0

    job = bench.job(crasher)
    assert job.state is State.DEAD
    assert [attempt.error for attempt in job.history] == ["WorkerLost: reservation timed out"] * 2
    assert killed == 3  # once as one of many, then twice alone
    jobs = [bench.job(result) for result in neighbours]
    assert {(job.state, job.attempts, job.history) for job in jobs} == {(State.COMPLETED, 0, ())}


def test_a_child_of_many_threads_blames_nobody_blindly(bench: Bench) -> None:
    with bench.working("--pool", "thread", "--concurrency", "4"):
        neighbours = [bench.send("act", ["sleep", 0.8]) for _ in range(3)]
        eventually(lambda: len(bench.ledger.starts()) == 3)
        crasher = bench.send("act", ["kill"], max_retries=1)
        coroutines = [bench.send("act_async", 0.5) for _ in range(20)]
        eventually(crasher.ready, within=30)
        for result in neighbours + coroutines:
            result.get(20)

    assert bench.job(crasher).state is State.DEAD
    assert [attempt.error_type for attempt in bench.job(crasher).history] == ["WorkerLost"] * 2
    assert {bench.job(result).attempts for result in neighbours + coroutines} == {0}


def test_five_thousand_orphans_come_back_without_holding_others_up(bench: Bench) -> None:
    backend = bench.app.backend
    template = bench.app.tasks["count"].s(0).set(visibility_timeout=0.3).job(bench.app)
    orphans = backend.push([dataclasses.replace(template, id=new_id(), keep=60.0) for _ in range(5000)])
    dead = backend.consume({"tasks": 1}, "dead:1:0")
    assert len(dead.take(5000).reservations) == 5000
    dead.close()

    def left() -> int:
        return backend.size("tasks") + backend.size("tasks", State.RESERVED)

    with bench.working("--concurrency", "2", "--queues", "tasks,fresh", "--log-level", "warning"):
        eventually(lambda: backend.size("tasks") > 1000)
        for n in range(20):
            assert bench.send("act", ["return", n], queue="fresh").get(20) == n
            assert bench.send("act", ["return", n], priority=9).get(20) == n
        assert left() > 0  # the others were served while orphans still waited
        eventually(lambda: not left(), within=60)

    starts = bench.ledger.starts()
    assert {starts[job_id] for job_id in orphans} == {1}
    jobs = [backend.find(job_id) for job_id in orphans]
    assert {(job.state, job.attempts, job.losses) for job in jobs} == {(State.COMPLETED, 0, 1)}
