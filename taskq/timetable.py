"""A schedule and the job it makes, as plain values that are stored and sent; and what is to be done at a moment.

Whoever reads a definition needs neither the app nor the task: workers fire schedules from what is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any, Final, Literal, NamedTuple, TypedDict

from taskq.clock import Duration, seconds, to_datetime
from taskq.errors import ConfigurationError, InvalidArgumentError
from taskq.job import Job, Lane, Unique, new_id
from taskq.schedule import Cron, Every, Misfire, Overlap, cron, due_instants, every, run_all, run_once, skip

#: In the headers of a job: the schedule that made it, and its instant in Unix seconds.
NAME_HEADER: Final = "taskq-schedule"
INSTANT_HEADER: Final = "taskq-instant"
#: An instant dealt with that is further ahead than this was written by a clock that was wrong, in seconds.
_LEAD: Final = 86_400.0


class ScheduleKeywords(TypedDict, total=False):
    """When, for tasks that are run periodically."""

    cron: str
    every: Duration
    schedule: Cron | Every
    timezone: str | tzinfo
    jitter: Duration
    start: datetime
    end: datetime
    overlap: Literal["allow", "skip", "queue_one"]
    misfire: Misfire | Literal["skip", "run_once", "run_all"]
    catch_up: Duration


SCHEDULE_KEYWORDS: Final = frozenset(ScheduleKeywords.__annotations__)
_OF_CRON: Final = frozenset({"timezone", "jitter", "start", "end"})
_MISFIRES: Final[dict[str, Callable[[], Misfire]]] = {"skip": skip, "run_once": run_once, "run_all": run_all}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """When, and what happens to instants that overlap or were missed."""

    schedule: Cron | Every
    overlap: Overlap = Overlap.ALLOW
    misfire: Misfire = dataclasses.field(default_factory=skip)

    def next(self, dealt: float, now: float) -> float | None:
        """The next instant to decide about."""
        instant = self.schedule.next(to_datetime(now if dealt > now + _LEAD else dealt))
        return None if instant is None else instant.timestamp()


def check_schedule(given: Mapping[str, Any]) -> Timetable | None:
    """The timetable that options add up to; ``None`` where none was given."""
    given = {name: value for name, value in given.items() if value is not None}
    kinds = [name for name in ("cron", "every", "schedule") if name in given]
    if not given:
        return None
    if len(kinds) != 1:
        what = " and ".join(f"{name}=" for name in kinds) or f"{next(iter(given))}= alone"
        raise ConfigurationError(f"{what}: give one of cron=, every= and schedule=")
    overlap = _overlap(given.get("overlap", "allow"))
    misfire = _misfire(given)
    if misfire.most > 1 and overlap is not Overlap.ALLOW:
        raise ConfigurationError(f"run_all runs several at once, which overlap={overlap.value!r} forbids")
    return Timetable(schedule=_schedule(kinds[0], given), overlap=overlap, misfire=misfire)


def _schedule(kind: str, given: Mapping[str, Any]) -> Cron | Every:
    about = {name: given[name] for name in _OF_CRON if name in given}
    if kind == "cron":
        made: Cron | Every = cron(given["cron"], **about)
    elif kind == "every":
        if "timezone" in about:
            raise ConfigurationError("every= counts real time, to which timezone= means nothing")
        made = every(given["every"], **about)
    else:
        made = given["schedule"]
        if about:
            raise ConfigurationError(f"schedule= and {next(iter(about))}=: say it inside schedule=")
    if not isinstance(made, Cron | Every):
        raise ConfigurationError(f"schedule={made!r}: use cron(…), crontab(…) or every(…)")
    if isinstance(made, Cron):
        _zone_value(made.zone)
    return made


def _overlap(value: Any) -> Overlap:
    try:
        return Overlap(value)
    except ValueError:
        allowed = ", ".join(repr(one.value) for one in Overlap)
        raise InvalidArgumentError(f"overlap={value!r}: use {allowed}") from None


def _misfire(given: Mapping[str, Any]) -> Misfire:
    misfire, catch_up = given.get("misfire"), given.get("catch_up")
    if misfire is None:
        return skip() if catch_up is None else run_once(catch_up)
    if isinstance(misfire, str) and misfire in _MISFIRES:
        misfire = _MISFIRES[misfire]()
    if not isinstance(misfire, Misfire):
        raise InvalidArgumentError(
            f"misfire={misfire!r}: use {', '.join(map(repr, _MISFIRES))}, or skip(…), run_once(…), run_all(…) "
            "of taskq.schedule"
        )
    if catch_up is None:
        return misfire
    limit = run_once(catch_up).max_age
    ages = [age for age in (misfire.max_age, limit) if age is not None]
    return Misfire(most=misfire.most, max_age=min(ages))


# -- as plain values ------------------------------------------------------------------


def pack(timetable: Timetable, job: Job) -> dict[str, Any]:
    """A definition: ``job`` is made anew for each instant."""
    return {"when": pack_when(timetable), "job": pack_job(job)}


def unpack(definition: Mapping[str, Any]) -> Timetable:
    """The timetable of a definition."""
    when = definition["when"]
    about: dict[str, Any] = {
        "jitter": timedelta(seconds=when["jitter"]),
        "start": _moment(when["start"]),
        "end": _moment(when["end"]),
    }
    if when["kind"] == "every":
        anchor = to_datetime(when["anchor"])
        made: Cron | Every = Every(period=timedelta(seconds=when["period"]), anchor=anchor, **about)
    else:
        zone = _zone(when["zone"])
        made = Cron(expression=when["expression"], zone=zone, both_days=when["both_days"], **about)
    age = when["max_age"]
    misfire = Misfire(most=when["most"], max_age=None if age is None else timedelta(seconds=age))
    return Timetable(schedule=made, overlap=Overlap(when["overlap"]), misfire=misfire)


def job_at(definition: Mapping[str, Any], name: str, instant: float | None, now: float) -> Job:
    """The job of an instant, or of no instant in particular: then it is due now."""
    moment = now if instant is None else instant + _spread(definition, instant)
    about = {NAME_HEADER: name} if instant is None else {NAME_HEADER: name, INSTANT_HEADER: instant}
    job = unpack_job(definition["job"], moment, now)
    return dataclasses.replace(job, headers={**job.headers, **about})


def unpack_job(packed: Mapping[str, Any], moment: float, now: float) -> Job:
    """A new job like the one that was packed, as if it had been called for ``moment``."""
    fields = dict(packed)
    due, expires = moment + fields.pop("delay"), fields.pop("expires_in")
    lane = fields.pop("lane")
    return Job(
        **{**fields, "unique": _unpack_unique(fields["unique"], now)},
        id=new_id(),
        created=now,
        due=due,
        expires=None if expires is None else due + expires,
        lane=None if lane is None else Lane.unpacked(lane),
    )


def _unpack_unique(packed: list[Any] | None, now: float) -> Unique | None:
    if packed is None:
        return None
    unique = Unique(*packed)
    return unique if unique.latest is None else unique._replace(latest=now + unique.latest)


#: What of a job is the same for every instant.
_KEPT: Final = (
    "queue",
    "task",
    "payload",
    "priority",
    "lease",
    "max_retries",
    "loss_base",
    "loss_cap",
    "keep",
)


def pack_job(job: Job) -> dict[str, Any]:
    """What of a job is the same whenever it is made."""
    unique = job.unique
    if unique is not None and unique.latest is not None:
        unique = unique._replace(latest=_since(job.created, unique.latest))
    return {
        **{name: getattr(job, name) for name in _KEPT},
        "headers": dict(job.headers),
        "delay": max(0.0, _since(job.created, job.due)) if job.due else 0.0,
        "expires_in": None if job.expires is None else _since(job.created, job.expires),
        "unique": None if unique is None else list(unique),
        "lane": None if job.lane is None else job.lane.packed(),
    }


def _since(created: float, moment: float) -> float:
    # Rounded: the same declaration must give the same value whenever it is read.
    return round(moment - created, 3)


def pack_when(timetable: Timetable) -> dict[str, Any]:
    """The half of a definition that says when."""
    schedule, age = timetable.schedule, timetable.misfire.max_age
    common = {
        "jitter": seconds(schedule.jitter),
        "start": schedule.start.timestamp() if schedule.start else None,
        "end": schedule.end.timestamp() if schedule.end else None,
        "overlap": timetable.overlap.value,
        "most": timetable.misfire.most,
        "max_age": None if age is None else seconds(age),
    }
    if isinstance(schedule, Every):
        period, anchor = seconds(schedule.period), schedule.anchor.timestamp()
        return {"kind": "every", "period": period, "anchor": anchor, **common}
    zone = _zone_value(schedule.zone)
    fields = {"expression": schedule.expression, "zone": zone, "both_days": schedule.both_days}
    return {"kind": "cron", **fields, **common}


def _spread(definition: Mapping[str, Any], instant: float) -> float:
    if not definition["when"]["jitter"]:
        return 0.0
    return unpack(definition).schedule.spread(to_datetime(instant)).total_seconds()


def _zone_value(zone: tzinfo) -> str | float:
    if zone is UTC:
        return "UTC"
    name = getattr(zone, "key", None)
    if isinstance(name, str):
        return name
    if type(zone) is timezone:
        return zone.utcoffset(None).total_seconds()
    raise ConfigurationError(f"timezone={zone!r} has no name by which workers could find it: use ZoneInfo")


def _zone(value: str | float) -> tzinfo:
    if isinstance(value, str):
        return cron("* * * * *", timezone=value).zone
    return timezone(timedelta(seconds=value))


def _moment(timestamp: float | None) -> datetime | None:
    return None if timestamp is None else to_datetime(timestamp)


# -- what is to be done ---------------------------------------------------------------


class Step(NamedTuple):
    """A decision about an instant; it stands for all earlier ones that are still open."""

    instant: float
    reason: str = ""  #: why it stores no job: ``missed`` or ``overlap``; empty where it stores one

    @property
    def fires(self) -> bool:
        return not self.reason


def steps(timetable: Timetable, dealt: float, now: float, latest: Job | None) -> list[Step]:
    """What to decide now, oldest first.

    ``dealt`` is the latest instant decided about, ``latest`` the job of the latest that stored one, as it is now;
    it is asked about only where instants must not overlap.
    """
    at_work = latest is not None and not latest.state.ended
    if at_work and timetable.overlap is Overlap.QUEUE_ONE:
        return []  # what comes due meanwhile is looked at when that job has ended
    due = _due(timetable, dealt, now, timetable.misfire)
    if timetable.overlap is Overlap.QUEUE_ONE and latest is not None:
        due = _waited(timetable, dealt, now, latest.ended or 0.0) or due
    if not due:
        passed = _due(timetable, dealt, now, run_once())
        return [Step(passed[-1], "missed")] if passed and dealt <= now else []
    if timetable.overlap is Overlap.ALLOW:
        return [Step(instant) for instant in due]
    return [Step(due[-1], "overlap" if at_work else "")]


def _due(timetable: Timetable, dealt: float, now: float, misfire: Misfire) -> list[float]:
    found = due_instants(timetable.schedule, to_datetime(dealt), to_datetime(now), misfire)
    return [instant.timestamp() for instant in found]


def _waited(timetable: Timetable, dealt: float, now: float, ended: float) -> list[float]:
    """The instant that waited for a job which ended at ``ended``: its age counts from then."""
    if not dealt < ended <= now:
        return []
    age = timetable.misfire.max_age
    if age is not None and now - ended > age.total_seconds():
        return []
    return _due(timetable, dealt, now, run_once())
