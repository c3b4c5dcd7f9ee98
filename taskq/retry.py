"""The retry policy: what becomes of a run that ended badly.

Declared once, on a task, out of tenacity's strategies; asked after each run, about the job's own counters.
Nothing sleeps: a retry is a due time.

A policy cannot lose a job. Delays are within ``[0, max_delay]`` whatever a strategy says, and a strategy that
fails means a retry after ``max_delay``, still counted against ``max_retries``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import tenacity
from tenacity.stop import stop_base
from tenacity.wait import wait_base

from taskq import decision
from taskq.breaker import CircuitBreaker, RetryBudget
from taskq.clock import Duration
from taskq.decision import UNSET, Decision, Jitter, Plan, Situation, clamp
from taskq.errors import ConfigurationError, InvalidArgumentError
from taskq.strategies import (
    DEFAULT_BASE,
    DEFAULT_CAP,
    On,
    Stop,
    Wait,
    bounds,
    duration,
    exception_types,
    predicate,
    refuse_unused,
    retries,
    stopping,
    waiting,
)

__all__ = [
    "DEFAULT_MAX_DELAY",
    "DEFAULT_MAX_RETRIES",
    "UNSET",
    "CircuitBreaker",
    "Decision",
    "Retry",
    "RetryBudget",
    "Situation",
    "policy_from_options",
]

#: Retries after the first run where nothing is said.
DEFAULT_MAX_RETRIES: Final = 3
#: No retry is further away than this, unless the policy says so; in seconds.
DEFAULT_MAX_DELAY: Final = 3600.0

ExceptionTypes = type[BaseException] | tuple[type[BaseException], ...]


@dataclass(frozen=True, kw_only=True)
class Retry:
    """When, how often and how late a task is tried again.

    Without any option: every ``Exception``, 3 retries, after 1, 2 and 4 seconds less up to a half.

    - ``on``: exception type(s), a ``retry_if_*`` strategy of tenacity, or a function of the exception. Of
      tenacity's, only ``retry_if_result`` and ``retry_if_not_result`` are asked about results. ``not_on`` wins.
    - ``wait``: seconds, a list of them, a ``wait_*`` strategy, or a function of tenacity's call state. Default:
      1 second, doubling up to 600.
    - ``max_retries``: runs after the first; ``None`` for ever. Unless given, it is ``None`` beside ``stop`` or
      ``retry_for``, else 3. ``stop_after_attempt(n)`` counts runs: it is ``max_retries=n - 1``.
    - ``stop``: a ``stop_*`` strategy. ``retry_for``: no retry that would start later than this after the first
      start.
    - ``max_delay``: the cap on every delay. Only a ``countdown`` that the task itself asks for may be longer.
    - ``jitter``: ``full`` (0 to the delay), ``equal`` (half of it to all of it) or ``decorrelated`` (between the
      first delay and three times the previous one); default ``equal`` for the default wait, else none.
    - ``throws``: expected failures, logged without traceback. ``on_exhausted``: kept for the executor.
    - ``honour_retry_after``: a ``Retry-After`` carried by the exception replaces the wait.
    - ``breaker``, ``budget``: see :mod:`taskq.breaker`; each child of a worker has its own.

    Raises :class:`ConfigurationError`, at declaration, for what cannot work.
    """

    on: On = Exception
    not_on: ExceptionTypes = ()
    wait: Wait | None = None
    stop: Stop | None = None
    max_retries: int | None = UNSET
    max_delay: Duration = DEFAULT_MAX_DELAY
    retry_for: Duration | None = None
    jitter: Jitter | None = UNSET
    throws: ExceptionTypes = ()
    on_exhausted: Any = None
    honour_retry_after: bool = True
    breaker: CircuitBreaker | None = None
    budget: RetryBudget | None = None
    _plan: Plan = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.max_retries is UNSET:
            bounded = self.stop is not None or self.retry_for is not None
            put(self, "max_retries", None if bounded else DEFAULT_MAX_RETRIES)
        if self.jitter is UNSET:
            put(self, "jitter", "equal" if self.wait is None else None)
        put(self, "throws", exception_types(self.throws, "throws"))
        put(self, "_plan", _plan(self))

    @classmethod
    def of(cls, policy: Any = None, **options: Any) -> Retry:
        """A policy from a strategy of tenacity (wait, stop or retry), a ``Retrying``, a policy, or ``None``.

        ``options`` are those of :class:`Retry`; they do not go with a finished policy.
        """
        if isinstance(policy, Retry):
            if options:
                raise ConfigurationError(f"{_listed(options)} beside retry=Retry(…): say it inside Retry(…)")
            return policy
        given = _from_tenacity(policy)
        for option in given.keys() & options.keys():
            raise ConfigurationError(f"retry={policy!r} and {option}= both say {option}: keep one")
        return cls(**given, **options)

    @property
    def loss_base(self) -> float:
        """Seconds before the first retry of a lost job (a dead worker, a hard limit); doubles with each."""
        return self._plan.loss_base

    @property
    def loss_cap(self) -> float:
        """Seconds that no such delay exceeds."""
        return self._plan.loss_cap

    @property
    def watches_successes(self) -> bool:
        """Whether the policy wants to be asked about runs that returned."""
        return not (self._plan.predicate.result is None and self.breaker is None and self.budget is None)

    def expected(self, error: BaseException) -> bool:
        """Whether ``error`` is one of ``throws``."""
        return isinstance(error, self.throws)

    def hold(self, now: float) -> float:
        """Seconds for which no run should start because the breaker is open; 0 to run now.

        A job held back is snoozed, which costs no attempt.
        """
        return 0.0 if self.breaker is None else self.breaker.admit(now)

    def decide(self, situation: Situation) -> Decision:
        """What becomes of a run that has ended. Never raises, whatever a strategy does."""
        return decision.decide(self._plan, situation)


def _plan(policy: Retry) -> Plan:
    if policy.jitter not in {None, "full", "equal", "decorrelated"}:
        raise InvalidArgumentError(
            f"jitter={policy.jitter!r}: expected 'full', 'equal', 'decorrelated' or None"
        )
    max_delay = duration(policy.max_delay, "max_delay")
    wait = waiting(policy.wait, max_delay)
    loss_base, loss_cap = _losses(policy, wait, max_delay)
    return Plan(
        predicate=predicate(policy.on),
        not_on=exception_types(policy.not_on, "not_on"),
        wait=wait,
        stop=stopping(policy.stop),
        max_retries=retries(policy.max_retries),
        max_delay=max_delay,
        retry_for=None if policy.retry_for is None else duration(policy.retry_for, "retry_for"),
        jitter=policy.jitter,
        honour_retry_after=policy.honour_retry_after,
        breaker=policy.breaker,
        budget=policy.budget,
        loss_base=loss_base,
        loss_cap=loss_cap,
    )


def _losses(policy: Retry, wait: Any, max_delay: float) -> tuple[float, float]:
    """The wait in two plain numbers, for whoever reclaims a job without having its task's code."""
    base, cap = bounds(wait) or (DEFAULT_BASE, DEFAULT_CAP)
    if policy.wait is not None and base > max_delay:
        raise ConfigurationError(
            f"wait begins at {base:g} s, beyond max_delay={max_delay:g}: raise max_delay"
        )
    if policy.max_retries is None:
        # A job that kills its worker for ever must not do so in a hot loop.
        base, cap = max(base, DEFAULT_BASE), max(cap, DEFAULT_BASE)
    return clamp(base, max_delay), clamp(max(base, cap), max_delay)


def _from_tenacity(policy: Any) -> dict[str, Any]:
    if policy is None:
        return {}
    if isinstance(policy, tenacity.BaseRetrying):
        refuse_unused(policy)
        return {"on": policy.retry, "wait": policy.wait, "stop": policy.stop}
    kinds = ((wait_base, "wait"), (stop_base, "stop"), (tenacity.retry_base, "on"))
    for kind, option in kinds:
        if isinstance(policy, kind):
            return {option: policy}
    raise ConfigurationError(
        f"retry={policy!r}: expected Retry(…) or a strategy of tenacity; a number of retries is max_retries="
    )


# -- short forms ----------------------------------------------------------------------


def policy_from_options(
    *,
    retry: Any = None,
    max_retries: int | None = UNSET,
    autoretry_for: ExceptionTypes | None = None,
    dont_autoretry_for: ExceptionTypes | None = None,
    retry_backoff: bool | float = False,
    retry_backoff_max: Duration = DEFAULT_CAP,
    retry_jitter: bool = True,
    default_retry_delay: Duration | None = None,
    retry_when: Callable[[BaseException], bool] | tenacity.retry_base | None = None,
    throws: ExceptionTypes = (),
    retry_for: Duration | None = None,
    on_exhausted: Any = None,
) -> Retry:
    """A policy from the options that Celery users type from memory.

    ``retry_backoff`` is ``True`` (1 second) or the first delay, doubling up to ``retry_backoff_max``;
    ``retry_jitter`` then draws from 0 to the delay. ``default_retry_delay`` is a fixed delay instead. Without
    either, the delays are those of :class:`Retry`. ``autoretry_for=()`` retries only what the task asks for.

    Raises :class:`ConfigurationError`, naming both options, where two of them contradict each other.
    """
    given = {
        "autoretry_for": autoretry_for is not None,
        "retry_when": retry_when is not None,
        "dont_autoretry_for": dont_autoretry_for is not None,
        "retry_backoff": retry_backoff is not False,
        "default_retry_delay": default_retry_delay is not None,
        "retry_backoff_max": retry_backoff_max != DEFAULT_CAP,
        "retry_jitter": not retry_jitter,
    }
    _refuse_contradictions(retry, [name for name, said in given.items() if said])
    options = {
        **_on(autoretry_for, dont_autoretry_for, retry_when),
        **_wait(retry_backoff, retry_backoff_max, retry_jitter, default_retry_delay),
        **_given(throws=throws or None, retry_for=retry_for, on_exhausted=on_exhausted),
    }
    limit = {} if max_retries is UNSET else {"max_retries": max_retries}
    return Retry.of(retry, **options, **limit)


_ABOUT_ON: Final = frozenset({"autoretry_for", "retry_when"})
_ABOUT_WAIT: Final = frozenset({"retry_backoff", "default_retry_delay", "retry_backoff_max", "retry_jitter"})


def _refuse_contradictions(retry: Any, given: list[str]) -> None:
    """Refuse two options that say the same thing differently; ``given`` are those beside ``retry``."""
    for pair in (("autoretry_for", "retry_when"), ("retry_backoff", "default_retry_delay")):
        if all(name in given for name in pair):
            raise ConfigurationError(f"{pair[0]}= and {pair[1]}= contradict each other: keep one")
    for name in given:
        if name in _said_by(retry, given):
            raise ConfigurationError(
                f"retry= and {name}= contradict each other: keep one, or say it inside Retry(…)"
            )


def _said_by(retry: Any, given: list[str]) -> frozenset[str]:
    """Which short forms a policy or strategy leaves no room for."""
    if isinstance(retry, Retry):
        return frozenset(given)
    if isinstance(retry, tenacity.BaseRetrying):
        return _ABOUT_ON | _ABOUT_WAIT
    if isinstance(retry, wait_base):
        return _ABOUT_WAIT
    return _ABOUT_ON if isinstance(retry, tenacity.retry_base) else frozenset()


def _on(autoretry_for: Any, dont_autoretry_for: Any, retry_when: Any) -> dict[str, Any]:
    on = retry_when if autoretry_for is None else autoretry_for
    return _given(on=on, not_on=dont_autoretry_for)


def _wait(backoff: bool | float, longest: Duration, jitter: bool, fixed: Duration | None) -> dict[str, Any]:
    if fixed is not None:
        delay = duration(fixed, "default_retry_delay")
        return {"wait": delay, "max_delay": max(delay, DEFAULT_MAX_DELAY)}
    cap = duration(longest, "retry_backoff_max")
    if backoff is False and cap == DEFAULT_CAP and jitter:
        return {}
    factor = DEFAULT_BASE if isinstance(backoff, bool) else duration(backoff, "retry_backoff")
    wait = tenacity.wait_exponential(multiplier=min(factor, cap), max=cap)
    style = "full" if backoff is not False else "equal"
    return {"wait": wait, "max_delay": max(cap, DEFAULT_MAX_DELAY), "jitter": style if jitter else None}


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}=" for name in options)
