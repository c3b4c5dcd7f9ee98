"""What every backend promises about what runs decided, and about jobs while they run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from taskq.backend import Note
from taskq.job import KEPT_ATTEMPTS, Settlement, State, Verdict
from tests.contract.acts import (
    complete,
    failure,
    ids,
    job,
    jobs,
    listed,
    outcome,
    settle,
    states,
    take,
    take_one,
)

SETTLED, ALREADY_YOURS, LOST = Settlement.SETTLED, Settlement.ALREADY_YOURS, Settlement.LOST


# -- settling -------------------------------------------------------------------------


@pytest.mark.needs(stores=True)
def test_a_completed_job_keeps_its_result_and_never_returns(backend, consumer, later):
    backend.push([job(lease=10)])
    reservation = take_one(consumer)

    assert settle(consumer, outcome(reservation, result=b"42")) is SETTLED
    later(1000)
    backend.reclaim()
    assert take(consumer) == []
    done = backend.find(reservation.job.id)
    assert (done.state, done.result, done.worker, done.attempts) == (State.COMPLETED, b"42", None, 0)


@pytest.mark.needs(stores=True)
def test_ended_says_when(backend, consumer, clock, later):
    backend.push([job()])
    later(5)
    reservation = take_one(consumer)
    complete(consumer, reservation)

    assert backend.find(reservation.job.id).ended == clock.now()


def test_keep_zero_deletes_at_completion(backend, consumer):
    backend.push(jobs(3, keep=0.0))

    assert set(complete(consumer, *take(consumer))) == {SETTLED}
    assert backend.counts() == {}


@pytest.mark.parametrize("keep", [0.0, 60.0])
def test_settling_twice_is_harmless(backend, consumer, keep):
    backend.push(jobs(2, keep=keep))
    outcomes = [outcome(r, result=b"first") for r in take(consumer)]
    consumer.settle(outcomes)
    before = backend.counts()

    assert consumer.settle([replace(o, result=b"second") for o in outcomes]) == [ALREADY_YOURS] * 2
    assert backend.counts() == before


def test_one_batch_may_name_a_job_twice(backend, consumer):
    backend.push([job()])
    reservation = take_one(consumer)

    assert complete(consumer, reservation, reservation) == [SETTLED, ALREADY_YOURS]
    assert states(backend) == {"completed": 1}


def test_repeating_a_retry_changes_nothing(backend, consumer):
    backend.push([job()])
    retry = failure(take_one(consumer))

    assert settle(consumer, retry) is SETTLED
    assert settle(consumer, retry) is ALREADY_YOURS
    assert [r.job.attempts for r in take(consumer)] == [1]


@pytest.mark.needs(leases="timed")
def test_settling_after_a_lost_lease_reports_it_and_changes_nothing(backend, consume, later):
    slow, quick = consume(), consume(worker="worker-2")
    backend.push([job(lease=10)])
    stale = take_one(slow)
    later(11)
    backend.reclaim()
    fresh = take_one(quick)

    assert settle(slow, outcome(stale, result=b"stale")) is LOST
    assert settle(quick, outcome(fresh, result=b"fresh")) is SETTLED
    assert settle(slow, outcome(stale, result=b"stale")) is LOST
    assert backend.find(fresh.job.id).result == b"fresh"


@pytest.mark.needs(leases="timed")
def test_a_settle_after_reclaim_is_lost_even_if_nobody_took_the_job(backend, consumer, later):
    backend.push([job(lease=10)])
    reservation = take_one(consumer)
    later(11)
    backend.reclaim()

    assert complete(consumer, reservation) is LOST


@pytest.mark.needs(leases="timed")
def test_a_job_lost_to_one_who_deleted_it_is_lost(backend, consume, later):
    slow, quick = consume(), consume(worker="worker-2")
    backend.push([job(lease=10, keep=0.0)])
    stale = take_one(slow)
    later(11)
    backend.reclaim()
    complete(quick, take_one(quick))

    assert complete(slow, stale) is LOST


@pytest.mark.needs(leases="timed")
def test_a_late_settle_counts_if_nobody_has_reclaimed(backend, consumer, later):
    backend.push([job(lease=10)])
    reservation = take_one(consumer)
    later(11)

    assert complete(consumer, reservation) is SETTLED


@pytest.mark.needs(leases="timed")
def test_a_batch_answers_one_by_one(backend, consume, later):
    consumer, other = consume(), consume(worker="worker-2")
    backend.push([job(lease=10), job(lease=1000), job(lease=1000)])
    lost, held, done = take(consumer)
    complete(consumer, done)
    later(11)
    backend.reclaim()
    take_one(other)

    assert complete(consumer, lost, held, done) == [LOST, SETTLED, ALREADY_YOURS]


def test_a_retry_is_counted_and_comes_back_when_due(backend, consumer, clock, later):
    backend.push([job(max_retries=3)])
    settle(consumer, failure(take_one(consumer), due=clock.now() + 1.0))

    assert states(backend) == {"scheduled": 1}
    assert take(consumer) == []
    later(1.0)
    (again,) = (r.job for r in take(consumer, timeout=5.0))
    assert (again.attempts, again.error) == (1, "ValueError: no")


def test_a_retry_at_once_is_pending(backend, consumer):
    backend.push([job()])
    settle(consumer, failure(take_one(consumer)))

    assert states(backend) == {"pending": 1}


def test_an_uncounted_retry_costs_no_attempt(backend, consumer):
    backend.push([job(max_retries=0)])
    settle(consumer, failure(take_one(consumer), counted=False))

    assert take_one(consumer).job.attempts == 0


def test_retries_used_up_means_dead(backend, consumer):
    (job_id,) = backend.push([job(max_retries=2)])
    for _ in range(3):
        settle(consumer, failure(take_one(consumer)))

    (dead,) = listed(backend, "tasks", State.DEAD)
    assert take(consumer) == []
    assert (dead.id, dead.state, dead.attempts, dead.error) == (job_id, State.DEAD, 3, "ValueError: no")


@pytest.mark.needs(stores=True)
def test_a_dead_job_keeps_what_its_last_run_left(backend, consumer):
    (job_id,) = backend.push([job(max_retries=0)])
    settle(consumer, failure(take_one(consumer), result=b"partial"))

    assert backend.find(job_id).result == b"partial"


def test_max_retries_none_never_dies(backend, consumer):
    backend.push([job(max_retries=None)])
    for _ in range(30):
        settle(consumer, failure(take_one(consumer)))

    assert states(backend) == {"pending": 1}


def test_a_retry_may_move_to_another_queue_and_priority(backend, consume):
    consumer = consume("tasks", "slow")
    backend.push([job()])
    settle(consumer, failure(take_one(consumer), queue="slow", priority=7))

    assert states(backend, "tasks", "slow") == {"tasks": {}, "slow": {"pending": 1}}
    assert take_one(consumer).job.priority == 7


def test_a_snooze_is_uncounted(backend, consumer, clock, later):
    backend.push([job(max_retries=0)])
    settle(consumer, outcome(take_one(consumer), Verdict.SNOOZE, due=clock.now() + 1.0))

    assert take(consumer) == []
    later(1.0)
    assert [r.job.attempts for r in take(consumer, timeout=5.0)] == [0]


def test_a_released_verdict_comes_back_uncounted(backend, consumer):
    backend.push([job(max_retries=0)])
    settle(consumer, outcome(take_one(consumer), Verdict.RELEASE))

    assert take_one(consumer).job.attempts == 0


def test_bury_goes_to_the_dead_letters_at_once(backend, consumer):
    (job_id,) = backend.push([job(max_retries=9)])
    settle(consumer, outcome(take_one(consumer), Verdict.BURY, error="rejected: bad address"))

    (dead,) = listed(backend, "tasks", State.DEAD)
    assert dead.id == job_id
    assert (dead.state, dead.error, dead.attempts) == (State.DEAD, "rejected: bad address", 0)


@pytest.mark.needs(stores=True)
def test_cancel_verdict_ends_cancelled(backend, consumer):
    (job_id,) = backend.push([job()])
    settle(consumer, outcome(take_one(consumer), Verdict.CANCEL, error="not needed"))

    assert backend.find(job_id).state is State.CANCELLED


def test_bad_ends_are_remembered_the_latest_few(backend, consumer):
    backend.push([job(max_retries=KEPT_ATTEMPTS + 4)])
    for _ in range(KEPT_ATTEMPTS + 5):
        reservation = take_one(consumer)
        assert reservation.job.history == ()
        settle(consumer, failure(reservation))

    (dead,) = listed(backend, "tasks", State.DEAD)
    assert [a.number for a in dead.history] == list(range(6, KEPT_ATTEMPTS + 6))
    assert (dead.history[0].error, dead.history[0].traceback) == ("ValueError: no", "Traceback: no")


def test_first_started_is_remembered(backend, consumer):
    backend.push([job()])
    settle(consumer, failure(take_one(consumer)))

    assert take_one(consumer).job.first_started == 1.0


def test_pushes_are_stored_with_the_outcome(backend, consumer):
    backend.push([job()])
    reservation = take_one(consumer)
    children = tuple(jobs(3, queue="next"))
    settle(consumer, outcome(reservation, pushes=children))

    assert states(backend, "tasks", "next") == {"tasks": {"completed": 1}, "next": {"pending": 3}}


@pytest.mark.needs(leases="timed")
def test_pushes_of_an_outcome_that_does_not_settle_are_not_stored(backend, consumer, later):
    backend.push([job(lease=10)])
    reservation = take_one(consumer)
    later(11)
    backend.reclaim()
    settle(consumer, outcome(reservation, pushes=(job(queue="next"),)))

    assert states(backend, "tasks", "next") == {"tasks": {"pending": 1}, "next": {}}


def test_exchange_settles_and_takes(backend, consumer):
    backend.push(jobs(3))
    first = take(consumer, 2)
    settlements, taken = consumer.exchange([outcome(r) for r in first], 5)

    assert settlements == [SETTLED, SETTLED]
    assert len(taken.reservations) == 1
    assert consumer.exchange([], 5)[1].reservations == []
    assert consumer.exchange([outcome(r) for r in taken.reservations], 0)[1].reservations == []
    assert states(backend) == {"completed": 3}


# -- giving back, prolonging, marking -------------------------------------------------


@pytest.mark.needs(order="fifo")
def test_released_jobs_return_uncounted_to_their_place(backend, consumer):
    pushed = backend.push(jobs(4, max_retries=0))
    consumer.release(take(consumer, 2))
    again = take(consumer, 4)

    assert ids(again) == pushed
    assert {(r.job.attempts, r.job.losses, r.job.deliveries) for r in again} == {(0, 0, 1)}


@pytest.mark.needs(leases="timed")
def test_releasing_what_was_lost_or_settled_changes_nothing(backend, consumer, later):
    backend.push([job(lease=10), job()])
    lost, done = take(consumer)
    complete(consumer, done)
    later(11)
    backend.reclaim()
    consumer.release([lost, done])

    assert states(backend) == {"pending": 1, "completed": 1}


@pytest.mark.needs(leases="timed")
def test_extend_prolongs_each_jobs_own_lease(backend, consumer, later):
    backend.push([job(lease=10), job(lease=100)])
    reservations = take(consumer)
    later(9)

    assert consumer.extend(reservations) == ([], [])
    later(9)
    assert backend.reclaim() == ([], [], [])
    later(2)
    assert backend.reclaim().suspects == [reservations[0].job.id]


@pytest.mark.needs(leases="timed")
def test_extend_by_seconds(backend, consumer, later):
    backend.push([job(lease=10)])
    consumer.extend(take(consumer), 50)
    later(49)

    assert backend.reclaim() == ([], [], [])


@pytest.mark.needs(leases="timed")
def test_extend_by_zero_seconds_ends_the_lease(backend, consumer):
    backend.push([job(lease=0), job(lease=50)])
    consumer.extend(take(consumer), 0)

    assert len(backend.reclaim().suspects) == 2


@pytest.mark.needs(leases="timed")
def test_extend_names_what_was_lost(backend, consumer, later):
    backend.push([job(lease=10)])
    reservations = take(consumer)
    later(11)
    backend.reclaim()

    assert consumer.extend(reservations) == (ids(reservations), [])


@pytest.mark.needs(leases="timed")
def test_note_marks_only_what_is_held(backend, consumer, clock, later):
    backend.push([job(lease=10), job(lease=100)])
    lost, held = take(consumer)
    later(11)
    backend.reclaim()
    notes = [Note(reservation=r, started=clock.now(), progress=b"half") for r in (lost, held)]

    assert consumer.note(notes) == [lost.job.id]
    assert backend.find(held.job.id).first_started == clock.now()
    assert backend.find(lost.job.id).first_started is None


@pytest.mark.needs(stores=True)
def test_a_later_note_does_not_move_first_started(backend, consumer):
    backend.push([job()])
    reservation = take_one(consumer)
    consumer.note([Note(reservation=reservation, started=5.0)])
    consumer.note([Note(reservation=reservation, started=9.0)])

    assert backend.find(reservation.job.id).first_started == 5.0
