"""One question to a retry policy, answered without ever raising."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import tenacity
from tenacity import Future, RetryCallState

from taskq.breaker import CircuitBreaker, RetryBudget
from taskq.clock import Duration, seconds
from taskq.errors import RetryRequested, TimeLimitExceeded
from taskq.retry_after import retry_after
from taskq.strategies import Predicate

#: An option that was not given, where ``None`` means something.
UNSET: Final[Any] = type("Unset", (), {"__repr__": lambda _: "UNSET", "__slots__": ()})()

Jitter = Literal["full", "equal", "decorrelated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A run that has just ended, as the policy sees it."""

    attempts: int  #: bad ends, this one included
    error: BaseException | None = None
    result: Any = None  #: what it returned, if ``error`` is ``None``
    first_started: float  #: Unix seconds
    now: float  #: Unix seconds
    idle: float = 0.0  #: seconds of delay planned so far
    max_retries: int | None = UNSET  #: the job's own, instead of the policy's


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of it."""

    action: Literal["accept", "retry", "give_up"]
    delay: float = 0.0  #: seconds until the retry
    queue: str | None = None  #: move there
    priority: int | None = None  #: change to this
    reason: str = ""
    flaw: str = ""  #: what failed in the policy itself; worth a log line


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A policy's options, checked and ready to be asked."""

    predicate: Predicate
    not_on: tuple[type[BaseException], ...]
    wait: Callable[[RetryCallState], Any]
    stop: Callable[[RetryCallState], Any]
    max_retries: int | None
    max_delay: float
    retry_for: float | None
    jitter: Jitter | None
    honour_retry_after: bool
    breaker: CircuitBreaker | None
    budget: RetryBudget | None
    loss_base: float
    loss_cap: float


def decide(plan: Plan, situation: Situation) -> Decision:
    """What becomes of the run; asks in tenacity's order: retry, wait, stop."""
    asked = _Asked(plan, situation)
    if plan.budget is not None:
        plan.budget.deposit()
    if not asked.wanted():
        return asked.unwanted()
    asked.plan_delay()
    ended = asked.ended()
    return asked.give_up(ended) if ended else asked.retry()


def clamp(delay: Any, longest: float) -> float:
    """``delay`` within ``[0, longest]``; what is not a number of seconds becomes ``longest``."""
    try:
        number = seconds(delay)
    except (TypeError, ValueError, OverflowError):
        return longest
    if math.isnan(number):
        return longest
    return min(max(0.0, number), longest)


def call_state(situation: Situation) -> RetryCallState:
    """What tenacity's strategies are asked about, made of the job's own counters and times."""
    state = RetryCallState(_NOBODY, None, (), {})
    state.attempt_number = situation.attempts
    state.start_time = situation.first_started
    # A clock that was set back must not make the elapsed time negative.
    state.outcome_timestamp = max(situation.now, situation.first_started)
    state.idle_for = situation.idle
    state.outcome = Future(situation.attempts)
    if situation.error is None:
        state.outcome.set_result(situation.result)
    else:
        state.outcome.set_exception(situation.error)
    return state


#: Strategies may look at the object that runs them; ours has run nothing.
_NOBODY: Final = tenacity.Retrying()


class _Asked:
    """The question, and what was found out so far."""

    def __init__(self, plan: Plan, situation: Situation) -> None:
        self.plan = plan
        self.situation = situation
        self.error = situation.error
        self.state = call_state(situation)
        self.delay = 0.0
        self.reason = ""
        self.flaws: list[str] = []

    def wanted(self) -> bool:
        """Whether another run is wanted at all."""
        if self.error is None:
            ask = self.plan.predicate.result
            # A predicate that fails must not repeat work that was done.
            return ask is not None and bool(self._try("retry predicate", ask, otherwise=False))
        if isinstance(self.error, RetryRequested | tenacity.TryAgain | TimeLimitExceeded):
            return True
        if isinstance(self.error, self.plan.not_on):
            return False
        return bool(self._try("retry predicate", self.plan.predicate.error, otherwise=True))

    def unwanted(self) -> Decision:
        if self.error is not None:
            return self.give_up(f"the policy does not retry {type(self.error).__name__}")
        if self.plan.breaker is not None:
            self.plan.breaker.succeeded()
        return Decision(action="accept", flaw=self._flaw())

    def plan_delay(self) -> None:
        """Find the seconds until the next run, and why."""
        self.delay, self.reason = self._delay()
        self.state.upcoming_sleep = self.delay
        if self.plan.breaker is not None:
            held = self.plan.breaker.failed(self.situation.now)
            if held > self.delay:
                self._postpone(held, f"circuit breaker {self.plan.breaker.name!r} is open")

    def ended(self) -> str:
        """Why there is no retry, or nothing."""
        limit = self.plan.max_retries if self.situation.max_retries is UNSET else self.situation.max_retries
        if limit is not None and self.situation.attempts > limit:
            return f"all {limit} retries are used up" if limit else "max_retries=0"
        if self._try("stop", self.plan.stop, otherwise=False):
            return "the stop strategy said so"
        elapsed = self.state.seconds_since_start or 0.0
        if self.plan.retry_for is not None and elapsed + self.delay > self.plan.retry_for:
            return f"the next run would start more than {self.plan.retry_for:g} s after the first"
        return ""

    def give_up(self, reason: str) -> Decision:
        return Decision(action="give_up", reason=reason, flaw=self._flaw())

    def retry(self) -> Decision:
        if self.flaws:
            self._postpone(self.plan.max_delay, "the policy failed")
        if self.plan.budget is not None and not self.plan.budget.withdraw(self.situation.now):
            self._postpone(self.plan.max_delay, "the retry budget is spent")
        request = self.error if isinstance(self.error, RetryRequested) else None
        return Decision(
            action="retry",
            delay=self.delay,
            queue=request.queue if request else None,
            priority=request.priority if request else None,
            reason=self.reason,
            flaw=self._flaw(),
        )

    def _delay(self) -> tuple[float, str]:
        if isinstance(self.error, TimeLimitExceeded):
            return self._loss_delay(), "time limit"
        if isinstance(self.error, RetryRequested) and self.error.countdown is not None:
            return self._countdown(self.error.countdown), self.error.reason or "asked for by the task"
        told = self._retry_after()
        if told is not None:
            return clamp(told, self.plan.max_delay), "Retry-After"
        delay = self._try("wait", self._planned, otherwise=self.plan.max_delay)
        return clamp(delay, self.plan.max_delay), self._why()

    def _why(self) -> str:
        if isinstance(self.error, RetryRequested):
            return self.error.reason or "asked for by the task"
        return "the result was refused" if self.error is None else type(self.error).__name__

    def _loss_delay(self) -> float:
        exponent = min(max(self.situation.attempts - 1, 0), 60)
        return clamp(min(self.plan.loss_cap, self.plan.loss_base * (1 << exponent)), self.plan.max_delay)

    def _countdown(self, countdown: Duration) -> float:
        """The task's own word, which ``max_delay`` does not cap unless it is no finite number."""
        asked = clamp(countdown, math.inf)
        return asked if asked < math.inf else self.plan.max_delay

    def _retry_after(self) -> float | None:
        if not self.plan.honour_retry_after or self.error is None:
            return None
        asked = isinstance(self.error, RetryRequested | tenacity.TryAgain)
        # `raise ctx.retry() from error`: the server spoke to the cause.
        error = (self.error.__cause__ or self.error.__context__) if asked else self.error
        return retry_after(error, self.situation.now)

    def _planned(self, state: RetryCallState) -> float:
        """The strategy's delay, jittered. Raises what the strategy raises."""
        if self.plan.jitter == "decorrelated":
            return decorrelated(self.plan.loss_base, self.plan.max_delay, state.attempt_number)
        wanted = self.plan.wait(state)
        delay = clamp(wanted, self.plan.max_delay)
        low = {"full": 0.0, "equal": delay / 2}.get(self.plan.jitter or "", delay)
        return random.uniform(low, delay)  # noqa: S311 - spreads load, guards nothing

    def _try(self, what: str, ask: Callable[[RetryCallState], Any], *, otherwise: Any) -> Any:
        try:
            return ask(self.state)
        except Exception as error:  # noqa: BLE001 - a policy's mistake must not lose the job
            self.flaws.append(f"{what} raised {type(error).__name__}: {error}")
            return otherwise

    def _postpone(self, delay: float, reason: str) -> None:
        self.delay = max(self.delay, clamp(delay, self.plan.max_delay))
        self.reason = reason

    def _flaw(self) -> str:
        return "; ".join(self.flaws)


def decorrelated(base: float, cap: float, attempts: int) -> float:
    """A delay of "decorrelated jitter": uniform between ``base`` and three times the previous delay.

    The previous delay is not kept with the job, so the walk is drawn anew from its start, which gives each
    delay the same distribution. After a few dozen steps that no longer changes.

    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    delay = base
    for _ in range(min(attempts, _STEPS)):
        delay = min(cap, random.uniform(base, max(base, delay * 3)))  # noqa: S311 - as above
    return delay


_STEPS: Final = 64
