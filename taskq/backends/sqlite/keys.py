"""Unique keys and full lines: a push that meets one does what its rules say, in the transaction of the push."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from taskq.backends import holding, moves, overflow
from taskq.backends.holding import Hold, Meeting
from taskq.backends.sqlite import queries, rows
from taskq.backends.sqlite.accounts import ASIDE
from taskq.backends.sqlite.change import STAGED, Change
from taskq.backends.sqlite.rows import Row
from taskq.job import Job, Lane

#: Later than any time a key is held to.
_EVER: Final = 9e15


def store(
    change: Change, jobs: Sequence[Job], *, may_refuse: bool = False, announced: bool = False
) -> list[str]:
    """Store jobs, each by the rules of its key and line; returns the id that stands for each."""
    return [_store(change, job, may_refuse, announced) for job in jobs]


def retake(change: Change, job: Job) -> bool:
    """Before a revival: take the job's key again; false where another holds it."""
    if job.unique is None or not holding.retakes(job):
        return True
    hold, row = _look(change, job.unique.key)
    holder = rows.full(row) if row else None
    if hold and hold.job_id != job.id and holding.holds(hold, holder, change.now):
        return False
    change.db.execute(queries.HOLD, (job.unique.key, job.id, job.unique.until, 0.0, None))
    return True


def tidy(change: Change) -> int:
    """Forget keys whose period is over and whose job is gone or has ended; returns how many were looked at."""
    spent = change.db.execute(queries.SPENT, (change.now, STAGED)).fetchall()
    change.db.executemany(queries.DROP_KEY, [(key,) for key, alive in spent if not alive])
    change.db.executemany(queries.END_PERIOD, [(key,) for key, alive in spent if alive])
    return len(spent)


def _store(change: Change, job: Job, may_refuse: bool, announced: bool) -> str:
    standing = _meet(change, job, may_refuse=may_refuse) if job.unique else None
    if standing is not None:
        return standing
    lane = overflow.bounded(job, change.now)
    full = lane is not None and _full(change, job, lane)
    if lane and full and lane.overflow == "raise" and may_refuse:
        overflow.refuse(job, lane)
    stored = change.insert([rows.inserted(job, change.now, announced=announced)])
    if stored and job.unique is not None:
        change.db.execute(queries.HOLD, (job.unique.key, *holding.taken(job, change.now)))
    if stored and full and lane:
        _spill(change, job, lane)
    return job.id


def _full(change: Change, job: Job, lane: Lane) -> bool:
    """Whether the line of ``job`` is full without it."""
    change.accounts().flush(change.db)
    (waiting,) = change.db.execute(queries.WAITING_IN, (lane.name, _aside(lane), lane.most)).fetchone()
    return waiting >= (lane.most or 0) and not change.db.execute(queries.KNOWN, (job.id,)).fetchone()


def _spill(change: Change, job: Job, lane: Lane) -> None:
    """End the newest or the oldest job of a line that holds one too many."""
    if lane.overflow == "drop_oldest":
        chosen = (lane.name, _aside(lane), job.id)
        row = change.db.execute(queries.OLDEST_IN, chosen).fetchone()
        change.move(row, moves.Move(overflow.displaced(rows.full(row), job, change.now)))
    else:
        row = change.db.execute(queries.BY_ID, (json.dumps([job.id]),)).fetchone()
        change.move(row, moves.Move(overflow.dropped(rows.full(row), change.now)))


def _aside(lane: Lane) -> str:
    """What the line's jobs are known by where their task was found paused."""
    return f"{ASIDE}{lane.task}{ASIDE}{lane.name}"


def _meet(change: Change, job: Job, *, may_refuse: bool) -> str | None:
    """Deal with the holder of the job's key; returns the id that stands for the job, ``None`` to store it."""
    hold, row = _look(change, job.unique.key if job.unique else "")
    holder = rows.full(row) if row else None
    meeting = holding.meet(job, hold, holder, change.now)
    if hold is None or meeting is Meeting.FREE:
        return None
    if meeting is Meeting.REFUSED and may_refuse:
        holding.refuse(job, hold.job_id)
    if row and holder and meeting is Meeting.REPLACE:
        change.move(row, moves.Move(holding.replaced(holder, job, change.now)))
        return None
    if row and holder and meeting is Meeting.RESCHEDULE:
        change.reschedule(row, holding.rescheduled(holder, job, hold.latest, change.now))
    return hold.job_id


def _look(change: Change, key: str) -> tuple[Hold | None, Row | None]:
    found = change.db.execute(queries.HOLDER, (key,)).fetchone()
    if found is None:
        return None, None
    hold = Hold(*found)
    return hold, change.db.execute(queries.BY_ID, (json.dumps([hold.job_id]),)).fetchone()
