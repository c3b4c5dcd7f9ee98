"""Schedules on every store: what each worker's scheduler does, with a clock that moves when told to."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from taskq import TaskQ
from taskq.clock import to_datetime
from taskq.errors import ConfigurationError, ScheduleNotFoundError
from taskq.events import Events
from taskq.job import State, Verdict
from taskq.schedule import run_all, run_once
from taskq.schedules import Schedules, declared
from taskq.timetable import INSTANT_HEADER, NAME_HEADER, check_schedule, job_at, pack, unpack
from taskq.worker.scheduler import Scheduler
from tests.contract.acts import complete, failure, job, listed, outcome, settle, states, take, take_one

pytestmark = pytest.mark.needs(stores=True)

#: The frozen clock stands 20 seconds into a minute.
MINUTELY = {"cron": "* * * * *"}


class App:
    """As much of an app as schedules need: a backend under the test's clock."""

    def __init__(self, backend):
        self.backend = self.store = backend

    def need_store(self, feature):
        return self.backend

    def enqueue(self, jobs):
        return self.backend.push(jobs)


def definition(*, task="t", queue="tasks", **when):
    return pack(
        check_schedule({**MINUTELY, **when} if "every" not in when else when), job(task=task, queue=queue)
    )


@pytest.fixture
def heard():
    return []


@pytest.fixture
def scheduler(backend, clock, heard):
    return make(backend, clock, heard)


def make(backend, clock, heard=None, **definitions):
    events = Events()
    if heard is not None:
        events.subscribe(lambda event: heard.append((event.name, dict(event.fields))))
    scheduler = Scheduler(backend, events, clock=clock)
    scheduler.declare(definitions)
    scheduler.run_once()
    return scheduler


def declare(scheduler, **definitions):
    scheduler.declare(definitions)
    scheduler.run_once()


def instants(backend, queue="tasks"):
    """The instants that stored jobs, in order, whatever became of those."""
    found = [one for state in State for one in listed(backend, queue, state)]
    return sorted(one.headers[INSTANT_HEADER] for one in found if INSTANT_HEADER in one.headers)


def only(backend):
    (record,) = backend.schedules()
    return record


def names(heard):
    return [name for name, _ in heard]


# -- firing ---------------------------------------------------------------------------


def test_an_instant_stores_one_job_however_often_and_by_whomever_it_is_looked_at(
    backend, clock, later, heard
):
    schedulers = [make(backend, clock, heard, m=definition()) for _ in range(5)]
    assert states(backend) == {}
    later(40)
    for scheduler in [*schedulers, *schedulers]:
        scheduler.run_once()

    assert instants(backend) == [clock.now()]
    (stored,) = listed(backend, "tasks", State.PENDING)
    assert stored.headers == {NAME_HEADER: "m", INSTANT_HEADER: clock.now()}
    assert (stored.task, stored.payload, stored.due, stored.created) == (
        "t",
        b"payload",
        clock.now(),
        clock.now(),
    )
    assert only(backend).fired == clock.now()
    assert only(backend).job_id == stored.id
    assert names(heard) == ["schedule.fired"]


def test_it_says_when_to_come_again(backend, clock, later):
    scheduler = make(backend, clock, m=definition())
    assert scheduler.run_once() == 1.0
    later(39.75)
    assert scheduler.run_once() == 0.25
    later(0.25)
    scheduler.run_once()
    assert scheduler.run_once() == 1.0


def test_every_instant_of_an_hour(backend, clock, later):
    scheduler = make(backend, clock, m=definition())
    start = clock.now() + 40
    for _ in range(360):
        later(10)
        scheduler.run_once()

    assert instants(backend) == [start + 60 * n for n in range(60)]


def test_jitter_delays_the_job_by_the_same_for_all(backend, clock, later):
    scheduler = make(backend, clock, m=definition(jitter=30))
    later(40)
    scheduler.run_once()
    (stored,) = [one for state in (State.PENDING, State.SCHEDULED) for one in listed(backend, "tasks", state)]
    again = job_at(only(backend).definition, "m", clock.now(), clock.now())

    assert clock.now() <= stored.due < clock.now() + 30
    assert again.due == stored.due


def test_start_and_end_bound_it(backend, clock, later):
    first = to_datetime(clock.now() + 100)
    scheduler = make(backend, clock, m=definition(start=first, end=first + timedelta(seconds=60)))
    for _ in range(10):
        later(40)
        scheduler.run_once()

    assert instants(backend) == [1_700_000_100.0, 1_700_000_160.0]


def test_a_crash_can_only_lose_the_answer_not_the_job(backend, clock, later):
    """The claim and the job are one write: who died after it has stored both."""
    scheduler = make(backend, clock, m=definition())
    later(40)
    scheduler.run_once()
    make(backend, clock, m=definition()).run_once()

    assert len(instants(backend)) == 1


# -- many at once ---------------------------------------------------------------------


def test_of_many_schedulers_one_wins_each_instant(open_backend, backend, case, clock, later):
    backends = [open_backend() for _ in range(3)] if case.capabilities.shared else [backend]
    heard = []
    schedulers = [
        make(backends[n % len(backends)], clock, heard, s=definition(every=1, misfire=run_all(100)))
        for n in range(6)
    ]
    start = clock.now()
    gate, done = threading.Barrier(7), threading.Barrier(7)

    def race(scheduler):
        for _ in range(20):
            gate.wait(30)
            scheduler.run_once()
            scheduler.run_once()
            done.wait(30)

    threads = [threading.Thread(target=race, args=(scheduler,)) for scheduler in schedulers]
    for thread in threads:
        thread.start()
    for _ in range(20):
        later(3)
        gate.wait(30)
        done.wait(30)
    for thread in threads:
        thread.join()
    schedulers[0].run_once()

    assert instants(backend) == [start + n for n in range(1, 61)]
    assert names(heard) == ["schedule.fired"] * 60


# -- missed, overlapping --------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "after", "expected"),
    [
        ({}, 90, [40]),  # at most a minute late
        ({}, 3600, [3580]),
        ({"cron": "0 * * * *", "misfire": "skip"}, 7200, []),
        ({"cron": "0 * * * *", "catch_up": 7200}, 7200, [6400]),
        ({"cron": "0 * * * *", "misfire": "run_once"}, 72000, [71200]),
        ({"cron": "0 * * * *", "misfire": "run_all"}, 10800, [2800, 6400, 10000]),
        ({"cron": "0 * * * *", "misfire": run_all(2)}, 10800, [6400, 10000]),
        ({"cron": "0 * * * *", "misfire": run_all(9, max_age=5000)}, 10800, [6400, 10000]),
        ({"cron": "0 * * * *", "misfire": "run_all", "catch_up": 5000}, 10800, [6400, 10000]),
    ],
)
def test_what_was_missed_while_no_worker_ran(backend, clock, later, heard, when, after, expected):
    start = clock.now()
    make(backend, clock, m=definition(**when))
    later(after)
    make(backend, clock, heard, m=definition(**when))

    assert [round(instant - start) for instant in instants(backend)] == expected
    if not expected:
        assert names(heard) == ["schedule.skipped"]
        assert heard[0][1]["reason"] == "missed"


def test_skip_leaves_out_instants_while_the_job_is_at_work(backend, consumer, clock, later, heard):
    scheduler = make(backend, clock, heard, m=definition(overlap="skip"))
    start = clock.now() + 40
    later(40)
    scheduler.run_once()
    reservation = take_one(consumer)
    for _ in range(3):
        later(60)
        scheduler.run_once()
    complete(consumer, reservation)
    scheduler.run_once()
    assert instants(backend) == [start]
    later(60)
    scheduler.run_once()

    assert instants(backend) == [start, start + 240]
    assert names(heard).count("schedule.skipped") == 3


def test_queue_one_lets_one_wait(backend, consumer, clock, later):
    scheduler = make(backend, clock, m=definition(overlap="queue_one"))
    start = clock.now() + 40
    later(40)
    scheduler.run_once()
    reservation = take_one(consumer)
    for _ in range(5):
        later(60)
        scheduler.run_once()
    assert instants(backend) == [start]
    later(10)
    complete(consumer, reservation)
    later(5)
    scheduler.run_once()

    assert instants(backend) == [start, start + 300]
    complete(consumer, take_one(consumer))
    scheduler.run_once()
    assert len(instants(backend)) == 2
    later(45)
    scheduler.run_once()
    assert instants(backend) == [start, start + 300, start + 360]


def test_queue_one_forgets_what_waited_if_nobody_looked_for_long(backend, consumer, clock, later):
    scheduler = make(backend, clock, m=definition(cron="0 * * * *", overlap="queue_one"))
    later(2800)
    scheduler.run_once()
    reservation = take_one(consumer)
    later(3600)
    complete(consumer, reservation)
    later(1000)
    scheduler.run_once()

    assert len(instants(backend)) == 1


@pytest.mark.parametrize("overlap", ["skip", "queue_one"])
def test_a_retry_that_waits_is_still_at_work_and_an_end_of_any_kind_is_not(
    backend, consumer, clock, later, overlap
):
    scheduler = make(backend, clock, m=definition(overlap=overlap))
    later(40)
    scheduler.run_once()
    settle(consumer, failure(take_one(consumer), due=clock.now() + 100))
    later(60)
    scheduler.run_once()
    assert len(instants(backend)) == 1
    later(45)
    settle(consumer, outcome(take_one(consumer), Verdict.BURY))
    later(15)
    scheduler.run_once()

    assert len(instants(backend)) == 2


def test_allow_runs_them_side_by_side(backend, consumer, clock, later):
    scheduler = make(backend, clock, m=definition())
    for _ in range(3):
        later(60)
        scheduler.run_once()

    assert len(take(consumer)) == 3


# -- clocks ---------------------------------------------------------------------------


@pytest.mark.parametrize("back", [5, 3600, 86_000])
def test_a_clock_that_is_set_back_repeats_nothing(backend, clock, later, back):
    scheduler = make(backend, clock, s=definition(every=10))
    for _ in range(3):
        later(10)
        scheduler.run_once()
    before = instants(backend)
    clock.step(-back)
    for _ in range(10):
        later(back / 20)
        scheduler.run_once()
    assert instants(backend) == before
    later(back + 10)
    scheduler.run_once()

    assert len(instants(backend)) == len(before) + 1
    assert len(set(instants(backend))) == len(instants(backend))


def test_a_clock_that_was_wrong_by_days_is_not_waited_for(backend, clock, later):
    clock.step(30 * 86_400)
    scheduler = make(backend, clock, s=definition(every=10))
    later(10)
    scheduler.run_once()
    clock.step(-30 * 86_400)
    later(10)
    scheduler.run_once()
    later(10)
    scheduler.run_once()

    assert clock.now() - only(backend).dealt < 10


def test_a_clock_that_jumps_ahead_makes_up_for_no_more_than_it_should(backend, clock, later):
    scheduler = make(backend, clock, s=definition(every=10))
    clock.step(10 * 86_400)
    scheduler.run_once()

    assert len(instants(backend)) == 1


def test_a_clock_that_swings_cannot_flood_the_queue(backend, clock, heard):
    scheduler = make(backend, clock, heard, m=definition(misfire=run_once()))
    for _ in range(500):
        clock.step(5 * 86_400)
        scheduler.run_once()
        clock.step(-5 * 86_400)
        scheduler.run_once()

    assert len(instants(backend)) <= 3
    assert names(heard).count("schedule.failed") == 1


# -- declared in code -----------------------------------------------------------------


def test_a_declaration_is_stored_and_restarts_change_nothing(backend, clock, later):
    start = clock.now()
    make(backend, clock, m=definition())
    later(30)
    make(backend, clock, m=definition())

    assert (only(backend).dealt, only(backend).declared, only(backend).revision) == (start, start, 1)


def test_the_last_deploy_wins_and_counts_from_now_on(backend, clock, later):
    old = make(backend, clock, m=definition())
    later(10)
    make(backend, clock, m=definition(every=7, task="new"))
    later(14)
    old.run_once()

    assert [one.task for one in listed(backend, "tasks", State.PENDING)] == ["new"]


def test_another_payload_does_not_move_the_instants(backend, clock, later):
    make(backend, clock, m=definition(cron="0 * * * *", catch_up=7200))
    later(3600)
    make(backend, clock, m=definition(cron="0 * * * *", catch_up=7200, queue="other"))

    assert len(instants(backend, "other")) == 1


def test_a_schedule_that_the_workers_code_does_not_declare_is_left_alone(backend, clock, later):
    make(backend, clock, m=definition())
    other = make(backend, clock)
    later(60)
    other.run_once()

    assert instants(backend) == []
    assert len(backend.schedules()) == 1


def test_it_is_forgotten_a_day_after_the_last_worker_declared_it_unless_paused(backend, clock, later):
    make(backend, clock, m=definition(), kept=definition())
    Schedules(App(backend)).pause("kept")
    other = make(backend, clock)
    later(86_000)
    other.run_once()
    assert len(backend.schedules()) == 2
    later(500)
    other.run_once()

    assert only(backend).name == "kept"


def test_a_worker_goes_on_declaring(backend, clock, later):
    scheduler, other = make(backend, clock, m=definition(cron="0 0 1 1 *")), make(backend, clock)
    for _ in range(30):
        later(3601)
        scheduler.run_once()
        other.run_once()

    assert clock.now() - only(backend).declared < 1


def test_code_that_changed_under_a_worker_is_declared_anew(backend, clock, later):
    scheduler = make(backend, clock, m=definition(), gone=definition())
    declare(scheduler, m=definition(queue="other"))
    later(40)
    scheduler.run_once()

    assert instants(backend) == []
    assert len(instants(backend, "other")) == 1


def test_a_schedule_that_is_broken_holds_up_no_other(backend, clock, later, heard):
    broken = definition()
    broken["when"] = {**broken["when"], "zone": "No/Where"}
    scheduler = make(backend, clock, heard, a=broken, b=definition())
    for _ in range(3):
        later(60)
        scheduler.run_once()

    assert len(instants(backend)) == 3
    assert [fields["schedule"] for name, fields in heard if name == "schedule.failed"] == ["a"]


# -- at run time ----------------------------------------------------------------------


@pytest.fixture
def app(backend):
    app = TaskQ("memory://")

    @app.task(name="greet", queue="greetings", expires=50)
    def greet(name: str) -> str:
        return f"hello {name}"

    with app.instead(backend):
        yield app


@pytest.fixture
def greet(app):
    return app.tasks["greet"]


@pytest.fixture
def schedules(app, clock):
    """``app.schedules`` by the test's clock."""
    return Schedules(app, clock=clock)


def test_one_made_at_run_time_is_fired_by_any_worker(schedules, greet, backend, clock, later):
    made = schedules.create("hourly", greet.s("you"), cron="30 * * * *", timezone="Asia/Kolkata")
    later(2810)
    make(backend, clock).run_once()

    (stored,) = listed(backend, "greetings", State.PENDING)
    assert stored.task == "greet"
    assert stored.headers[INSTANT_HEADER] == made.next.timestamp()
    assert stored.expires == made.next.timestamp() + 50
    view = schedules.get("hourly")
    assert (view.last, view.last_job, view.declared) == (made.next, stored.id, None)
    assert view.next == made.next + timedelta(hours=1)


@pytest.mark.needs(persistent=True)
def test_it_outlives_the_process(app, schedules, greet, backend, open_backend):
    made = schedules.create("hourly", greet.s("you"), cron="0 * * * *", jitter=5)
    schedules.pause("hourly")
    backend.close()
    with app.instead(open_backend()):
        found = schedules.get("hourly")

    assert found.timetable == made.timetable
    assert found.paused


def test_a_paused_schedule_fires_nothing_and_resumes_from_then_on(schedules, backend, clock, later, heard):
    scheduler = make(backend, clock, heard, m=definition(misfire="run_all"))
    declare(scheduler, m=definition(misfire="run_all", every=10))
    schedules.pause("m")
    schedules.pause("m")
    assert schedules.get("m").next is None
    later(100)
    scheduler.run_once()
    assert instants(backend) == []
    make(backend, clock, m=definition(misfire="run_all", every=10))
    assert only(backend).paused, "a deploy does not resume what an operator paused"
    later(-100)
    schedules.resume("m")
    schedules.resume("m")
    later(10)
    scheduler.run_once()

    assert len(instants(backend)) == 1


def test_trigger_stores_its_job_now_also_while_it_is_paused(app, greet, live):
    with app.instead(live):
        app.schedules.create("yearly", greet.s("you"), cron="@yearly")
        app.schedules.pause("yearly")
        result = app.schedules.trigger("yearly")
        view = app.schedules.get("yearly")
        app.worker(queues={"greetings": 1}).run(burst=True)

        assert result.get(timeout=0) == "hello you"
        assert result.job().headers == {NAME_HEADER: "yearly"}
        assert (view.last, view.paused) == (None, True)


def test_change_gives_it_another_call_another_time_or_both(schedules, greet):
    made = schedules.create("s", greet.s("you"), every=30, overlap="skip")
    other = schedules.change("s", greet.options(queue="elsewhere").s("me"))
    assert (other.queue, other.timetable) == ("elsewhere", made.timetable)
    later = schedules.change("s", cron="0 0 * * *")
    assert (later.queue, later.description) == ("elsewhere", "At 00:00 every day (UTC)")
    assert later.timetable.overlap == "allow"
    both = schedules.change("s", greet.s("them"), every=5)

    assert (both.queue, both.timetable.schedule.period) == ("greetings", timedelta(seconds=5))
    assert both.revision == 4


def test_remove(schedules, greet):
    schedules.create("s", greet.s("you"), every=30)
    schedules.remove("s")

    assert list(schedules.list()) == []
    with pytest.raises(ScheduleNotFoundError):
        schedules.remove("s")


def test_names_are_taken_once(schedules, greet):
    schedules.create("nightly", greet.s("you"), every=30)
    with pytest.raises(ConfigurationError, match="already"):
        schedules.create("nightly", greet.s("you"), every=30)
    with pytest.raises(ScheduleNotFoundError, match="did you mean 'nightly'"):
        schedules.get("nihgtly")


def test_what_code_declares_is_neither_changed_nor_removed_from_outside(schedules, greet, backend, clock):
    make(backend, clock, m=definition())
    with pytest.raises(ConfigurationError, match="declared in code"):
        schedules.change("m", every=5)
    with pytest.raises(ConfigurationError, match="declared in code"):
        schedules.remove("m")
    clock.step(3 * 3600)
    schedules.remove("m")

    assert backend.schedules() == []


def test_a_task_declares_what_its_options_say(app, backend):
    @app.task(name="tidy", cron="0 3 * * *", timezone="Europe/Paris", overlap="skip", catch_up=3600)
    def tidy(days: int = 7) -> None: ...

    found = declared(app)

    assert list(found) == ["tidy"]
    timetable = unpack(found["tidy"])
    assert timetable == tidy.config.timetable
    assert timetable.schedule.describe() == "At 03:00 every day (Europe/Paris)"
    assert timetable.misfire == run_once(3600)
