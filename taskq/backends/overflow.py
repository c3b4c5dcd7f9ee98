"""A push into a line that has as many waiting jobs as it may: pure rules that every backend with lanes applies."""

from __future__ import annotations

from typing import NoReturn

from taskq.backends import moves
from taskq.errors import LineFullError
from taskq.job import Job, Lane, State


def bounded(job: Job, now: float) -> Lane | None:
    """The lane whose bound the push of ``job`` is under, if any: that of a job which is due."""
    lane = job.lane
    if lane is None or lane.most is None or moves.arrival(job, now)[1] is not State.PENDING:
        return None
    return lane


def refuse(job: Job, lane: Lane) -> NoReturn:
    """Raise for a push that finds its line full."""
    of = f" with the key {lane.key!r}" if lane.key else ""
    raise LineFullError(
        f"{lane.task}: {lane.most:,} jobs{of} wait already, as many as max_waiting allows ({job.id})"
    )


def dropped(job: Job, now: float) -> Job:
    """``job``, which found its line full."""
    return moves.end(job, State.CANCELLED, now, error=moves.cancelled("the line is full"))


def displaced(holder: Job, by: Job, now: float) -> Job:
    """``holder``, which made way."""
    return moves.end(holder, State.CANCELLED, now, error=moves.cancelled(f"the line is full, {by.id} came"))
