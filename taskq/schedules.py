"""Schedules at run time: made, changed, paused, triggered and removed while workers run, and remembered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Unpack

from taskq.clock import SYSTEM_CLOCK, Clock, to_datetime
from taskq.errors import BackendError, ConfigurationError, ScheduleNotFoundError
from taskq.options import nearest
from taskq.registry import App
from taskq.result import AsyncResult
from taskq.store import ScheduleRecord, Store
from taskq.tasks import Signature, Task
from taskq.timetable import ScheduleKeywords, Timetable, check_schedule, job_at, pack, pack_when, unpack

#: A schedule that code declares is declared anew by its workers this often, in seconds.
DECLARED_EVERY: Final = 3600.0
#: How often a write that others were quicker with is tried.
_TRIES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """A schedule as it stands."""

    name: str
    task: str
    queue: str
    timetable: Timetable
    paused: bool
    declared: (
        datetime | None
    )  #: when a worker last said that its code declares it; ``None``: made at run time
    next: datetime | None  #: the instant that comes next; ``None`` while paused, or where there is none
    last: datetime | None  #: the latest instant that stored a job
    last_job: str | None  #: and that job's id
    revision: int

    @property
    def description(self) -> str:
        """When, in words."""
        return self.timetable.schedule.describe()


class Schedules:
    """The schedules of an app's store, those that code declares included. ``app.schedules`` is one."""

    def __init__(self, app: App, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._app = app
        self._clock = clock

    def create(self, name: str, call: Signature[Any], **when: Unpack[ScheduleKeywords]) -> ScheduleView:
        """Run ``call`` (``report.s("sales")``) by a new schedule; ``when`` are the options of periodic tasks.

        Instants count from now on. Raises ``ConfigurationError`` where one of that name is there.
        """
        if not 1 <= len(name) <= 200 or not name.isprintable():
            raise ConfigurationError(f"name={name!r}: use 1 to 200 printable characters")
        record = ScheduleRecord(
            name=name, definition=self._definition(call, _timetable(when)), dealt=self._clock.now()
        )
        if not self._store.write_schedule(record):
            raise ConfigurationError(f"there is a schedule named {name!r} already: change() or remove() it")
        return self._view(replace(record, revision=1))

    def change(
        self, name: str, call: Signature[Any] | None = None, **when: Unpack[ScheduleKeywords]
    ) -> ScheduleView:
        """Give a schedule another call, another ``when`` (all of it), or both. A new ``when`` counts from now on."""

        def changed(record: ScheduleRecord) -> ScheduleRecord:
            if record.declared is not None:
                raise ConfigurationError(f"{name} is declared in code: change it there, or pause it")
            old = record.definition
            if call is None:
                definition = {"when": pack_when(_timetable(when)), "job": old["job"]}
            else:
                definition = self._definition(call, _timetable(when) if when else unpack(old))
            dealt = self._clock.now() if when else record.dealt
            return replace(record, definition=definition, dealt=dealt)

        return self._write(name, changed)

    def pause(self, name: str) -> ScheduleView:
        """Let nothing come due until :meth:`resume`. Idempotent."""
        return self._write(name, lambda record: replace(record, paused=True))

    def resume(self, name: str) -> ScheduleView:
        """Undo :meth:`pause`; instants that passed meanwhile are not made up for. Idempotent."""

        def resumed(record: ScheduleRecord) -> ScheduleRecord:
            if not record.paused:
                return record
            return replace(record, paused=False, dealt=max(record.dealt, self._clock.now()))

        return self._write(name, resumed)

    def trigger(self, name: str) -> AsyncResult[Any]:
        """Store the schedule's job now, beside its instants and also while it is paused."""
        job = job_at(self._record(name).definition, name, None, self._clock.now())
        (stored,) = self._app.enqueue([job])
        return AsyncResult(stored, self._app, deduplicated=stored != job.id)

    def remove(self, name: str) -> None:
        """Forget a schedule. One that running code declares cannot be removed; it can be paused."""
        record = self._record(name)
        if record.declared is not None and self._clock.now() - record.declared < 2 * DECLARED_EVERY:
            raise ConfigurationError(
                f"{name} is declared in code (last at {to_datetime(record.declared):%Y-%m-%d %H:%M:%SZ}): "
                "remove it there, or pause it"
            )
        self._store.remove_schedule(name)

    def get(self, name: str) -> ScheduleView:
        """One schedule; raises ``ScheduleNotFoundError``."""
        return self._view(self._record(name))

    def list(self) -> Sequence[ScheduleView]:
        """Every schedule, by name."""
        return [self._view(record) for record in self._store.schedules()]

    # -- inside -----------------------------------------------------------------------

    @property
    def _store(self) -> Store:
        return self._app.need_store("schedules")

    def _record(self, name: str) -> ScheduleRecord:
        records = {record.name: record for record in self._store.schedules()}
        if name not in records:
            raise ScheduleNotFoundError(f"no schedule is named {name!r}{nearest(name, records)}")
        return records[name]

    def _write(self, name: str, change: Callable[[ScheduleRecord], ScheduleRecord]) -> ScheduleView:
        for _ in range(_TRIES):
            before = self._record(name)
            after = change(before)
            if after == before:
                return self._view(before)
            if self._store.write_schedule(after):
                return self._view(replace(after, revision=after.revision + 1))
        raise BackendError(f"schedule {name} is being written by others all the time")

    def _view(self, record: ScheduleRecord) -> ScheduleView:
        return _view(record, self._clock.now())

    def _definition(self, call: Signature[Any], timetable: Timetable) -> dict[str, Any]:
        if call.options.eta is not None or call.options.job_id is not None:
            raise ConfigurationError("a schedule makes many jobs: give its call no eta and no job_id")
        return pack(timetable, call.job(self._app))


def declared(app: App) -> dict[str, dict[str, Any]]:
    """The definitions of the tasks that are declared with a schedule, by name."""
    tasks: Mapping[str, Task[Any, Any]] = app.tasks
    found = {
        name: pack(task.config.timetable, task.s().job(app))
        for name, task in tasks.items()
        if task.config.timetable is not None
    }
    if found:
        app.need_store("schedules")
    return found


def _timetable(when: Mapping[str, Any]) -> Timetable:
    timetable = check_schedule(when)
    if timetable is None:
        raise ConfigurationError("when? Give one of cron=, every= and schedule=")
    return timetable


def _view(record: ScheduleRecord, now: float) -> ScheduleView:
    timetable = unpack(record.definition)
    following = None if record.paused else timetable.next(record.dealt, now)
    return ScheduleView(
        name=record.name,
        task=record.definition["job"]["task"],
        queue=record.definition["job"]["queue"],
        timetable=timetable,
        paused=record.paused,
        declared=None if record.declared is None else to_datetime(record.declared),
        next=None if following is None else to_datetime(following),
        last=None if record.fired is None else to_datetime(record.fired),
        last_job=record.job_id,
        revision=record.revision,
    )
