"""What every backend with lanes promises: limits, sequences, fair shares, pauses of tasks and keys."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from dataclasses import replace

import pytest

from taskq.backend import Note
from taskq.errors import LineFullError
from taskq.job import Lane, Settlement, State, Unique, Verdict
from taskq.limits import Limits, Rate
from tests.conftest import eventually
from tests.contract.acts import (
    bury,
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

pytestmark = pytest.mark.needs(stores=True)

UNDER = Lane(task="t")


def key(name, **fields):
    return Lane(task="t", key=name, **fields)


def tenant(name, **fields):
    return Lane(key=name, **fields)


@pytest.fixture(autouse=True)
def _accounts_stay_right(case, backend, tmp_path):
    yield
    case.verify(tmp_path)


@pytest.fixture
def declare(backend):
    return lambda **limits: backend.declare_limits([Limits(task="t", **limits)])


def lanes_of(reservations):
    return [r.job.lane.key for r in reservations]


# -- declarations ---------------------------------------------------------------------


def test_a_lane_travels_with_its_job(backend, consumer):
    lanes = [Lane(task="t", key="a:b", weight=2.5, ordered=True), Lane(key="ü"), Lane(task="t"), None]
    backend.push([job(lane=lane) for lane in lanes])

    assert {lane.name if lane else None for lane in lanes} == {
        r.job.lane.name if r.job.lane else None for r in take(consumer)
    }
    assert {2.5, 1.0} == {j.lane.weight for j in listed(backend, "tasks", State.RESERVED) if j.lane}


def test_the_last_declaration_wins_and_changes_are_named(backend):
    first = Limits(task="t", rate=Rate(10, 60.0, 2), concurrency=5)

    assert backend.declare_limits([first, Limits(task="u")]) == ["t", "u"]
    assert backend.declare_limits([first]) == []
    assert backend.declare_limits([replace(first, concurrency=6)]) == ["t"]
    assert backend.limits() == {"t": replace(first, concurrency=6), "u": Limits(task="u")}


def test_a_new_declaration_binds_what_waits_already(backend, consumer, declare):
    declare(concurrency=1)
    backend.push(jobs(5, lane=UNDER))
    assert len(take(consumer)) == 1

    declare(concurrency=3)
    assert len(take(consumer)) == 2

    declare(concurrency=2)
    assert take(consumer) == []

    declare()
    assert len(take(consumer)) == 2


# -- concurrency ----------------------------------------------------------------------


def test_no_more_at_once_than_the_limit_over_all_sessions_and_queues(backend, consume, declare):
    declare(concurrency=3)
    backend.push([*jobs(5, lane=UNDER), *jobs(5, lane=UNDER, queue="other", priority=4)])

    lent = [r for queue in ("tasks", "other", "tasks") for r in take(consume(queue, worker="w"), 2)]

    assert len(lent) == 3
    assert take(consume("tasks", "other")) == []


ENDS = {
    "complete": lambda backend, consumer, r: complete(consumer, r),
    "fail": lambda backend, consumer, r: settle(consumer, failure(r, due=9e12)),
    "bury": lambda backend, consumer, r: settle(consumer, outcome(r, Verdict.BURY)),
    "snooze": lambda backend, consumer, r: settle(consumer, outcome(r, Verdict.SNOOZE, due=9e12)),
    "cancel": lambda backend, consumer, r: settle(consumer, outcome(r, Verdict.CANCEL)),
    "give back": lambda backend, consumer, r: settle(consumer, outcome(r, Verdict.RELEASE)),
    "release": lambda backend, consumer, r: consumer.release([r]),
}


@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.parametrize("keep", [0.0, 60.0])
@pytest.mark.parametrize("how", ENDS)
def test_every_end_makes_room(backend, consumer, declare, clock, how, keep, noted):
    declare(concurrency=1)
    backend.push(jobs(3, lane=UNDER, keep=keep))
    for _ in range(2):
        reservation = take_one(consumer)
        assert take(consumer) == []
        if noted and how != "release":
            consumer.note([Note(reservation=reservation, started=clock.now())])
        ENDS[how](backend, consumer, reservation)

    assert len(take(consumer)) == 1
    assert take(consumer) == []


@pytest.mark.parametrize("noted", [False, True])
def test_a_lost_lease_makes_room(backend, consumer, consume, declare, clock, later, noted):
    declare(key_concurrency=1)
    backend.push(jobs(2, lane=key("a"), lease=10.0, max_retries=0))
    held = take_one(consumer)
    if noted:
        consumer.note([Note(reservation=held, started=clock.now())])
    other = consume(worker="worker-2")
    assert take(other) == []

    later(11)
    assert take(other) == []
    backend.reclaim()

    assert len(take(other)) == 1
    assert take(other) == []


def test_an_exchange_makes_room_for_itself(backend, consumer, declare):
    declare(concurrency=2)
    backend.push(jobs(6, lane=UNDER))
    held = take(consumer)
    for _ in range(2):
        _, taken = consumer.exchange([outcome(r) for r in held], 100)
        held = taken.reservations
        assert len(held) == 2


def test_room_wakes_a_worker_that_waits(live, consume):
    live.declare_limits([Limits(task="t", concurrency=1)])
    live.push(jobs(2, lane=UNDER))
    first, second = consume(of=live), consume(of=live, worker="worker-2")
    held = take_one(first)
    found = []
    waiting = threading.Thread(target=lambda: found.extend(take(second, 1, timeout=30)))
    waiting.start()
    complete(first, held)
    waiting.join()

    assert len(found) == 1


# -- rates ----------------------------------------------------------------------------


def test_no_window_holds_more_than_the_rate(backend, consumer, declare, later, clock):
    declare(rate=Rate(10, 60.0))
    backend.push(jobs(200, lane=UNDER))
    starts = []
    for step in range(400):
        lent = take(consumer, 3 + step % 5)
        starts += [clock.now()] * len(lent)
        complete(consumer, *lent)
        later(1.0 + step % 3)
    windows = [sum(1 for at in starts if 0 <= at - first < 60) for first in starts]

    assert max(windows) == 10
    assert len(starts) == 140


def test_a_burst_is_a_second_window(backend, consumer, declare, later, clock):
    declare(rate=Rate(10, 60.0, burst=1))
    backend.push(jobs(50, lane=UNDER))
    starts = []
    for _ in range(130):
        lent = take(consumer)
        starts += [clock.now()] * len(lent)
        complete(consumer, *lent)
        later(1.0)

    assert {b - a for a, b in itertools.pairwise(starts)} == {6.0}


def test_next_due_is_the_moment_of_the_next_start(backend, consumer, declare, later, clock):
    declare(rate=Rate(2, 60.0))
    backend.push(jobs(4, lane=UNDER))
    for lent in ([1], [1]):
        complete(consumer, *take(consumer, len(lent)))
        later(10)

    assert consumer.take(9) == ([], clock.now() - 20 + 60)
    later(40)
    assert len(take(consumer)) == 1
    assert consumer.take(9).reservations == []


def test_a_start_counts_from_when_it_is_known(backend, consumer, declare, later, clock):
    """A job may lie in a worker for a while before it starts; the window must hold for starts, not for takes."""
    declare(rate=Rate(1, 60.0))
    backend.push(jobs(3, lane=UNDER))
    lent = take_one(consumer)
    later(100)
    assert consumer.take(9) == ([], None)

    consumer.note([Note(reservation=lent, started=clock.now())])
    assert consumer.take(9) == ([], clock.now() + 60)
    later(60)
    assert len(take(consumer)) == 1


def test_what_is_given_back_unstarted_does_not_count(backend, consumer, declare):
    declare(rate=Rate(2, 60.0))
    backend.push(jobs(4, lane=UNDER))
    consumer.release(take(consumer))

    assert len(take(consumer)) == 2


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_step_of_the_wall_clock_changes_no_window(backend, consumer, declare, later, clock, step):
    declare(rate=Rate(1, 60.0))
    backend.push(jobs(3, lane=UNDER))
    complete(consumer, take_one(consumer))

    clock.step(step)
    assert consumer.take(1) == ([], clock.now() + 60)
    later(60)
    assert len(take(consumer)) == 1


@pytest.mark.needs(persistent=True)
@pytest.mark.needs(lease_clock="machine")
def test_a_window_lasts_over_restarts_and_reboots(backend, consumer, open_backend, declare, later, clock):
    declare(rate=Rate(1, 60.0))
    backend.push(jobs(3, lane=UNDER))
    complete(consumer, take_one(consumer))
    backend.close()
    later(20)
    clock.reboot()

    with_new_boot = open_backend().consume({"tasks": 1}, "worker-2")
    assert with_new_boot.take(1) == ([], clock.now() + 40)
    later(40)
    assert len(with_new_boot.take(1).reservations) == 1
    with_new_boot.close()


def test_many_starts_per_window_are_kept_in_a_short_log(backend, consumer, declare, later):
    declare(rate=Rate(1000, 10.0))
    backend.push(jobs(2500, lane=UNDER, keep=0.0))
    counts = []
    for _ in range(40):
        lent = take(consumer, 90)
        counts.append(len(lent))
        complete(consumer, *lent) if lent else None
        later(0.5)

    assert all(sum(counts[at : at + 20]) <= 1000 for at in range(20))
    assert sum(counts) >= 1980


# -- keys -----------------------------------------------------------------------------


def test_each_key_has_its_own_limits(backend, consumer, declare, later):
    declare(key_concurrency=1, key_rate=Rate(2, 60.0))
    backend.push([job(lane=key(name)) for name in "aaabbbc"])

    lent = take(consumer)
    assert Counter(lanes_of(lent)) == {"a": 1, "b": 1, "c": 1}
    complete(consumer, *lent)
    lent = take(consumer)
    assert Counter(lanes_of(lent)) == {"a": 1, "b": 1}
    complete(consumer, *lent)
    assert take(consumer) == []
    later(60)
    assert Counter(lanes_of(take(consumer))) == {"a": 1, "b": 1}


def test_a_limited_key_delays_nobody(backend, consumer, declare):
    declare(key_concurrency=1)
    backend.push(jobs(500, lane=key("full"), priority=9))
    assert len(take(consumer)) == 1
    others = [job(lane=key("other")), job(lane=tenant("third")), job()]
    backend.push(others)

    assert set(ids(others)) == set(ids(take(consumer, 3)))


def test_limits_of_a_task_and_of_its_keys_hold_together(backend, consumer, declare):
    declare(concurrency=3, key_concurrency=2)
    backend.push([job(lane=key(name)) for name in "aaabbb"])
    lent = take(consumer)

    assert len(lent) == 3
    assert max(Counter(lanes_of(lent)).values()) <= 2
    complete(consumer, lent[0])
    assert len(take(consumer)) == 1


def test_a_single_job_is_taken_only_where_there_is_room(backend, consumer, declare):
    declare(key_concurrency=1)
    a, b, c = [job(lane=key(name)) for name in "aab"]
    backend.push([a, b, c])

    assert ids(take(consumer, 1, job_id=b.id)) == [b.id]
    assert take(consumer, 1, job_id=a.id) == []
    assert ids(take(consumer, 1, job_id=c.id)) == [c.id]


@pytest.mark.parametrize("lane", [UNDER, key("a"), key("b", ordered=True)], ids=["task", "key", "ordered"])
def test_waiting_for_a_single_job_without_room_ends_when_there_is(live, consume, lane):
    live.declare_limits([Limits(task="t", concurrency=2, key_concurrency=1)])
    first, second = job(lane=lane), job(lane=lane)
    live.push([first, second])
    worker = consume(of=live)
    held = take(worker, 1, job_id=first.id)
    assert take(worker, 1, job_id=second.id, timeout=0.05) == []
    found = []
    other = consume(of=live, worker="worker-2")
    waiting = threading.Thread(target=lambda: found.extend(take(other, 1, timeout=30, job_id=second.id)))
    waiting.start()
    complete(worker, *held)
    waiting.join()

    assert ids(found) == [second.id]


# -- sequences ------------------------------------------------------------------------


def test_an_ordered_key_runs_one_by_one_in_the_order_of_pushes(backend, consumer, clock):
    a = [job(lane=key("a", ordered=True), priority=n % 3) for n in range(4)]
    b = job(lane=key("b", ordered=True))
    backend.push([*a, b])
    order = []
    while lent := take(consumer):
        order += ids(lent)
        complete(consumer, *lent)

    assert [each for each in order if each != b.id] == ids(a)


def test_a_failed_job_holds_up_its_sequence_until_it_has_ended(backend, consumer, later, clock):
    first, second = [job(lane=key("a", ordered=True), max_retries=1) for _ in range(2)]
    backend.push([first, second])
    settle(consumer, failure(take_one(consumer), due=clock.now() + 60))
    assert consumer.take(9) == ([], clock.now() + 60)

    later(60)
    again = take_one(consumer)
    assert again.job.id == first.id
    settle(consumer, failure(again))

    assert ids(take(consumer)) == [second.id]


@pytest.mark.parametrize("how", ["cancel", "purge"])
def test_what_is_removed_holds_up_nobody(backend, consumer, clock, how):
    first, second = (
        job(lane=key("a", ordered=True), due=clock.now() + 500),
        job(lane=key("a", ordered=True)),
    )
    backend.push([first, second])
    assert take(consumer) == []

    if how == "cancel":
        backend.cancel([first.id])
    else:
        backend.purge("tasks", State.SCHEDULED)

    assert ids(take(consumer)) == [second.id]


# -- fair shares ----------------------------------------------------------------------


def test_tenants_take_turns_however_many_jobs_one_has(backend, consumer):
    backend.push(jobs(300, lane=tenant("flood")))
    backend.push([job(lane=tenant(name)) for name in "abc" for _ in range(3)])
    order = [lane for _ in range(4) for lane in lanes_of(take(consumer, 3))]

    assert Counter(order) == {"flood": 3, "a": 3, "b": 3, "c": 3}


def test_shares_follow_weights(backend, consumer):
    backend.push(jobs(100, lane=tenant("heavy", weight=3.0)))
    backend.push(jobs(100, lane=tenant("light")))
    lent = [lane for _ in range(10) for lane in lanes_of(take(consumer, 4))]

    assert Counter(lent) == {"heavy": 30, "light": 10}


def test_the_latest_weight_holds(backend, consumer):
    backend.push(jobs(50, lane=tenant("a")))
    backend.push(jobs(50, lane=tenant("b")))
    backend.push([job(lane=tenant("a", weight=4.0))])

    assert Counter(lanes_of(take(consumer, 20))) == {"a": 16, "b": 4}


def test_jobs_without_a_lane_are_one_tenant(backend, consumer):
    backend.push([*jobs(50), *jobs(50, lane=tenant("a"))])

    assert Counter(r.job.lane is None for r in take(consumer, 20)) == {True: 10, False: 10}


def test_who_was_away_is_owed_nothing(backend, consumer):
    backend.push(jobs(60, lane=tenant("busy")))
    complete(consumer, *take(consumer, 40))
    backend.push(jobs(40, lane=tenant("late")))

    assert 4 <= Counter(lanes_of(take(consumer, 10)))["late"] <= 6


def test_priority_comes_before_fairness(backend, consumer):
    backend.push([*jobs(3, lane=tenant("a")), *jobs(3, lane=tenant("b"), priority=1), *jobs(2, priority=2)])

    assert [r.job.priority for r in take(consumer)] == [2, 2, 1, 1, 1, 0, 0, 0]


def test_within_a_lane_the_older_comes_first(backend, consumer, clock):
    old, new = job(lane=tenant("a"), due=clock.now() - 5), job(lane=tenant("a"))
    backend.push([new, old])

    assert ids([old, new]) == ids(take(consumer))


def test_a_queue_whose_lanes_are_full_leaves_its_turns_to_others(backend, consume, declare):
    declare(concurrency=1)
    backend.push(jobs(50, lane=UNDER, queue="a"))
    backend.push(jobs(5, queue="b"))
    consumer = consume(weights={"a": 9, "b": 1})

    assert Counter(r.job.queue for r in take(consumer, 6)) == {"a": 1, "b": 5}


# -- ageing ---------------------------------------------------------------------------


@pytest.mark.needs(priority="strict")
@pytest.mark.parametrize("laned", [False, True])
def test_ageing_keeps_low_priorities_from_starving(open_backend, later, laned):
    backend = open_backend(ageing=60.0)
    low = job(lane=tenant("a") if laned else None)
    backend.push([low])
    with_ageing = backend.consume({"tasks": 1}, "worker-1")
    later(59)
    backend.push(jobs(5, priority=1))
    assert low.id not in ids(take(with_ageing, 5))
    later(62)
    backend.push(jobs(5, priority=1))

    assert ids(take(with_ageing, 1)) == [low.id]
    with_ageing.close()


# -- pauses ---------------------------------------------------------------------------


@pytest.mark.parametrize("lane", [None, UNDER, tenant("a")], ids=["plain", "limited", "tenant"])
def test_a_paused_task_is_not_lent_and_delays_nobody(backend, consumer, lane):
    stopped = [job(task="t", lane=lane, priority=n % 2) for n in range(150)]
    backend.pause("t", "task")
    backend.push(stopped)
    others = [job(task="u"), job(task="u", lane=tenant("a"))]
    backend.push(others)

    assert backend.paused("task") == {"t"}
    assert backend.paused() == set()
    assert set(ids(take(consumer))) == set(ids(others))
    assert take(consumer) == []
    assert take(consumer, 1, job_id=stopped[0].id) == []
    assert states(backend) == {"pending": 150, "reserved": 2}
    assert len(listed(backend, "tasks", State.PENDING, 40)) == 150

    backend.resume("t", "task")
    expected = sorted(stopped, key=lambda each: -each.priority)
    lent = []
    while found := take(consumer, 64):
        lent += found
    assert ids(expected) == ids(lent)
    assert {r.job.lane for r in lent} == {lane}
    assert {r.job.deliveries for r in lent} == {1}


def test_a_paused_key_is_not_lent_and_delays_nobody(backend, consumer):
    backend.push([*jobs(3, lane=key("a")), *jobs(2, lane=tenant("a")), job(lane=tenant("b")), job()])
    backend.pause("a", "key")
    backend.push(jobs(2, lane=key("a")))

    assert [r.job.lane and r.job.lane.key for r in take(consumer)] in (["b", None], [None, "b"])
    assert take(consumer) == []
    assert backend.paused("key") == {"a"}

    backend.resume("a", "key")
    assert len(take(consumer)) == 7


@pytest.mark.parametrize("what", ["queue", "task", "key"])
def test_a_pause_is_idempotent_and_ends_a_wait_when_resumed(live, consume, what):
    name = {"queue": "tasks", "task": "t", "key": "k"}[what]
    live.pause(name, what)
    live.pause(name, what)
    live.push([job(task="t", lane=tenant("k"))])
    consumer = consume(of=live)
    assert take(consumer) == []
    found = []
    waiting = threading.Thread(target=lambda: found.extend(take(consumer, 1, timeout=30)))
    waiting.start()

    live.resume(name, what)
    live.resume(name, what)
    waiting.join()

    assert len(found) == 1
    assert live.paused(what) == set()


@pytest.mark.needs(persistent=True)
@pytest.mark.parametrize("what", ["queue", "task", "key"])
def test_a_pause_lasts_over_restarts_and_holds_for_every_worker(open_backend, what):
    name = {"queue": "tasks", "task": "t", "key": "k"}[what]
    first, second = open_backend(), open_backend()
    first.push([job(task="t", lane=tenant("k"))])
    consumer = second.consume({"tasks": 1}, "worker-2")
    first.pause(name, what)
    first.close()

    assert take(consumer) == []
    assert open_backend().paused(what) == {name}
    consumer.close()


def test_a_revived_job_of_a_paused_task_waits_for_the_resume(backend, consumer):
    job_id = bury(backend, consumer, task="t")
    backend.pause("t", "task")
    backend.revive("tasks")
    assert take(consumer) == []

    backend.resume("t", "task")
    assert ids(take(consumer)) == [job_id]


def test_any_interleaving_keeps_the_accounts(backend, consume, declare, later, clock):  # noqa: C901
    """Random verbs on jobs in every kind of lane; the fixture compares the accounts with the jobs at the end."""
    declare(concurrency=6, key_concurrency=2, key_rate=Rate(5, 60.0))
    rng = random.Random(20)
    lanes = [None, UNDER, tenant("x"), *(key(n, ordered=o) for n in "abc" for o in (False, True))]
    consumers = [consume("tasks", "other", worker=f"w{n}") for n in range(2)]
    held = []
    for _ in range(1500):
        consumer = rng.choice(consumers)
        match rng.randrange(10):
            case 0 | 1:
                due = clock.now() + rng.choice([0, 0, 30])
                fields = {"keep": rng.choice([0.0, 99.0]), "max_retries": 1, "lease": 40.0}
                where = {"queue": rng.choice(["tasks", "other"]), "priority": rng.randrange(3)}
                lane = rng.choice(lanes)
                backend.push([job(due=due, lane=lane, task=rng.choice("tu"), **fields, **where)])
            case 2 | 3:
                held += [(consumer, r) for r in take(consumer, rng.randrange(1, 5))]
            case 4 | 5 | 6 if held:
                consumer, r = held.pop(rng.randrange(len(held)))
                verdict = rng.choice(list(Verdict))
                moved = {"queue": "other", "priority": 2} if verdict is Verdict.RETRY else {}
                if rng.random() < 0.3:
                    consumer.note([Note(reservation=r, started=clock.now())])
                settle(consumer, outcome(r, verdict, **moved))
            case 7 if held:
                consumer, r = held.pop()
                consumer.release([r])
            case 8:
                what, name = rng.choice([("task", "t"), ("task", "u"), ("key", "a"), ("queue", "other")])
                rng.choice([backend.pause, backend.resume])(name, what)
            case 9:
                waiting = [j.id for j in backend.list_jobs("tasks", State.PENDING, limit=5).jobs]
                rng.choice(
                    [
                        backend.reclaim,
                        backend.housekeep,
                        lambda waiting=waiting: backend.cancel(waiting[:1]),
                        lambda: backend.revive("tasks"),
                        lambda: later(rng.choice([1, 20, 50])),
                    ]
                )()
    for name, what in (("t", "task"), ("u", "task"), ("a", "key"), ("other", "queue")):
        backend.resume(name, what)
    later(100)
    while backend.reclaim() != ([], [], []):
        pass
    for _ in range(2000):
        lent = take(consumers[0], 50)
        complete(consumers[0], *lent) if lent else later(30)
        if not sum(
            states(backend).get(s, 0) + states(backend, "other").get(s, 0) for s in ("pending", "scheduled")
        ):
            break
    assert "pending" not in states(backend) | states(backend, "other")


# -- upkeep ---------------------------------------------------------------------------


def test_expired_jobs_leave_their_lane(backend, consumer, declare, later, clock):
    declare(concurrency=1)
    backend.push(jobs(3, lane=UNDER, expires=clock.now() + 5))
    last = job(lane=UNDER)
    backend.push([last])
    later(6)

    assert ids(take(consumer)) == [last.id]
    backend.housekeep()
    assert states(backend) == {"cancelled": 3, "reserved": 1}


def test_keeping_house_forgets_no_limit(backend, consumer, declare, later):
    declare(key_rate=Rate(1, 60.0), key_concurrency=1)
    backend.push([job(lane=key(name)) for name in "aab"])
    complete(consumer, *take(consumer))
    later(30)
    eventually(lambda: backend.housekeep() != 0.0)

    assert take(consumer) == []
    later(30)
    eventually(lambda: backend.housekeep() != 0.0)
    assert lanes_of(take(consumer)) == ["a"]


# -- overflow -------------------------------------------------------------------------


def bounded(name="", overflow="raise", most=3):
    return Lane(task="t", key=name, most=most, overflow=overflow)


def test_a_full_line_refuses_a_push_and_stores_nothing_of_its_batch(backend):
    backend.push(jobs(3, lane=bounded("a")))

    with pytest.raises(LineFullError, match="'a' wait already"):
        backend.push([job(), job(lane=bounded("a"))])
    with pytest.raises(LineFullError):
        backend.push(jobs(4, lane=bounded("b")))

    assert states(backend) == {"pending": 3}
    backend.push([*jobs(3, lane=bounded("b")), *jobs(5)])
    assert states(backend) == {"pending": 11}


def test_the_newest_or_the_oldest_of_a_full_line_is_dropped_by_name(backend, later):
    first = []
    for _ in range(3):
        (job_id,) = backend.push([job(lane=bounded("a", "drop_newest"))])
        first.append(job_id)
        later(1)
    new = job(lane=bounded("a", "drop_newest"))

    assert backend.push([new]) == [new.id]
    dropped = backend.find(new.id)
    assert (dropped.state, dropped.error) == (State.CANCELLED, "cancelled: the line is full")
    assert ids(listed(backend, "tasks", State.PENDING)) == first

    newer = job(lane=bounded("a", "drop_oldest"), priority=2)
    backend.push([newer])
    assert backend.find(first[0]).error == f"cancelled: the line is full, {newer.id} came"
    assert set(ids(listed(backend, "tasks", State.PENDING))) == {newer.id, *first[1:]}
    assert backend.wait([new.id, first[0]], 0) == [new.id, first[0]]


def test_what_is_lent_due_later_or_retried_is_not_counted(backend, consumer, clock):
    backend.push(jobs(3, lane=bounded()))
    lent = take(consumer, 2)
    backend.push(jobs(2, lane=bounded()))
    backend.push(jobs(5, lane=bounded(), due=clock.now() + 60))
    for reservation in lent:
        settle(consumer, failure(reservation))

    assert states(backend) == {"pending": 5, "scheduled": 5}
    with pytest.raises(LineFullError):
        backend.push([job(lane=bounded())])


def test_pausing_a_task_makes_no_room_in_its_lines(backend, consumer):
    backend.push(jobs(3, lane=bounded("a", "drop_oldest"), task="t"))
    backend.pause("t", "task")
    assert take(consumer) == []

    newest = backend.push(jobs(2, lane=bounded("a", "drop_oldest"), task="t"))

    assert states(backend) == {"pending": 3, "cancelled": 2}
    backend.resume("t", "task")
    assert set(newest) < set(ids(take(consumer)))


def test_pushing_an_id_again_meets_no_bound(backend):
    there = jobs(3, lane=bounded())
    backend.push(there)

    assert backend.push(there) == ids(there)
    assert states(backend) == {"pending": 3}


def test_a_settle_drops_what_would_be_refused(backend, consumer, consume):
    backend.push([*jobs(3, lane=bounded()), job(queue="other", keep=0)])
    other = take_one(consume("other"))
    follow = job(lane=bounded())

    assert consumer.settle([outcome(other, pushes=(follow,))]) == [Settlement.SETTLED]

    assert backend.find(follow.id).state is State.CANCELLED


def test_a_dropped_job_keeps_no_unique_key(backend):
    backend.push(jobs(3, lane=bounded()))
    lost = job(lane=bounded("", "drop_newest"), unique=Unique("k"))
    backend.push([lost])
    again = job(unique=Unique("k"))

    assert backend.push([again]) == [again.id]


def test_of_many_pushes_at_once_no_more_wait_than_may(open_backend):
    backends = (
        [open_backend() for _ in range(2)] if open_backend().capabilities.shared else [open_backend()] * 2
    )
    refused = []

    def push(backend):
        for _ in range(20):
            try:
                backend.push([job(lane=bounded("a", most=10))])
            except LineFullError as error:
                refused.append(error)

    threads = [threading.Thread(target=push, args=(backend,)) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert states(backends[0]) == {"pending": 10}
    assert len(refused) == 30
