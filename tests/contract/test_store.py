"""What every store promises about what outlives a delivery."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from taskq.backend import Note
from taskq.clock import SYSTEM_CLOCK
from taskq.errors import BackendUnavailableError
from taskq.job import State, Verdict
from taskq.store import ScheduleRecord, WorkerInfo
from tests.contract.acts import complete, failure, job, jobs, outcome, settle, take, take_one

pytestmark = pytest.mark.needs(stores=True)


def test_find_knows_a_job_from_push_to_end(backend, consumer, clock):
    pushed = job(task="t", headers={"k": "v"}, created=1.5)
    backend.push([pushed])
    assert backend.find(pushed.id) == replace(pushed, due=clock.now())

    reservation = take_one(consumer)
    assert backend.find(pushed.id) == reservation.job

    settle(consumer, outcome(reservation, result=b"r"))
    ended = replace(reservation.job, state=State.COMPLETED, worker=None, result=b"r", ended=clock.now())
    assert backend.find(pushed.id) == ended


def test_find_knows_nothing_of_others(backend):
    assert backend.find("unknown") is None


def test_progress_is_the_latest_note(backend, consumer):
    backend.push([job()])
    reservation = take_one(consumer)
    assert backend.progress(reservation.job.id) is None
    for mark in (b"1", b"2"):
        consumer.note([Note(reservation=reservation, progress=mark)])

    assert backend.progress(reservation.job.id) == b"2"
    assert backend.progress("unknown") is None


# -- waiting --------------------------------------------------------------------------


def test_wait_answers_at_once_for_what_has_ended_or_is_unknown(backend, consumer):
    first, second = backend.push(jobs(2))
    complete(consumer, take_one(consumer))

    assert backend.wait([first, second]) == [first]
    assert backend.wait([second, "unknown"]) == ["unknown"]


def test_wait_gives_up_at_its_timeout_and_not_before(backend):
    pushed = backend.push([job()])
    before = time.monotonic()

    assert backend.wait(pushed, timeout=0.1) == []
    assert time.monotonic() - before >= 0.1
    assert backend.wait(pushed, timeout=0.0) == []


def in_thread(function):
    found = []

    def run():
        try:
            found.append(function())
        except BackendUnavailableError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


@pytest.mark.parametrize(
    "verdict", [Verdict.COMPLETE, Verdict.BURY, Verdict.CANCEL], ids=lambda verdict: verdict.value
)
@pytest.mark.parametrize("keep", [0.0, 60.0])
def test_every_end_frees_a_wait(live, consume, verdict, keep):
    consumer = consume(of=live)
    pushed = live.push([job(keep=keep)])
    thread, found = in_thread(lambda: live.wait(pushed, timeout=30))
    settle(consumer, outcome(take_one(consumer), verdict))
    thread.join(10)

    assert found == [pushed]


def test_cancelling_a_waiting_job_frees_a_wait(live):
    pushed = live.push([job()])
    thread, found = in_thread(lambda: live.wait(pushed, timeout=30))
    live.cancel(pushed)
    thread.join(10)

    assert found == [pushed]


def test_a_retry_does_not_end_a_wait(live, consume):
    consumer = consume(of=live)
    pushed = live.push([job()])
    settle(consumer, failure(take_one(consumer)))

    assert live.wait(pushed, timeout=0.05) == []


def test_many_threads_wait_for_their_own(live, consume):
    consumer = consume(of=live)
    pushed = live.push(jobs(20))
    waits = [in_thread(lambda job_id=job_id: live.wait([job_id], timeout=30)) for job_id in pushed]
    for reservation in take(consumer):
        complete(consumer, reservation)
    for thread, _ in waits:
        thread.join(10)

    assert [found for _, found in waits] == [[[job_id]] for job_id in pushed]


def test_wait_for_very_many(live, consume):
    consumer = consume(of=live)
    pushed = live.push(jobs(1000))
    thread, found = in_thread(lambda: live.wait(pushed, timeout=30))
    complete(consumer, take_one(consumer))
    thread.join(10)

    assert found == [pushed[:1]]


@pytest.mark.needs(shared=True)
def test_a_settle_elsewhere_frees_a_wait_quickly(open_backend, consume):
    here, there = open_backend(clock=SYSTEM_CLOCK), open_backend(clock=SYSTEM_CLOCK)
    consumer = consume(of=there)
    delays = []
    for _ in range(5):
        pushed = here.push([job()])
        (reservation,) = take(consumer)
        thread, _ = in_thread(lambda pushed=pushed: here.wait(pushed, timeout=30))
        before = time.monotonic()
        complete(consumer, reservation)
        thread.join(10)
        delays.append(time.monotonic() - before)

    assert sorted(delays)[2] < 0.5, "rung, not found by looking once a second"


def test_close_frees_a_wait(live):
    pushed = live.push([job()])
    thread, found = in_thread(lambda: live.wait(pushed, timeout=30))
    live.close()
    thread.join(10)

    assert isinstance(found[0], BackendUnavailableError)


# -- workers --------------------------------------------------------------------------


def worker(clock, name="w", **fields):
    about = {"host": "h", "pid": 1, "queues": ("a", "b"), "pool": "process", "concurrency": 2}
    return WorkerInfo(id=name, started=1.0, seen=clock.now(), **{**about, **fields})


def test_a_worker_is_remembered_as_it_last_described_itself(backend, clock):
    backend.heartbeat(worker(clock, running=1))
    backend.heartbeat(worker(clock, running=2))

    assert backend.workers() == [worker(clock, running=2)]


def test_a_silent_worker_is_forgotten(backend, clock, later):
    backend.heartbeat(worker(clock, "silent"))
    later(100)
    backend.heartbeat(worker(clock, "alive"))
    later(21)

    assert [w.id for w in backend.workers()] == ["alive"]


def test_a_worker_that_leaves_is_forgotten_at_once(backend, clock):
    backend.heartbeat(worker(clock))
    backend.forget_worker("w")
    backend.forget_worker("w")

    assert backend.workers() == []


# -- schedules ------------------------------------------------------------------------


def record(name="nightly", **fields):
    definition = {"kind": "every", "nested": {"payload": b"\x00", "none": None}}
    return ScheduleRecord(**{"name": name, "definition": definition, "dealt": 100.5, **fields})


def test_a_schedule_is_remembered_with_every_field(backend, case, open_backend):
    full = record(paused=True, declared=7.5, fired=99.25, job_id="j")
    assert backend.write_schedule(record("other"))
    assert backend.write_schedule(full)

    again = open_backend() if case.capabilities.persistent else backend
    assert again.schedules() == [replace(full, revision=1), record("other", revision=1)]


def test_only_who_knows_the_latest_revision_writes(backend):
    assert backend.write_schedule(record())
    assert not backend.write_schedule(record())
    assert backend.write_schedule(record(revision=1, dealt=101.0))
    assert not backend.write_schedule(record(revision=1, dealt=102.0), [job()])
    assert not backend.write_schedule(record("unknown", revision=3))

    assert backend.schedules() == [record(revision=2, dealt=101.0)]
    assert backend.counts() == {}


def test_a_schedule_is_written_together_with_its_jobs(backend, consumer, clock):
    later = job(due=clock.now() + 60)
    assert backend.write_schedule(record(), [job(), later])

    assert len(take(consumer)) == 1
    assert backend.find(later.id).state is State.SCHEDULED


@pytest.mark.needs(persistent=True)
def test_a_job_that_cannot_be_stored_leaves_the_schedule_as_it_was(backend):
    backend.write_schedule(record())
    for bad in (job(payload=object()), job(headers={"x": object()})):
        with pytest.raises(Exception):  # noqa: B017
            backend.write_schedule(record(revision=1, dealt=200.0), [job(), bad])

    assert backend.schedules() == [record(revision=1)]
    assert backend.counts() == {}


def test_a_removed_schedule_is_gone(backend):
    backend.write_schedule(record())

    assert backend.remove_schedule("nightly")
    assert not backend.remove_schedule("nightly")
    assert backend.schedules() == []
    assert not backend.write_schedule(record(revision=1))
    assert backend.write_schedule(record())


def test_of_many_who_write_a_revision_one_stores_its_job(open_backend, backend, case):
    backends = [open_backend() for _ in range(3)] if case.capabilities.shared else [backend]
    backend.write_schedule(record())
    start = threading.Barrier(8)

    def race(n):
        start.wait()
        mine = backends[n % len(backends)]
        return [mine.write_schedule(record(revision=r), [job()]) for r in range(1, 21)]

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))

    (last,) = backend.schedules()
    wins = sum(map(sum, won))
    assert last.revision == wins + 1
    assert backend.size("tasks") == wins
