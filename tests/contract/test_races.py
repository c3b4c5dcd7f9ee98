"""Many at once: threads of one process, and processes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from taskq.job import Settlement, State
from tests.conftest import eventually
from tests.contract.acts import bury, complete, ids, jobs, outcome, states, take

SETTLED = Settlement.SETTLED


def at_once(function, arguments):
    """Call ``function`` with each argument, all at the same moment; returns what they returned."""
    arguments = list(arguments)
    barrier = threading.Barrier(len(arguments))

    def run(argument):
        barrier.wait()
        return function(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(run, arguments))


def test_many_producers_lose_nothing(backend):
    pushed = at_once(lambda _: [i for _ in range(50) for i in backend.push(jobs(2))], range(8))

    assert len({job_id for batch in pushed for job_id in batch}) == 800
    assert states(backend) == {"pending": 800}


@pytest.mark.needs(stores=True)
def test_many_pushers_of_one_id_store_it_once(backend):
    wanted = jobs(5)
    at_once(lambda _: backend.push(wanted), range(8))

    assert states(backend) == {"pending": 5}


def test_many_consumers_share_without_overlap(backend, consume):
    backend.push(jobs(1000))

    def drain(consumer):
        found = []
        while reservations := take(consumer, 7):
            found += ids(reservations)
            assert set(consumer.settle(list(map(outcome, reservations)))) == {SETTLED}
        return found

    shares = at_once(drain, [consume(worker=f"worker-{n}") for n in range(8)])

    assert len([i for share in shares for i in share]) == len({i for share in shares for i in share}) == 1000


def test_of_two_who_settle_one_reservation_one_settles(backend, consume):
    backend.push(jobs(50))
    for reservation in take(consume()):
        sessions = [consume(), consume()]
        answers = at_once(lambda consumer, r=reservation: complete(consumer, r), sessions)
        assert sorted(a.value for a in answers) == ["already yours", "settled"]


def test_a_reaper_that_never_rests_reaps_no_live_job(live, consume):
    done = threading.Event()
    reaped = []

    def reap():
        while not done.is_set():
            reaped.extend(job_id for batch in live.reclaim() for job_id in batch)

    reaper = threading.Thread(target=reap)
    reaper.start()
    try:
        consumer = consume(of=live)
        live.push(jobs(2000))
        while reservations := take(consumer, 16):
            assert set(consumer.settle(list(map(outcome, reservations)))) == {SETTLED}
    finally:
        done.set()
        reaper.join()

    assert reaped == []
    assert states(live) == {"completed": 2000}


@pytest.mark.needs(leases="timed")
def test_orphans_are_reclaimed_by_one_of_many(backend, consume, later):
    pushed = backend.push(jobs(300, lease=10))
    take(consume(), 300)
    later(11)
    found = at_once(lambda _: backend.reclaim().suspects, range(6))

    assert Counter(i for batch in found for i in batch) == Counter(pushed)


@pytest.mark.needs(revive="once")
def test_each_dead_job_is_revived_by_one_of_many(backend, consume):
    consumer = consume()
    dead = [bury(backend, consumer) for _ in range(30)]
    found = at_once(lambda _: backend.revive("tasks"), range(6))

    assert Counter(i for batch in found for i in batch) == Counter(dead)


@pytest.mark.needs(stores=True)
@pytest.mark.needs(shared=True)
def test_eight_processes_of_four_threads_lose_and_double_nothing(backend, launch, case, tmp_path):
    total = 8 * 2 * case.many
    processes = [launch("produce_and_consume", f"p{n}", str(case.many)) for n in range(8)]
    eventually(lambda: backend.size("tasks", State.COMPLETED) == total, within=60)
    lines = [line.split() for process in processes for line in process.communicate("")[0].splitlines()]

    assert [line for line in lines if line[0] == "error"] == []
    assert {settlement for _, settlement in lines} == {"SETTLED"}
    assert len(lines) == len({job_id for job_id, _ in lines}) == total
    assert [process.returncode for process in processes] == [os.EX_OK] * 8
    case.verify(tmp_path)
