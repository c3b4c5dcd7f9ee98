"""When a periodic task is due: cron expressions, fixed periods, and what was missed meanwhile.

A schedule is a frozen value without state. :meth:`Schedule.next` is a pure function of an instant, so any
number of workers agree on the instants, and an instant can name the job it makes.

Daylight saving, for cron expressions, after the habit of Vixie and Debian cron:

- *Fixed-time* jobs (five fields, neither minute nor hour beginning with ``*``) run once a day whatever the clocks
  do: a time that is skipped runs at the first moment after the gap, and several skipped ones run once between
  them; a time that comes twice runs at its first coming.
- All others follow the wall clock in *real time*: what is skipped does not happen, what comes twice runs twice.
  So ``30 * * * *`` runs every hour, always, and ``*/15 2 * * *`` does not run on the night without a 2 o'clock.
"""
# budget: 420 lines: the two kinds of schedule and the one question about what was missed

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final, Protocol

from cronsim import CronSim, CronSimError

from taskq.clock import Duration
from taskq.errors import ConfigurationError, InvalidArgumentError
from taskq.wallclock import first_change, instant_of, offset_at

_SECOND: Final = timedelta(seconds=1)


class Schedule(Protocol):
    """Instants in order."""

    def next(self, after: datetime) -> datetime | None:
        """The first instant strictly after ``after``, in UTC, or ``None`` if there is none."""
        ...

    def spread(self, instant: datetime) -> timedelta:
        """How much later than ``instant`` its job should start: the same for everyone who asks."""
        ...

    def describe(self) -> str:
        """The schedule in words."""
        ...


def cron(
    expression: str,
    *,
    timezone: str | tzinfo = "UTC",
    jitter: Duration = 0,
    start: datetime | None = None,
    end: datetime | None = None,
) -> Cron:
    """A cron expression: five fields (minute, hour, day of month, month, day of week) or six, seconds first.

    Understands ranges, steps, lists, names, ``L`` and ``LW`` as day of month, ``5L`` and ``MON#2`` as day of week,
    and ``@hourly @daily @midnight @weekly @monthly @yearly @annually``. If both day fields are restricted, either
    may match, unless one of them begins with ``*``, as in Debian's cron.

    ``timezone`` is a zone's name or a ``tzinfo``; ``jitter`` spreads the starts over that many seconds; no instant
    lies before ``start`` or after ``end`` (aware datetimes). Raises :class:`ConfigurationError` naming the field
    that is wrong.
    """
    return Cron(
        expression=_ALIASES.get(expression.strip().lower(), expression.strip()),
        zone=_zone(timezone),
        jitter=_duration(jitter, "jitter"),
        start=_aware_or_none(start, "start"),
        end=_aware_or_none(end, "end"),
    )


def crontab(
    minute: str | int | Iterable[int] = "*",
    hour: str | int | Iterable[int] = "*",
    day_of_week: str | int | Iterable[int] = "*",
    day_of_month: str | int | Iterable[int] = "*",
    month_of_year: str | int | Iterable[int] = "*",
    *,
    timezone: str | tzinfo = "UTC",
    jitter: Duration = 0,
    start: datetime | None = None,
    end: datetime | None = None,
) -> Cron:
    """Celery's form. As there, and unlike :func:`cron`, both day fields must match."""
    fields = (minute, hour, day_of_month, month_of_year, day_of_week)
    return Cron(
        expression=" ".join(map(_field_text, fields)),
        zone=_zone(timezone),
        jitter=_duration(jitter, "jitter"),
        start=_aware_or_none(start, "start"),
        end=_aware_or_none(end, "end"),
        both_days=True,
    )


def every(
    period: Duration,
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    anchor: datetime | None = None,
    jitter: Duration = 0,
) -> Every:
    """A fixed period, in real time: the instants ``anchor + n * period``, whatever ran when.

    ``anchor`` defaults to ``start``, else to the Unix epoch, so that restarts do not shift anything. No instant
    lies before ``start`` or after ``end``. Raises :class:`InvalidArgumentError` for periods under 10 milliseconds.
    """
    step = _duration(period, "every")
    if step < _SHORTEST:
        raise InvalidArgumentError(
            f"every({period!r}): expected at least {_SHORTEST.total_seconds()} seconds"
        )
    first = _aware_or_none(start, "start")
    return Every(
        period=step,
        anchor=_aware_or_none(anchor, "anchor") or first or _EPOCH,
        jitter=_duration(jitter, "jitter"),
        start=first,
        end=_aware_or_none(end, "end"),
    )


_SHORTEST: Final = timedelta(milliseconds=10)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_ALIASES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


# -- fixed periods --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Every:
    """See :func:`every`."""

    period: timedelta
    anchor: datetime
    jitter: timedelta = timedelta(0)
    start: datetime | None = None
    end: datetime | None = None

    def next(self, after: datetime) -> datetime | None:
        moment = _from(after, self.start)
        try:
            instant = self.anchor + ((moment - self.anchor) // self.period + 1) * self.period
        except OverflowError:
            return None
        return _until(instant, self.end)

    def spread(self, instant: datetime) -> timedelta:
        return _spread(str(self.period), instant, self.jitter)

    def describe(self) -> str:
        return f"every {self.period}"


# -- cron -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cron:
    """See :func:`cron` and :func:`crontab`."""

    expression: str
    zone: tzinfo = UTC
    jitter: timedelta = timedelta(0)
    start: datetime | None = None
    end: datetime | None = None
    both_days: bool = False  #: both day fields must match, even if both are restricted
    _fixed: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.expression)
        object.__setattr__(self, "_fixed", _is_fixed_time(self.expression))

    def next(self, after: datetime) -> datetime | None:
        moment = _from(after, self.start).replace(microsecond=0)
        try:
            instant = self._fixed_time(moment) if self._fixed else self._real_time(moment)
        except (StopIteration, OverflowError):  # nothing within fifty years, or before year 10000
            return None
        return _until(instant, self.end)

    def spread(self, instant: datetime) -> timedelta:
        return _spread(self.expression, instant, self.jitter)

    def describe(self) -> str:
        zone = getattr(self.zone, "key", None) or str(self.zone)
        return f"{self._matches(_ANY).explain()} ({zone})"

    def _fixed_time(self, after: datetime) -> datetime:
        """The first nominal time whose instant is later.

        Instants do not fall as nominal times rise, so the search may begin at the wall time of ``after``.
        """
        for wall in self._matches(after.astimezone(self.zone).replace(tzinfo=None)):
            instant = instant_of(wall, self.zone)
            if instant > after:
                return instant
        raise StopIteration

    def _real_time(self, after: datetime) -> datetime:
        """The first instant whose wall time matches.

        Within a stretch of constant offset that is a search in wall time; where a stretch ends before its match,
        the search begins again in the next one.
        """
        # The moment that is tried next; the stretch it lies in decides the offset.
        moment = after + _SECOND
        while True:
            offset = offset_at(moment, self.zone)
            wall = moment.replace(tzinfo=None) + offset
            match = next(self._matches(wall - _SECOND))
            instant = (match - offset).replace(tzinfo=UTC)
            change = first_change(moment, instant, self.zone)
            if change is None:
                return instant
            moment = change

    def _matches(self, wall: datetime) -> CronSim:
        """Matching wall times after ``wall``, for a clock without daylight saving."""
        matches = CronSim(self.expression, wall)
        matches.day_and = matches.day_and or self.both_days
        return matches


_ANY: Final = datetime(2000, 1, 1)  # noqa: DTZ001 - a wall clock


def _check(expression: str) -> None:
    if len(expression.split()) not in {5, 6}:
        raise ConfigurationError(
            f"cron {expression!r}: expected five fields (minute hour day-of-month month day-of-week), or six with "
            f"seconds first; got {len(expression.split())}"
        )
    try:
        CronSim(expression, _ANY)
    except CronSimError as error:
        field_name = str(error).removeprefix("Bad ")
        raise ConfigurationError(f"cron {expression!r}: the {field_name} field is wrong") from error


def _is_fixed_time(expression: str) -> bool:
    fields = expression.split()
    return len(fields) == 5 and not fields[0].startswith("*") and not fields[1].startswith("*")


def _field_text(value: str | int | Iterable[int]) -> str:
    if isinstance(value, str):
        return "".join(value.split()) or "?"
    if isinstance(value, int):
        return str(value)
    return ",".join(map(str, sorted(value))) or "?"


def _zone(zone: str | tzinfo) -> tzinfo:
    if isinstance(zone, tzinfo):
        return zone
    if zone.upper() == "UTC":
        return UTC
    import zoneinfo

    try:
        return zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigurationError(
            f"timezone={zone!r} is not a known time zone (is tzdata installed?)"
        ) from error


# -- shared by all schedules ----------------------------------------------------------


def _from(after: datetime, start: datetime | None) -> datetime:
    """``after`` in UTC, moved to just before ``start`` if that is later."""
    moment = _aware(after, "after")
    if start is None or moment >= start:
        return moment
    return start - timedelta(microseconds=1)


def _until(instant: datetime, end: datetime | None) -> datetime | None:
    return instant if end is None or instant <= end else None


def _aware(moment: datetime, name: str) -> datetime:
    if moment.utcoffset() is None:
        raise InvalidArgumentError(f"{name}={moment!r} has no time zone: write datetime(…, tzinfo=…)")
    return moment.astimezone(UTC)


def _aware_or_none(moment: datetime | None, name: str) -> datetime | None:
    return None if moment is None else _aware(moment, name)


def _duration(value: Duration, name: str) -> timedelta:
    try:
        length = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (TypeError, ValueError, OverflowError):
        length = -_SECOND
    if isinstance(value, bool) or length < timedelta(0):
        raise InvalidArgumentError(f"{name}={value!r}: expected seconds or a timedelta, 0 or more")
    return length


def _spread(name: str, instant: datetime, jitter: timedelta) -> timedelta:
    if not jitter:
        return jitter
    digest = hashlib.sha256(f"{name} {instant.timestamp()}".encode()).digest()
    return jitter * (int.from_bytes(digest[:6]) / (1 << 48))


# -- what is due ----------------------------------------------------------------------


class Overlap(enum.StrEnum):
    """What happens to an instant whose predecessor is still at work."""

    SKIP = "skip"  #: it does not happen
    QUEUE_ONE = "queue_one"  #: one waits; further ones do not happen
    ALLOW = "allow"  #: they run side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfire:
    """Which missed instants are made up for."""

    most: int  #: how many, the latest ones
    max_age: timedelta | None  #: and none older than this


def skip(tolerance: Duration = 60) -> Misfire:
    """None: only an instant that is at most ``tolerance`` late still runs."""
    return Misfire(most=1, max_age=_duration(tolerance, "tolerance"))


def run_once(max_age: Duration | None = None) -> Misfire:
    """The latest, once."""
    return Misfire(most=1, max_age=None if max_age is None else _duration(max_age, "max_age"))


def run_all(most: int = 100, max_age: Duration | None = None) -> Misfire:
    """All, but no more than ``most``, the latest ones, and none older than ``max_age``."""
    if isinstance(most, bool) or not 1 <= most <= _MOST:
        raise InvalidArgumentError(f"run_all({most!r}): expected 1 to {_MOST}")
    return Misfire(most=most, max_age=None if max_age is None else _duration(max_age, "max_age"))


_MOST: Final = 10_000
#: A last instant further ahead of the clock than this was made by a clock that was wrong.
_LEAD: Final = timedelta(days=1)


def due_instants(
    schedule: Schedule,
    last: datetime,
    now: datetime,
    misfire: Misfire,
    catch_up: Duration | None = None,
) -> list[datetime]:
    """The instants to run now, oldest first; the caller then remembers the latest as ``last``.

    ``last`` is the latest instant dealt with, or when the schedule was first seen. ``catch_up`` is one more limit
    on age, in seconds. However long ago ``last`` was, the cost is at most about 50 questions per instant
    returned, and most often two.

    A clock that was set back finds nothing due until it has caught up, so that nothing runs twice; if ``last`` is
    more than a day ahead, it is the record that was wrong, and counting begins again a minute ago.
    """
    begin, end = _aware(last, "last"), _aware(now, "now")
    if begin - end > _LEAD:
        begin = end - timedelta(minutes=1)
    ages = [misfire.max_age, None if catch_up is None else _duration(catch_up, "catch_up")]
    for age in ages:
        if age is not None and end - begin > age:
            begin = end - age - timedelta(microseconds=1)  # an instant of exactly that age is still due
    found: list[datetime] = []
    while len(found) < misfire.most and (instant := _latest(schedule, begin, end)) is not None:
        found.append(instant)
        end = instant - timedelta(microseconds=1)
    return found[::-1]


def _latest(schedule: Schedule, begin: datetime, end: datetime) -> datetime | None:
    """The last instant in ``(begin, end]``: a binary search with :meth:`Schedule.next`."""
    found = schedule.next(begin)
    if found is None or found > end:
        return None
    following = schedule.next(found)
    if following is None or following > end:  # the usual case
        return found
    found, barren = following, end  # nothing that is due follows `barren`
    while found < barren:
        probe = found + (barren - found) // 2
        instant = schedule.next(probe)
        if instant is None or instant > end:
            barren = probe
        else:
            found = instant
    return found
