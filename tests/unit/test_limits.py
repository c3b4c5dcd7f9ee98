"""Declared limits: what they accept, what they say of the rest, and what a call makes of them."""

from __future__ import annotations

import uuid

import pytest
from click.testing import CliRunner

from taskq import Rate, TaskQ
from taskq.backend import Backend
from taskq.backends.memory import MemoryBackend
from taskq.backends.shares import Gate
from taskq.cli import main
from taskq.errors import ConfigurationError, InvalidArgumentError, LineFullError, TaskCancelledError
from taskq.job import Lane
from taskq.limits import MAX_KEY, Limits, as_facts, from_facts, parse_rate
from taskq.schedules import declared
from taskq.timetable import job_at


@pytest.fixture
def app():
    with TaskQ("memory://") as app:
        yield app


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("10/m", Rate(10, 60)),
        ("100/s", Rate(100, 1)),
        ("5/30s", Rate(5, 30)),
        (" 7 / hour ", Rate(7, 3600)),
        ("1/D", Rate(1, 86_400)),
        ("3/1.5min", Rate(3, 90)),
        (20, Rate(20, 1)),
        (Rate(2, 5.0, burst=1), Rate(2, 5.0, burst=1)),
    ],
)
def test_rates_that_can_be_read(given, meant):
    assert parse_rate("rate_limit", given) == meant


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("10/minuets", "did you mean '10/minutes'?"),
        ("10 per minute", "did you mean '10/minute'?"),
        ("10", "did you mean '10/s'?"),
        ("10m", "did you mean '10/m'?"),
        ("fast", "write it as '10/m'"),
        ("10/x", "use s, m, h, d"),
        ("0/m", "use an int from 1"),
        (0, "write it as '10/m'"),
        (1.5, "write it as '10/m'"),
        (True, "write it as '10/m'"),
        ("1/99d", "seconds"),
    ],
)
def test_errors_about_rates_name_the_nearest_form(given, said):
    with pytest.raises(InvalidArgumentError, match=said.replace("?", r"\?")):
        parse_rate("rate_limit", given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate_limt": "1/s"}, "did you mean 'rate_limit'"),
        ({"rate_limit": "1/fortnight"}, "no unit 'fortnight'"),
        ({"concurrency": 0}, "at least 1"),
        ({"key": "accuont"}, "did you mean 'account'"),
        ({"key": 3}, "name of a parameter"),
        ({"key": "account", "fairness_key": "account"}, "give one"),
        ({"key": "account", "ordered": True, "key_concurrency": 2}, "leave key_concurrency out"),
        ({"fairness_key": "account", "key_concurrency": 2}, "need key="),
        ({"weight": -1}, "use 0.001"),
        ({"max_waiting": 0}, "at least 1"),
        ({"overflow": "raise"}, "needs max_waiting="),
        ({"max_waiting": 5, "overflow": "drop_newer"}, "did you mean 'drop_newest'"),
    ],
)
def test_wrong_declarations_say_what_would_be_right(app, options, said):
    with pytest.raises(InvalidArgumentError, match=said):

        @app.task(name="t", **options)
        def t(account): ...


def lane_of(task, *args, **options):
    return task.options(**options).s(*args).job(task._app).lane


def test_a_call_works_out_its_lane(app):
    @app.task(name="plain")
    def plain(account): ...

    @app.task(name="limited", rate_limit="1/s")
    def limited(account): ...

    @app.task(name="keyed", key="account", key_concurrency=1, ordered=True, weight=lambda account=7: 2)
    def keyed(account=7): ...

    @app.task(name="called", key=lambda account: account[0] or None, key_concurrency=3)
    def called(account): ...

    @app.task(name="shared", fairness_key="account")
    def shared(account): ...

    unit = uuid.UUID(int=5)
    assert lane_of(plain, "a") is None
    assert lane_of(plain, "a", key="k", weight=3) == Lane(key="k", weight=3.0)
    assert lane_of(limited, "a") == Lane(task="limited")
    assert lane_of(limited, "a", fairness_key=unit) == Lane(task="limited", key=str(unit))
    assert lane_of(keyed) == Lane(task="keyed", key="7", weight=2.0, ordered=True)
    assert lane_of(keyed, 8, key=9, weight=0.5) == Lane(task="keyed", key="9", weight=0.5, ordered=True)
    assert lane_of(called, ("x", 1)) == Lane(task="called", key="x")
    assert lane_of(shared, "t1") == Lane(key="t1")

    @app.task(name="few", max_waiting=5)
    def few(account): ...

    @app.task(name="latest", key="account", max_waiting=1, overflow="drop_oldest")
    def latest(account): ...

    assert lane_of(few, "a") == Lane(task="few", most=5)
    assert lane_of(latest, "a") == Lane(task="latest", key="a", most=1, overflow="drop_oldest")
    with pytest.raises(InvalidArgumentError, match="give key= with the call"):
        lane_of(called, ("", 1))
    with pytest.raises(InvalidArgumentError, match="contradict"):
        lane_of(plain, "a", key="k", fairness_key="f")
    with pytest.raises(InvalidArgumentError, match="use a str, an int or a UUID"):
        lane_of(shared, ["a"])
    with pytest.raises(InvalidArgumentError, match=f"1 to {MAX_KEY}"):
        lane_of(shared, "a\x1f")


def test_calls_that_are_too_many_are_refused_or_say_that_they_were_dropped(app):
    @app.task(name="few", max_waiting=2)
    def few(n): ...

    @app.task(name="newest", max_waiting=1, overflow="drop_newest")
    def newest(n): ...

    app.enqueue_many(few.s(n) for n in range(2))
    with pytest.raises(LineFullError, match="few: 2 jobs wait already"):
        few.delay(3)
    newest.delay(1)
    dropped = newest.delay(2)

    assert dropped.state == "cancelled"
    with pytest.raises(TaskCancelledError, match="the line is full"):
        dropped.get(timeout=0)


def test_lanes_travel_as_plain_values():
    lane = Lane(task="t", key="k", weight=2.0, most=7, overflow="drop_newest")

    assert Lane.unpacked(lane.packed()) == lane


def test_names_of_lanes_can_be_read_back():
    for lane in (Lane(), Lane(task="a.b", key="c", ordered=True), Lane(key="=-\x1e"), Lane(task="t")):
        assert Lane.parse(lane.name) == lane


def test_limits_travel_as_plain_values():
    limits = Limits(task="t", rate=Rate(3, 60.0, 2), key_concurrency=4)

    assert from_facts(as_facts(limits)) == limits


def test_the_first_push_declares_and_a_change_is_an_event(app):
    heard = []
    app.subscribe(lambda event: heard.append(event.fields["task"]), "limits.changed")

    @app.task(name="t", rate_limit="10/m")
    def t(): ...

    t.delay()
    t.delay()

    assert heard == ["t"]
    assert app.inspector.limits() == {"t": Limits(task="t", rate=Rate(10, 60.0))}


def test_a_backend_without_lanes_refuses_by_name(app):
    class Bare(MemoryBackend):
        declare_limits = Backend.declare_limits

    @app.task(name="t", concurrency=1)
    def t(): ...

    with app.instead(Bare()), pytest.raises(ConfigurationError, match="limits, keys and fair shares"):
        t.delay()


def test_a_log_stays_short_and_never_forgets_early():
    gate = Gate(rate=Rate(1000, 64.0))
    for tick in range(1000):
        gate.record(1, tick * 0.0639)

    assert len(gate.log) <= 65
    gate.look(63.9)
    assert gate.room == 0
    assert gate.until == pytest.approx(64.0, abs=1.01)
    assert gate.until >= 64.0


def test_a_scheduled_task_keeps_its_limits(app):
    @app.task(name="t", cron="* * * * *", rate_limit="10/m", fairness_key=lambda: "nightly", weight=2)
    def t(): ...

    definition = declared(app)["t"]

    assert job_at(definition, "t", None, 1.0).lane == Lane(task="t", key="nightly", weight=2.0)


def test_the_command_line_pauses_and_lists(tmp_path, monkeypatch):
    monkeypatch.setenv("TASKQ_URL", f"sqlite:///{tmp_path}/jobs.db")

    def run(*arguments):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
        return done.output.split()

    run("pause", "mail", "--task", "app.charge", "--key", "a-7")
    assert run("pause")[2:] == ["queue", "mail", "task", "app.charge", "key", "a-7"]
    run("resume", "mail", "--key", "a-7")
    assert run("pause")[2:] == ["task", "app.charge"]
    assert run("limits")[0] == "TASK"
    assert CliRunner().invoke(main, ["resume"]).exit_code == 2
