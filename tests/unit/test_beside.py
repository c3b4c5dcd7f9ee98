"""A broker with a store beside it: messages that are lost, doubled, late or strange, and a broker that is away.

The part of the broker is played by a backend of its own, so that a test can reach its messages.
"""

from __future__ import annotations

import pytest

from taskq import TaskQ
from taskq.backends import from_url
from taskq.backends.beside import ANNOUNCEMENT, GRACE, LONG_GRACE, Beside, announcement
from taskq.errors import BackendError, ConfigurationError
from taskq.job import Settlement, State
from tests.contract.acts import complete, ids, job, jobs, listed, outcome, states, take


@pytest.fixture
def broker(tmp_path, clock):
    return from_url(f"sqlite:///{tmp_path}/messages.db", clock=clock)


@pytest.fixture
def backend(tmp_path, clock, broker):
    backend = Beside(broker, from_url(f"sqlite:///{tmp_path}/jobs.db", clock=clock), clock=clock)
    yield backend
    backend.close()


@pytest.fixture
def consumer(backend):
    consumer = backend.consume({"tasks": 1}, "w")
    yield consumer
    consumer.close()


def test_a_message_bears_no_more_than_a_name(backend, broker):
    pushed = backend.push([job(payload=b"x" * 10_000, headers={"a": 1}, keep=50.0, priority=7)])

    (message,) = listed(broker, "tasks", State.PENDING)
    assert [message.id] == pushed
    assert (message.payload, message.headers, message.priority) == (b"", {ANNOUNCEMENT: 1}, 7)


def test_a_message_is_done_with_once_its_job_is_claimed(backend, broker, consumer):
    backend.push(jobs(3))

    lent = take(consumer)

    assert len(lent) == 3
    assert states(broker) == {}
    assert states(backend) == {"reserved": 3}
    complete(consumer, *lent)
    assert states(backend) == {"completed": 3}


def test_jobs_whose_messages_were_lost_are_adopted(backend, broker, consumer, clock):
    pushed = backend.push(jobs(3))
    broker.purge("tasks", State.PENDING)

    assert backend.housekeep() <= GRACE
    assert take(consumer) == []
    clock.advance(GRACE + 1)
    backend.housekeep()
    assert ids(take(consumer)) == pushed


def test_while_the_broker_has_messages_jobs_wait_longer_for_theirs(backend, broker, consumer, clock):
    (lost,) = backend.push(jobs(1))
    broker.purge("tasks", State.PENDING)
    backend.push(jobs(1))

    clock.advance(GRACE + 1)
    backend.housekeep()
    assert states(backend) == {"pending": 2}
    assert backend.adopt("tasks", 0.0) == 0
    clock.advance(LONG_GRACE)
    backend.housekeep()
    assert lost in ids(take(consumer))


def test_messages_that_come_twice_or_late_run_nothing_twice(backend, broker, consumer, clock):
    pushed = backend.push(jobs(2))
    (first, second) = listed(broker, "tasks", State.PENDING)
    lent = take(consumer)
    broker.purge("tasks", State.COMPLETED)
    broker.push([announcement(first), announcement(second)])

    assert take(consumer) == []
    complete(consumer, lent[0])
    broker.push([announcement(first), announcement(second), announcement(job())])
    assert take(consumer) == []
    assert states(broker) == {}
    assert ids(lent) == pushed


def test_a_cancelled_job_is_not_run_when_its_message_comes(backend, consumer):
    pushed = backend.push(jobs(2))
    backend.cancel(pushed[:1])

    assert ids(take(consumer)) == pushed[1:]


def test_jobs_that_the_broker_had_before_there_was_a_store_are_kept(backend, broker, consumer):
    before = job(payload=b"all of it", headers={"a": 1})
    broker.push([before])

    (lent,) = take(consumer)

    assert (lent.job.id, lent.job.payload, lent.job.headers) == (before.id, b"all of it", {"a": 1})
    complete(consumer, lent)
    assert backend.find(before.id).state is State.COMPLETED
    assert states(broker) == {"completed": 1}


def test_a_push_holds_while_the_broker_is_away(tmp_path, clock):
    broker = from_url(f"sqlite:///{tmp_path}/messages.db", clock=clock)
    backend = Beside(broker, from_url(f"sqlite:///{tmp_path}/jobs.db", clock=clock), clock=clock)
    broker.close()

    first = backend.push(jobs(1))
    assert isinstance(backend.broker_failure, BackendError)
    second = backend.push(jobs(1))

    assert states(backend) == {"pending": 2}
    again = Beside(
        from_url(f"sqlite:///{tmp_path}/messages.db", clock=clock),
        from_url(f"sqlite:///{tmp_path}/jobs.db", clock=clock),
        clock=clock,
    )
    consumer = again.consume({"tasks": 1}, "w")
    assert ids(take(consumer)) == second, "while the broker is left alone the store lends at once"
    clock.advance(GRACE + 1)
    again.housekeep()
    assert ids(take(consumer)) == first
    backend.close()
    again.close()


def test_a_session_whose_broker_is_away_lends_what_the_store_has_and_says_so(backend, broker, consumer):
    backend.push([job(due=1.0)])
    assert len(take(consumer)) == 1
    backend.push(jobs(1))
    broker.close()

    with pytest.raises(BackendError):
        take(consumer)
    backend.adopt("tasks", 9e12)
    assert len(take(consumer)) == 1
    with pytest.raises(BackendError):
        consumer.take(1, 0.1)


def test_follow_ups_and_retries_are_the_stores_own(backend, broker, consumer):
    backend.push([job(keep=0.0)])
    (lent,) = take(consumer)
    follow = job()
    consumer.settle([outcome(lent, pushes=(follow,))])

    assert states(broker) == {}
    assert ids(take(consumer)) == [follow.id]


def test_an_app_with_a_broker_needs_a_store_that_keeps_results(tmp_path):
    with pytest.raises(ConfigurationError, match="keeps results itself"):
        TaskQ(f"sqlite:///{tmp_path}/a.db", store=f"sqlite:///{tmp_path}/b.db")


@pytest.fixture
def store_fails(monkeypatch, consumer):
    """Let the store refuse the next claims."""
    claim, left = consumer._own.claim, []

    def refusing(announced):
        if left:
            left.pop()
            raise BackendError("the store is away")
        return claim(announced)

    monkeypatch.setattr(consumer._own, "claim", refusing)
    return lambda times: left.extend(range(times))


def test_messages_whose_claim_fails_are_looked_at_again(backend, broker, consumer, store_fails):
    pushed = backend.push(jobs(3))
    store_fails(1)

    with pytest.raises(BackendError):
        take(consumer)
    assert ids(take(consumer)) == pushed
    assert states(broker) == {}


def test_what_the_store_has_lent_is_kept_where_a_claim_fails(backend, consumer, store_fails):
    announced = backend.push(jobs(1))
    own = backend._store.push(jobs(1))
    store_fails(1)

    assert ids(take(consumer)) == own
    assert ids(take(consumer)) == announced


def test_what_was_claimed_is_kept_where_the_store_fails_later(backend, consumer, monkeypatch):
    pushed = backend.push(jobs(1)) + backend._store.push(jobs(2))
    take_own, asked = consumer._own.take, []

    def refusing_the_second(*arguments, **options):
        asked.append(arguments)
        if len(asked) == 2:
            raise BackendError("the store is away")
        return take_own(*arguments, **options)

    monkeypatch.setattr(consumer._own, "take", refusing_the_second)

    assert sorted(ids(take(consumer, 4))) == sorted(pushed)
    assert len(asked) == 2


def test_an_exchange_answers_for_its_outcomes_also_where_a_claim_fails(backend, consumer, store_fails):
    pushed = backend.push(jobs(1))
    lent = take(consumer)
    more = backend.push(jobs(2))
    store_fails(1)

    settlements, taken = consumer.exchange([outcome(each) for each in lent], 5)
    assert (settlements, taken.reservations) == ([Settlement.SETTLED], [])
    assert backend.find(pushed[0]).state is State.COMPLETED
    _, taken = consumer.exchange([], 5)
    assert ids(taken.reservations) == more


def test_an_exchange_settles_and_takes_by_one_write_of_the_store(backend, consumer, monkeypatch):
    backend.push(jobs(2))
    lent = take(consumer)
    more = backend._store.push(jobs(1))
    monkeypatch.setattr(consumer._own, "take", None)

    settlements, taken = consumer.exchange([outcome(each) for each in lent], 5)
    assert settlements == [Settlement.SETTLED] * 2
    assert ids(taken.reservations) == more
