"""What every store promises about unique keys."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from taskq.backend import Cancellation, Note
from taskq.errors import DuplicateJobError
from taskq.job import State, Unique, Verdict
from taskq.store import ScheduleRecord
from tests.contract.acts import complete, failure, job, outcome, settle, states, take, take_one

pytestmark = pytest.mark.needs(stores=True)


def unique(key="k", **fields):
    """A job with a key, told from others by its payload."""
    how = {name: fields.pop(name) for name in ("until", "period", "conflict", "latest") if name in fields}
    return job(unique=Unique(key, **how), **fields)


def push(backend, pushed):
    """Push one job; returns the id that stands for it."""
    (standing,) = backend.push([pushed])
    return standing


def is_held(backend, key="k", **fields):
    """Whether a push of another job with the key meets a holder. A free key is taken by that, and let go again."""
    probe = unique(key, due=9e9, **fields)
    if push(backend, probe) != probe.id:
        return True
    assert backend.cancel([probe.id])[probe.id] is Cancellation.CANCELLED
    return False


# -- who holds it ---------------------------------------------------------------------


def test_the_key_comes_back_with_the_job(backend, consumer):
    pushed = unique(until="started", period=2.5, conflict="replace", latest=9e9)
    push(backend, pushed)

    assert backend.find(pushed.id).unique == pushed.unique
    assert take_one(consumer).job.unique == pushed.unique


def test_a_second_push_gets_the_first_job(backend):
    first = push(backend, unique())

    assert push(backend, unique()) == first
    assert states(backend) == {"pending": 1}


def test_other_keys_and_jobs_without_one_are_not_concerned(backend):
    pushed = [unique("a"), unique("b"), job(), job()]

    assert backend.push(pushed) == [one.id for one in pushed]


def test_one_push_may_name_a_key_twice(backend):
    first, second = unique(), unique()

    assert backend.push([first, job(), second])[::2] == [first.id, first.id]
    assert states(backend) == {"pending": 2}


def test_a_repeated_push_is_no_conflict_with_itself(backend):
    for conflict in ("return", "raise", "replace", "reschedule"):
        pushed = unique(conflict, conflict=conflict)

        assert [push(backend, pushed), push(backend, pushed)] == [pushed.id, pushed.id]
    assert states(backend) == {"pending": 4}


def test_a_key_is_one_for_all_queues(backend):
    first = push(backend, unique(queue="a"))

    assert push(backend, unique(queue="b")) == first


@pytest.mark.needs(persistent=True)
def test_a_key_is_held_over_a_restart(backend, open_backend):
    first = push(backend, unique())
    backend.close()

    assert push(open_backend(), unique()) == first


@pytest.mark.needs(shared=True)
def test_a_key_is_held_for_other_processes(backend, open_backend):
    first = push(backend, unique())

    assert push(open_backend(), unique()) == first


# -- until when -----------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.0, 60.0])
def test_it_is_held_while_the_job_waits_and_runs_and_free_once_it_completed(backend, consumer, keep):
    push(backend, unique(keep=keep))
    reservation = take_one(consumer)
    assert is_held(backend)

    complete(consumer, reservation)

    assert not is_held(backend)


def test_it_is_held_while_a_retry_waits_and_free_once_the_job_is_dead(backend, consumer, clock, later):
    push(backend, unique(max_retries=1))
    settle(consumer, failure(take_one(consumer), due=clock.now() + 5))
    assert is_held(backend)
    later(5)
    settle(consumer, failure(take_one(consumer)))

    assert states(backend)["dead"] == 1
    assert not is_held(backend)


def test_a_snoozed_or_released_job_holds_it(backend, consumer, clock):
    push(backend, unique())
    settle(consumer, outcome(take_one(consumer), Verdict.SNOOZE, due=clock.now() + 5))
    assert is_held(backend)


@pytest.mark.parametrize("marked", [False, True], ids=["suspect", "blamed"])
def test_a_lost_job_holds_it_until_it_has_ended(backend, consumer, clock, later, marked):
    push(backend, unique(max_retries=0, lease=10.0))
    reservation = take_one(consumer)
    if marked:
        consumer.note([Note(reservation=reservation, started=clock.now())])
    later(11)
    assert is_held(backend), "nobody knows yet that the worker is gone"

    backend.reclaim()

    assert is_held(backend) is not marked


def test_a_rejected_or_undecodable_job_frees_it(backend, consumer):
    push(backend, unique())
    settle(consumer, outcome(take_one(consumer), Verdict.BURY, error="DecodeError"))

    assert not is_held(backend)


@pytest.mark.parametrize("running", [False, True])
def test_a_cancelled_job_frees_it(backend, consumer, running):
    pushed = push(backend, unique())
    if running:
        reservation = take_one(consumer)
        backend.cancel([pushed])
        assert is_held(backend)
        settle(consumer, outcome(reservation, Verdict.CANCEL))
    else:
        backend.cancel([pushed])

    assert not is_held(backend)


@pytest.mark.parametrize("found_by", ["take", "housekeep"])
def test_an_expired_job_frees_it(backend, consumer, clock, later, found_by):
    push(backend, unique(expires=clock.now() + 5))
    later(6)
    if found_by == "take":
        assert take(consumer) == []
    else:
        backend.housekeep()

    assert not is_held(backend)


@pytest.mark.parametrize("state", [State.PENDING, State.SCHEDULED])
def test_a_purged_job_frees_it(backend, clock, state):
    push(backend, unique(due=clock.now() + 60 if state is State.SCHEDULED else 0.0, period=1000.0))
    assert backend.purge("tasks", state) == 1

    assert not is_held(backend)


def test_until_started_it_is_free_once_the_job_was_lent(backend, consumer, clock):
    push(backend, unique(until="started"))
    assert is_held(backend)
    reservation = take_one(consumer)
    assert not is_held(backend)

    settle(consumer, failure(reservation, due=clock.now() + 5))
    assert not is_held(backend), "a retry is no first start"


@pytest.mark.parametrize("keep", [0.0, 5.0, 1000.0])
@pytest.mark.parametrize("until", ["ended", "started", "period"])
def test_a_period_is_held_beyond_a_completed_job(backend, consumer, later, until, keep):
    push(backend, unique(until=until, period=60.0, keep=keep))
    complete(consumer, take_one(consumer))
    later(10)
    backend.housekeep()
    assert is_held(backend)
    later(51)

    assert not is_held(backend)


@pytest.mark.parametrize("until", ["ended", "period"])
def test_a_period_is_over_while_the_job_waits(backend, later, until):
    push(backend, unique(until=until, period=60.0))
    later(61)
    backend.housekeep()

    assert is_held(backend) is (until == "ended")


def test_no_period_outlives_a_job_that_did_not_complete(backend, consumer):
    for n, verdict in enumerate((Verdict.BURY, Verdict.CANCEL)):
        push(backend, unique(str(n), until="period", period=1000.0))
        settle(consumer, outcome(take_one(consumer), verdict))
        assert not is_held(backend, str(n))


def test_a_key_that_its_job_held_beyond_the_period_is_free_at_its_end(backend, consumer, later):
    push(backend, unique(period=5.0, keep=0.0))
    reservation = take_one(consumer)
    later(6)
    backend.housekeep()
    assert is_held(backend)
    complete(consumer, reservation)

    assert not is_held(backend)


# -- what a conflict does -------------------------------------------------------------


def test_raise_names_the_holder_and_stores_nothing(backend):
    first = push(backend, unique())
    with pytest.raises(DuplicateJobError) as caught:
        backend.push([job(), unique("other"), unique(conflict="raise")])

    assert caught.value.job_id == first
    assert states(backend) == {"pending": 1}
    assert not is_held(backend, "other")


def test_raise_notices_a_key_named_twice_in_one_push(backend):
    with pytest.raises(DuplicateJobError):
        backend.push([unique(conflict="raise"), unique(conflict="raise")])

    assert states(backend) == {}


def test_replace_cancels_a_job_that_waits(backend, consumer):
    first = push(backend, unique(payload=b"old"))
    second = unique(payload=b"new", conflict="replace")

    assert push(backend, second) == second.id
    assert backend.find(first).state is State.CANCELLED
    assert backend.find(first).error == f"cancelled: replaced by {second.id}"
    assert take_one(consumer).job.payload == b"new"
    assert push(backend, unique()) == second.id


def test_replace_leaves_a_running_job_alone(backend, consumer):
    first = push(backend, unique())
    take_one(consumer)

    assert push(backend, unique(conflict="replace")) == first


def test_reschedule_moves_the_job_and_takes_the_new_arguments(backend, consumer, clock, later):
    first = push(backend, unique(due=clock.now() + 10, payload=b"old"))
    later(5)
    again = unique(due=clock.now() + 10, payload=b"new", expires=clock.now() + 900, conflict="reschedule")

    assert push(backend, again) == first
    later(6)
    assert take(consumer) == []
    later(4)
    taken = take_one(consumer).job
    assert (taken.id, taken.payload, taken.expires) == (first, b"new", again.expires)
    assert states(backend) == {"reserved": 1}


def test_reschedule_may_make_it_due_at_once(backend, consumer, clock):
    first = push(backend, unique(due=clock.now() + 10))
    push(backend, unique(conflict="reschedule"))

    assert take_one(consumer).job.id == first


def test_reschedule_does_not_put_off_what_is_due_already(backend, consumer, clock, later):
    first = push(backend, unique(due=clock.now() + 10))
    second = push(backend, unique("2"))
    later(10)
    for key in ("k", "2"):
        push(backend, unique(key, due=clock.now() + 10, payload=b"new", conflict="reschedule"))

    assert {(r.job.id, r.job.payload) for r in take(consumer)} == {(first, b"new"), (second, b"new")}


def test_reschedule_never_goes_beyond_the_latest_time_of_the_first(backend, clock, later):
    start = clock.now()
    first = push(backend, unique(due=start + 10, latest=start + 25))
    for _ in range(4):
        later(5)
        push(backend, unique(due=clock.now() + 10, latest=clock.now() + 25, conflict="reschedule"))

    assert backend.find(first).due == start + 25


def test_reschedule_leaves_a_running_job_alone(backend, consumer):
    first = push(backend, unique(payload=b"old"))
    take_one(consumer)

    assert push(backend, unique(conflict="reschedule", payload=b"new")) == first
    assert backend.find(first).payload == b"old"


def test_a_conflict_inside_a_settle_fails_nobody(backend, consumer):
    first = push(backend, unique())
    running = take_one(consumer)
    backend.push([job(), job()])
    a, b = take(consumer)
    settle(
        consumer,
        outcome(a, pushes=(unique(conflict="raise"), unique("fresh"))),
        outcome(b, pushes=(job(),)),
    )

    assert states(backend) == {"completed": 2, "reserved": 1, "pending": 2}
    assert running.job.id == first


def test_a_conflict_of_a_scheduled_job_leaves_the_schedule_written(backend):
    first = push(backend, unique())
    record = ScheduleRecord(name="s", definition={}, dealt=1.0)

    assert backend.write_schedule(record, [unique(conflict="raise")])
    assert states(backend) == {"pending": 1}
    assert backend.find(first) is not None


# -- second lives ---------------------------------------------------------------------


def buried(backend, consumer, **fields):
    job_id = push(backend, unique(max_retries=0, **fields))
    settle(consumer, failure(take_one(consumer)))
    return job_id


def test_a_revived_job_holds_its_key_again(backend, consumer):
    dead = buried(backend, consumer)
    assert backend.revive("tasks") == [dead]

    assert push(backend, unique()) == dead


def test_a_dead_job_whose_key_another_holds_stays_dead(backend, consumer):
    dead = buried(backend, consumer)
    others = [buried(backend, consumer, key=key) for key in "ab"]
    holder = push(backend, unique())

    assert backend.revive("tasks", [dead]) == []
    assert backend.revive("tasks") == others
    assert backend.find(dead).state is State.DEAD
    backend.cancel([holder])
    assert backend.revive("tasks") == [dead]


def test_of_two_dead_jobs_with_one_key_one_is_revived(backend, consumer):
    first, second = buried(backend, consumer), buried(backend, consumer)

    assert backend.revive("tasks") == [first]
    assert backend.find(second).state is State.DEAD


# -- races ----------------------------------------------------------------------------


@pytest.mark.parametrize("conflict", ["return", "raise", "replace", "reschedule"])
def test_of_many_who_push_a_key_at_once_one_job_waits(open_backend, backend, case, conflict):
    backends = [open_backend() for _ in range(3)] if case.capabilities.shared else [backend]
    start = threading.Barrier(8)

    def race(n):
        start.wait()
        for _ in range(10):
            try:
                push(backends[n % len(backends)], unique(conflict=conflict))
            except DuplicateJobError:
                assert conflict == "raise"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(race, range(8)))

    assert states(backend)["pending"] == 1


def test_a_key_goes_from_hand_to_hand_without_two_at_once(open_backend, backend, case, consume):
    """Pushers and workers at once: no two jobs of the key are ever lent at the same time."""
    backends = [open_backend() for _ in range(2)] if case.capabilities.shared else [backend]
    lent, most, done = [], [], threading.Event()
    lock = threading.Lock()

    def work(n):
        consumer = consume(of=backends[n % len(backends)], worker=f"worker-{n}")
        while not done.is_set():
            for reservation in take(consumer, 1, timeout=0.05):
                with lock:
                    lent.append(reservation)
                    most.append(len(lent))
                with lock:
                    lent.remove(reservation)
                settle(consumer, outcome(reservation))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for worker in workers:
        worker.start()
    stored = [pushed.id == push(backends[0], pushed) for pushed in (unique() for _ in range(300))]
    done.set()
    for worker in workers:
        worker.join()

    assert sum(stored) >= 1
    assert max(most, default=1) == 1
    counts = states(backend)
    assert counts.get("pending", 0) + counts.get("completed", 0) == sum(stored)


def test_fields_of_the_holder_survive_a_key(backend, consumer):
    """The key costs a job none of its other fields."""
    pushed = unique(priority=3, headers={"a": 1}, lease=5.0, keep=7.0)
    push(backend, pushed)
    taken = take_one(consumer).job

    assert replace(taken, state=State.PENDING, worker=None, deliveries=0) == replace(
        pushed, due=taken.due, created=taken.created
    )
