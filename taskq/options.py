"""Options of tasks, calls and queues, checked where they are given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import msgpack

from taskq.clock import Duration, seconds
from taskq.errors import InvalidArgumentError
from taskq.job import MAX_PRIORITY
from taskq.limits import (
    Declared,
    Key,
    KeySource,
    Overflow,
    RateLimit,
    WeightSource,
    check_key,
    check_weight,
    declared,
)
from taskq.settings import suggestion
from taskq.timetable import SCHEDULE_KEYWORDS, ScheduleKeywords, Timetable, check_schedule
from taskq.unique import UNIQUE_KEYWORDS, UniqueKeywords, check_unique

#: Names that every backend can carry (Kafka's topics are the narrowest).
_QUEUE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
#: Delays up to this are accepted everywhere; more is a mistake (a timestamp given as a countdown).
MAX_DELAY: Final = 86_400.0 * 365 * 8


def check_queue(name: object) -> str:
    """``name`` if every backend can carry it as a queue name."""
    if not isinstance(name, str) or not _QUEUE_NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"queue name {name!r}: use 1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    return name


def check_priority(priority: object) -> int:
    """``priority`` if it is an int from 0 (the default) to 9 (first)."""
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= MAX_PRIORITY:
        raise InvalidArgumentError(
            f"priority {priority!r}: use an int from 0 to {MAX_PRIORITY}; higher runs first"
        )
    return priority


def check_seconds(name: str, value: object, *, least: float = 0.0, most: float = MAX_DELAY) -> float:
    """A duration given as seconds or ``timedelta``, within bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise InvalidArgumentError(f"{name}={value!r}: use seconds (int or float) or a timedelta")
    try:
        number = seconds(value)
    except OverflowError:
        number = math.inf
    if math.isnan(number) or not least <= number <= most:
        raise InvalidArgumentError(f"{name}={_shown(value)}: use {least:g} to {most:g} seconds")
    return number


def _shown(value: object) -> str:
    """``value`` for a message, however large or odd it is."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a repr may do anything
        text = f"<{type(value).__name__}: its repr raised {type(error).__name__}>"
    return text if len(text) <= 100 else f"{text[:90]}…"


def check_instant(name: str, value: object) -> float:
    """An aware datetime as Unix seconds; a naive one is refused, because its zone would be a guess."""
    if not isinstance(value, datetime):
        raise InvalidArgumentError(f"{name}={value!r}: use an aware datetime")
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidArgumentError(
            f"{name}={value!r} has no time zone: use datetime.now(UTC) + timedelta(...), or value.astimezone()"
        )
    return value.timestamp()


def check_bool(name: str, value: object) -> bool:
    """``value`` if it is ``True`` or ``False``: a text that says no is neither."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name}={_shown(value)}: use True or False")
    return value


def check_list(name: str, value: object) -> Sequence[Any]:
    """``value`` if it is a list or a tuple: a text or a dict would be taken apart instead."""
    if not isinstance(value, list | tuple):
        raise InvalidArgumentError(f"{name}={_shown(value)}: use a list or a tuple")
    return value


def check_mapping(name: str, value: object) -> dict[str, Any]:
    """``value`` as a dict of parameter names to values; ``None`` is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidArgumentError(f"{name}={_shown(value)}: use a mapping of parameter names to values")
    return dict(value)


def check_count(name: str, value: object) -> int:
    """``value`` if it is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{name}={value!r}: use an int of at least 1")
    return value


def check_retries(max_retries: object) -> int | None:
    """The number of retries after the first run; ``None`` for ever."""
    if max_retries is None:
        return None
    if isinstance(max_retries, bool) or not isinstance(max_retries, int) or not 0 <= max_retries <= 1_000_000:
        raise InvalidArgumentError(
            f"max_retries={max_retries!r}: use an int from 0 (one run) to 1,000,000, or None for ever"
        )
    return max_retries


class TaskKeywords(UniqueKeywords, ScheduleKeywords, total=False):
    """What ``@app.task(...)`` accepts, besides ``bind``."""

    name: str
    queue: str
    priority: int
    max_retries: int | None
    visibility_timeout: Duration
    expires: Duration
    time_limit: Duration
    soft_time_limit: Duration
    ignore_result: bool
    result_ttl: Duration
    retry: Any
    autoretry_for: tuple[type[BaseException], ...]
    dont_autoretry_for: tuple[type[BaseException], ...]
    retry_backoff: bool | float
    retry_backoff_max: Duration
    retry_jitter: bool
    default_retry_delay: Duration
    retry_when: Callable[[BaseException], bool]
    retry_for: Duration
    throws: tuple[type[BaseException], ...]
    on_success: Callable[..., object]
    on_failure: Callable[..., object]
    on_retry: Callable[..., object]
    on_exhausted: Any
    rate_limit: RateLimit
    concurrency: int
    key: KeySource
    key_rate_limit: RateLimit
    key_concurrency: int
    ordered: bool
    fairness_key: KeySource
    weight: WeightSource
    max_waiting: int
    overflow: Overflow


#: Keywords that describe the retry policy and are handed to it as they are.
RETRY_KEYWORDS: Final = frozenset(
    {
        "retry",
        "max_retries",
        "autoretry_for",
        "dont_autoretry_for",
        "retry_backoff",
        "retry_backoff_max",
        "retry_jitter",
        "default_retry_delay",
        "retry_when",
        "retry_for",
        "throws",
        "on_exhausted",
    }
)


class CallKeywords(UniqueKeywords, total=False):
    """What one call may decide: ``apply_async(args, kwargs, **these)`` and ``options(**these)``."""

    queue: str
    priority: int
    countdown: Duration
    eta: datetime
    expires: Duration | datetime
    headers: Mapping[str, Any]
    max_retries: int | None
    visibility_timeout: Duration
    ignore_result: bool
    result_ttl: Duration
    job_id: str
    key: Key
    fairness_key: Key
    weight: float


CALL_KEYWORDS: Final = frozenset(CallKeywords.__annotations__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """One call's decisions, checked; ``None`` leaves a matter to the task and its app."""

    queue: str | None = None
    priority: int | None = None
    countdown: float | None = None
    eta: float | None = None
    expires_in: float | None = None
    expires_at: float | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)
    max_retries: int | None = None
    unlimited: bool = False  #: ``max_retries=None`` was said
    lease: float | None = None
    ignore_result: bool | None = None
    keep: float | None = None
    job_id: str | None = None
    unique: Mapping[str, Any] = field(default_factory=dict)  #: those of ``UniqueKeywords`` that were given
    key: str | None = None
    fairness_key: str | None = None
    weight: float | None = None


#: A call that decides nothing.
NO_OPTIONS: Final = CallOptions()


def check_call(given: Mapping[str, Any]) -> CallOptions:
    """Turn the keywords of a call into checked options; unknown ones are named with the nearest valid one."""
    if not given:
        return NO_OPTIONS
    refuse_unknown("option of a call", given, CALL_KEYWORDS)
    if given.get("countdown") is not None and given.get("eta") is not None:
        raise InvalidArgumentError("countdown and eta contradict each other: give one of them")
    fields: dict[str, Any] = {}
    fields["unique"] = {name: given[name] for name in given.keys() & UNIQUE_KEYWORDS}
    for name, value in given.items():
        if name == "max_retries":
            fields["max_retries"] = check_retries(value)
            fields["unlimited"] = value is None
        elif value is not None and name not in UNIQUE_KEYWORDS:
            _CALL_CHECKS[name](fields, value)
    return CallOptions(**fields)


def _expires(fields: dict[str, Any], value: Any) -> None:
    if isinstance(value, datetime):
        fields["expires_at"] = check_instant("expires", value)
    else:
        fields["expires_in"] = check_seconds("expires", value)


def _headers(fields: dict[str, Any], value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidArgumentError(f"headers={value!r}: use a mapping with str keys")
    try:
        msgpack.packb(dict(value), strict_types=True)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgumentError(
            f"headers={_shown(value)}: use str, int, float, bool, None, bytes, lists, dicts"
        ) from error
    fields["headers"] = dict(value)


def _job_id(fields: dict[str, Any], value: Any) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= 100 or not value.isprintable():
        raise InvalidArgumentError(f"job_id={value!r}: use 1 to 100 printable characters, or leave it out")
    fields["job_id"] = value


_CALL_CHECKS: Final[Mapping[str, Callable[[dict[str, Any], Any], None]]] = {
    "queue": lambda fields, value: fields.update(queue=check_queue(value)),
    "priority": lambda fields, value: fields.update(priority=check_priority(value)),
    "countdown": lambda fields, value: fields.update(countdown=check_seconds("countdown", value)),
    "eta": lambda fields, value: fields.update(eta=check_instant("eta", value)),
    "expires": _expires,
    "headers": _headers,
    "visibility_timeout": lambda fields, value: fields.update(lease=check_lease(value)),
    "ignore_result": lambda fields, value: fields.update(ignore_result=check_bool("ignore_result", value)),
    "result_ttl": lambda fields, value: fields.update(keep=check_seconds("result_ttl", value)),
    "job_id": _job_id,
    "key": lambda fields, value: fields.update(key=check_key("key", value)),
    "fairness_key": lambda fields, value: fields.update(fairness_key=check_key("fairness_key", value)),
    "weight": lambda fields, value: fields.update(weight=check_weight(value)),
}


def check_lease(value: object) -> float:
    """A visibility timeout; 0 or less means: taken back only on proof that the worker is gone."""
    return check_seconds("visibility_timeout", value, least=-1.0)


def refuse_unknown(what: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    """Name the first keyword that is not known, and the nearest that is."""
    for name in given:
        if name not in known:
            raise InvalidArgumentError(f"unknown {what}: {name!r}{nearest(name, known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or what there is where nothing is near."""
    known = sorted(known)
    return suggestion(name, known) or f"; known: {', '.join(known) or 'none'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """A task's declaration, checked, apart from its retry policy."""

    queue: str | None = None
    priority: int = 0
    lease: float | None = None
    expires: float | None = None
    time_limit: float | None = None
    soft_time_limit: float | None = None
    ignore_result: bool = False
    keep: float | None = None
    on_success: Callable[..., object] | None = None
    on_failure: Callable[..., object] | None = None
    on_retry: Callable[..., object] | None = None
    unique: Mapping[str, Any] = field(default_factory=dict)  #: those of ``UniqueKeywords`` that were given
    timetable: Timetable | None = None
    limits: Declared | None = None


def check_task(given: Mapping[str, Any]) -> TaskOptions:
    """Turn the keywords of a declaration into checked options; the retry policy's are left to the policy."""
    refuse_unknown("option of a task", given, frozenset(TaskKeywords.__annotations__))
    soft, hard = (
        None if given.get(name) is None else check_seconds(name, given[name], least=0.001)
        for name in ("soft_time_limit", "time_limit")
    )
    if soft is not None and hard is not None and soft >= hard:
        raise InvalidArgumentError(f"soft_time_limit={soft:g} must be less than time_limit={hard:g}")
    for name in ("on_success", "on_failure", "on_retry"):
        if given.get(name) is not None and not callable(given[name]):
            raise InvalidArgumentError(f"{name}={given[name]!r}: use a callable")
    unique = {name: given[name] for name in given.keys() & UNIQUE_KEYWORDS}
    check_unique(unique)
    return TaskOptions(
        queue=None if given.get("queue") is None else check_queue(given["queue"]),
        priority=check_priority(given.get("priority", 0)),
        lease=None if given.get("visibility_timeout") is None else check_lease(given["visibility_timeout"]),
        expires=None if given.get("expires") is None else check_seconds("expires", given["expires"]),
        time_limit=hard,
        soft_time_limit=soft,
        ignore_result=check_bool("ignore_result", given.get("ignore_result", False)),
        keep=None if given.get("result_ttl") is None else check_seconds("result_ttl", given["result_ttl"]),
        on_success=given.get("on_success"),
        on_failure=given.get("on_failure"),
        on_retry=given.get("on_retry"),
        unique=unique,
        timetable=check_schedule({name: given[name] for name in given.keys() & SCHEDULE_KEYWORDS}),
        limits=declared(given),
    )
