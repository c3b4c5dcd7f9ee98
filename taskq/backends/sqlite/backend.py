"""The SQLite backend: its verbs, each a few statements on the file of jobs."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Final, TypeVar

import msgpack

from taskq.backend import Cancellation, Capabilities, Consumer, Page, Reclaimed, Scope
from taskq.backends import moves
from taskq.backends.sqlite import keys, lanes, queries, rows, upkeep
from taskq.backends.sqlite.bells import LOOK, Waiting
from taskq.backends.sqlite.change import RETIRED, Change
from taskq.backends.sqlite.consumer import SQLiteConsumer
from taskq.backends.sqlite.jobfile import JobFile
from taskq.backends.sqlite.rows import Row
from taskq.backends.sqlite.settle import UNSTORABLE
from taskq.backends.turns import Turns
from taskq.clock import SYSTEM_CLOCK, Clock, monotonic
from taskq.errors import InvalidArgumentError
from taskq.job import MAX_PRIORITY, Attempt, Job, State
from taskq.limits import Limits
from taskq.store import Ledger, ScheduleRecord, WorkerInfo

T = TypeVar("T")

#: Completed jobs remembered per queue.
MAX_FINISHED: Final = 100_000
#: How long a lock of another process is waited for, in seconds.
TIMEOUT: Final = 30.0
#: Workers are forgotten when unheard of for this long, in seconds.
WORKER_SILENCE: Final = 120.0

_STEP: Final = 500
_PRIORITIES: Final = json.dumps(list(range(MAX_PRIORITY + 1)))

_CAPABILITIES = Capabilities(
    name="sqlite",
    leases="timed",
    fencing=True,
    attempts="exact",
    priority="strict",
    size="exact",
    scheduled="visible",
    dead_listing="safe",
    revive="once",
    pause="durable",
    order="fifo",
    persistent=True,
    shared=True,
    stores=True,
)


class SQLiteBackend(Ledger):
    """Jobs in one file, for the processes of one machine."""

    def __init__(
        self,
        path: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        synchronous: str = "normal",
        timeout: float = TIMEOUT,
        max_finished: int = MAX_FINISHED,
        ageing: float | None = None,
    ) -> None:
        self._clock = clock
        self._ageing = ageing
        self._max_finished = max_finished
        self._file = JobFile(path, clock, timeout=timeout, full=synchronous == "full")

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def location(self) -> str:
        return self._file.path

    # -- jobs in and out --------------------------------------------------------------

    def push(self, jobs: Sequence[Job]) -> list[str]:
        return self._push(jobs, announced=False)

    def announce(self, jobs: Sequence[Job]) -> list[str]:
        return self._push(jobs, announced=True)

    def adopt(self, queue: str, before: float, *, limit: int = 500) -> int:
        def some(change: Change) -> int:
            chosen = (_PRIORITIES, queue, before, limit)
            adopted: int = change.db.execute(queries.ADOPT, chosen).rowcount
            change.ready[queue] = change.ready.get(queue, 0) + adopted
            return adopted

        return self._file.change(some)

    def _push(self, jobs: Sequence[Job], *, announced: bool) -> list[str]:
        if not jobs:
            return []
        now = self._clock.now()
        try:
            inserts = [rows.inserted(job, now, announced=announced) for job in jobs]
        except UNSTORABLE as error:
            raise InvalidArgumentError(f"the job cannot be stored: {error}") from error
        return self._file.push(jobs, inserts, announced=announced)

    def consume(self, queues: Mapping[str, int], worker: str) -> Consumer:
        self._file.check_open()
        return SQLiteConsumer(self._file, Turns(queues), worker, self._ageing)

    # -- looking ----------------------------------------------------------------------

    def counts(self, queue: str | None = None) -> dict[str, dict[State, int]]:
        query, names = (queries.COUNTS, ()) if queue is None else (queries.COUNTS_OF, (queue,))
        found: dict[str, dict[State, int]] = {}
        for name, code, n in self._file.read(lambda db: db.execute(query, names).fetchall()):
            found.setdefault(name, {})[rows.STATES[code]] = n
        return found

    def list_jobs(self, queue: str, state: State, *, limit: int = 100, cursor: str | None = None) -> Page:
        first, after, width = queries.LISTINGS[state]
        key = () if cursor is None else _parse_cursor(cursor, width)

        def look(db: sqlite3.Connection) -> tuple[list[Row], list[Job]]:
            found = db.execute(after if key else first, (queue, *key, limit + 1)).fetchall()
            if state is State.PENDING:
                query = queries.LANED_LISTING[bool(key)]
                found += db.execute(query, (queue, *key, limit + 1)).fetchall()
                found = sorted(found, key=itemgetter(0, 1, 2))[: limit + 1]
            return found, _with_history(db, [row[width:] for row in found[:limit]])

        found, jobs = self._file.read(look)
        more = json.dumps(found[limit - 1][:width]) if len(found) > limit > 0 else None
        return Page(jobs, more)

    def find(self, job_id: str) -> Job | None:
        def look(db: sqlite3.Connection) -> list[Job]:
            return _with_history(db, db.execute(queries.BY_ID, (json.dumps([job_id]),)).fetchall())

        return next(iter(self._file.read(look)), None)

    def progress(self, job_id: str) -> bytes | None:
        row = self._file.read(lambda db: db.execute(queries.PROGRESS, (job_id,)).fetchone())
        return row[0] if row else None

    def wait(self, ids: Sequence[str], timeout: float | None = None) -> list[str]:
        done = self._ended(ids)
        if done or not ids:
            return done
        end = float("inf") if timeout is None else monotonic() + timeout
        with self._file.borrowed_bell() as bell:
            while (left := end - monotonic()) > 0:
                with bell.idle(Waiting.RESULTS, ids):
                    done = self._ended(ids)  # what ended before the flag was up has rung nobody
                    if done:
                        break
                    bell.sleep(min(left, LOOK))
            return done or self._ended(ids)

    def _ended(self, ids: Sequence[str]) -> list[str]:
        names = json.dumps(ids if isinstance(ids, list) else list(ids))
        found = self._file.read(lambda db: db.execute(queries.UNENDED, (names,)).fetchall())
        unended = {job_id for (job_id,) in found}
        return [job_id for job_id in ids if job_id not in unended]

    # -- changing what waits or has ended ---------------------------------------------

    def revive(self, queue: str, ids: Sequence[str] | None = None, *, due: float = 0.0) -> list[str]:
        def some(change: Change, dead: list[Row]) -> list[Row]:
            revived = []
            for row in dead:
                job = rows.full(row)
                if keys.retake(change, job):
                    change.move(row, moves.Move(moves.revived(job, due, change.now)))
                    revived.append(row)
            return revived

        def slice_after(
            change: Change, place: tuple[float, int]
        ) -> tuple[tuple[float, int] | None, list[str]]:
            dead = change.db.execute(queries.DEAD, (queue, *place, _STEP)).fetchall()
            last = (dead[-1][rows.ENDED], dead[-1][0]) if dead else None
            return last, [row[1] for row in some(change, dead)]

        def named(change: Change, names: Sequence[str]) -> list[tuple[float, int, str]]:
            found = change.db.execute(queries.BY_ID, (json.dumps(names),)).fetchall()
            dead = [row for row in found if row[rows.QUEUE] == queue and row[rows.STATE] == rows.DEAD]
            return [(row[rows.ENDED], row[0], row[1]) for row in some(change, dead)]

        if ids is None:
            everyone: list[str] = []
            place: tuple[float, int] | None = (float("-inf"), 0)
            while place is not None:
                place, some_ids = self._file.change(partial(slice_after, place=place))
                everyone += some_ids
            return everyone
        revived: list[tuple[float, int, str]] = []
        for step in _steps(ids):
            revived += self._file.change(partial(named, names=step))
        return [job_id for *_, job_id in sorted(revived)]

    def hasten(self, queue: str, ids: Sequence[str]) -> list[str]:
        def some(change: Change, names: Sequence[str]) -> list[str]:
            found = change.db.execute(queries.BY_ID, (json.dumps(names),)).fetchall()
            waiting = [row for row in found if row[rows.QUEUE] == queue and row[rows.STATE] == rows.SCHEDULED]
            for row in waiting:
                change.move(row, moves.Move(moves.hastened(rows.full(row), change.now)))
            return [row[1] for row in waiting]

        hastened: list[str] = []
        for step in _steps(ids):
            hastened += self._file.change(partial(some, names=step))
        return hastened

    def purge(self, queue: str, state: State) -> int:
        if state is State.RESERVED:
            raise InvalidArgumentError("reserved jobs cannot be purged; cancel them instead")
        query: str = queries.PURGE_WAITING.get(state, queries.RETIRE_OLDEST)
        which = (queue, rows.CODES[state]) if state.ended else (queue,)
        total = 0
        while True:
            n = self._file.change(lambda change: change.retire(query, (*which, RETIRED)))
            total += n
            if n < RETIRED:
                return total

    def forget(self, ids: Sequence[str]) -> int:
        return sum(
            self._file.change(partial(Change.retire, query=queries.FORGET, parameters=(json.dumps(step),)))
            for step in _steps(ids)
        )

    def cancel(self, ids: Sequence[str], *, reason: str = "") -> dict[str, Cancellation]:
        answers = dict.fromkeys(ids, Cancellation.UNKNOWN)
        for step in _steps(list(answers)):
            found, holders = self._file.change(partial(_cancel, ids=step, reason=reason))
            answers |= found
            for worker in holders:
                self._file.bells.call(worker)
        return answers

    # -- pauses -----------------------------------------------------------------------

    def pause(self, name: str, what: Scope = "queue") -> None:
        self._execute(queries.PAUSE, what, name)

    def resume(self, name: str, what: Scope = "queue") -> None:
        self._execute(queries.RESUME, what, name)
        if what == "key":
            self._execute(queries.OPEN_NAMED, name)
        if what == "task":
            while self._file.change(partial(lanes.take_back, task=name, limit=_STEP)) == _STEP:
                pass
        queues = [name] if what == "queue" else list(self.counts())
        self._file.bells.ring_takers({queue: max(1, self.size(queue)) for queue in queues})

    def paused(self, what: Scope = "queue") -> set[str]:
        return {
            name for (name,) in self._file.read(lambda db: db.execute(queries.PAUSED_OF, (what,)).fetchall())
        }

    # -- limits -----------------------------------------------------------------------

    def declare_limits(self, limits: Sequence[Limits]) -> list[str]:
        known = self.limits() if limits else {}
        wanted = [each for each in limits if known.get(each.task) != each]
        return self._file.change(partial(_declare, limits=wanted)) if wanted else []

    def limits(self) -> dict[str, Limits]:
        found = self._file.read(lambda db: db.execute(queries.LIMITS).fetchall())
        return {row[0]: lanes.limits(row) for row in found}

    # -- upkeep -----------------------------------------------------------------------

    def reclaim(self, *, limit: int = 500) -> Reclaimed:
        return upkeep.reclaim(self._file, limit)

    def housekeep(self) -> float | None:
        return upkeep.housekeep(self._file, self._max_finished)

    # -- workers and schedules --------------------------------------------------------

    def heartbeat(self, worker: WorkerInfo) -> None:
        info = msgpack.packb(dataclasses.asdict(worker))

        def beat(change: Change) -> None:
            change.db.execute(queries.HEARTBEAT, (worker.id, worker.seen, info))
            change.db.execute(queries.FORGET_SILENT, (change.now - WORKER_SILENCE,))

        self._file.change(beat)

    def workers(self) -> list[WorkerInfo]:
        oldest = self._clock.now() - WORKER_SILENCE
        found = self._file.read(lambda db: db.execute(queries.WORKERS, (oldest,)).fetchall())
        infos = [msgpack.unpackb(info) for (info,) in found]
        workers = [WorkerInfo(**{**info, "queues": tuple(info["queues"])}) for info in infos]
        return sorted(workers, key=lambda worker: (worker.started, worker.id))

    def forget_worker(self, worker_id: str) -> None:
        self._execute(queries.FORGET_WORKER, worker_id)

    def schedules(self) -> list[ScheduleRecord]:
        found = self._file.read(lambda db: db.execute(queries.SCHEDULES).fetchall())
        return [
            ScheduleRecord(name=name, revision=revision, **msgpack.unpackb(record, strict_map_key=False))
            for name, revision, record in found
        ]

    def write_schedule(self, record: ScheduleRecord, jobs: Sequence[Job] = ()) -> bool:
        fields = dataclasses.asdict(record)
        named = {name: fields.pop(name) for name in ("name", "revision")}
        query = queries.WRITE_SCHEDULE if record.revision else queries.NEW_SCHEDULE

        def write(change: Change) -> bool:
            if not change.db.execute(query, {**named, "record": msgpack.packb(fields)}).rowcount:
                return False
            keys.store(change, jobs)
            return True

        return self._file.change(write, durable=bool(jobs))

    def remove_schedule(self, name: str) -> bool:
        return self._execute(queries.REMOVE_SCHEDULE, name) > 0

    def close(self) -> None:
        self._file.close()

    def _execute(self, query: str, *parameters: object) -> int:
        return self._file.change(lambda change: change.db.execute(query, parameters).rowcount)


def _declare(change: Change, limits: Sequence[Limits]) -> list[str]:
    changed = [
        each.task for each in limits if change.db.execute(queries.DECLARE, lanes.declaration(each)).rowcount
    ]
    for task in changed:  # what was shut under the old ones may have room under the new
        change.db.execute(queries.OPEN_GATE, (task,))
        change.db.execute(queries.OPEN_GATES, (f"{task}\x1f", f"{task}\x20"))
        change.db.execute(queries.OPEN_TASK, (task,))
    return changed


def _cancel(change: Change, ids: Sequence[str], reason: str) -> tuple[dict[str, Cancellation], set[str]]:
    """Cancel what waits, ask for what runs; returns the answers and who is to be told."""
    answers: dict[str, Cancellation] = {}
    holders: set[str] = set()
    for row in change.db.execute(queries.BY_ID, (json.dumps(ids),)).fetchall():
        job = rows.full(row)
        if job.state.ended:
            answers[job.id] = Cancellation.ENDED
        elif job.state is State.RESERVED:
            worker = job.worker or ""
            change.db.execute(queries.REQUEST, (row[0], worker, reason))
            holders.add(worker)
            answers[job.id] = Cancellation.REQUESTED
        else:
            ended = moves.end(job, State.CANCELLED, change.now, error=moves.cancelled(reason))
            change.move(row, moves.Move(ended))
            answers[job.id] = Cancellation.CANCELLED
    return answers, holders


def _with_history(db: sqlite3.Connection, found: Sequence[Row]) -> list[Job]:
    tried = [row[0] for row in found if rows.tries(row)]
    history: dict[int, list[Attempt]] = {}
    if tried:
        for seq, *bad_end in db.execute(queries.HISTORY, (json.dumps(tried),)).fetchall():
            history.setdefault(seq, []).append(rows.attempt(tuple(bad_end)))
    return [rows.full(row, history.get(row[0], ())) for row in found]


def _parse_cursor(cursor: str, width: int) -> tuple[float, ...]:
    try:
        key = tuple(float(value) if isinstance(value, float) else int(value) for value in json.loads(cursor))
    except (TypeError, ValueError):
        key = ()
    if len(key) != width:
        raise InvalidArgumentError(f"{cursor!r} is not a cursor of this listing")
    return key


def _steps(ids: Sequence[T]) -> Iterator[Sequence[T]]:
    """Slices small enough that a transaction holds nobody up."""
    return (ids[start : start + _STEP] for start in range(0, len(ids), _STEP))
