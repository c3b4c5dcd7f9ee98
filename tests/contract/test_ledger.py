"""What every store promises that can stand beside a broker: announced jobs wait for their message."""

from __future__ import annotations

import threading

import pytest

from taskq.job import Lane, State, Unique
from tests.contract.acts import complete, failure, ids, job, jobs, listed, settle, states, take

pytestmark = pytest.mark.needs(stores=True)


def announce(backend, *announced):
    assert backend.announce(announced) == ids(announced)
    return ids(announced)


def test_announced_jobs_are_pending_but_only_a_claim_lends_them(backend, consumer):
    pushed = announce(backend, *jobs(3))

    assert states(backend) == {"pending": 3}
    assert ids(listed(backend, "tasks", State.PENDING)) == pushed
    assert take(consumer) == []
    assert consumer.take(1, 0.05).reservations == []

    lent = consumer.claim(pushed[:2])
    assert set(ids(lent)) == set(pushed[:2])
    assert {r.job.state for r in lent} == {State.RESERVED}
    assert {r.job.deliveries for r in lent} == {1}
    assert consumer.claim(pushed[:2]) == []
    assert take(consumer) == []
    complete(consumer, *lent)
    assert consumer.claim(pushed[:2]) == []
    assert states(backend) == {"pending": 1, "completed": 2}


def test_after_its_first_run_a_job_is_like_any_other(backend, consumer, later):
    one, two, three = announce(backend, *jobs(3, lease=10.0))
    by_id = {r.job.id: r for r in consumer.claim([one, two, three])}
    settle(consumer, failure(by_id[one]))
    consumer.release([by_id[two]])
    later(11)
    backend.reclaim()

    assert set(ids(take(consumer))) == {one, two, three}


def test_only_what_is_due_and_in_no_lane_is_announced(backend, consumer, clock):
    limited, plain = job(lane=Lane(key="a")), job()
    future = job(due=clock.now() + 60)
    announce(backend, limited, future, plain)

    assert ids(take(consumer)) == [limited.id]
    assert consumer.claim([future.id, "unknown"]) == []
    assert ids(consumer.claim([plain.id])) == [plain.id]


def test_keys_and_repeats_hold_for_announced_jobs(backend, consumer):
    first = job(unique=Unique("k"))
    announce(backend, first)

    assert backend.announce([job(unique=Unique("k"))]) == [first.id]
    assert backend.announce([first]) == [first.id]
    assert states(backend) == {"pending": 1}
    complete(consumer, *consumer.claim([first.id]))
    assert backend.announce([first]) == [first.id], "a repeat after its end changes nothing"
    assert states(backend) == {"completed": 1}


@pytest.mark.parametrize(("name", "what"), [("tasks", "queue"), ("t", "task")])
def test_what_is_paused_is_not_claimed_and_waits_on(backend, consumer, name, what):
    pushed = announce(backend, *jobs(2, task="t"))
    backend.pause(name, what)

    assert consumer.claim(pushed) == []
    assert take(consumer) == []
    backend.resume(name, what)
    assert ids(take(consumer)) == pushed


def test_a_claim_of_another_queue_leaves_the_job_to_its_own(backend, consume):
    (pushed,) = announce(backend, job(queue="other"))

    assert consume("tasks").claim([pushed]) == []
    assert ids(take(consume("other"))) == [pushed]


def test_expired_or_cancelled_jobs_are_not_claimed(backend, consumer, clock, later):
    late, cancelled = announce(backend, job(expires=clock.now() + 5), job())
    backend.cancel([cancelled])
    later(6)

    assert consumer.claim([late, cancelled]) == []
    assert backend.find(late).error == "expired"
    assert states(backend) == {"cancelled": 2}


def test_what_was_announced_long_ago_is_adopted(backend, consumer, clock, later):
    old = announce(backend, *jobs(3, priority=4), job())
    others = announce(backend, job(queue="other"))
    later(60)
    new = announce(backend, job())

    assert backend.adopt("tasks", clock.now() - 30, limit=3) == 3
    assert backend.adopt("tasks", clock.now() - 30) == 1
    assert backend.adopt("tasks", clock.now() - 30) == 0
    assert ids(take(consumer)) == old
    assert ids(consumer.claim([*old, *others, *new])) == new
    assert states(backend, "tasks") == {"reserved": 5}


def test_an_adoption_wakes_who_waits(live, consume):
    consumer = consume(of=live)
    (pushed,) = announce(live, job())
    found = []
    waiting = threading.Thread(target=lambda: found.extend(consumer.take(1, 30.0).reservations))
    waiting.start()
    live.adopt("tasks", live.find(pushed).due + 1.0)
    waiting.join(30)

    assert ids(found) == [pushed]


def test_of_many_who_claim_one_gets_it(open_backend, consume):
    first = open_backend()
    backends = [first, open_backend() if first.capabilities.shared else first]
    consumers = [consume(worker=f"w{n}", of=backend) for n, backend in enumerate(backends)]
    pushed = announce(first, *jobs(100))
    claimed = []

    def claim(consumer):
        for job_id in pushed:
            claimed.extend(ids(consumer.claim([job_id])))

    threads = [threading.Thread(target=claim, args=(consumer,)) for consumer in consumers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(claimed) == sorted(pushed)


def test_weights_hold_beside_announced_jobs(backend, consume):
    announce(backend, *jobs(20, queue="a"))
    backend.push(jobs(10, queue="b"))

    assert len(take(consume("a", "b"), 10)) == 10


def test_announced_jobs_can_be_purged(backend, consumer):
    pushed = announce(backend, *jobs(3))

    assert backend.purge("tasks", State.PENDING) == 3
    assert consumer.claim(pushed) == []
    assert states(backend) == {}
