"""The dispatcher's books: chunks, take-back, suspects, and what a dead child leaves."""

from __future__ import annotations

from typing import Any

import pytest

from taskq.events import Events
from taskq.job import Reservation, Verdict
from taskq.worker import limits
from taskq.worker.dispatch import Dispatcher
from taskq.worker.pipes import FLUSH
from taskq.worker.portions import Running, TaskFacts
from taskq.worker.suspects import SOLITUDE
from taskq.worker.watch import Watch
from tests.unit.worker.children import FakeChild, done, reservation, reservations


def learned(dispatcher: Dispatcher, child: Any, task: str, seconds: float) -> None:
    """Let the dispatcher know how long a task takes."""
    dispatcher.offer([reservation(task)])
    dispatcher.dispatch(0.0)
    lane, chunk, _ = child.chunks()[-1]
    dispatcher.results(child, lane, chunk, done(0, seconds=seconds), 0.0)
    child.end.sent.clear()


def at_work(*, children: int = 1, most_jobs: int | None = None, **spec: int) -> tuple[Dispatcher, list[Any]]:
    dispatcher = Dispatcher(most_jobs)
    dispatcher.tasks = {"coroutine": TaskFacts(is_async=True)} if spec.get("coroutines") else {}
    made: list[Any] = [FakeChild(**spec) for _ in range(children)]
    for child in made:
        dispatcher.add_child(child)
    return dispatcher, made


# -- chunks ---------------------------------------------------------------------------


def test_unknown_jobs_go_out_one_at_a_time() -> None:
    dispatcher, children = at_work(children=2)

    dispatcher.offer(reservations(5))
    dispatcher.dispatch(0.0)

    assert [len(child.jobs()) for child in children] == [1, 1]
    assert dispatcher.waiting == 3


def test_short_jobs_go_out_in_chunks_of_a_fair_share() -> None:
    dispatcher, (child,) = at_work()
    learned(dispatcher, child, "short", 0.00001)

    dispatcher.offer(reservations(200))
    dispatcher.dispatch(0.0)

    assert [n for _, _, n in child.chunks()] == [64, 64]  # one to run, one behind it
    assert dispatcher.waiting == 72


def test_a_long_job_never_goes_behind_another() -> None:
    dispatcher, (child,) = at_work()
    learned(dispatcher, child, "short", 0.00001)
    learned(dispatcher, child, "long", 1.0)

    dispatcher.offer([*reservations(2), reservation("long")])
    dispatcher.dispatch(0.0)

    assert sum(n for _, _, n in child.chunks()) == 2
    assert dispatcher.waiting == 1


def test_the_target_follows_what_jobs_take() -> None:
    dispatcher, (child,) = at_work()
    assert dispatcher.target == 1
    learned(dispatcher, child, "short", 0.0001)
    assert dispatcher.target > 50
    for _ in range(200):
        learned(dispatcher, child, "long", 1.0)
    assert dispatcher.target == 1


def test_a_child_is_handed_no_more_jobs_than_it_may_run() -> None:
    dispatcher, (child,) = at_work(most_jobs=10)
    learned(dispatcher, child, "short", 0.00001)  # its first

    dispatcher.offer(reservations(50))
    dispatcher.dispatch(0.0)

    assert len(child.jobs()) == 9
    assert dispatcher.waiting == 41


# -- take-back ------------------------------------------------------------------------


def test_what_waits_behind_a_long_job_goes_to_another() -> None:
    dispatcher, (busy, free) = at_work(children=2)
    learned(dispatcher, busy, "short", 0.00001)
    free.end.sent.clear()
    dispatcher.retire(free)
    jobs = reservations(10)
    dispatcher.offer(jobs)
    dispatcher.dispatch(0.0)
    lane, chunk, _ = busy.chunks()[0]
    busy.begin(lane, chunk, 0)

    dispatcher.take_back(1.0)
    other: Any = FakeChild()
    dispatcher.add_child(other)
    dispatcher.dispatch(1.0)

    assert [FLUSH, lane] in busy.end.sent
    assert other.jobs()
    assert set(other.jobs()) < {each.job.id for each in jobs[1:]}
    assert not busy.begin(lane, chunk, 1)


def test_nothing_is_taken_back_from_a_child_that_was_stopped_while_it_held_the_lock() -> None:
    dispatcher, (child,) = at_work()
    learned(dispatcher, child, "short", 0.00001)
    dispatcher.offer(reservations(10))
    dispatcher.dispatch(0.0)

    with child.lock:
        dispatcher.take_back(1.0)

    assert dispatcher.waiting == 0
    assert dispatcher.outstanding == 10


def test_what_was_withdrawn_twice_over_runs_once() -> None:
    """Chunks that the child has not even read may be withdrawn, replaced and withdrawn again."""
    dispatcher, (child,) = at_work()
    learned(dispatcher, child, "short", 0.00001)
    child.end.sent.clear()
    dispatcher.offer(reservations(3))
    for now in (1.0, 2.0, 3.0):
        dispatcher.dispatch(now)
        dispatcher.take_back(now + 0.5)
    dispatcher.dispatch(4.0)

    begun = [
        packed[1]
        for _, lane, chunk, jobs in child.runs()
        for index, packed in enumerate(jobs)
        if child.begin(lane, chunk, index)
    ]
    assert len(begun) == len(set(begun)) == 3


def test_excess_is_dropped_from_the_end() -> None:
    dispatcher, (_child,) = at_work()
    jobs = reservations(5)
    dispatcher.offer(jobs)
    dispatcher.dispatch(0.0)

    dropped = dispatcher.drop_excess(0.1)

    assert dropped == jobs[:0:-1]
    assert dispatcher.outstanding == 1


def test_what_no_lane_takes_for_long_is_given_to_other_workers() -> None:
    dispatcher, (child,) = at_work()
    learned(dispatcher, child, "short", 0.0001)
    jobs = [reservation("unknown"), *reservations(10)]
    dispatcher.offer(jobs)
    dispatcher.dispatch(1.0)
    lane, chunk, _ = child.chunks()[0]
    child.begin(lane, chunk, 0)

    assert dispatcher.drop_excess(1.5) == []
    dispatcher.take_back(2.5)
    dropped = dispatcher.drop_excess(2.5)
    assert sorted(each.job.id for each in dropped) == sorted(each.job.id for each in jobs[1:])
    assert dispatcher.target == 1  # nothing but what runs
    dispatcher.results(child, lane, chunk, done(0), 3.0)
    assert dispatcher.target > 1


def test_a_stopping_worker_gives_back_what_has_not_begun() -> None:
    dispatcher, (child,) = at_work()
    learned(dispatcher, child, "short", 0.00001)
    jobs = [*reservations(4), *reservations(2, losses=1)]
    dispatcher.offer(jobs[:4])
    dispatcher.dispatch(0.0)
    lane, chunk, _ = child.chunks()[0]
    child.begin(lane, chunk, 0)
    dispatcher.offer(jobs[4:])

    dropped = dispatcher.drop_ready(1.0)

    assert sorted(each.job.id for each in dropped) == sorted(each.job.id for each in jobs[1:])
    assert dispatcher.outstanding == 1


def test_a_cancelled_job_is_found_wherever_it_is() -> None:
    dispatcher, (child,) = at_work()
    learned(dispatcher, child, "short", 0.00001)
    running, handed, suspect = reservation(), reservation(), reservation(losses=1)
    dispatcher.offer([running, handed])
    dispatcher.dispatch(0.0)
    lane, chunk, _ = child.chunks()[0]
    child.begin(lane, chunk, 0)
    dispatcher.offer([suspect])

    found = dispatcher.withdraw(running.job.id, 0.0)
    assert isinstance(found, Running)
    assert found.reservation is running
    assert dispatcher.withdraw(handed.job.id, 0.0) is handed
    assert dispatcher.withdraw(suspect.job.id, 0.0) is suspect
    assert dispatcher.withdraw("unknown", 0.0) is None


# -- suspects -------------------------------------------------------------------------


def test_a_suspect_runs_alone_once_it_is_marked() -> None:
    dispatcher, children = at_work(children=2)
    suspect, other = reservation(losses=1), reservation()
    dispatcher.offer([suspect, other])

    assert dispatcher.dispatch(0.0) is suspect
    assert dispatcher.dispatch(0.1) is None  # its mark is under way
    assert [child.jobs() for child in children] == [[], []]
    assert dispatcher.run_alone(suspect, 0.2)
    assert dispatcher.dispatch(0.3) is None

    assert sorted(map(len, (child.jobs() for child in children))) == [0, 1]
    _end(dispatcher, children, 1.0)
    dispatcher.dispatch(1.0)
    assert other.job.id in [*children[0].jobs(), *children[1].jobs()]


def test_a_suspect_waits_for_what_runs() -> None:
    dispatcher, (child,) = at_work(threads=2)
    dispatcher.offer([reservation()])
    dispatcher.dispatch(0.0)
    lane, chunk, _ = child.chunks()[0]
    child.begin(lane, chunk, 0, now=0.0)
    suspect = reservation(losses=1)
    dispatcher.offer([suspect])

    assert dispatcher.dispatch(0.1) is None
    assert dispatcher.dispatch(SOLITUDE + 0.1) is suspect  # by now that one is marked itself


def test_others_join_a_suspect_that_runs_for_long() -> None:
    dispatcher, (child,) = at_work(threads=2)
    suspect, other = reservation(losses=1), reservation()
    dispatcher.offer([suspect])
    dispatcher.dispatch(0.0)
    dispatcher.run_alone(suspect, 0.0)
    dispatcher.offer([other])
    dispatcher.dispatch(1.0)
    assert child.jobs() == [suspect.job.id]

    dispatcher.dispatch(SOLITUDE + 0.1)

    assert child.jobs() == [suspect.job.id, other.job.id]


def test_others_have_their_turn_between_suspects() -> None:
    dispatcher, (child,) = at_work()
    first, second, other = reservation(losses=1), reservation(losses=1), reservation()
    dispatcher.offer([first, second, other])
    dispatcher.dispatch(0.0)
    dispatcher.run_alone(first, 0.0)
    _end(dispatcher, [child], 0.5)

    assert dispatcher.dispatch(0.5) is None
    assert child.jobs() == [first.job.id, other.job.id]
    _end(dispatcher, [child], 0.6)
    assert dispatcher.dispatch(0.7) is second


def test_a_suspect_waits_for_a_lane_if_its_child_has_just_died() -> None:
    dispatcher, (child,) = at_work()
    suspect = reservation(losses=1)
    dispatcher.offer([suspect])
    dispatcher.dispatch(0.0)
    dispatcher.bury_child(child, 0.0)
    assert dispatcher.run_alone(suspect, 0.1)

    successor: Any = FakeChild()
    dispatcher.add_child(successor)
    dispatcher.dispatch(0.2)

    assert successor.jobs() == [suspect.job.id]


def test_the_death_of_a_suspect_lets_the_next_one_run_at_once() -> None:
    dispatcher, (child,) = at_work()
    first, second = reservations(2, losses=1)
    dispatcher.offer([first, second])
    dispatcher.dispatch(0.0)
    dispatcher.run_alone(first, 0.0)
    lane, chunk, _ = child.chunks()[0]
    child.begin(lane, chunk, 0)
    dispatcher.bury_child(child, 0.1)
    dispatcher.add_child(FakeChild())  # type: ignore[arg-type]

    assert dispatcher.dispatch(0.2) is second


@pytest.mark.parametrize("when", ["marking", "marked"])
def test_a_suspect_that_was_lost_meanwhile_does_not_run(when: str) -> None:
    dispatcher, (child,) = at_work()
    suspect = reservation(losses=1)
    dispatcher.offer([suspect])
    dispatcher.dispatch(0.0)
    if when == "marked":
        dispatcher.bury_child(child, 0.0)
        dispatcher.run_alone(suspect, 0.0)
        child = FakeChild()
    found = dispatcher.withdraw(suspect.job.id, 0.1)

    assert found is (suspect if when == "marked" else None)
    assert when == "marked" or not dispatcher.run_alone(suspect, 0.2)
    if when == "marked":
        dispatcher.add_child(child)
    assert dispatcher.dispatch(0.3) is None
    assert child.jobs() == []
    assert dispatcher.quiet


def _end(dispatcher: Dispatcher, children: list[Any], now: float) -> None:
    """Let every chunk come to its end."""
    for child in children:
        for lane in list(dispatcher.lanes[child].values()):
            for chunk in list(lane.chunks):
                dispatcher.results(child, lane.number, chunk.number, done(*sorted(chunk.open)), now)


# -- blame ----------------------------------------------------------------------------


def dead(child: Any, dispatcher: Dispatcher, told: dict[str, str] | None = None) -> dict[str, Any]:
    """Bury ``child``; what becomes of each job, by id, and what can go to another child at once."""
    watch = Watch(dispatcher, Events(), "w", lambda _: None)
    for running in list(dispatcher.running()):
        kind = (told or {}).get(running.reservation.job.id)
        if kind:
            watch.interrupt(running, kind)
    if child.killed:
        watch.killed(child)
    death = dispatcher.bury_child(child, 0.0)
    outcomes = watch.judge(child, death, "signal 9")
    found: dict[str, Any] = {each.job.id: "another child" for each in death.unbegun}
    for outcome in outcomes:
        verdict = outcome.verdict
        fate = "suspect" if outcome.suspect else "repeated" if verdict is Verdict.RELEASE else verdict.value
        found[outcome.reservation.job.id] = outcome.attempt.error_type if outcome.attempt else fate
    return found


def chunk_of(dispatcher: Dispatcher, child: Any, jobs: list[Reservation]) -> tuple[int, int]:
    learned(dispatcher, child, "short", 0.00001)
    dispatcher.offer(jobs)
    dispatcher.dispatch(0.0)
    ((lane, chunk, n),) = child.chunks()
    assert n == len(jobs)
    return lane, chunk


def test_the_job_that_ran_is_to_blame_and_its_neighbours_are_not() -> None:
    dispatcher, (child,) = at_work()
    jobs = reservations(4)
    lane, chunk = chunk_of(dispatcher, child, jobs)
    for index in range(3):
        child.begin(lane, chunk, index)

    fates = dead(child, dispatcher)

    assert [fates[each.job.id] for each in jobs] == ["repeated", "repeated", "WorkerLost", "another child"]
    assert dispatcher.quiet


def test_a_child_that_dies_between_bodies_makes_a_suspect_of_the_last() -> None:
    dispatcher, (child,) = at_work()
    jobs = reservations(3)
    lane, chunk = chunk_of(dispatcher, child, jobs)
    for index in range(2):
        child.begin(lane, chunk, index)
    child.slots.ran(lane)

    fates = dead(child, dispatcher)

    assert [fates[each.job.id] for each in jobs] == ["repeated", "suspect", "another child"]


def test_a_suspect_whose_process_dies_after_it_is_counted() -> None:
    dispatcher, (child,) = at_work()
    suspect = reservation(losses=1)
    dispatcher.offer([suspect])
    dispatcher.dispatch(0.0)
    dispatcher.run_alone(suspect, 0.0)
    ((lane, chunk, _),) = child.chunks()
    child.begin(lane, chunk, 0)
    child.slots.ran(lane)

    assert dead(child, dispatcher) == {suspect.job.id: "WorkerLost"}


def side_by_side(*jobs: Reservation) -> tuple[Dispatcher, Any]:
    dispatcher, (child,) = at_work(threads=len(jobs))
    for job in jobs:
        dispatcher.offer([job])
        if job.job.losses:
            dispatcher.dispatch(0.0)
            dispatcher.run_alone(job, 0.0)
        dispatcher.dispatch(SOLITUDE + 1)
    for lane, chunk, _ in child.chunks():
        child.begin(lane, chunk, 0)
    return dispatcher, child


def test_where_many_ran_all_become_suspects() -> None:
    jobs = reservations(3)
    dispatcher, child = side_by_side(*jobs)

    assert dead(child, dispatcher) == {each.job.id: "suspect" for each in jobs}


def test_one_that_was_a_suspect_already_is_counted() -> None:
    known, *others = reservation(losses=1), *reservations(2)
    dispatcher, child = side_by_side(known, *others)

    fates = dead(child, dispatcher)

    assert fates == {known.job.id: "WorkerLost"} | {each.job.id: "suspect" for each in others}


def test_one_that_was_killed_for_its_limit_takes_nobody_with_it() -> None:
    guilty, *others = reservations(3)
    dispatcher, child = side_by_side(guilty, *others)
    dispatcher.tasks = {"short": TaskFacts(hard=1.0)}
    child.killed = True

    fates = dead(child, dispatcher, told={guilty.job.id: limits.HARD})

    assert fates == {guilty.job.id: "TimeLimitExceeded"} | {each.job.id: "repeated" for each in others}


@pytest.mark.parametrize(("kind", "fate"), [(limits.SHUTDOWN, "repeated"), (limits.CANCELLED, "cancel")])
def test_who_was_told_to_end_has_ended(kind: str, fate: str) -> None:
    told, other = reservations(2)
    dispatcher, child = side_by_side(told, other)

    assert dead(child, dispatcher, told={told.job.id: kind}) == {
        told.job.id: fate,
        other.job.id: "WorkerLost",
    }
