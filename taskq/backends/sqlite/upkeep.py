"""What somebody must do now and then: take back what the dead held, stage, expire, forget."""

from __future__ import annotations

import json
import sqlite3
from functools import partial

from taskq.backend import Reclaimed
from taskq.backends.sqlite import keys, lanes, locks, queries, rows
from taskq.backends.sqlite.change import RETIRED, STAGED, Change, at_boot, lost
from taskq.backends.sqlite.jobfile import JobFile
from taskq.backends.sqlite.rows import Row
from taskq.job import State

#: Longest time between two calls of ``housekeep``, in seconds.
_LONGEST_WISH = 10.0


def reclaim(file: JobFile, limit: int) -> Reclaimed:
    """Take back reservations that are over, first by time, then by proof of death."""
    found = Reclaimed([], [], [])
    boot = file.clock.boot_id()
    known, deadline = file.read(
        lambda db: (*db.execute(queries.BOOT).fetchone(), *db.execute(queries.FIRST_DEADLINE).fetchone())
    )
    if deadline is None:
        return found
    if known != boot or deadline <= file.clock.lease_time():
        file.change(lambda change: _reclaim_overdue(change, file, limit, found))
    dead = _dead_workers(file)
    left = limit - sum(map(len, found))
    if dead and left > 0:
        names = json.dumps(dead)
        over = file.change(lambda change: _take_back(change, queries.TIMELESS_OF, (names, left), found))
        if over < left:
            for worker in dead:
                locks.clear(file.bells.folder, worker)
    return found


def housekeep(file: JobFile, max_finished: int) -> float | None:
    """One small step of each kind; returns when to come again."""
    now = file.clock.now()
    counts = file.read(lambda db: db.execute(queries.COUNTS).fetchall())
    more, times = _stage(file, [queue for queue, code, _ in counts if code == rows.SCHEDULED], now)
    (expires,) = file.read(lambda db: db.execute(queries.NEXT_EXPIRY).fetchone())
    if expires is not None and expires <= now:
        more |= file.change(_expire) >= STAGED
    (forget,) = file.read(lambda db: db.execute(queries.NEXT_FORGET).fetchone())
    if forget is not None and forget <= now:
        more |= file.change(lambda change: change.retire(queries.RETIRE, (now, RETIRED))) >= RETIRED
    for queue, code, n in counts:
        if code == rows.COMPLETED and n > max_finished:
            more |= _retire_surplus(file, queue, n - max_finished)
    (spent,) = file.read(lambda db: db.execute(queries.NEXT_SPENT).fetchone())
    if spent is not None and spent <= now:
        more |= file.change(keys.tidy) >= STAGED
    more |= _tidy_lanes(file)
    if more:
        return 0.0
    times += [time for time in (expires, forget, spent) if time is not None and time > now]
    return min(max(0.0, min(times) - now), _LONGEST_WISH) if times else None


def _reclaim_overdue(change: Change, file: JobFile, limit: int, found: Reclaimed) -> None:
    (known,) = change.db.execute(queries.BOOT).fetchone()
    at_boot(change, known, file.clock.boot_id())
    _take_back(change, queries.OVERDUE, (file.clock.lease_time(), limit), found)


def _take_back(change: Change, query: str, parameters: Row, found: Reclaimed) -> int:
    overdue = change.db.execute(query, parameters).fetchall()
    for job, move in lost(change, overdue):
        if move.job.state is State.DEAD:
            found.buried.append(job.id)
        elif move.attempt is not None:
            found.retried.append(job.id)
        elif move.job.state is State.PENDING:
            found.suspects.append(job.id)
    return len(overdue)


def _dead_workers(file: JobFile) -> list[str]:
    holders = file.read(lambda db: db.execute(queries.TIMELESS).fetchall())
    return [worker for (worker,) in holders if locks.is_dead(file.bells.folder, worker)]


def _stage(file: JobFile, queues: list[str], now: float) -> tuple[bool, list[float]]:
    """Stage a step of each queue; says whether one has more, and when the others have their next."""
    more = False
    times: list[float] = []
    for queue in queues:
        due = file.read(partial(_next_due, queue=queue))
        if due is not None and due <= now:
            due = file.change(partial(Change.stage, queue=queue))
        if due is not None:
            more |= due <= now
            times.append(due)
    return more, times


def _next_due(db: sqlite3.Connection, queue: str) -> float | None:
    due: float | None = db.execute(queries.NEXT_DUE, (queue,)).fetchone()[0]
    return due


def _expire(change: Change) -> int:
    late = change.db.execute(queries.TOO_LATE, (change.now, STAGED)).fetchall()
    change.expire(late)
    return len(late)


def _tidy_lanes(file: JobFile) -> bool:
    """Forget lanes and gates that hold nothing, and end a resume that was interrupted; says whether more is left."""
    lease = file.clock.lease_time()
    task, empty = file.read(
        lambda db: (lanes.forgotten_aside(db), db.execute(queries.ANY_EMPTY, {"now": lease}).fetchone()[0])
    )
    more = task is not None and file.change(partial(lanes.take_back, task=task, limit=RETIRED)) == RETIRED
    if empty:
        more |= file.change(_forget_lanes) >= RETIRED
    return more


def _forget_lanes(change: Change) -> int:
    now = change.clock.lease_time()
    forgotten = change.db.execute(queries.FORGET_LANES, (RETIRED,)).rowcount
    return max(forgotten, change.db.execute(queries.FORGET_GATES, (now, RETIRED)).rowcount)


def _retire_surplus(file: JobFile, queue: str, surplus: int) -> bool:
    step = min(surplus, RETIRED)
    file.change(lambda change: change.retire(queries.RETIRE_OLDEST, (queue, rows.COMPLETED, step)))
    return surplus > step
