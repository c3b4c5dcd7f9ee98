"""Who holds a unique key, and what becomes of a push that meets it: pure rules that every backend applies."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, NoReturn

from taskq.backends import moves
from taskq.errors import DuplicateJobError
from taskq.job import Job, State

#: Not lent, and not begun.
_WAITS = frozenset({State.BLOCKED, State.SCHEDULED, State.PENDING})


class Hold(NamedTuple):
    """What is remembered of a key. The rest is the state of its job."""

    job_id: str
    until: str
    ends: float  #: the period's end; 0 without one
    latest: float | None


class Meeting(enum.Enum):
    """What a push does about the key of its job."""

    FREE = "free"  #: takes it
    EXISTING = "existing"  #: the holder stands for it
    REFUSED = "refused"
    REPLACE = "replace"  #: cancels the holder and takes it
    RESCHEDULE = "reschedule"  #: changes the holder, which stands for it


def taken(job: Job, now: float) -> Hold:
    """The hold of ``job``, which is stored now."""
    assert job.unique is not None
    unique = job.unique
    return Hold(job.id, unique.until, now + unique.period if unique.period else 0.0, unique.latest)


def holds(hold: Hold, holder: Job | None, now: float) -> bool:
    """Whether a key is held; ``holder`` is its job as it is now, ``None`` if that is gone."""
    if hold.ends > now:
        return True
    if holder is None or holder.state.ended or hold.until == "period":
        return False
    return hold.until == "ended" or (holder.state in _WAITS and not holder.deliveries)


def outlives(hold: Hold, ended: Job) -> bool:
    """Whether a key is held on after its job has ended as ``ended``."""
    return ended.state is State.COMPLETED and hold.ends > (ended.ended or 0.0)


def meet(job: Job, hold: Hold | None, holder: Job | None, now: float) -> Meeting:
    """What the push of ``job`` does about its key."""
    if job.unique is None or hold is None or not holds(hold, holder, now):
        return Meeting.FREE
    conflict = job.unique.conflict
    if hold.job_id == job.id or conflict == "return":
        return Meeting.EXISTING
    if conflict == "raise":
        return Meeting.REFUSED
    if holder is None or holder.state not in _WAITS:
        return Meeting.EXISTING
    return Meeting.REPLACE if conflict == "replace" else Meeting.RESCHEDULE


def refuse(job: Job, holder: str) -> NoReturn:
    """Raise for a push that must not meet a holder."""
    key = job.unique.key if job.unique else ""
    raise DuplicateJobError(
        f"{job.task or 'a job'} with the unique key {key!r} is there already: {holder}", job_id=holder
    )


def refuse_any(
    jobs: Iterable[Job], look: Callable[[str], tuple[Hold | None, Job | None]], now: float
) -> None:
    """Raise if one of ``jobs``, pushed in that order, had to be refused; for stores that cannot undo a part."""
    pushed: dict[str, str] = {}
    for job in jobs:
        if job.unique is None:
            continue
        earlier = pushed.setdefault(job.unique.key, job.id)
        if job.unique.conflict == "raise":
            hold, holder = look(job.unique.key)
            if earlier != job.id:
                refuse(job, earlier)
            if hold is not None and meet(job, hold, holder, now) is Meeting.REFUSED:
                refuse(job, hold.job_id)


def replaced(holder: Job, by: Job, now: float) -> Job:
    """``holder``, which made way."""
    return moves.end(holder, State.CANCELLED, now, error=moves.cancelled(f"replaced by {by.id}"))


def rescheduled(holder: Job, by: Job, latest: float | None, now: float) -> Job:
    """``holder`` with what ``by`` was to bring. One that is due already keeps its place."""
    changed = replace(holder, payload=by.payload, expires=by.expires)
    if holder.state is not State.SCHEDULED or holder.due <= now:
        return changed
    due = by.due or now
    due = due if latest is None else min(due, latest)
    return replace(changed, due=due, state=State.SCHEDULED if due > now else State.PENDING)


def retakes(job: Job) -> bool:
    """Whether ``job`` must have its key again before it can be revived."""
    return job.unique is not None and job.unique.until == "ended"
