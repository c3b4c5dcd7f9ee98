from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

import msgpack
import pytest

from taskq import TaskQ, cron, crontab, every
from taskq.errors import ConfigurationError
from taskq.job import Job, Lane, Reservation, Unique, Verdict
from taskq.schedule import Overlap, run_all, run_once, skip
from taskq.timetable import check_schedule, pack, pack_job, unpack, unpack_job
from taskq.worker.executor import Result
from taskq.worker.wire import pack_result, unpack_result

WHEN = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
#: A job with every part of its declaration set.
FULL = Job(
    id="a",
    queue="q",
    task="t",
    payload=b"\x00\xff",
    priority=3,
    due=1060.0,
    expires=1100.0,
    lease=7.0,
    max_retries=None,
    loss_base=2.0,
    loss_cap=3.0,
    keep=4.0,
    headers={"h": [1, b"x"]},
    created=1000.0,
    unique=Unique("k", "started", 5.0, "reschedule", 1030.0),
    lane=Lane(task="t", key="c", weight=2.0, ordered=True),
)
#: What a run changes, which no declaration says.
OF_RUNS = {
    "state",
    "attempts",
    "losses",
    "deliveries",
    "generation",
    "first_started",
    "ended",
    "worker",
    "error",
    "result",
    "history",
}


def travelled(value):
    return msgpack.unpackb(msgpack.packb(value), strict_map_key=False)


@pytest.mark.parametrize(
    "given",
    [
        {"cron": "*/5 * * * *"},
        {"cron": "0 30 3 L * MON#2", "timezone": "Europe/Paris", "jitter": 2.5},
        {"cron": "@daily", "timezone": timezone(timedelta(hours=5, minutes=45)), "start": WHEN, "end": WHEN},
        {"schedule": crontab(minute=0, day_of_month="1", day_of_week="mon", timezone=ZoneInfo("Asia/Tokyo"))},
        {"every": 0.01},
        {"every": timedelta(days=3), "start": WHEN, "misfire": run_all(7, max_age=99.5)},
        {"schedule": every(60, anchor=WHEN, jitter=3), "overlap": "queue_one", "catch_up": 10},
        {"every": 5, "misfire": "run_once", "overlap": Overlap.SKIP},
    ],
    ids=str,
)
def test_a_timetable_comes_back_as_it_was(given):
    timetable = check_schedule(given)

    assert unpack(travelled(pack(timetable, Job(id="x")))) == timetable


def test_no_part_of_a_jobs_declaration_is_lost_on_the_way():
    defaults = Job(id="")
    for field in dataclasses.fields(Job):
        if field.name not in OF_RUNS:
            assert getattr(FULL, field.name) != getattr(defaults, field.name), (
                f"FULL says nothing of {field.name}"
            )
    remade = unpack_job(travelled(pack_job(FULL)), 5000.0, 4990.0)
    sent = unpack_result(
        travelled(pack_result(0, 0.0, Result(verdict=Verdict.BURY, pushes=(FULL,)))), Reservation(FULL, 1)
    )

    assert sent.pushes == (FULL,)
    assert remade == dataclasses.replace(
        FULL,
        id=remade.id,
        created=4990.0,
        due=5060.0,
        expires=5160.0,
        unique=FULL.unique._replace(latest=5020.0),
    )


@pytest.mark.parametrize(
    ("given", "misfire"),
    [
        ({}, skip(60)),
        ({"catch_up": 9}, run_once(9)),
        ({"misfire": "skip"}, skip(60)),
        ({"misfire": "run_once"}, run_once()),
        ({"misfire": "run_all", "catch_up": 9}, run_all(100, max_age=9)),
        ({"misfire": run_all(5, max_age=3), "catch_up": 9}, run_all(5, max_age=3)),
    ],
)
def test_what_is_made_up_for(given, misfire):
    assert check_schedule({"every": 5, **given}).misfire == misfire


class Nameless(tzinfo):
    pass


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"cron": "* * * * *", "every": 5}, "one of cron=, every= and schedule="),
        ({"timezone": "UTC"}, "one of cron=, every= and schedule="),
        ({"cron": "61 * * * *"}, "minute"),
        ({"every": 5, "timezone": "UTC"}, "means nothing"),
        ({"schedule": every(5), "jitter": 5}, "inside schedule="),
        ({"schedule": "* * * * *"}, "use cron"),
        ({"every": 5, "overlap": "maybe"}, "'skip', 'queue_one', 'allow'"),
        ({"every": 5, "misfire": "later"}, "'skip', 'run_once', 'run_all'"),
        ({"every": 5, "misfire": "run_all", "overlap": "skip"}, "forbids"),
        ({"every": 0}, "at least"),
        ({"schedule": cron("* * * * *", timezone=Nameless())}, "ZoneInfo"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_declared(given, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        TaskQ("memory://").task(name="bad", **given)


def test_a_task_that_needs_arguments_cannot_be_scheduled():
    app = TaskQ("memory://")
    with pytest.raises(ConfigurationError, match="without arguments"):

        @app.task(name="bad", every=5)
        def bad(needed: int) -> None: ...


def test_on_exhausted_must_take_what_it_is_told():
    app = TaskQ("memory://")

    @app.task(name="mute")
    def mute() -> None: ...

    for wrong, complaint in ((mute, "one dict"), (5, "a task or a callable")):
        with pytest.raises(ConfigurationError, match=complaint):

            @app.task(name="bad", on_exhausted=wrong)
            def bad() -> None: ...


def test_without_a_store_a_schedule_is_refused_where_it_is_declared():
    app = TaskQ("amqp://localhost")
    with pytest.raises(ConfigurationError):

        @app.task(name="periodic", every=5)
        def periodic() -> None: ...
