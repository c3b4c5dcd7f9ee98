"""Fires schedules: every worker looks at all of them, and for each instant one worker's write succeeds.

There is no leader. What a schedule has dealt with and the job of its instant are written together, against the
revision that was read; of all who saw the instant come due, one finds that revision still there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from taskq.clock import SYSTEM_CLOCK, Clock, to_datetime
from taskq.errors import BackendError
from taskq.events import Events
from taskq.job import Job
from taskq.schedule import Overlap
from taskq.schedules import DECLARED_EVERY
from taskq.store import ScheduleRecord, Store
from taskq.timetable import Step, Timetable, job_at, steps, unpack

#: Longest time between two looks: schedules that others make or change are noticed within it, in seconds.
_LOOK: Final = 1.0
#: Instants of one schedule that one step deals with.
_STEPS: Final = 100
#: A schedule that code declared is forgotten when no worker has declared it for this long, in seconds.
_FORGOTTEN: Final = 86_400.0
#: The guard counts what was fired within this long, in seconds that no clock step changes.
_WINDOW: Final = 60.0

Definitions = Mapping[str, Mapping[str, Any]]


class Scheduler:
    """The scheduling of one worker.

    Schedules made at run time are fired by any worker; those that code declares only by workers whose code declares
    them, by the definition that was declared last.
    """

    name = "scheduler"

    def __init__(self, store: Store, events: Events, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store = store
        self._events = events
        self._clock = clock
        self._declared: Definitions = {}
        self._news: Definitions | None = None
        self._pending: dict[str, Mapping[str, Any]] = {}  # declared, not yet written
        self._guards: dict[str, Guard] = {}
        self._told: dict[str, str] = {}

    def declare(self, definitions: Definitions) -> None:
        """This is what the worker's code declares, from now on; may be called from another thread."""
        if definitions != self._declared:
            self._news = definitions

    def run_once(self) -> float | None:
        """Fire what is due; returns the seconds to the next instant, a second at the most."""
        self._announce()
        wish = _LOOK
        for record in self._store.schedules():
            if record.declared is not None and record.name not in self._declared:
                self._forget_in_time(record)
            else:
                wish = min(wish, self._guarded(record))
        return wish

    # -- what code declares -----------------------------------------------------------

    def _announce(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            self._declared, self._pending = news, dict(news)
        if self._pending:
            there = {record.name: record for record in self._store.schedules()}
            written = [
                name
                for name, definition in self._pending.items()
                if self._announce_one(name, definition, there.get(name))
            ]
            for name in written:
                del self._pending[name]

    def _announce_one(self, name: str, definition: Mapping[str, Any], there: ScheduleRecord | None) -> bool:
        """Make ``definition`` the one that holds: the last to start wins. False where others were quicker."""
        now = self._clock.now()
        if there is None:
            fresh = ScheduleRecord(name=name, definition=definition, dealt=now, declared=now)
            return self._store.write_schedule(fresh)
        if there.declared is None:
            self._tell(name, "a schedule made at run time has the name of this task")
            return True
        if there.definition == definition and 0 <= now - there.declared < DECLARED_EVERY:
            return True
        same = there.definition["when"] == definition["when"]
        dealt = there.dealt if same else max(there.dealt, now)
        return self._store.write_schedule(replace(there, definition=definition, dealt=dealt, declared=now))

    def _forget_in_time(self, record: ScheduleRecord) -> None:
        silent = self._clock.now() - (record.declared or 0.0)
        if silent > _FORGOTTEN and not record.paused:
            self._store.remove_schedule(record.name)

    # -- one schedule -----------------------------------------------------------------

    def _guarded(self, record: ScheduleRecord) -> float:
        """Attend to a schedule; one that is broken does not hold up the others."""
        try:
            return self._attend(record)
        except BackendError:
            raise
        except Exception as error:  # noqa: BLE001 - a definition from elsewhere may be anything
            self._tell(record.name, f"{type(error).__name__}: {error}")
            return _LOOK

    def _attend(self, record: ScheduleRecord) -> float:
        now = self._clock.now()
        if record.declared is not None and now - record.declared > DECLARED_EVERY:
            record = self._written(replace(record, declared=now)) or record
        if record.paused:
            return _LOOK
        timetable = unpack(record.definition)
        latest = self._latest(record, timetable)
        for number, step in enumerate(steps(timetable, record.dealt, now, latest)):
            after = self._take(record, timetable, step, now) if number < _STEPS else None
            if after is None:
                return 0.0 if number == _STEPS else _LOOK / 10
            record = after
        following = timetable.next(record.dealt, now)
        return _LOOK if following is None else min(_LOOK, max(0.0, following - self._clock.now()))

    def _latest(self, record: ScheduleRecord, timetable: Timetable) -> Job | None:
        if timetable.overlap is Overlap.ALLOW or record.job_id is None:
            return None
        return self._store.find(record.job_id)

    def _take(
        self, record: ScheduleRecord, timetable: Timetable, step: Step, now: float
    ) -> ScheduleRecord | None:
        """Deal with one instant; ``None`` where others were quicker, or the guard forbids it."""
        after = replace(record, dealt=step.instant)
        job: Job | None = None
        if step.fires:
            guard = self._guards.setdefault(record.name, Guard())
            if not guard.allows(timetable, now, self._clock.lease_time()):
                self._tell(record.name, "fired far more often than its times allow; is a clock being set?")
                return None
            job = job_at(record.definition, record.name, step.instant, now)
            after = replace(after, fired=step.instant, job_id=job.id)
        written = self._written(after, job)
        if written is not None:
            self._announce_step(record, timetable, step, job)
        return written

    def _written(self, record: ScheduleRecord, job: Job | None = None) -> ScheduleRecord | None:
        if not self._store.write_schedule(record, () if job is None else (job,)):
            return None
        return replace(record, revision=record.revision + 1)

    # -- telling ----------------------------------------------------------------------

    def _announce_step(
        self, record: ScheduleRecord, timetable: Timetable, step: Step, job: Job | None
    ) -> None:
        first = timetable.next(record.dealt, step.instant)
        passed_over = "overlap" if timetable.overlap is Overlap.QUEUE_ONE else "missed"
        if step.reason or (first is not None and first < step.instant):
            instant = to_datetime(step.instant).isoformat()
            self._events.emit(
                "schedule.skipped", schedule=record.name, until=instant, reason=step.reason or passed_over
            )
        if job is not None:
            guard = self._guards[record.name]
            guard.fired(self._clock.lease_time())
            instant = to_datetime(step.instant).isoformat()
            self._events.emit("schedule.fired", schedule=record.name, instant=instant, job_id=job.id)

    def _tell(self, name: str, error: str) -> None:
        """Tell of a schedule that cannot be attended to, once for each reason."""
        if self._told.get(name) != error:
            self._told[name] = error
            self._events.emit("schedule.failed", schedule=name, error=error)


class Guard:
    """Bounds how often one schedule is fired, whatever its record and the clock say.

    Within a minute that really passed, at most as many as its times have instants in a minute of the calendar, and
    as many as may be made up for.
    """

    def __init__(self) -> None:
        self._fired: deque[float] = deque()

    def fired(self, lease_time: float) -> None:
        """It was fired."""
        self._fired.append(lease_time)

    def allows(self, timetable: Timetable, now: float, lease_time: float) -> bool:
        """Whether it may be fired once more."""
        while self._fired and self._fired[0] <= lease_time - _WINDOW:
            self._fired.popleft()
        spare = len(self._fired) - timetable.misfire.most
        return spare < 1 or spare < _instants(timetable.schedule.next, now, spare + 1) + 1


def _instants(following: Callable[[Any], Any], now: float, most: int) -> int:
    """How many instants the last minute had, counted up to ``most``."""
    end = to_datetime(now)
    instant = following(to_datetime(now - _WINDOW))
    count = 0
    while instant is not None and instant <= end and count < most:
        count += 1
        instant = following(instant)
    return count
