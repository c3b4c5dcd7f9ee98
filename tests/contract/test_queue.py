"""The queue of plain payloads, on every backend."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from taskq import ConfigurationError, LeaseLostError, Queue
from taskq.clock import SYSTEM_CLOCK, to_datetime
from taskq.errors import InvalidArgumentError
from taskq.job import Job, State, new_id
from tests.conftest import eventually

FAR = 3600


@pytest.fixture
def queue(live):
    with Queue("mail", live) as queue:
        yield queue


def test_a_payload_of_any_kind_comes_back_equal(queue):
    payloads = [
        {"to": "a@b.c"},
        [1, 2],
        "text",
        None,
        7,
        b"\x00",
        {"when": datetime(2030, 1, 1, tzinfo=UTC), 1: (2,)},
    ]
    for payload in payloads:
        queue.push(payload)

    popped = [queue.pop() for _ in payloads]

    assert [job.payload for job in popped] == payloads
    assert [job.data for job in popped] == payloads
    assert queue.pop() is None


def test_higher_priority_first_then_first_in_first_out(queue):
    for name, priority in [("a", 0), ("b", 5), ("c", 0), ("d", 9), ("e", 5)]:
        queue.push({"name": name}, priority=priority)

    assert [job.payload["name"] for job in queue.pop_batch(10)] == ["d", "b", "e", "a", "c"]


def test_a_popped_payload_is_lent_once_and_settled_once(queue):
    job_id = queue.push({"n": 1})

    job = queue.pop()

    assert (job.id, job.queue, job.priority, job.attempts, job.error) == (job_id, "mail", 0, 0, None)
    assert queue.pop() is None
    assert queue.size() == 0
    job.complete()
    job.complete()  # the same again changes nothing
    assert (queue.size(), queue.size("dead")) == (0, 0)


@pytest.mark.needs(stores=True)
def test_what_is_lent_and_what_is_done_are_counted(queue):
    queue.push({"n": 1})
    job = queue.pop()
    assert queue.size("reserved") == 1
    job.complete()
    job.complete()

    assert (queue.size("reserved"), queue.size("completed")) == (0, 1)


def test_a_failed_payload_is_tried_again_until_its_retries_are_used_up(live):
    with Queue("mail", live, max_retries=2) as queue:
        job_id = queue.push({"n": 1})
        for attempts in range(3):
            job = queue.pop()
            assert (job.id, job.attempts) == (job_id, attempts)
            job.fail(f"try {attempts}")
        assert queue.pop() is None
        (dead,) = queue.dead_letters()

    assert (dead.id, dead.payload, dead.attempts, dead.error) == (job_id, {"n": 1}, 3, "Failed: try 2")


def test_sizes_by_every_name_of_a_status(queue):
    queue.push(1)
    queue.pop().reject("no")

    assert [queue.size(name) for name in ("dead", "failed", "dead_letter", "pending")] == [1, 1, 1, 0]
    with pytest.raises(InvalidArgumentError, match="did you mean 'completed'"):
        queue.size("complete")


@pytest.mark.needs(scheduled="visible")
def test_a_backoff_delays_the_next_try(live):
    with Queue("mail", live, retry_backoff=FAR) as queue:
        queue.push({"n": 1})
        queue.pop().fail("later")
        assert queue.pop() is None
        assert [job.error for job in queue.failed()] == ["Failed: later"]
        assert queue.size("scheduled") == 1
        assert queue.retry_failed() == 1
        assert queue.pop().attempts == 1


def test_rejected_is_dead_at_once_and_revived_with_all_its_retries(queue):
    job_id = queue.push({"n": 1})
    queue.pop().reject("bad address")
    assert [job.error for job in queue.dead_letters()] == ["Failed: bad address"]

    assert queue.retry(job_id)

    assert queue.dead_letters() == []
    job = queue.pop()
    assert (job.id, job.attempts) == (job_id, 0)
    job.fail("once more")
    assert queue.pop().attempts == 1
    assert not queue.retry("no such job")


def test_all_dead_letters_are_revived_in_order(queue):
    for number in range(5):
        queue.push(number)
    for job in queue.pop_batch(5):
        job.reject()

    assert queue.retry()

    assert [job.payload for job in queue.pop_batch(5)] == [*range(5)]


def test_a_dead_letter_revives_itself(queue):
    queue.push(1)
    queue.pop().reject()
    (dead,) = queue.dead_letters()

    dead.retry(delay_seconds=FAR)

    assert queue.pop() is None
    assert queue.dead_letters() == []
    with pytest.raises(InvalidArgumentError, match="dead letter"):
        dead.complete()


def test_put_back_costs_no_attempt(queue):
    queue.push({"n": 1})
    queue.pop().retry()
    job = queue.pop()
    assert job.attempts == 0
    job.retry(delay_seconds=FAR)
    assert queue.pop() is None


@pytest.mark.needs(scheduled="visible")
def test_what_waits_for_its_time_is_counted(queue):
    queue.push("later", delay_seconds=FAR)

    assert (queue.size("scheduled"), queue.size()) == (1, 0)


def test_delays(queue):
    queue.push("later", delay_seconds=FAR)
    queue.push("at", delay_until=to_datetime(SYSTEM_CLOCK.now()) + timedelta(days=400))
    queue.push("past", delay_until=datetime(2020, 1, 1, tzinfo=UTC))
    assert queue.pop().payload == "past"
    queue.push("soon", delay_seconds=0.5)

    assert queue.pop() is None
    assert eventually(queue.pop).payload == "soon"
    assert queue.pop() is None


@pytest.mark.needs(stores=True)
def test_pop_by_id(queue):
    ids = [queue.push(number) for number in range(3)]

    assert queue.pop_by_id(ids[1]).payload == 1
    assert queue.pop_by_id(ids[1]) is None
    assert queue.pop_by_id("nothing") is None
    assert [job.payload for job in queue.pop_batch(9)] == [0, 2]


def test_consume_drains_and_stops(queue):
    for number in range(7):
        queue.push(number)

    seen = []
    for job in queue.consume(poll_interval=0):
        seen.append(job.payload)
        job.complete()

    assert seen == [*range(7)]


def test_consume_stops_after_so_many_payloads(queue):
    queue.push_many([*range(9)])

    batches = []
    for jobs in queue.consume(iterations=5, batch_size=2):
        batches.append([job.payload for job in jobs])
        for job in jobs:
            job.complete()

    assert batches == [[0, 1], [2, 3], [4]]


@pytest.mark.needs(stores=True)
def test_consume_one_by_its_id(queue):
    ids = queue.push_many(["a", "b"])

    assert [job.payload for job in queue.consume(job_id=ids[1])] == ["b"]


def test_consume_waits_for_the_next(queue):
    import threading

    threading.Timer(0.1, lambda: queue.push("late")).start()

    job = next(iter(queue.consume(poll_interval=5)))

    assert job.payload == "late"


@pytest.mark.needs(stores=True)
def test_process_completes_what_returns_and_fails_what_raises(backend):
    queue = Queue("mail", backend, retry_backoff=60)
    queue.push_many(["good", "bad", "good"])

    def handle(job):
        if job.payload == "bad":
            raise ValueError("spoiled")

    assert queue.process(handle, max_jobs=3) == 3
    assert queue.size("completed") == 2
    (failed,) = queue.failed()
    assert failed.error == "ValueError: spoiled"


def test_process_leaves_what_the_handler_settled(queue):
    queue.push_many([1, 2])
    queue.process(lambda job: job.reject("unwanted"), max_jobs=2)

    assert queue.size("dead") == 2


def test_produce_to_another_queue(live, queue):
    queue.produce("other", {"n": 1}, priority=3)

    assert queue.size() == 0
    with Queue("other", live) as other:
        job = other.pop()
        assert job.priority == 3
        job.complete()
    assert [job.payload for job in queue.consume("other", poll_interval=0)] == []


@pytest.mark.needs(scheduled="visible")
def test_purge_and_clear(queue):
    queue.push_many([1, 2, 3])
    queue.push(4, delay_seconds=FAR)
    queue.pop().reject()

    assert queue.purge("dead") == 1
    assert queue.clear() == 3
    assert queue.size() == queue.size("scheduled") == 0
    with pytest.raises(InvalidArgumentError, match="reserved"):
        queue.purge("reserved")


@pytest.mark.needs(leases="timed")
def test_a_payload_that_is_not_settled_comes_back_and_is_counted(live):
    with Queue("mail", live, visibility_timeout=0.3) as queue:
        queue.push({"n": 1})
        lost = queue.pop()
        again = eventually(queue.pop)
        assert (again.id, again.attempts) == (lost.id, 1)
        with pytest.raises(LeaseLostError, match="visibility timeout"):
            lost.complete()
        again.complete()


def test_while_a_handler_works_its_lease_is_renewed(live):
    import threading

    with Queue("mail", live, visibility_timeout=0.4) as queue, Queue("mail", live) as other:
        queue.push({"n": 1})
        stolen = []

        def handle(job):
            for _ in range(15):
                threading.Event().wait(0.1)
                stolen.extend(other.pop_batch(1))

        assert queue.process(handle) == 1
        assert stolen == []
        assert queue.pop() is None


def test_an_undecodable_payload_is_parked_and_the_next_is_given(queue, live):
    live.push([Job(id=new_id(), queue="mail", payload=b"\xc1")])
    queue.push("good")

    assert [job.payload for job in queue.pop_batch(2)] == ["good"]
    (dead,) = queue.dead_letters()
    assert dead.error.startswith("DecodeError")
    assert dead.payload == b"\xc1"


def test_a_closed_queue_says_so(live):
    queue = Queue("mail", live)
    queue.pop()
    queue.close()
    queue.close()

    with pytest.raises(ConfigurationError, match="closed"):
        queue.push(1)
    assert live.size("mail", State.PENDING) == 0


@pytest.mark.needs(pause="durable")
def test_pause_and_resume(queue):
    queue.push(1)
    queue.pause()
    assert queue.pop() is None
    queue.resume()
    assert queue.pop().payload == 1


def test_bad_input_is_named():
    for bad in ({"name": "a b"}, {"name": "q", "max_retries": -1}, {"name": "q", "retry_backoff": -1}):
        with pytest.raises(ConfigurationError):
            Queue(**bad)
    with pytest.raises(ValueError, match="did you mean 'sqlite'"):
        Queue("q", "sqllite:///x.db").push(1)
