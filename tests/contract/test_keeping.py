"""What every backend promises about jobs that have ended, listings, pauses, retention and closing."""

from __future__ import annotations

import time

import pytest

from taskq.clock import SYSTEM_CLOCK
from taskq.errors import BackendUnavailableError, InvalidArgumentError
from taskq.job import Settlement, State, Verdict, new_id
from tests.contract.acts import (
    blocked_take,
    bury,
    complete,
    failure,
    ids,
    job,
    jobs,
    joined,
    listed,
    outcome,
    settle,
    states,
    take,
    take_one,
)

SETTLED, ALREADY_YOURS = Settlement.SETTLED, Settlement.ALREADY_YOURS


# -- the dead -------------------------------------------------------------------------


def test_a_revived_job_begins_a_new_generation(backend, consumer):
    job_id = bury(backend, consumer)

    assert backend.revive("tasks", [job_id]) == [job_id]
    again = take_one(consumer).job
    assert (again.generation, again.attempts, again.losses) == (1, 0, 0)


def test_a_dead_job_is_revived_once(backend, consumer):
    job_id = bury(backend, consumer)
    backend.revive("tasks", [job_id])

    assert backend.revive("tasks", [job_id]) == []
    assert states(backend) == {"pending": 1}


def test_revive_all_of_a_queue_oldest_first(backend, consume, later):
    consumer = consume("tasks", "other")
    dead = [bury(backend, consumer) for _ in range(3) if later(1) is None]
    bury(backend, consumer, queue="other")

    assert backend.revive("tasks") == dead
    assert states(backend, "tasks", "other") == {"tasks": {"pending": 3}, "other": {"dead": 1}}


def test_revive_by_id_is_oldest_first_and_minds_the_queue(backend, consume, later):
    consumer = consume("tasks", "other")
    first = bury(backend, consumer)
    later(1)
    second = bury(backend, consumer)
    foreign = bury(backend, consumer, queue="other")

    assert backend.revive("tasks", [second, foreign, first, "unknown"]) == [first, second]


def test_revive_for_later(backend, consumer, clock):
    bury(backend, consumer)
    backend.revive("tasks", due=clock.now() + 60)

    assert states(backend) == {"scheduled": 1}


def test_a_revived_job_can_die_again(backend, consumer):
    job_id = bury(backend, consumer)
    backend.revive("tasks")
    settle(consumer, failure(take_one(consumer)))

    (dead,) = listed(backend, "tasks", State.DEAD)
    assert dead.id == job_id
    assert [a.generation for a in dead.history] == [0, 1]


# -- looking --------------------------------------------------------------------------


@pytest.mark.needs(stores=True)
def test_counts_equal_listings_in_every_state(backend, consumer, clock):
    pushed = backend.push([*jobs(6), job(due=clock.now() + 60)])
    reservations = take(consumer, 4)
    complete(consumer, reservations[0])
    settle(consumer, outcome(reservations[1], Verdict.BURY))
    backend.cancel([pushed[4]])

    assert states(backend) == {
        "reserved": 2,
        "completed": 1,
        "dead": 1,
        "cancelled": 1,
        "pending": 1,
        "scheduled": 1,
    }
    for state in State:
        assert len(listed(backend, "tasks", state)) == backend.size("tasks", state)
    assert backend.counts("tasks") == backend.counts()
    assert backend.counts("unknown") == {}


@pytest.mark.needs(priority="strict")
def test_pending_jobs_are_listed_in_the_order_they_would_be_taken(backend, consumer, clock):
    backend.push([job(), job(priority=4), job(due=clock.now() - 5), job(priority=4), job()])
    found = ids(listed(backend, "tasks", State.PENDING, limit=2))

    assert found == ids(take(consumer))


@pytest.mark.needs(scheduled="visible")
def test_scheduled_jobs_are_listed_by_due_time(backend, clock):
    pushed = [job(due=clock.now() + s) for s in (30, 10, 20)]
    backend.push(pushed)

    assert ids(listed(backend, "tasks", State.SCHEDULED, limit=1)) == ids([pushed[1], pushed[2], pushed[0]])


@pytest.mark.needs(stores=True)
def test_ended_jobs_are_listed_oldest_first(backend, consumer, later):
    backend.push(jobs(5))
    reservations = take(consumer)
    for reservation in reversed(reservations):
        later(1)
        complete(consumer, reservation)

    assert ids(listed(backend, "tasks", State.COMPLETED, limit=2)) == ids(reversed(reservations))


def test_a_listing_shows_history_and_changes_nothing(backend, consumer):
    bury(backend, consumer)
    before = backend.counts()
    (dead,) = backend.list_jobs("tasks", State.DEAD).jobs

    assert dead.history[0].error == "ValueError: no"
    assert backend.counts() == before


def test_a_foreign_cursor_is_refused(backend):
    with pytest.raises(InvalidArgumentError):
        backend.list_jobs("tasks", State.DEAD, cursor="nonsense")


# -- purging and forgetting -----------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        State.PENDING,
        State.DEAD,
        *(
            pytest.param(state, marks=pytest.mark.needs(stores=True))
            for state in (State.SCHEDULED, State.COMPLETED, State.CANCELLED)
        ),
    ],
)
def test_purge_touches_one_queue_and_one_state(backend, consume, clock, state):
    for queue in ("a", "b"):
        consumer = consume(queue)
        backend.push(jobs(3, queue=queue))
        reservations = take(consumer, 3)
        complete(consumer, reservations[0])
        settle(consumer, outcome(reservations[1], Verdict.BURY))
        settle(consumer, outcome(reservations[2], Verdict.CANCEL))
        backend.push([job(queue=queue), job(queue=queue, due=clock.now() + 60)])
    before = states(backend, "a", "b")

    assert backend.purge("a", state) == 1
    assert backend.purge("a", state) == 0
    assert states(backend, "a", "b") == {
        "a": {name: n for name, n in before["a"].items() if name != state},
        "b": before["b"],
    }


def test_reserved_jobs_cannot_be_purged(backend):
    with pytest.raises(InvalidArgumentError):
        backend.purge("tasks", State.RESERVED)


def test_purging_many(backend):
    backend.push(jobs(1234))

    assert backend.purge("tasks", State.PENDING) == 1234
    assert backend.counts() == {}


@pytest.mark.needs(stores=True)
def test_forget_deletes_ended_jobs_only(backend, consumer):
    dead, waiting = bury(backend, consumer), *backend.push([job()])

    assert backend.forget([dead, waiting, "unknown"]) == 1
    assert backend.find(dead) is None
    assert states(backend) == {"pending": 1}


# -- pausing --------------------------------------------------------------------------


@pytest.mark.needs(pause="durable")
def test_a_paused_queue_lends_nothing_until_resumed(backend, consume):
    consumer = consume("tasks", "other")
    backend.push([job(), job(queue="other")])
    backend.pause("tasks")
    backend.pause("tasks")

    assert backend.paused() == {"tasks"}
    assert [r.job.queue for r in take(consumer)] == ["other"]
    backend.resume("tasks")
    backend.resume("tasks")
    assert backend.paused() == set()
    assert [r.job.queue for r in take(consumer)] == ["tasks"]


@pytest.mark.needs(pause="durable")
def test_a_paused_queue_still_accepts_and_settles(backend, consumer):
    backend.push([job()])
    reservation = take_one(consumer)
    backend.pause("tasks")
    backend.push([job()])

    assert complete(consumer, reservation) is SETTLED
    assert take(consumer, job_id=None) == []
    assert states(backend) == {"completed": 1, "pending": 1}


# -- retention ------------------------------------------------------------------------


def keep_house(backend):
    """Every step of housekeeping that is due."""
    while backend.housekeep() == 0.0:
        pass


@pytest.mark.needs(stores=True)
def test_ended_jobs_are_forgotten_after_their_time_the_dead_are_not(backend, consumer, later):
    backend.push([job(keep=100), job(keep=200)])
    complete(consumer, *take(consumer))
    backend.cancel(backend.push([job(keep=100)]))
    bury(backend, consumer, keep=0.0)
    later(101)
    keep_house(backend)
    assert states(backend) == {"completed": 1, "dead": 1}
    later(100)
    keep_house(backend)

    assert states(backend) == {"dead": 1}


@pytest.mark.needs(stores=True)
def test_unfinished_jobs_are_never_forgotten(backend, consumer, clock, later):
    backend.push([*jobs(2, keep=0.0), job(keep=0.0, due=clock.now() + 10**6)])
    take_one(consumer)
    later(10**5)
    keep_house(backend)

    assert states(backend) == {"pending": 1, "reserved": 1, "scheduled": 1}


@pytest.mark.needs(stores=True)
def test_more_completed_jobs_than_are_kept_lose_the_oldest(open_backend, consume, later):
    backend = open_backend(max_finished=3)
    consumer = consume(of=backend)
    pushed = backend.push(jobs(5))
    for reservation in take(consumer):
        later(1)
        complete(consumer, reservation)
    keep_house(backend)

    assert ids(listed(backend, "tasks", State.COMPLETED)) == pushed[2:]


@pytest.mark.needs(scheduled="visible")
def test_housekeeping_stages_and_says_when_to_come_again(backend, clock, later):
    backend.push([job(due=clock.now() + 5)])

    assert 0 < backend.housekeep() <= 5
    later(5)
    keep_house(backend)
    assert states(backend) == {"pending": 1}


def test_housekeeping_with_nothing_to_do_wishes_nothing(backend):
    assert backend.housekeep() is None


# -- lasting and closing --------------------------------------------------------------


@pytest.mark.needs(persistent=True)
@pytest.mark.needs(pause="durable")
def test_everything_survives_reopening(open_backend, clock):
    first = open_backend()
    consumer = first.consume({"tasks": 1}, "worker-1")
    first.push([*jobs(3), job(due=clock.now() + 60)])
    reservations = take(consumer, 2)
    complete(consumer, reservations[0])
    first.pause("other")
    counts = first.counts()
    first.close()

    second = open_backend()
    assert second.counts() == counts
    assert second.paused() == {"other"}
    again = second.consume({"tasks": 1}, "worker-1")
    assert complete(again, reservations[1]) is SETTLED
    assert complete(again, reservations[0]) is ALREADY_YOURS


@pytest.mark.needs(shared=True)
def test_two_openings_see_one_another(open_backend, consume):
    here, there = open_backend(), open_backend()
    pushed = here.push([job()])

    assert ids(take(consume(of=there))) == pushed


@pytest.mark.needs(shared=True)
def test_a_push_elsewhere_ends_a_blocked_take_quickly(open_backend, consume):
    here, there = open_backend(clock=SYSTEM_CLOCK), open_backend(clock=SYSTEM_CLOCK)
    consumer = consume(of=there)
    delays = []
    for _ in range(5):
        thread, _ = blocked_take(consumer)
        before = time.monotonic()
        here.push([job()])
        assert joined(thread)
        delays.append(time.monotonic() - before)

    assert sorted(delays)[2] < 0.5, "rung, not found by looking once a second"


def test_close_is_idempotent_and_later_use_is_refused(backend, consumer):
    backend.close()
    backend.close()
    for use in (backend.counts, lambda: backend.push([job()]), lambda: consumer.take(1), backend.housekeep):
        with pytest.raises(BackendUnavailableError, match="closed"):
            use()
    consumer.close()


def test_a_closed_consumer_refuses(backend, consume):
    consumer = consume()
    consumer.close()
    consumer.close()

    with pytest.raises(BackendUnavailableError, match="closed"):
        consumer.take(1)


@pytest.mark.needs(leases="timed")
def test_what_a_closed_consumer_held_comes_back_with_its_lease(backend, consume, later):
    backend.push([job(lease=10)])
    consumer = consume()
    take_one(consumer)
    consumer.close()
    assert backend.reclaim() == ([], [], [])
    later(11)

    assert len(backend.reclaim().suspects) == 1


def test_a_backend_says_where_it_is_and_what_it_can(backend, case):
    assert backend.location
    assert backend.capabilities == case.capabilities
    assert len(new_id()) == 32
