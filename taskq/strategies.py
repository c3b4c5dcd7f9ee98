"""What tenacity's strategies mean for a job that is retried by being scheduled, not by sleeping.

Everything here happens when a policy is declared: what works is wrapped, what cannot work is refused by name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import tenacity
from tenacity import RetryCallState, retry_base
from tenacity.stop import stop_base
from tenacity.wait import wait_base

from taskq.clock import Duration, seconds
from taskq.errors import ConfigurationError, InvalidArgumentError

#: What ``Retry(on=…)`` takes.
On = type[BaseException] | Sequence[type[BaseException]] | retry_base | Callable[[BaseException], bool]
#: What ``Retry(wait=…)`` takes.
Wait = Duration | Sequence[Duration] | wait_base | Callable[[RetryCallState], float]
#: What ``Retry(stop=…)`` takes.
Stop = stop_base | Callable[[RetryCallState], bool]

Asking = Callable[[RetryCallState], bool]

#: The first delay where nothing else is said, in seconds; it doubles up to ``DEFAULT_CAP``.
DEFAULT_BASE: Final = 1.0
DEFAULT_CAP: Final = 600.0


# -- whether to retry -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Predicate:
    """Whether a run's end calls for another."""

    error: Asking
    result: Asking | None  #: ``None``: every result is accepted


def predicate(on: On) -> Predicate:
    """``on`` as questions about a run's end. Raises :class:`ConfigurationError` for what cannot be asked."""
    if isinstance(on, retry_base):
        return _tenacity_predicate(on)
    if isinstance(on, type | Sequence):
        types = exception_types(on, "on")
        return Predicate(lambda state: isinstance(error_of(state), types), None)
    if not callable(on):
        raise ConfigurationError(
            f"Retry(on=…) takes exception types, a retry strategy of tenacity or a function, not {on!r}"
        )
    _refuse_coroutine(on, "on")
    return Predicate(lambda state: bool(on(error_of(state))), None)


def exception_types(given: Any, option: str) -> tuple[type[BaseException], ...]:
    """One exception type or several, as a tuple."""
    types = tuple(given) if isinstance(given, Sequence) else (given,)
    for cls in types:
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            raise ConfigurationError(f"{option}: {cls!r} is not an exception type")
    return types


def error_of(state: RetryCallState) -> BaseException:
    """The exception that ended the run."""
    error = state.outcome.exception() if state.outcome is not None else None
    if error is None:
        raise TypeError("the run did not end with an exception")
    return error


def _tenacity_predicate(strategy: retry_base) -> Predicate:
    nodes = list(_nodes(strategy, "retries"))
    for node in nodes:
        _refuse_coroutine(node, "on")
        _refuse_coroutine(getattr(node, "predicate", None), "on")
    if _true_on_success(strategy):
        raise ConfigurationError(
            f"Retry(on={_name(strategy)}) says True for every success, so the job would never be done; "
            "combine it (&) with a strategy that looks at the exception or the result"
        )
    asks_results = any(
        isinstance(node, tenacity.retry_if_result | tenacity.retry_if_not_result) for node in nodes
    )
    return Predicate(strategy, strategy if asks_results else None)


def _nodes(strategy: Any, inner: str) -> Iterator[Any]:
    """``strategy`` and everything it is composed of."""
    pending = [strategy]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(getattr(node, inner, ()))


# tenacity means the first two for code that it calls itself, where a success ends the loop by other means.
_ALWAYS: Final = (
    tenacity.retry_unless_exception_type,
    tenacity.retry_if_not_exception_message,
    type(tenacity.retry_always),
)


def _true_on_success(strategy: Any) -> bool:
    if isinstance(strategy, tenacity.retry_any):
        return any(map(_true_on_success, strategy.retries))
    if isinstance(strategy, tenacity.retry_all):
        return all(map(_true_on_success, strategy.retries))
    return isinstance(strategy, _ALWAYS)


def _refuse_coroutine(function: Any, option: str) -> None:
    call = getattr(function, "__call__", None)  # noqa: B004 - the method itself may be a coroutine function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        raise ConfigurationError(
            f"Retry({option}={_name(function)}) is asynchronous: its answer would be a coroutine, which is "
            "always true; use the strategy of the same name from tenacity itself"
        )


def _name(strategy: Any) -> str:
    if isinstance(strategy, type(tenacity.retry_always)):
        return "retry_always"
    return getattr(strategy, "__qualname__", None) or type(strategy).__qualname__


# -- how long to wait -----------------------------------------------------------------


def waiting(wait: Wait | None, max_delay: float) -> Callable[[RetryCallState], Any]:
    """``wait`` as a strategy. Raises :class:`ConfigurationError` for what is none."""
    if wait is None:
        return tenacity.wait_exponential(multiplier=DEFAULT_BASE, max=min(DEFAULT_CAP, max_delay))
    if isinstance(wait, bool):
        raise InvalidArgumentError("Retry(wait=…) takes seconds, not True or False")
    if isinstance(wait, int | float | timedelta):
        return tenacity.wait_fixed(duration(wait, "wait"))
    if isinstance(wait, Sequence) and not isinstance(wait, str):
        return _steps(wait)
    if not callable(wait):
        raise ConfigurationError(
            f"Retry(wait=…) takes seconds, a list of them, a wait strategy of tenacity or a function, not {wait!r}"
        )
    for node in _nodes(wait, "wait_funcs"):
        _refuse_coroutine(node, "wait")
        _refuse_coroutine(getattr(node, "predicate", None), "wait")
    return wait


def _steps(delays: Sequence[Duration]) -> wait_base:
    if not delays:
        raise InvalidArgumentError("Retry(wait=[]) names no delay")
    return tenacity.wait_chain(*(tenacity.wait_fixed(duration(delay, "wait")) for delay in delays))


def duration(value: Any, option: str) -> float:
    """``value`` as seconds. Raises :class:`InvalidArgumentError` unless it is finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise InvalidArgumentError(f"{option}={value!r}: expected seconds or a timedelta")
    try:
        number = seconds(value)
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise InvalidArgumentError(f"{option}={value!r}: expected a finite number of seconds, 0 or more")
    return number


def bounds(wait: Any) -> tuple[float, float] | None:
    """The first and the longest delay of a strategy that says them without being run, jitter aside."""
    if isinstance(wait, tenacity.wait_fixed):
        return wait.wait_fixed, wait.wait_fixed
    if isinstance(wait, tenacity.wait_exponential | tenacity.wait_exponential_jitter):
        return max(wait.min, wait.multiplier), wait.max
    if isinstance(wait, tenacity.wait_incrementing):
        return wait.start, wait.max
    if isinstance(wait, tenacity.wait_random):
        return wait.wait_random_min, wait.wait_random_max
    if isinstance(wait, tenacity.wait_chain):
        ends = [bounds(step) for step in wait.strategies]
        known = [end for end in ends if end is not None]
        return (known[0][0], max(end[1] for end in known)) if len(known) == len(ends) else None
    return None


# -- when to stop ---------------------------------------------------------------------


def stopping(stop: Stop | None) -> Callable[[RetryCallState], Any]:
    """``stop`` as a strategy. Raises :class:`ConfigurationError` for what cannot be asked."""
    if stop is None:
        return tenacity.stop_never
    if not callable(stop):
        raise ConfigurationError(
            f"Retry(stop=…) takes a stop strategy of tenacity or a function, not {stop!r}; a number of retries "
            "is max_retries="
        )
    for node in _nodes(stop, "stops"):
        _refuse_coroutine(node, "stop")
        if isinstance(node, tenacity.stop_when_event_set):
            raise ConfigurationError(
                "Retry(stop=stop_when_event_set) cannot work: the event lives in one process, the job does not"
            )
    return stop


# -- a whole tenacity object ----------------------------------------------------------

_UNUSED: Final = ("sleep", "before", "after", "before_sleep", "retry_error_callback")


def refuse_unused(retrying: tenacity.BaseRetrying) -> None:
    """Refuse what a ``Retrying`` object asks for that nothing here would do."""
    own = inspect.signature(type(retrying).__init__).parameters
    inherited = inspect.signature(tenacity.BaseRetrying.__init__).parameters
    for option in _UNUSED:
        default = (own.get(option) or inherited[option]).default
        if getattr(retrying, option) is not default:
            raise ConfigurationError(
                f"{type(retrying).__name__}({option}=…) has no meaning for a job, which waits in its queue; "
                "remove it (hooks belong to the task or a middleware)"
            )


# -- numbers --------------------------------------------------------------------------

#: Beyond this, say ``None``.
MOST_RETRIES: Final = 2**31 - 1


def retries(value: Any) -> int | None:
    """``max_retries`` checked: ``None`` (for ever) or a whole number from 0 to :data:`MOST_RETRIES`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_RETRIES:
        raise InvalidArgumentError(
            f"max_retries={value!r}: expected a whole number from 0 to {MOST_RETRIES}, or None for ever"
        )
    return value
