"""Processes that die at any moment."""

from __future__ import annotations

import random

import pytest

from taskq.clock import SYSTEM_CLOCK
from taskq.job import State
from tests.conftest import eventually
from tests.contract.acts import ids, jobs, states, take

pytestmark = [pytest.mark.needs(shared=True), pytest.mark.needs(persistent=True)]


def kill(process):
    process.kill()
    rest = process.stdout.read()
    process.wait()
    return rest


def test_a_killed_producer_loses_nothing_confirmed(open_backend, launch, consume, case, tmp_path):
    backend = open_backend()
    confirmed = []
    for n in range(6):
        producer = launch("push_for_ever")
        confirmed += [producer.stdout.readline().strip() for _ in range(random.randint(1, 60 * n + 1))]
        # The last line may be cut off: only whole ones were confirmed.
        confirmed += [line[:-1] for line in kill(producer).splitlines(keepends=True) if line.endswith("\n")]

    assert len(confirmed) <= backend.size("tasks") <= len(confirmed) + 6 * 3
    consumer = consume(of=backend)
    found = set()
    while reservations := take(consumer, 500):
        found.update(ids(reservations))
    assert found >= set(confirmed)
    case.verify(tmp_path)


@pytest.mark.needs(stores=True)
def test_a_worker_killed_in_a_loop_leaves_everything_whole(open_backend, launch, case, tmp_path):
    backend = open_backend(clock=SYSTEM_CLOCK)
    for n in range(8):
        worker = launch("work_for_ever", f"killed-{n}")
        assert worker.stdout.readline() == "ready\n"
        start = backend.counts().get("tasks", {}).get(State.COMPLETED, 0)
        eventually(lambda start=start: backend.size("tasks", State.COMPLETED) > start + 5)
        kill(worker)
        case.verify(tmp_path)


@pytest.mark.needs(leases="timed")
def test_jobs_without_a_time_limit_come_back_from_a_killed_worker_only(open_backend, launch):
    backend = open_backend(clock=SYSTEM_CLOCK)
    pushed = backend.push(jobs(3, lease=0.0))
    holder = launch("hold", "holder")
    assert holder.stdout.readline() == "3\n"
    assert backend.reclaim() == ([], [], [])
    kill(holder)

    assert sorted(backend.reclaim().suspects) == sorted(pushed)
    assert states(backend) == {"pending": 3}


@pytest.mark.needs(leases="timed")
def test_a_killed_workers_jobs_come_back_after_their_lease(open_backend, launch, consume):
    backend = open_backend(clock=SYSTEM_CLOCK)
    pushed = backend.push(jobs(3, lease=0.3))
    holder = launch("hold", "holder")
    assert holder.stdout.readline() == "3\n"
    kill(holder)
    found = []
    eventually(lambda: found.extend(backend.reclaim().suspects) or len(found) == 3)

    assert pushed == ids(take(consume(of=backend)))


def test_a_killed_sleeper_swallows_no_wake_for_long(open_backend, launch, consume):
    backend = open_backend(clock=SYSTEM_CLOCK)
    sleeper = launch("hold", "sleeper")
    eventually(lambda: sleeper.poll() is None)
    kill(sleeper)
    consumer = consume(of=backend)
    backend.push(jobs(1))

    assert len(take(consumer, 1, timeout=5)) == 1
