"""What every backend promises about workers that die and jobs that are cancelled."""

from __future__ import annotations

import pytest

from taskq.backend import Cancellation, Note
from taskq.job import Settlement, State, Verdict
from tests.contract.acts import (
    blocked_take,
    complete,
    failure,
    ids,
    job,
    jobs,
    joined,
    outcome,
    settle,
    states,
    take,
    take_one,
)

pytestmark = pytest.mark.needs(stores=True)

SETTLED = Settlement.SETTLED


# -- losing ---------------------------------------------------------------------------


def start(consumer, reservation, at=1.0):
    consumer.note([Note(reservation=reservation, started=at)])
    return reservation


def test_a_loss_that_was_started_is_counted_and_retried_later(backend, consumer, clock, later):
    backend.push([job(lease=10, loss_base=4.0)])
    reservation = start(consumer, take_one(consumer))
    later(11)

    assert backend.reclaim().retried == [reservation.job.id]
    lost = backend.find(reservation.job.id)
    assert (lost.state, lost.attempts, lost.due) == (State.SCHEDULED, 1, clock.now() + 4)
    assert lost.error == "WorkerLost: reservation timed out"
    (attempt,) = lost.history
    assert (attempt.error_type, attempt.number, attempt.delay) == ("WorkerLost", 1, 4.0)
    assert (attempt.worker, attempt.started, attempt.ended) == ("worker-1", 1.0, clock.now())


def test_the_delay_doubles_with_each_loss(backend, consumer, later):
    (job_id,) = backend.push([job(lease=10, loss_base=4.0, loss_cap=10.0)])
    for delay in (4.0, 8.0, 10.0):
        start(consumer, take_one(consumer))
        later(11)
        backend.reclaim()
        assert backend.find(job_id).history[-1].delay == delay
        later(delay)


def test_a_job_that_kills_its_worker_ends_dead(backend, consumer, later):
    (job_id,) = backend.push([job(lease=10, max_retries=1, loss_base=0.0)])
    start(consumer, take_one(consumer))
    later(11)
    assert backend.reclaim().retried == [job_id]
    start(consumer, take_one(consumer))
    later(11)

    assert backend.reclaim().buried == [job_id]
    assert states(backend) == {"dead": 1}


def test_an_unmarked_loss_makes_a_suspect_uncounted_and_at_once(backend, consumer, later):
    pushed = backend.push([job(lease=10, max_retries=0), job()])
    take_one(consumer)
    later(11)

    assert backend.reclaim().suspects == pushed[:1]
    again = take(consumer)
    assert ids(again) == pushed, "it keeps its place"
    assert (again[0].job.attempts, again[0].job.losses) == (0, 1)


def test_the_mark_of_one_run_does_not_count_for_the_next(backend, consumer, later):
    backend.push([job(lease=10, loss_base=0.0)])
    settle(consumer, failure(start(consumer, take_one(consumer))))
    take_one(consumer)
    later(11)

    assert len(backend.reclaim().suspects) == 1


def test_reclaim_takes_only_what_is_over_and_at_most_its_limit(backend, consumer, later):
    backend.push([*jobs(10, lease=10), *jobs(5, lease=100)])
    take(consumer)
    assert backend.reclaim() == ([], [], [])
    later(11)

    assert len(backend.reclaim(limit=4).suspects) == 4
    assert len(backend.reclaim().suspects) == 6
    assert backend.reclaim() == ([], [], [])


def test_five_thousand_orphans_come_back_in_batches(backend, consumer, later):
    for _ in range(5):
        backend.push(jobs(1000, lease=10))
    while take(consumer, 1000):
        pass
    later(11)
    batches = []
    while batch := backend.reclaim().suspects:
        batches.append(len(batch))

    assert batches == [500] * 10
    assert states(backend) == {"pending": 5000}


@pytest.mark.parametrize("hour", [3600.0, -3600.0])
def test_a_stepped_wall_clock_neither_doubles_nor_freezes_a_job(backend, consume, clock, later, hour):
    backend.push([job(lease=30)])
    take_one(consume())
    clock.step(hour)
    assert backend.reclaim() == ([], [], [])
    later(29)
    assert backend.reclaim() == ([], [], [])
    later(2)

    assert len(backend.reclaim().suspects) == 1
    assert len(take(consume(worker="worker-2"))) == 1


@pytest.mark.needs(lease_clock="machine")
def test_leases_of_another_boot_are_over(backend, consumer, clock):
    backend.push([job(lease=1000), job(lease=0)])
    take(consumer)
    clock.reboot()

    assert len(backend.reclaim().suspects) == 2


@pytest.mark.needs(lease_clock="machine")
def test_a_take_after_a_reboot_leaves_the_old_leases_to_be_reclaimed(backend, consumer, clock):
    backend.push([job(lease=1000), job(lease=1000)])
    before = take_one(consumer)
    clock.reboot()
    take_one(consumer)

    assert backend.reclaim().suspects == [before.job.id]


def test_a_lease_of_zero_does_not_end_by_time(backend, consumer, later):
    backend.push([job(lease=0)])
    reservation = take_one(consumer)
    later(10**7)

    assert backend.reclaim() == ([], [], [])
    assert consumer.extend([reservation]) == ([], [])
    assert complete(consumer, reservation) is SETTLED


def test_a_lease_of_zero_ends_with_its_worker(backend, consume):
    backend.push(jobs(2, lease=0))
    gone, alive = consume(worker="gone"), consume(worker="alive")
    lost = take_one(gone)
    take_one(alive)
    gone.close()

    assert backend.reclaim().suspects == [lost.job.id]


# -- cancelling -----------------------------------------------------------------------


def test_cancelling_what_waits_ends_it(backend, consumer, clock):
    pending, scheduled = job(), job(due=clock.now() + 60)
    backend.push([pending, scheduled])

    assert set(backend.cancel(ids([pending, scheduled])).values()) == {Cancellation.CANCELLED}
    assert take(consumer) == []
    assert states(backend) == {"cancelled": 2}


def test_cancel_keeps_the_reason(backend):
    (job_id,) = backend.push([job()])
    backend.cancel([job_id], reason="no longer wanted")

    assert backend.find(job_id).error == "cancelled: no longer wanted"


def test_cancel_answers_for_ended_and_unknown_jobs(backend, consumer):
    (job_id,) = backend.push([job()])
    complete(consumer, take_one(consumer))

    assert backend.cancel([job_id, "unknown"]) == {
        job_id: Cancellation.ENDED,
        "unknown": Cancellation.UNKNOWN,
    }
    assert backend.cancel([]) == {}


def test_cancelling_what_runs_asks_its_worker(backend, consume):
    holder, other = consume(), consume(worker="worker-2")
    backend.push(jobs(2))
    mine = take_one(holder)
    take_one(other)

    assert backend.cancel([mine.job.id]) == {mine.job.id: Cancellation.REQUESTED}
    assert backend.cancel([mine.job.id]) == {mine.job.id: Cancellation.REQUESTED}
    assert holder.cancellations() == [mine.job.id]
    assert holder.extend([mine]).cancelled == [mine.job.id]
    assert other.cancellations() == []


def test_a_cancel_request_ends_a_blocked_take_of_its_worker(live, consume):
    consumer = consume(of=live)
    live.push([job()])
    reservation = take_one(consumer)
    thread, _ = blocked_take(consumer)
    live.cancel([reservation.job.id])

    assert joined(thread, within=5)
    assert consumer.cancellations() == [reservation.job.id]


def test_a_job_that_completes_in_spite_of_a_request_is_completed(backend, consumer):
    backend.push([job()])
    reservation = take_one(consumer)
    backend.cancel([reservation.job.id])

    assert complete(consumer, reservation) is SETTLED
    assert consumer.cancellations() == []
    assert states(backend) == {"completed": 1}


@pytest.mark.parametrize("verdict", [Verdict.RETRY, Verdict.SNOOZE, Verdict.RELEASE, Verdict.CANCEL])
def test_a_job_that_was_to_be_cancelled_does_not_run_again(backend, consumer, verdict):
    backend.push([job()])
    reservation = take_one(consumer)
    backend.cancel([reservation.job.id], reason="enough")

    assert settle(consumer, outcome(reservation, verdict)) is SETTLED
    assert backend.find(reservation.job.id).state is State.CANCELLED
    assert consumer.cancellations() == []


def test_a_lost_or_released_job_that_was_to_be_cancelled_ends_cancelled(backend, consumer, later):
    backend.push(jobs(2, lease=10))
    lost, released = take(consumer)
    backend.cancel(ids([lost, released]))
    consumer.release([released])
    later(11)

    assert backend.reclaim() == ([], [], [])
    assert states(backend) == {"cancelled": 2}
