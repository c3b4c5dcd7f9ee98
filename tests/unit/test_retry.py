"""What a retry policy promises: bounded starts, bounded delays, and never an exception of its own."""

from __future__ import annotations

import email.message
import email.utils
import math
import threading
import urllib.error
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import requests
import tenacity
import tenacity.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from taskq.errors import (
    ConfigurationError,
    InvalidArgumentError,
    RetryRequested,
    SoftTimeLimit,
    TimeLimitExceeded,
)
from taskq.job import Job, loss_delay
from taskq.retry import UNSET, CircuitBreaker, Retry, RetryBudget, Situation, policy_from_options

NOW = 1_700_000_000.0


def after(attempts=1, error=None, *, elapsed=10.0, **options):
    return Situation(attempts=attempts, error=error, first_started=NOW - elapsed, now=NOW, **options)


def starts(policy, error, most=50):
    """How often a task that always ends like this is started."""
    for attempt in range(1, most):
        if policy.decide(after(attempt, error)).action != "retry":
            return attempt
    return math.inf


# -- how often ------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1, 3, 7])
def test_max_retries_counts_the_runs_after_the_first(most):
    assert most + 1 == starts(Retry(max_retries=most), ValueError())


def test_three_retries_are_the_default_and_none_is_for_ever():
    assert starts(Retry(), ValueError()) == 4
    assert math.inf == starts(Retry(max_retries=None), ValueError())


def test_a_policy_with_its_own_end_is_not_also_counted():
    assert starts(Retry(stop=tenacity.stop_after_attempt(6)), ValueError()) == 6
    assert Retry(retry_for=60).max_retries is None
    assert starts(Retry(stop=tenacity.stop_after_attempt(6), max_retries=2), ValueError()) == 3
    assert starts(Retry(stop=tenacity.stop_after_attempt(2), max_retries=5), ValueError()) == 2


def test_the_jobs_own_limit_wins_over_the_policys():
    policy = Retry(max_retries=0)
    assert policy.decide(after(5, ValueError(), max_retries=5)).action == "retry"
    assert policy.decide(after(6, ValueError(), max_retries=5)).action == "give_up"
    assert policy.decide(after(1000, ValueError(), max_retries=None)).action == "retry"
    assert policy.decide(after(1, ValueError(), max_retries=UNSET)).action == "give_up"


@pytest.mark.parametrize("wrong", [-1, True, False, 1.0, math.nan, math.inf, 2**31, "3"])
def test_max_retries_that_is_no_number_of_retries_is_refused(wrong):
    with pytest.raises(InvalidArgumentError, match="max_retries"):
        Retry(max_retries=wrong)
    with pytest.raises(InvalidArgumentError, match="max_retries"):
        policy_from_options(max_retries=wrong)


def test_the_elapsed_limits_look_at_the_jobs_own_times():
    for policy in (
        Retry(retry_for=60, wait=1),
        Retry(stop=tenacity.stop_after_delay(60), wait=1),
        Retry(stop=tenacity.stop_before_delay(61), wait=1),
        Retry(retry_for=timedelta(minutes=1), wait=timedelta(seconds=1)),
    ):
        assert policy.decide(after(3, ValueError(), elapsed=58)).action == "retry"
        assert policy.decide(after(3, ValueError(), elapsed=60.5)).action == "give_up"


def test_a_clock_that_was_set_back_gives_no_negative_age():
    assert Retry(retry_for=60, wait=1).decide(after(1, ValueError(), elapsed=-5000)).action == "retry"


# -- what is retried ------------------------------------------------------------------


class SpecialError(ValueError):
    pass


@pytest.mark.parametrize(
    ("policy", "retried", "refused"),
    [
        (Retry(), [ValueError(), SoftTimeLimit(), ExceptionGroup("x", [ValueError()])], [SystemExit(1)]),
        (Retry(on=ValueError), [ValueError(), SpecialError()], [KeyError()]),
        (Retry(on=(ValueError, KeyError)), [SpecialError(), KeyError()], [TypeError()]),
        (Retry(on=[ValueError], not_on=SpecialError), [ValueError()], [SpecialError()]),
        (Retry(on=()), [], [ValueError()]),
        (Retry(on=lambda error: "again" in str(error)), [ValueError("again")], [ValueError("no")]),
        (Retry(on=tenacity.retry_if_exception_message(match="a")), [ValueError("a")], [ValueError("b")]),
        (Retry(on=tenacity.retry_if_not_exception_type(KeyError)), [ValueError()], [KeyError()]),
        (
            Retry(on=tenacity.retry_if_exception_type(OSError) | tenacity.retry_if_exception_type(KeyError)),
            [OSError(), KeyError()],
            [ValueError()],
        ),
        (
            Retry(on=tenacity.retry_if_exception_type(OSError) & tenacity.retry_if_exception_message("a")),
            [OSError("a")],
            [OSError("b"), ValueError("a")],
        ),
    ],
)
def test_what_is_retried(policy, retried, refused):
    for error in retried:
        assert policy.decide(after(1, error)).action == "retry"
    for error in refused:
        decision = policy.decide(after(1, error))
        assert decision.action == "give_up"
        assert type(error).__name__ in decision.reason
    assert policy.decide(after(1)).action == "accept"


def test_a_cause_can_be_asked_for():
    error = RuntimeError()
    error.__cause__ = OSError()
    policy = Retry(on=tenacity.retry_if_exception_cause_type(OSError))
    assert policy.decide(after(1, error)).action == "retry"


def test_a_result_can_be_refused():
    policy = Retry(
        on=tenacity.retry_if_result(lambda value: value is None) | tenacity.retry_if_exception_type()
    )
    assert policy.decide(after(1, result=None)).action == "retry"
    assert policy.decide(after(4, result=None)).action == "give_up"
    assert policy.decide(after(4, result=1)).action == "accept"
    assert policy.decide(after(1, ValueError())).action == "retry"


def test_a_result_is_accepted_where_only_exceptions_are_asked_about():
    policy = Retry(on=tenacity.retry_if_not_exception_type(KeyError))
    assert policy.decide(after(1, result=None)).action == "accept"


@pytest.mark.parametrize("error", [TimeLimitExceeded(), RetryRequested(), tenacity.TryAgain()], ids=repr)
def test_a_hard_limit_or_the_tasks_own_wish_is_retried_whatever_the_policy_asks(error):
    assert starts(Retry(on=KeyError, not_on=Exception), error) == 4


def test_expected_failures_are_told_apart():
    policy = Retry(throws=(KeyError,))
    assert policy.expected(KeyError())
    assert not policy.expected(ValueError())
    assert policy.decide(after(1, KeyError())).action == "retry"


# -- how late -------------------------------------------------------------------------


def delays(policy, error=None, count=6):
    return [policy.decide(after(n, error or ValueError(), max_retries=None)).delay for n in range(1, count)]


def test_the_default_delay_doubles_with_jitter_up_to_ten_minutes():
    for n in range(1, 30):
        delay = Retry().decide(after(n, ValueError(), max_retries=None)).delay
        whole = min(600, 2 ** (n - 1))
        assert whole / 2 <= delay <= whole


@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        (5, [5, 5, 5, 5, 5]),
        (0, [0] * 5),
        (timedelta(minutes=1), [60] * 5),
        ([1, timedelta(seconds=5), 30], [1, 5, 30, 30, 30]),
        (tenacity.wait_exponential(multiplier=3, max=20), [3, 6, 12, 20, 20]),
        (tenacity.wait_incrementing(start=1, increment=2), [1, 3, 5, 7, 9]),
        (tenacity.wait_fixed(1) + tenacity.wait_fixed(2), [3] * 5),
        (tenacity.wait_chain(tenacity.wait_fixed(1), tenacity.wait_exponential(max=5)), [1, 2, 4, 5, 5]),
        (tenacity.wait_exception(lambda error: len(str(error))), [0] * 5),
        (lambda state: state.attempt_number * 10, [10, 20, 30, 40, 50]),
        (lambda state: timedelta(seconds=state.attempt_number), [1, 2, 3, 4, 5]),
        (tenacity.wait_exponential(), [1, 2, 4, 8, 16]),
    ],
)
def test_how_long_it_waits(wait, expected):
    assert expected == delays(Retry(wait=wait))


def test_full_equal_and_decorrelated_jitter_stay_in_their_ranges():
    assert all(0 <= delay <= 100 for delay in delays(Retry(wait=100, jitter="full"), count=200))
    assert all(50 <= delay <= 100 for delay in delays(Retry(wait=100, jitter="equal"), count=200))
    walk = Retry(wait=tenacity.wait_exponential(multiplier=2), jitter="decorrelated", max_delay=50)
    assert all(2 <= delay <= 50 for delay in delays(walk, count=500))
    assert 2 <= walk.decide(after(1, ValueError())).delay <= 6


@pytest.mark.parametrize("returned", [math.nan, math.inf, 10**400, "soon", None, [], 1e308])
def test_a_wait_that_is_no_number_of_seconds_is_the_longest_delay(returned):
    assert {3600.0} == set(delays(Retry(wait=lambda _: returned)))


@pytest.mark.parametrize("returned", [-1, -math.inf, timedelta(-1), -(10**300)])
def test_a_negative_wait_is_none(returned):
    assert {0.0} == set(delays(Retry(wait=lambda _: returned)))


def broken(*_):
    raise ZeroDivisionError("oops")


@pytest.mark.parametrize(
    "policy",
    [
        Retry(wait=broken),
        Retry(on=broken),
        Retry(stop=broken, max_retries=3),
        Retry(wait=tenacity.wait_exception(broken)),
        Retry(on=tenacity.retry_if_exception(broken)),
        Retry(wait=lambda state: state.retry_object.statistics["nothing"]),
    ],
)
def test_a_strategy_that_fails_keeps_the_job_and_says_so(policy):
    decision = policy.decide(after(1, ValueError()))
    assert (decision.action, decision.delay) == ("retry", 3600.0)
    assert "raised" in decision.flaw
    assert starts(policy, ValueError()) == 4


def test_a_result_predicate_that_fails_does_not_repeat_what_was_done():
    decision = Retry(on=tenacity.retry_if_result(broken)).decide(after(1, result=1))
    assert decision.action == "accept"
    assert "ZeroDivisionError" in decision.flaw


def test_a_wait_for_exceptions_also_serves_a_refused_result():
    policy = Retry(on=tenacity.retry_if_result(bool), wait=tenacity.wait_exception(lambda _: 1.0))
    decision = policy.decide(after(1, result=True))
    assert (decision.action, decision.delay) == ("retry", 3600.0)
    assert "wait raised" in decision.flaw


# -- what the task asks for -----------------------------------------------------------


def test_a_countdown_is_the_tasks_own_word():
    wish = RetryRequested("later", countdown=86_400, queue="slow", priority=2)
    decision = Retry().decide(after(1, wish))
    assert (
        decision.action,
        decision.delay,
        decision.queue,
        decision.priority,
        decision.reason,
    ) == ("retry", 86_400.0, "slow", 2, "later")


@pytest.mark.parametrize(
    ("countdown", "delay"), [(0, 0), (-5, 0), (math.nan, 3600), (math.inf, 3600), (None, 7), ("x", 3600)]
)
def test_a_countdown_is_a_finite_delay(countdown, delay):
    assert delay == Retry(wait=7).decide(after(1, RetryRequested(countdown=countdown))).delay


def test_try_again_waits_as_the_policy_says():
    assert Retry(wait=7).decide(after(1, tenacity.TryAgain())).delay == 7


# -- Retry-After ----------------------------------------------------------------------


def with_httpx(value):
    response = httpx.Response(429, headers={"retry-after": value}, request=httpx.Request("GET", "http://x"))
    return httpx.HTTPStatusError("x", request=response.request, response=response)


def with_requests(value):
    response = requests.Response()
    response.headers["Retry-After"] = value
    return requests.HTTPError("x", response=response)


def with_urllib(value):
    headers = email.message.Message()
    headers["Retry-After"] = value
    return urllib.error.HTTPError("http://x", 429, "x", headers, None)


def with_plain_dict(value):
    error = ValueError()
    error.headers = {"Retry-After": value}
    return error


def with_attribute(value):
    error = ValueError()
    error.retry_after = value
    return error


CARRIERS = [with_httpx, with_requests, with_urllib, with_plain_dict, with_attribute]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    ("value", "delay"),
    [
        ("120", 120),
        (" 1.5 ", 1.5),
        ("0", 0),
        ("99999999", 3600),
        (email.utils.format_datetime(datetime.fromtimestamp(NOW + 90, UTC), usegmt=True), 90),
        (email.utils.format_datetime(datetime.fromtimestamp(NOW - 90, UTC)), 0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 0),
        ("", 7),
        ("soon", 7),
        ("-1", 7),
        ("nan", 7),
        ("inf", 7),
        ("1e999", 7),
        ("Wed, 99 Foo 2026 99:99:99 GMT", 7),
        ("12, 13", 7),
    ],
)
def test_retry_after_is_honoured_or_ignored_if_malformed(carrier, value, delay):
    assert delay == Retry(wait=7).decide(after(1, carrier(value))).delay


@pytest.mark.parametrize(
    ("value", "delay"),
    [
        (5, 5),
        (2.5, 2.5),
        (True, 7),
        (timedelta(seconds=9), 9),
        (-1, 7),
        (10**400, 7),
        (b"8", 8),
        (object(), 7),
    ],
)
def test_retry_after_as_an_attribute(value, delay):
    assert delay == Retry(wait=7).decide(after(1, with_attribute(value))).delay


def test_retry_after_as_a_moment():
    moment = datetime.fromtimestamp(NOW + 30, UTC)
    assert Retry(wait=7).decide(after(1, with_attribute(moment))).delay == 30


def test_retry_after_of_the_cause_of_a_wish():
    wish = RetryRequested()
    wish.__cause__ = with_httpx("33")
    assert Retry(wait=7).decide(after(1, wish)).delay == 33


def test_retry_after_can_be_ignored():
    assert Retry(wait=7, honour_retry_after=False).decide(after(1, with_httpx("33"))).delay == 7


def test_an_exception_whose_attributes_fail_is_just_an_exception():
    class NastyError(Exception):
        headers = response = retry_after = property(broken)

    class OddError(Exception):
        headers = property(lambda _: object())

    assert Retry(wait=7).decide(after(1, NastyError())).delay == 7
    assert Retry(wait=7).decide(after(1, OddError())).delay == 7


# -- what is refused ------------------------------------------------------------------


async def coroutine(*_): ...


class Awaitable:
    async def __call__(self, *_): ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": tenacity.stop_when_event_set(threading.Event())}, "stop_when_event_set"),
        ({"stop": tenacity.stop_any(tenacity.stop_when_event_set(threading.Event()))}, "stop_when_event_set"),
        ({"stop": 3}, "max_retries="),
        ({"stop": coroutine}, "asynchronous"),
        ({"on": tenacity.asyncio.retry_if_exception(coroutine)}, "asynchronous"),
        (
            {"on": tenacity.retry_if_exception_type() | tenacity.asyncio.retry_if_result(coroutine)},
            "asynchronous",
        ),
        ({"on": tenacity.retry_if_exception(coroutine)}, "asynchronous"),
        ({"on": coroutine}, "asynchronous"),
        ({"on": Awaitable()}, "asynchronous"),
        ({"on": tenacity.retry_always}, "retry_always"),
        ({"on": tenacity.retry_unless_exception_type(KeyError)}, "retry_unless_exception_type"),
        ({"on": tenacity.retry_if_not_exception_message("a")}, "retry_if_not_exception_message"),
        ({"on": tenacity.retry_always | tenacity.retry_if_result(bool)}, "every success"),
        ({"on": 3}, "exception types"),
        ({"on": int}, "not an exception type"),
        ({"on": (ValueError, int)}, "not an exception type"),
        ({"not_on": "ValueError"}, "not an exception type"),
        ({"throws": 3}, "throws"),
        ({"wait": True}, "True or False"),
        ({"wait": -1}, "wait=-1"),
        ({"wait": math.nan}, "wait=nan"),
        ({"wait": math.inf}, "wait=inf"),
        ({"wait": []}, "names no delay"),
        ({"wait": [1, -1]}, "wait=-1"),
        ({"wait": "5"}, "wait"),
        ({"wait": coroutine}, "asynchronous"),
        ({"wait": 86_400}, "max_delay"),
        ({"wait": tenacity.wait_fixed(5000)}, "max_delay"),
        ({"max_delay": -1}, "max_delay"),
        ({"max_delay": None}, "max_delay"),
        ({"max_delay": 10**400}, "max_delay"),
        ({"retry_for": math.nan}, "retry_for"),
        ({"retry_for": True}, "retry_for"),
        ({"jitter": "some"}, "jitter"),
        ({"jitter": True}, "jitter"),
    ],
)
def test_what_cannot_work_is_refused_at_declaration_by_name(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Retry(**options)


def test_always_true_strategies_work_where_another_decides():
    policy = Retry(on=tenacity.retry_always & tenacity.retry_if_result(lambda value: value is None))
    assert policy.decide(after(1, result=None)).action == "retry"
    assert policy.decide(after(1, result=1)).action == "accept"


# -- bare tenacity --------------------------------------------------------------------


def test_bare_strategies_become_policies():
    assert delays(Retry.of(tenacity.wait_fixed(3))) == [3] * 5
    assert starts(Retry.of(tenacity.stop_after_attempt(2)), ValueError()) == 2
    assert starts(Retry.of(tenacity.retry_if_exception_type(KeyError)), ValueError()) == 1
    assert Retry.of(None) == Retry() == Retry.of()
    policy = Retry(max_retries=9)
    assert Retry.of(policy) is policy


@pytest.mark.parametrize("kind", [tenacity.Retrying, tenacity.AsyncRetrying])
def test_a_retrying_object_becomes_a_policy(kind):
    policy = Retry.of(kind(stop=tenacity.stop_after_attempt(3), wait=tenacity.wait_fixed(2)))
    assert starts(policy, ValueError()) == 3
    assert delays(policy)[:1] * 5 == [2] * 5


@pytest.mark.parametrize("option", ["sleep", "before", "after", "before_sleep", "retry_error_callback"])
@pytest.mark.parametrize("kind", [tenacity.Retrying, tenacity.AsyncRetrying])
def test_hooks_of_a_retrying_object_are_refused_by_name(kind, option):
    with pytest.raises(ConfigurationError, match=rf"\({option}="):
        Retry.of(kind(**{option: broken}))


@pytest.mark.parametrize("wrong", [3, "always", object(), broken, ValueError])
def test_what_is_no_policy_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="max_retries="):
        Retry.of(wrong)


# -- short forms ----------------------------------------------------------------------


def test_no_option_is_the_default_policy():
    assert policy_from_options() == Retry()


def test_short_forms():
    assert delays(policy_from_options(default_retry_delay=5)) == [5] * 5
    assert delays(policy_from_options(default_retry_delay=86_400)) == [86_400] * 5
    assert delays(policy_from_options(retry_backoff=True, retry_jitter=False)) == [1, 2, 4, 8, 16]
    assert delays(policy_from_options(retry_backoff=3, retry_backoff_max=10, retry_jitter=False)) == [
        3,
        6,
        10,
        10,
        10,
    ]
    assert delays(policy_from_options(retry_jitter=False)) == [1, 2, 4, 8, 16]
    assert (
        delays(policy_from_options(retry_backoff=7200, retry_backoff_max=9000, retry_jitter=False))[0] == 7200
    )
    assert policy_from_options(retry_backoff=True).jitter == "full"
    assert starts(policy_from_options(autoretry_for=()), ValueError()) == 1
    assert starts(policy_from_options(autoretry_for=()), RetryRequested()) == 4
    assert starts(policy_from_options(dont_autoretry_for=(KeyError,)), KeyError()) == 1
    assert starts(policy_from_options(retry_when=lambda error: True), KeyError()) == 4
    assert starts(policy_from_options(retry=tenacity.wait_fixed(1), max_retries=5), KeyError()) == 6
    assert policy_from_options(throws=KeyError, on_exhausted=print, retry_for=5).on_exhausted is print
    assert policy_from_options(max_retries=None).max_retries is None
    policy = Retry(max_retries=9)
    assert policy_from_options(retry=policy) is policy


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"autoretry_for": (KeyError,), "retry_when": bool}, ["autoretry_for", "retry_when"]),
        ({"retry_backoff": True, "default_retry_delay": 3}, ["retry_backoff", "default_retry_delay"]),
        ({"retry": Retry(), "max_retries": 3}, ["retry=", "max_retries"]),
        ({"retry": Retry(), "autoretry_for": KeyError}, ["retry=", "autoretry_for"]),
        ({"retry": Retry(), "retry_backoff": 2}, ["retry=", "retry_backoff"]),
        ({"retry": Retry(), "default_retry_delay": 2}, ["retry=", "default_retry_delay"]),
        ({"retry": Retry(), "throws": KeyError}, ["retry=", "throws"]),
        ({"retry": tenacity.wait_fixed(1), "retry_backoff": 2}, ["retry=", "retry_backoff"]),
        ({"retry": tenacity.wait_fixed(1), "retry_jitter": False}, ["retry=", "retry_jitter"]),
        ({"retry": tenacity.retry_if_result(bool), "retry_when": bool}, ["retry=", "retry_when"]),
        ({"default_retry_delay": -1}, ["default_retry_delay"]),
        ({"retry_backoff": -1}, ["retry_backoff"]),
        ({"retry_backoff_max": "x"}, ["retry_backoff_max"]),
    ],
)
def test_contradictory_options_are_refused_by_name(options, names):
    with pytest.raises(ConfigurationError) as caught:
        policy_from_options(**options)
    assert all(name in str(caught.value) for name in names)


# -- losses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "base", "cap"),
    [
        (Retry(), 1, 600),
        (Retry(wait=5), 5, 5),
        (Retry(wait=[1, 2, 30]), 1, 30),
        (Retry(wait=0), 0, 0),
        (Retry(wait=0, max_retries=None), 1, 1),
        (Retry(wait=tenacity.wait_exponential(multiplier=2, max=50)), 2, 50),
        (Retry(wait=tenacity.wait_exponential_jitter(max=600)), 1, 600),
        (Retry(wait=tenacity.wait_exponential()), 1, 3600),
        (Retry(wait=tenacity.wait_exponential(max=math.inf)), 1, 3600),
        (Retry(wait=lambda _: 5), 1, 600),
        (Retry(wait=lambda _: 5, max_delay=100), 1, 100),
    ],
)
def test_losses_have_plain_numbers(policy, base, cap):
    assert (base, cap) == (policy.loss_base, policy.loss_cap)
    job = Job(id="x", loss_base=policy.loss_base, loss_cap=policy.loss_cap, attempts=70)
    assert cap == loss_delay(job)


def test_a_hard_limit_waits_as_a_loss_does():
    assert delays(Retry(), TimeLimitExceeded()) == [1, 2, 4, 8, 16]


# -- brakes ---------------------------------------------------------------------------


def test_a_breaker_opens_probes_and_closes():
    breaker = CircuitBreaker("api", failure_threshold=2, reset_after=30)
    policy = Retry(wait=1, breaker=breaker, max_retries=None)
    assert policy.hold(NOW) == 0
    assert policy.decide(after(1, ValueError())).delay == 1
    second = policy.decide(after(1, ValueError()))
    assert second.delay == 30
    assert "'api' is open" in second.reason
    assert policy.hold(NOW + 10) == 20
    assert policy.hold(NOW + 30) == 0  # the probe
    assert policy.hold(NOW + 31) == 29  # the others wait for it
    policy.decide(after(1, result=1))
    assert policy.hold(NOW + 31) == 0


def test_a_failed_probe_opens_again_and_a_lost_one_is_replaced():
    breaker = CircuitBreaker("api", failure_threshold=1, reset_after=30)
    breaker.failed(NOW)
    assert breaker.admit(NOW + 30) == 0
    assert breaker.failed(NOW + 40) == 30
    assert breaker.admit(NOW + 70) == 0
    assert breaker.admit(NOW + 100) == 0


def test_a_breaker_outlives_a_clock_that_was_set_back():
    breaker = CircuitBreaker("api", failure_threshold=1, reset_after=30)
    breaker.failed(NOW)
    assert breaker.admit(NOW - 5000) == 30


def test_failures_that_are_not_retried_do_not_count_against_the_service():
    policy = Retry(on=OSError, breaker=CircuitBreaker("api", failure_threshold=1))
    policy.decide(after(1, ValueError()))
    assert policy.hold(NOW) == 0


def test_a_budget_keeps_retries_to_a_share():
    policy = Retry(wait=1, budget=RetryBudget(ratio=0.25, min_per_second=0), max_retries=None)
    waits = [policy.decide(after(1, ValueError())).delay for _ in range(100)]
    assert waits.count(1) == 25
    assert waits.count(3600) == 75


def test_a_budget_has_a_floor_and_a_ceiling():
    budget = RetryBudget(ratio=1, min_per_second=2, burst=3)
    for _ in range(100):
        budget.deposit()
    assert [budget.withdraw(NOW) for _ in range(23)] == [True] * 23
    assert not budget.withdraw(NOW)
    assert budget.withdraw(NOW + 0.5)
    assert not budget.withdraw(NOW - 1000)


@pytest.mark.parametrize("wrong", [(0, 1), (1, 0), (1, math.inf), (True, 1), (1, math.nan)])
def test_a_breaker_of_nonsense_is_refused(wrong):
    with pytest.raises(InvalidArgumentError):
        CircuitBreaker("x", *wrong)


@pytest.mark.parametrize("wrong", [(-1, 1), (math.nan, 1), (1, -1), (1, 1, math.inf)])
def test_a_budget_of_nonsense_is_refused(wrong):
    with pytest.raises(InvalidArgumentError):
        RetryBudget(*wrong)


# -- for any policy -------------------------------------------------------------------

numbers = st.floats() | st.integers(-(10**6), 10**6) | st.sampled_from([1e308, 0])
huge = numbers | st.just(10**400)  # more than tenacity's own constructors take
simple_waits = (
    st.builds(tenacity.wait_fixed, numbers)
    | st.builds(tenacity.wait_random, numbers, numbers)
    | st.builds(tenacity.wait_incrementing, numbers, numbers)
    | st.builds(tenacity.wait_exponential, numbers, max=numbers, exp_base=numbers, min=numbers)
    | st.builds(tenacity.wait_exponential, numbers)
    | st.builds(tenacity.wait_random_exponential, numbers, max=numbers)
    | st.builds(tenacity.wait_random_exponential)
    | st.builds(tenacity.wait_exponential_jitter, max=numbers, jitter=numbers, exp_base=numbers)
    | st.builds(lambda number: tenacity.wait_exception(lambda _: number), huge)
    | st.just(broken)
    | st.builds(lambda value: lambda _: value, huge | st.none() | st.text(max_size=3) | st.timedeltas())
)
strategies = simple_waits.filter(lambda wait: isinstance(wait, tenacity.wait.wait_base))
waits = (
    simple_waits
    | st.none()
    | st.builds(lambda a, b: a + b, strategies, strategies)
    | st.builds(tenacity.wait_chain, strategies, strategies)
)
stops = st.none() | st.just(broken) | st.builds(tenacity.stop_after_delay, numbers) | st.just(lambda _: False)
jitters = st.sampled_from([None, "full", "equal", "decorrelated"])


@settings(deadline=None, max_examples=400)
@given(
    wait=waits,
    stop=stops,
    jitter=jitters,
    attempts=st.integers(1, 10_000),
    max_retries=st.none() | st.integers(0, 20),
    max_delay=st.floats(0, 1e9),
    error=st.sampled_from(
        [None, ValueError("x"), with_attribute(1e300), TimeLimitExceeded(), tenacity.TryAgain()]
    ),
    idle=numbers,
)
def test_no_policy_raises_or_leaves_its_bounds(
    wait, stop, jitter, attempts, max_retries, max_delay, error, idle
):
    try:
        on = tenacity.retry_if_result(lambda _: True) | tenacity.retry_if_exception_type()
        policy = Retry(
            on=on, wait=wait, stop=stop, jitter=jitter, max_retries=max_retries, max_delay=max_delay
        )
    except ConfigurationError:
        return  # said at declaration
    for count in {attempts, 1, 2, 1025}:
        decision = policy.decide(after(count, error, idle=idle))
        assert decision.action in {"retry", "give_up"}
        assert 0 <= decision.delay <= max_delay
        assert 0 <= policy.loss_base <= policy.loss_cap <= max_delay
        if max_retries is not None and count > max_retries:
            assert decision.action == "give_up"


@settings(deadline=None)
@given(
    factor=st.floats(0.001, 1e6),
    cap=st.floats(0.001, 1e9),
    jitter=st.booleans(),
    attempts=st.integers(1, 10_000),
)
def test_backoff_never_overflows(factor, cap, jitter, attempts):
    policy = policy_from_options(
        retry_backoff=factor, retry_backoff_max=cap, retry_jitter=jitter, max_retries=None
    )
    decision = policy.decide(after(attempts, ValueError()))
    assert decision.action == "retry"
    assert not decision.flaw
    assert 0 <= decision.delay <= cap
