"""What every backend promises about pushing and taking."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from taskq.clock import SYSTEM_CLOCK
from taskq.errors import BackendUnavailableError, InvalidArgumentError
from taskq.job import Settlement, State
from tests.conftest import eventually
from tests.contract.acts import (
    blocked_take,
    complete,
    failure,
    ids,
    job,
    jobs,
    joined,
    settle,
    states,
    take,
    take_one,
)

SETTLED = Settlement.SETTLED


# -- pushing --------------------------------------------------------------------------


def test_a_pushed_job_comes_back_with_every_field(backend, consumer, clock):
    pushed = job(
        task="mail.send",
        priority=3,
        due=clock.now() - 5.0,
        expires=clock.now() + 60.5,
        lease=12.5,
        max_retries=None,
        loss_base=0.25,
        loss_cap=9.0,
        keep=77.0,
        headers={"trace": "ü", "n": [1, {"deep": b"\x00"}], 7: None},
        created=clock.now() - 9.0,
    )
    backend.push([pushed])

    taken = take_one(consumer).job

    assert replace(pushed, state=State.RESERVED, deliveries=1, worker="worker-1") == taken


@pytest.mark.parametrize("payload", [b"", bytes(range(256)), "naïve 日本".encode(), b"x" * (1 << 20)])
def test_payloads_come_back_byte_for_byte(backend, consumer, payload):
    backend.push([job(payload=payload)])

    assert payload == take_one(consumer).job.payload


def test_a_push_answers_with_ids_in_order(backend):
    pushed = jobs(5)

    assert ids(pushed) == backend.push(pushed)
    assert backend.push([]) == []


@pytest.mark.needs(stores=True)
def test_pushing_an_id_again_changes_nothing(backend, consumer):
    first = job(payload=b"first")
    backend.push([first])

    assert backend.push([replace(first, payload=b"second"), job()])[0] == first.id
    assert states(backend) == {"pending": 2}
    assert take_one(consumer).job.payload == b"first"


@pytest.mark.needs(stores=True)
def test_pushing_the_id_of_an_ended_job_changes_nothing(backend, consumer):
    pushed = job()
    backend.push([pushed])
    complete(consumer, take_one(consumer))

    backend.push([pushed])

    assert states(backend) == {"completed": 1}


@pytest.mark.needs(stores=True)
def test_one_push_may_name_an_id_twice(backend):
    pushed = job()
    backend.push([pushed, pushed])

    assert states(backend) == {"pending": 1}


@pytest.mark.needs(scheduled="visible")
def test_a_job_due_in_the_future_is_scheduled(backend, consumer, clock):
    backend.push([job(due=clock.now() + 60)])

    assert states(backend) == {"scheduled": 1}
    assert consumer.take(1) == ([], clock.now() + 60)


def test_due_zero_means_now(backend, consumer, clock):
    backend.push([job()])

    assert take_one(consumer).job.due == clock.now()


# -- taking ---------------------------------------------------------------------------


def test_an_empty_take_returns_at_once(consumer):
    assert consumer.take(1) == ([], None)


def test_an_empty_take_returns_at_its_timeout_and_not_before(consumer):
    before = time.monotonic()

    assert take(consumer, 1, timeout=0.1) == []
    assert 0.1 <= time.monotonic() - before < 5


def test_never_more_than_the_limit(backend, consumer):
    backend.push(jobs(10))

    assert len(take(consumer, 3)) == 3
    assert len(take(consumer, 0)) == 0
    assert len(take(consumer, 100)) == 7


def test_first_in_first_out(backend, consumer):
    pushed = [job_id for _ in range(3) for job_id in backend.push(jobs(2))]

    assert pushed == ids(take(consumer))


@pytest.mark.needs(priority="strict")
def test_higher_priority_first_then_due_then_first_in(backend, consumer, clock):
    now = clock.now()
    old, low, high, middle = job(due=now - 9), job(), job(priority=9), job(priority=5, due=now - 1)
    late_middle = job(priority=5)
    backend.push([low, late_middle, high, old, middle])

    assert ids([high, middle, late_middle, old, low]) == ids(take(consumer))


@pytest.mark.needs(priority="strict")
def test_high_priority_in_the_future_does_not_stand_in_the_way(backend, consumer, clock):
    backend.push([*jobs(300, priority=9, due=clock.now() + 60), job()])

    assert len(take(consumer)) == 1


def test_a_scheduled_job_is_lent_when_it_is_due_and_not_before(backend, consumer, clock, later):
    backend.push([job(due=clock.now() + 1.0)])
    later(0.5)
    assert take(consumer) == []
    later(0.5)
    assert len(take(consumer, timeout=5.0)) == 1
    assert states(backend) == {"reserved": 1}


def test_many_jobs_due_at_once_all_come(backend, consumer, clock, later):
    backend.push(jobs(1000, due=clock.now() + 1.0))
    later(1.0)
    found = []
    while len(found) < 1000 and (reservations := take(consumer, 64, timeout=5.0)):
        found += reservations

    assert len(set(ids(found))) == 1000


@pytest.mark.needs(leases="timed")
def test_a_reserved_job_is_not_lent_again_while_its_lease_lives(backend, consume, later):
    backend.push([job(lease=30)])
    take_one(consume())
    later(29)
    backend.reclaim()

    assert take(consume(worker="worker-2")) == []


def test_queues_do_not_mix(backend, consume):
    backend.push([job(queue="a"), job(queue="b")])

    assert [r.job.queue for r in take(consume("a"))] == ["a"]
    assert states(backend, "a", "b") == {"a": {"reserved": 1}, "b": {"pending": 1}}


def test_queue_names_are_free_text(backend, consume):
    name = 'naïve "queue"; DROP/日本'
    backend.push([job(queue=name)])

    assert len(take(consume(name))) == 1


def test_queues_are_served_by_weight(backend, consume):
    consumer = consume(weights={"a": 3, "b": 1})
    backend.push([*jobs(100, queue="a"), *jobs(100, queue="b")])

    batch = [r.job.queue for r in take(consumer, 40)]
    singles = [take_one(consumer).job.queue for _ in range(40)]

    assert batch.count("a") == singles.count("a") == 30
    assert batch[:8].count("b") == 2, "queues take turns within a batch"


def test_no_share_is_left_unused(backend, consume):
    consumer = consume(weights={"a": 1, "b": 9})
    backend.push(jobs(10, queue="a"))

    assert len(take(consumer, 10)) == 10


def test_a_consumer_needs_a_queue_of_positive_weight(backend):
    for queues in ({}, {"a": 0}):
        with pytest.raises(InvalidArgumentError):
            backend.consume(queues, "worker-1")


def test_tokens_grow_with_every_take(backend, consume):
    backend.push(jobs(4))
    tokens = [take_one(consume(worker=f"worker-{n}")).token for n in range(4)]

    assert tokens == sorted(set(tokens))


@pytest.mark.needs(stores=True)
def test_a_job_can_be_taken_by_its_id(backend, consumer):
    first, second = backend.push(jobs(2))

    assert ids(take(consumer, 1, job_id=second)) == [second]
    assert take(consumer, 1, job_id=second) == []
    assert take(consumer, 1, job_id="unknown") == []
    assert ids(take(consumer, 1, job_id=first)) == [first]


@pytest.mark.needs(stores=True)
def test_a_job_of_another_queue_is_not_taken_by_its_id(backend, consumer):
    (job_id,) = backend.push([job(queue="other")])

    assert take(consumer, 1, job_id=job_id) == []


def test_deliveries_count_starts(backend, consumer):
    backend.push([job()])
    for n in (1, 2, 3):
        reservation = take_one(consumer)
        assert reservation.job.deliveries == n
        settle(consumer, failure(reservation))


# -- waiting to take ------------------------------------------------------------------


def test_a_push_ends_a_blocked_take(live, consume):
    thread, found = blocked_take(consume(of=live))
    pushed = live.push([job()])

    assert joined(thread)
    assert ids(found[0].reservations) == pushed


def test_every_blocked_take_gets_one_of_as_many_jobs(live, consume):
    waiting = [blocked_take(consume(of=live, worker=f"worker-{n}")) for n in range(5)]
    live.push(jobs(5))

    assert all(joined(thread) for thread, _ in waiting)
    assert len({i for _, found in waiting for i in ids(found[0].reservations)}) == 5


def test_a_blocked_take_ends_when_a_scheduled_job_becomes_due(live, consume):
    due = SYSTEM_CLOCK.now() + 0.2
    pushed = live.push([job(due=due)])
    thread, found = blocked_take(consume(of=live))

    assert joined(thread)
    assert ids(found[0].reservations) == pushed
    assert SYSTEM_CLOCK.now() >= due


def test_a_blocked_take_learns_of_a_nearer_due_time(live, consume):
    live.push([job(due=SYSTEM_CLOCK.now() + 3600)])
    thread, found = blocked_take(consume(of=live))
    pushed = live.push([job(due=SYSTEM_CLOCK.now() + 0.1)])

    assert joined(thread)
    assert ids(found[0].reservations) == pushed


def test_wake_ends_a_blocked_take(live, consume):
    consumer = consume(of=live)
    thread, found = blocked_take(consumer)
    eventually(lambda: consumer.wake() or not thread.is_alive())

    assert found[0].reservations == []


def test_a_wake_just_before_a_take_is_not_lost(live, consume):
    consumer = consume(of=live)
    take(consumer)
    consumer.wake()
    thread, _ = blocked_take(consumer)

    assert joined(thread)


def test_a_wake_before_the_first_take_is_not_lost(live, consume):
    consumer = consume(of=live)
    consumer.wake()
    thread, _ = blocked_take(consumer)

    assert joined(thread)


@pytest.mark.needs(stores=True)
def test_a_take_waits_for_the_job_it_names(live, consume):
    consumer = consume(of=live)
    live.push(jobs(3))
    wanted = job(due=SYSTEM_CLOCK.now() + 0.1)
    thread, found = blocked_take(consumer, job_id=wanted.id)
    live.push([wanted])

    assert joined(thread)
    assert ids(found[0].reservations) == [wanted.id]


@pytest.mark.parametrize(
    "how",
    [{"limit": 0}, pytest.param({"job_id": "unknown"}, marks=pytest.mark.needs(stores=True))],
    ids=str,
)
def test_a_take_that_can_bring_nothing_sleeps(live, consume, how):
    consumer = consume(of=live)
    live.push(jobs(3))
    before = time.process_time()

    assert consumer.take(**{"limit": 1, "timeout": 0.2, **how}).reservations == []
    assert time.process_time() - before < 0.1


def test_a_released_job_ends_a_blocked_take(live, consume):
    holder = consume(of=live)
    live.push([job()])
    reservation = take_one(holder)
    thread, found = blocked_take(consume(of=live, worker="worker-2"))
    holder.release([reservation])

    assert joined(thread)
    assert ids(found[0].reservations) == [reservation.job.id]


@pytest.mark.needs(pause="durable")
def test_a_resume_ends_a_blocked_take(live, consume):
    live.pause("tasks")
    pushed = live.push([job()])
    thread, found = blocked_take(consume(of=live))
    live.resume("tasks")

    assert joined(thread)
    assert ids(found[0].reservations) == pushed


@pytest.mark.parametrize("what", ["consumer", "backend"])
def test_close_frees_a_blocked_take(live, consume, what):
    consumer = consume(of=live)
    thread, found = blocked_take(consumer)
    {"consumer": consumer, "backend": live}[what].close()

    assert joined(thread)
    assert isinstance(found[0], BackendUnavailableError) or found[0].reservations == []


# -- expiry ---------------------------------------------------------------------------


def test_an_expired_job_is_not_lent(backend, consumer, clock, later):
    late, good = job(expires=clock.now() + 1.0), job()
    backend.push([late, good])
    later(1.0)

    assert ids(take(consumer)) == [good.id]


@pytest.mark.needs(stores=True)
def test_an_expired_job_ends_cancelled(backend, consumer, clock, later):
    late, good = job(expires=clock.now() + 10), job()
    backend.push([late, good])
    later(10)
    take(consumer)

    ended = backend.find(late.id)
    assert (ended.state, ended.error, ended.deliveries) == (State.CANCELLED, "expired", 0)
    assert states(backend) == {"cancelled": 1, "reserved": 1}


def test_expired_jobs_do_not_use_up_the_limit(backend, consumer, clock, later):
    backend.push(jobs(30, expires=clock.now() + 1.0))
    wanted = backend.push(jobs(5))
    later(1.5)

    assert wanted == ids(take(consumer, 5))


@pytest.mark.needs(stores=True)
def test_housekeeping_ends_expired_jobs_nobody_takes(backend, clock, later):
    backend.push([job(expires=clock.now() + 10), job(expires=clock.now() + 10, due=clock.now() + 99)])
    later(11)
    backend.housekeep()

    assert states(backend) == {"cancelled": 2}


def test_a_job_that_has_started_does_not_expire(backend, consumer, clock, later):
    backend.push([job(expires=clock.now() + 1.0)])
    reservation = take_one(consumer)
    later(1.5)
    backend.housekeep()

    assert complete(consumer, reservation) is SETTLED
