"""The life of a job, from ``delay()`` to its end, through a worker inside this process, on every backend."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tenacity import TryAgain, retry_if_exception_type, retry_if_result, stop_after_attempt, wait_fixed

from taskq import CONTEXT, Cancel, CircuitBreaker, Context, Reject, Retry, Snooze, TaskQ
from taskq.backend import Cancellation
from taskq.clock import SYSTEM_CLOCK
from taskq.errors import InvalidArgumentError, TaskCancelledError, TaskFailedError
from taskq.job import KEPT_ATTEMPTS, State
from tests.conftest import eventually

pytestmark = pytest.mark.needs(stores=True)

AT_ONCE = {"wait": 0}


@pytest.fixture
def app(live):
    app = TaskQ("memory://")
    with app.instead(live):
        yield app


@pytest.fixture
def work(app):
    """Run what is due in this process; with ``later``, what waits for a retry too."""

    def run(*queues, later=False, **options):
        served = dict.fromkeys(queues or ("tasks",), 1)
        app.worker(queues=served, **{"concurrency": 1, **options}).run(burst=True)
        if later:
            for queue in served:
                waiting = app.backend.list_jobs(queue, State.SCHEDULED).jobs
                if app.backend.hasten(queue, [job.id for job in waiting]):
                    run(*queues, later=True, **options)

    return run


@pytest.fixture
def notes():
    return []


@pytest.fixture
def heard(app):
    found = []
    app.subscribe(lambda event: found.append(event.name))
    return found


# -- retries --------------------------------------------------------------------------


@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_a_job_that_always_fails_is_started_once_and_then_max_retries_times(app, work, notes, max_retries):
    told = []

    @app.task(
        name="fails",
        retry=Retry(
            **AT_ONCE, max_retries=max_retries, on_exhausted=lambda ctx, error: told.append("gave up")
        ),
        on_failure=lambda ctx, error: told.append(f"failed {error}"),
        on_retry=lambda ctx, error: told.append("again"),
        on_success=lambda ctx, value: told.append("succeeded"),
        bind=True,
    )
    def fails(ctx: Context) -> None:
        notes.append((ctx.attempt, ctx.last_attempt))
        raise ValueError(ctx.attempt)

    result = fails.delay()
    work()

    runs = max_retries + 1
    assert notes == [(n, n == runs) for n in range(1, runs + 1)]
    assert told.count("gave up") == 1
    assert told.count("again") == max_retries
    assert [one for one in told if one.startswith("failed")] == [f"failed {n}" for n in range(1, runs + 1)]
    assert "succeeded" not in told
    assert result.state is State.DEAD


def test_a_job_that_recovers_completes_and_keeps_what_went_wrong(app, work):
    told = []

    @app.task(
        name="recovers", retry=Retry(**AT_ONCE), on_success=lambda ctx, value: told.append(value), bind=True
    )
    def recovers(ctx: Context) -> int:
        if ctx.attempt < 3:
            raise OSError(f"no luck {ctx.attempt}")
        return ctx.attempt

    result = recovers.delay()
    work()

    assert result.get(timeout=0) == 3
    assert told == [3]
    first, second = app.inspector.attempts(result.id)
    assert (first.error, second.error) == ("OSError: no luck 1", "OSError: no luck 2")
    assert first.number == 1
    assert first.worker
    assert first.started <= first.ended <= second.started
    assert first.delay == 0
    assert 'raise OSError(f"no luck' in first.traceback
    assert "executor.py" not in first.traceback


def test_the_latest_attempts_are_kept(app, work):
    @app.task(name="stubborn", retry=Retry(**AT_ONCE, max_retries=30))
    def stubborn() -> None:
        raise ValueError

    result = stubborn.delay()
    work()

    assert [attempt.number for attempt in result.attempts] == list(range(32 - KEPT_ATTEMPTS, 32))
    assert result.job().attempts == 31


def test_on_exhausted_may_be_a_task_which_is_told(app, work, notes):
    @app.task(name="mourn", queue="mourning", unique=True)
    def mourn(about: dict) -> None:
        notes.append(about)

    @app.task(name="fails", retry=Retry(**AT_ONCE, max_retries=1, on_exhausted=mourn))
    def fails() -> None:
        raise ValueError("no")

    result = fails.delay()
    work("tasks", "mourning")

    assert notes == [{"job_id": result.id, "task": "fails", "error": "ValueError: no"}]


def test_expected_failures_are_kept_without_traceback(app, work):
    @app.task(name="expects", retry=Retry(**AT_ONCE, max_retries=1, throws=(KeyError,)))
    def expects() -> None:
        raise KeyError("x")

    result = expects.delay()
    work()

    assert [attempt.traceback for attempt in result.attempts] == ["", ""]
    with pytest.raises(TaskFailedError, match="KeyError"):
        result.get(timeout=0)


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_honoured(app, work, form):
    class TooManyRequestsError(Exception):
        def __init__(self):
            later = datetime.now(UTC) + timedelta(seconds=120)  # noqa: TID251 - as a server would
            self.retry_after = 120 if form == "seconds" else later.strftime("%a, %d %b %Y %H:%M:%S GMT")

    @app.task(name="asks", retry=Retry(**AT_ONCE))
    def asks() -> None:
        raise TooManyRequestsError

    result = asks.delay()
    work()

    (attempt,) = result.attempts
    assert result.state is State.SCHEDULED
    assert 110 < attempt.delay <= 120
    assert result.job().due == pytest.approx(attempt.ended + attempt.delay, abs=1)


def test_predicates_and_limits_compose(app, work, notes):
    @app.task(
        name="composed",
        retry=Retry(
            on=retry_if_exception_type(OSError) | retry_if_result(lambda value: value is None),
            wait=wait_fixed(0),
            stop=stop_after_attempt(4),
        ),
    )
    def composed(steps: list[str], ctx: Context = CONTEXT) -> str | None:
        notes.append(ctx.attempt)
        step = steps[min(ctx.attempt, len(steps)) - 1]
        if step == "os":
            raise OSError
        if step == "value":
            raise ValueError
        return None if step == "none" else step

    results = [composed.delay(steps) for steps in (["os", "none", "ok"], ["os", "value"], ["none"])]
    work()

    assert [result.state for result in results] == [State.COMPLETED, State.DEAD, State.DEAD]
    assert [result.job().attempts for result in results] == [2, 2, 4]
    assert results[2].attempts[-1].error_type == "ResultRejected"


STEPS = st.sampled_from(["fail", "retry", "again", "snooze", "none", "reject", "ok", "bad policy"])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, min_size=1, max_size=8), max_retries=st.integers(0, 3))
def test_starts_never_exceed_one_and_max_retries(app, work, steps, max_retries):
    """Whatever a task does, however its policy is made; snoozes do not count."""
    starts, snoozes = [], []

    def wait(state):
        if steps[(len(starts) - 1) % len(steps)] == "bad policy":
            raise ZeroDivisionError
        return 0

    def played(ctx: Context) -> str | None:
        step = steps[len(starts) % len(steps)]
        starts.append(step)
        if step in {"fail", "bad policy"}:
            raise ValueError
        if step == "retry":
            raise ctx.retry(countdown=0)
        if step == "again":
            raise TryAgain
        if step == "snooze" and len(snoozes) < 3:
            snoozes.append(step)
            raise Snooze(0)
        if step == "reject":
            raise Reject
        return None if step == "none" else step

    retry = Retry(
        on=retry_if_exception_type(ValueError) | retry_if_result(lambda value: value is None),
        wait=wait,
        max_retries=max_retries,
        max_delay=5,
    )
    app._tasks.clear()
    result = app.task(name="played", retry=retry, bind=True)(played).delay()
    work(later=True)

    assert len(starts) - len(snoozes) <= 1 + max_retries
    assert result.ready()


def test_a_policy_that_fails_costs_a_delay_and_not_the_job(app, work, heard):
    def broken(state):
        raise ZeroDivisionError

    @app.task(name="fails", retry=Retry(wait=broken, max_delay=77))
    def fails() -> None:
        raise ValueError

    result = fails.delay()
    work()

    assert result.state is State.SCHEDULED
    assert result.attempts[0].delay == 77
    assert heard.count("policy.failed") == 1


def test_a_hook_that_fails_is_told_once_and_changes_nothing(app, work, heard):
    def broken(ctx, value):
        raise ZeroDivisionError

    @app.task(name="succeeds", on_success=broken)
    def succeeds() -> int:
        return 1

    result = succeeds.delay()
    work()

    assert result.get(timeout=0) == 1
    assert heard.count("hook.failed") == 1


def test_while_a_breaker_is_open_jobs_wait_and_nothing_is_counted(app, work, notes):
    breaker = CircuitBreaker("payments", failure_threshold=2, reset_after=60)

    @app.task(name="pays", retry=Retry(**AT_ONCE, max_retries=0, breaker=breaker))
    def pays() -> None:
        notes.append("run")
        raise ConnectionError

    results = [pays.delay() for _ in range(5)]
    work()

    assert notes == ["run", "run"]
    assert [result.state for result in results].count(State.SCHEDULED) == 3
    assert [result.job().attempts for result in results] == [1, 1, 0, 0, 0]


# -- steering -------------------------------------------------------------------------


def test_a_task_asks_to_be_retried_elsewhere(app, work, notes):
    @app.task(name="moves", bind=True)
    def moves(ctx: Context) -> str:
        if ctx.attempt == 1:
            raise ctx.retry("too big", countdown=0, queue="big", priority=7)
        return f"{ctx.queue} {ctx.job.priority}"

    result = moves.delay()
    work("tasks", "big")

    assert result.get(timeout=0) == "big 7"
    assert result.attempts[0].error == "RetryRequested: too big"


def test_snooze_reject_and_cancel(app, work):
    @app.task(name="steers", bind=True)
    def steers(ctx: Context, how: str) -> None:
        if ctx.job.deliveries == 1 and how == "snooze":
            raise Snooze(0)
        if how == "reject":
            raise Reject("no use")
        if how == "cancel":
            raise Cancel("not wanted")

    snoozed, rejected, cancelled = (steers.delay(how) for how in ("snooze", "reject", "cancel"))
    work()

    assert (snoozed.state, snoozed.job().attempts, snoozed.job().deliveries) == (State.COMPLETED, 0, 2)
    assert (rejected.state, rejected.job().error) == (State.DEAD, "Reject: no use")
    assert (cancelled.state, cancelled.job().error) == (State.CANCELLED, "not wanted")
    with pytest.raises(TaskCancelledError, match="not wanted"):
        cancelled.get(timeout=0)


class TwoArgumentsError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


class UnreducibleError(Exception):
    def __reduce__(self):
        raise TypeError("never")


class MuteError(Exception):
    def __str__(self):
        raise ValueError("mute")


def troubles():
    class LocalError(Exception):
        pass

    yield TwoArgumentsError(1, 2), "TwoArgumentsError"
    yield ValueError(threading.Lock()), "ValueError"
    yield UnreducibleError("x"), "UnreducibleError"
    yield MuteError(), "MuteError"
    yield LocalError("x"), "LocalError"
    yield ExceptionGroup("many", [ValueError(1), LocalError(2)]), "ExceptionGroup"
    yield SystemExit(3), "SystemExit"
    yield KeyboardInterrupt(), "KeyboardInterrupt"
    yield ValueError("x" * 5_000_000), "ValueError"
    yield ValueError("\ud800 \x00"), "ValueError"


@pytest.mark.parametrize(
    ("error", "kind"), list(troubles()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_any_exception_ends_its_job_and_nothing_else(app, work, error, kind):
    @app.task(name="raises", retry=Retry(**AT_ONCE, max_retries=1))
    def raises() -> None:
        raise error

    @app.task(name="innocent")
    def innocent() -> int:
        return 1

    result, neighbour = raises.delay(), innocent.delay()
    work()

    assert neighbour.get(timeout=0) == 1
    assert result.state is State.DEAD
    last = result.attempts[-1]
    assert last.error_type.endswith(kind)
    assert len(last.message) < 10_000
    assert last.traceback


# -- cancelling -----------------------------------------------------------------------


def test_a_waiting_job_that_was_cancelled_never_starts(app, work, notes):
    @app.task(name="runs")
    def runs(n: int) -> None:
        notes.append(n)

    now, later, kept = runs.delay(1), runs.options(countdown=3600).delay(2), runs.delay(3)
    assert now.cancel("changed my mind") is Cancellation.CANCELLED
    assert later.cancel() is Cancellation.CANCELLED
    work(later=True)

    assert notes == [3]
    assert (now.state, now.job().error) == (State.CANCELLED, "cancelled: changed my mind")
    assert kept.cancel() is Cancellation.ENDED
    assert app.result("unknown").cancel() is Cancellation.UNKNOWN


def test_a_job_that_was_lent_but_not_begun_never_starts(app, notes):
    """It waits in the worker behind one that runs, and is taken out there."""
    running, go_on = threading.Event(), threading.Event()

    @app.task(name="holds")
    def holds() -> None:
        running.set()
        go_on.wait(20)

    @app.task(name="behind")
    def behind() -> None:
        notes.append("ran")

    for _ in range(50):  # short jobs, so that the worker holds some in advance
        behind.delay()
    first = holds.delay()
    others = [behind.delay() for _ in range(20)]
    with app.worker(concurrency=1):
        assert running.wait(20)
        answers = {result.cancel() for result in others}
        eventually(lambda: all(result.ready() for result in others))
        go_on.set()
        eventually(first.ready)

    assert answers <= {Cancellation.CANCELLED, Cancellation.REQUESTED}
    assert {result.state for result in others} == {State.CANCELLED}
    assert len(notes) == 50


def test_a_running_coroutine_is_cancelled_at_its_next_await(app, notes):
    @app.task(name="awaits")
    async def awaits() -> None:
        notes.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            notes.append("tidied")

    with app.worker(concurrency=2):
        result = awaits.delay()
        eventually(lambda: notes)
        assert result.cancel() is Cancellation.REQUESTED
        eventually(result.ready)

    assert notes == ["begun", "tidied"]
    assert result.state is State.CANCELLED


def test_a_running_thread_is_told(app, notes):
    @app.task(name="looks")
    def looks(ctx: Context = CONTEXT) -> str:
        notes.append("begun")
        pause = threading.Event()
        try:
            while not ctx.cancelled:
                pause.wait(0.01)
        finally:
            notes.append("tidied")
        return ctx.cancel_reason

    with app.worker(concurrency=1):
        result = looks.delay()
        eventually(lambda: notes)
        result.cancel()
        eventually(result.ready)

    assert notes == ["begun", "tidied"]
    assert result.state in {State.CANCELLED, State.COMPLETED}  # whether it looked, or was interrupted first


def test_a_job_that_fails_after_it_was_cancelled_is_not_retried(app, notes):
    go_on = threading.Event()

    @app.task(name="fails", retry=Retry(**AT_ONCE, max_retries=5))
    def fails() -> None:
        notes.append("run")
        with contextlib.suppress(BaseException):  # it does not let go
            go_on.wait(20)
        raise ValueError

    with app.worker(concurrency=1):
        result = fails.delay()
        eventually(lambda: notes)
        result.cancel()
        go_on.set()
        eventually(result.ready)

    assert notes == ["run"]
    assert result.state is State.CANCELLED


# -- later, and too late --------------------------------------------------------------


@pytest.mark.parametrize("days", [25, 50, 400])
def test_a_job_far_ahead_waits(app, work, notes, days):
    @app.task(name="runs")
    def runs() -> None:
        notes.append("ran")

    before = SYSTEM_CLOCK.now()
    counted = runs.options(countdown=timedelta(days=days)).delay()
    fixed = runs.options(eta=datetime(2100, 1, 1, tzinfo=UTC)).delay()
    work()

    assert notes == []
    assert 0 <= counted.job().due - before - days * 86_400 < 60
    assert fixed.job().due == datetime(2100, 1, 1, tzinfo=UTC).timestamp()


def test_a_short_delay_does_not_wait_behind_a_long_one(app, work, notes):
    @app.task(name="runs")
    def runs(n: int) -> None:
        notes.append(n)

    runs.options(countdown=3600).delay(1)
    with app.worker(concurrency=1):
        runs.options(countdown=0.2).delay(2)
        eventually(lambda: notes)

    assert notes == [2]


def test_a_naive_eta_is_refused(app):
    @app.task(name="runs")
    def runs() -> None: ...

    with pytest.raises(InvalidArgumentError, match="no time zone"):
        runs.options(eta=datetime(2100, 1, 1)).delay()  # noqa: DTZ001 - that is the point


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/Los_Angeles", "Pacific/Chatham"])
def test_an_eta_is_an_instant_in_whatever_zone_anybody_is(app, monkeypatch, zone):
    import time
    import zoneinfo

    @app.task(name="runs")
    def runs() -> None: ...

    eta = datetime(2030, 6, 1, 12, tzinfo=zoneinfo.ZoneInfo(zone))
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "America/New_York")
        time.tzset()
        due = runs.options(eta=eta).delay().job().due
    time.tzset()

    assert due == eta.timestamp()


def test_an_expired_job_ends_without_a_start_also_between_its_retries(app, work, notes):
    @app.task(name="fails", retry=Retry(wait=3600), expires=7200)
    def fails() -> None:
        notes.append("ran")
        raise ValueError

    late = fails.options(expires=datetime.now(UTC) - timedelta(seconds=1)).delay()  # noqa: TID251
    tried = fails.delay()
    work()

    assert notes == ["ran"]
    assert (late.state, late.job().error) == (State.CANCELLED, "expired")
    assert tried.state is State.SCHEDULED


# -- unique jobs ----------------------------------------------------------------------


ENDS = ["success", "failure", "reject", "cancel", "steer", "expiry", "undecodable", "unknown", "arguments"]


@pytest.mark.parametrize("end", ENDS)
def test_a_key_is_free_after_each_end(app, work, end):
    @app.task(name="once", unique="k", retry=Retry(**AT_ONCE, max_retries=1))
    def once(how: str) -> None:
        if how == "failure":
            raise ValueError
        if how == "reject":
            raise Reject
        if how == "steer":
            raise Cancel

    options = {"expires": datetime.now(UTC) - timedelta(1)} if end == "expiry" else {}  # noqa: TID251
    signature = once.options(**options).s(end)
    if end in {"undecodable", "unknown", "arguments"}:
        from dataclasses import replace

        from taskq.codec import encode_call

        broken = {
            "undecodable": {"payload": b"\xff"},
            "unknown": {"task": "nobody"},
            "arguments": {"payload": encode_call((), {"x": 1})},
        }[end]
        result = app.result(app.enqueue([replace(signature.job(app), **broken)])[0])
    else:
        result = signature.delay()
    assert once.delay("success") == result
    if end == "cancel":
        result.cancel()
    work()

    assert result.ready()
    assert not once.delay("success").deduplicated


def test_a_key_is_held_while_a_retry_waits(app, work):
    @app.task(name="once", unique=True, retry=Retry(wait=3600))
    def once() -> None:
        raise ValueError

    result = once.delay()
    work()

    assert result.state is State.SCHEDULED
    assert once.delay() == result


def test_a_job_may_push_its_own_successor_once_it_was_started(app, work, notes):
    @app.task(name="chained", unique="chain", unique_until="started")
    def chained(n: int) -> None:
        notes.append(n)
        if n < 3:
            assert not chained.delay(n + 1).deduplicated

    chained.delay(1)
    work()

    assert notes == [1, 2, 3]
