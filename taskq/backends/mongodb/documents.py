"""Between jobs and the documents that hold them.

What never changes while a job lives is packed in one field (``b``); beside it stand what queries need and what changes.
A field that says nothing is left out.

    _id  id            s  state, a number      q  queue              t  task
    r d n  place in its listing: rank, time, number                  p u  minus priority, due
    b  the rest        ls seconds of lease     x  expires            f  when it may be forgotten
    k  token           w  worker               e  end of its lease   st mark of the present run
    c  reason of a cancel request              pr progress           rs result
    a lo de ge  attempts, losses, deliveries, generation             fs first started
    en ended           er error                h  bad ends, packed
    l  lane            o  lane, if ordered     g  gates that it is lent through
    z  the latest write of many, to recognise it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgpack

from taskq.backends import moves
from taskq.backends.shares import gate_names
from taskq.job import KEPT_ATTEMPTS, Attempt, Job, Lane, State, Unique

Document = dict[str, Any]

#: The numbers that stand for states.
CODES: Final[Mapping[State, int]] = MappingProxyType(
    {
        State.PENDING: 0,
        State.RESERVED: 1,
        State.SCHEDULED: 2,
        State.BLOCKED: 3,
        State.WAITING: 4,
        State.COMPLETED: 5,
        State.DEAD: 6,
        State.CANCELLED: 7,
    }
)
PENDING, RESERVED, SCHEDULED, BLOCKED, WAITING, COMPLETED, DEAD, CANCELLED = range(8)
#: Kinds of pending that a plain claim must not meet: in a lane, announced, of a task that was found paused.
LANED, ANNOUNCED, ASIDE = 8, 9, 10
#: Every number of a state.
KINDS: Final[Mapping[State, tuple[int, ...]]] = MappingProxyType(
    {state: (code,) for state, code in CODES.items()} | {State.PENDING: (PENDING, LANED, ANNOUNCED, ASIDE)}
)
STATES: Final = (*CODES, State.PENDING, State.PENDING, State.PENDING)
UNENDED: Final = (PENDING, RESERVED, SCHEDULED, BLOCKED, WAITING, LANED, ANNOUNCED, ASIDE)

#: Fields that a lent job has, and one that waits or has ended has not.
_LENT_ONLY: Final = ("e", "st", "c", "g")
_NO_HEADERS: Final[Mapping[str, Any]] = MappingProxyType({})


def stored(job: Job, now: float, number: int, *, announced: bool = False) -> Document:
    """The document of a job that is pushed at ``now`` as the one of that ``number``."""
    due, state = moves.arrival(job, now)
    rank = -job.priority
    document: Document = {
        "_id": job.id,
        "s": kind(job, state, announced=announced),
        "q": job.queue,
        "r": 0 if state is State.SCHEDULED else rank,
        "d": due,
        "n": number,
        "p": rank,
        "u": due,
        "ls": job.lease,
        "b": _constants(job, now),
    }
    lane = job.lane
    facts = {
        "t": job.task or None,
        "x": job.expires,
        "l": lane and lane.name,
        "o": lane.name if lane and lane.ordered else None,
        "a": job.attempts or None,
        "lo": job.losses or None,
        "de": job.deliveries or None,
        "ge": job.generation or None,
        "fs": job.first_started,
        "er": job.error,
    }
    document.update((name, value) for name, value in facts.items() if value is not None)
    return document


def _constants(job: Job, now: float) -> bytes:
    packed: bytes = msgpack.packb(
        (
            job.payload,
            job.max_retries,
            job.loss_base,
            job.loss_cap,
            job.keep,
            job.created or now,
            dict(job.headers) or None,
            job.unique,
            job.lane and job.lane.packed(),
        )
    )
    return packed


def kind(job: Job, state: State, *, announced: bool = False) -> int:
    """The number of ``state`` for that job."""
    if state is not State.PENDING:
        return CODES[state]
    if job.lane is not None:
        return LANED
    return ANNOUNCED if announced else PENDING


def job_of(document: Document, *, history: bool = False) -> Job:
    """The job that a document holds."""
    payload, max_retries, loss_base, loss_cap, keep, created, headers, unique, lane = msgpack.unpackb(
        document["b"], strict_map_key=False
    )
    get = document.get
    return Job(
        id=document["_id"],
        queue=document["q"],
        task=get("t", ""),
        payload=payload,
        priority=-document["p"],
        due=document["u"],
        expires=get("x"),
        lease=document["ls"],
        max_retries=max_retries,
        loss_base=loss_base,
        loss_cap=loss_cap,
        keep=keep,
        headers=headers or _NO_HEADERS,
        created=created,
        unique=None if unique is None else Unique(*unique),
        lane=None if lane is None else Lane.unpacked(lane),
        state=STATES[document["s"]],
        attempts=get("a", 0),
        losses=get("lo", 0),
        deliveries=get("de", 0),
        generation=get("ge", 0),
        first_started=get("fs"),
        ended=get("en"),
        worker=get("w"),
        error=get("er"),
        result=get("rs"),
        history=tuple(map(_attempt, get("h", ()))) if history else (),
    )


def change(before: Document, move: moves.Move, *, unfence: bool = False, **extra: Any) -> Document:
    """The update that makes ``before`` the job of ``move``, which is not lent; ``unfence`` forgets its token."""
    job = move.job
    place = (
        (0 if job.state is State.SCHEDULED or job.state.ended else -job.priority),
        (job.ended if job.ended is not None else job.due),
    )
    lane = None if job.state.ended else job.lane
    facts = {
        "s": kind(job, job.state),
        "q": job.queue,
        "r": place[0],
        "d": place[1],
        "p": -job.priority,
        "u": job.due,
        "x": job.expires,
        "f": moves.forget_at(job),
        "w": job.worker,
        "a": job.attempts or None,
        "lo": job.losses or None,
        "de": job.deliveries or None,
        "ge": job.generation or None,
        "fs": job.first_started,
        "en": job.ended,
        "er": job.error,
        "rs": job.result,
        "l": lane and lane.name,
        "o": lane.name if lane and lane.ordered else None,
        **dict.fromkeys(_LENT_ONLY),
        **extra,
    }
    if unfence:
        facts["k"] = None
    return update(before, facts, move.attempt)


def update(before: Document, facts: Mapping[str, Any], attempt: Attempt | None = None) -> Document:
    """The update that gives ``before`` these facts; ``None`` is a field that is left out."""
    made: Document = {}
    changed = {
        name: value for name, value in facts.items() if value is not None and before.get(name) != value
    }
    gone = dict.fromkeys((name for name, value in facts.items() if value is None and name in before), "")
    if changed:
        made["$set"] = changed
    if gone:
        made["$unset"] = gone
    if attempt is not None:
        made["$push"] = {"h": {"$each": [_packed(attempt)], "$slice": -KEPT_ATTEMPTS}}
    return made


def repacked(job: Job) -> bytes:
    """The field of what never changes, for a job whose payload has changed after all."""
    return _constants(job, job.created)


def fence(before: Document) -> Document:
    """The filter that finds ``before`` only if it has not been moved or lent since it was read."""
    return {"_id": before["_id"], "s": before["s"], "k": before.get("k")}


def gates(lane: Lane) -> list[str] | None:
    """The names of the gates that jobs of ``lane`` pass."""
    names = gate_names(lane)
    return None if names is None else list(names)


def started(document: Document) -> float | None:
    """The mark of the present run."""
    mark: float | None = document.get("st")
    return mark


def ids(documents: Iterable[Document]) -> list[str]:
    return [document["_id"] for document in documents]


def _packed(attempt: Attempt) -> bytes:
    packed: bytes = msgpack.packb(
        (
            attempt.number,
            attempt.generation,
            attempt.worker,
            attempt.started,
            attempt.ended,
            attempt.error_type,
            attempt.message,
            attempt.traceback,
            attempt.delay,
        )
    )
    return packed


def _attempt(packed: bytes) -> Attempt:
    number, generation, worker, begun, ended, error_type, message, traceback, delay = msgpack.unpackb(packed)
    return Attempt(
        number=number,
        generation=generation,
        worker=worker,
        started=begun,
        ended=ended,
        error_type=error_type,
        message=message,
        traceback=traceback,
        delay=delay,
    )
