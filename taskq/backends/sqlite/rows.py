"""Between rows and jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgpack

from taskq.backends import moves
from taskq.backends.sqlite.accounts import ANNOUNCED, ASIDE
from taskq.job import Attempt, Job, Lane, State, Unique

Row = tuple[Any, ...]

#: The numbers that stand for states in the file; the partial indexes name them.
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
STATES: Final = tuple(CODES)
PENDING, RESERVED, SCHEDULED, BLOCKED, WAITING, COMPLETED, DEAD, CANCELLED = range(8)

#: What a claim returns, in the order that ``lent`` reads.
LENT_COLUMNS: Final = (
    "seq, id, queue, task, payload, rank, due, expires, lease, max_retries, loss_base, loss_cap, keep, headers,"
    " created, attempts, losses, deliveries, generation, first_started, error, unique_by, lane, weight"
)
#: Everything about a job; begins with the above, so that ``full`` can build on it.
FULL_COLUMNS: Final = f"{LENT_COLUMNS}, state, ended, worker, result, started, tries"
INSERTED_COLUMNS: Final = (
    "id, queue, task, payload, rank, due, expires, lease, max_retries, loss_base, loss_cap, keep, headers, created,"
    " attempts, losses, deliveries, generation, first_started, error, unique_by, lane, weight, state"
)
QUEUE, TASK, RANK, DUE, EXPIRES, LEASE = 2, 3, 5, 6, 7, 8
_UNIQUE, LANE, WEIGHT = 21, 22, 23
STATE, ENDED, _WORKER, _RESULT, _STARTED, _TRIES = range(24, 30)
#: Where a row of ``inserted`` has its lane and its weight.
INSERTED_LANE, _INSERTED_WEIGHT = -3, -2
_NO_HEADERS: Final[Mapping[str, Any]] = MappingProxyType({})


def inserted(job: Job, now: float, *, announced: bool = False) -> Row:
    """The row of a job that is pushed."""
    due, state = moves.arrival(job, now)
    lane = None if job.lane is None else job.lane.name
    if announced and lane is None and state is State.PENDING:
        lane = ANNOUNCED
    return (
        job.id,
        job.queue,
        job.task,
        job.payload,
        -job.priority,
        due,
        job.expires,
        job.lease,
        job.max_retries,
        job.loss_base,
        job.loss_cap,
        job.keep,
        msgpack.packb(dict(job.headers)) if job.headers else None,
        job.created or now,
        job.attempts,
        job.losses,
        job.deliveries,
        job.generation,
        job.first_started,
        job.error,
        None if job.unique is None else msgpack.packb(job.unique),
        lane,
        None if job.lane is None else job.lane.weight,
        CODES[state],
    )


def lane_entry(inserted: Row) -> tuple[str, str, int, float]:
    """Lane, queue, rank and weight of a row of ``inserted`` that has a lane."""
    return inserted[INSERTED_LANE], inserted[1], inserted[4], inserted[_INSERTED_WEIGHT]


def deliveries(row: Row) -> int:
    """How many starts a claimed row counts."""
    count: int = row[17]
    return count


def lent(row: Row, worker: str) -> Job:
    """The job of a row that was just claimed."""
    return Job(
        id=row[1],
        queue=row[2],
        task=row[3],
        payload=row[4],
        priority=-row[5],
        due=row[6],
        expires=row[7],
        lease=row[8],
        max_retries=row[9],
        loss_base=row[10],
        loss_cap=row[11],
        keep=row[12],
        headers=_NO_HEADERS if row[13] is None else headers(row[13]),
        created=row[14],
        state=State.RESERVED,
        attempts=row[15],
        losses=row[16],
        deliveries=row[17],
        generation=row[18],
        first_started=row[19],
        worker=worker,
        error=row[20],
        unique=None if row[_UNIQUE] is None else _unique(row[_UNIQUE]),
        lane=None if row[LANE] is None else lane(row),
    )


def full(row: Row, history: Iterable[Attempt] = ()) -> Job:
    """The job of a row with all columns."""
    return Job(
        id=row[1],
        queue=row[2],
        task=row[3],
        payload=row[4],
        priority=-row[5],
        due=row[6],
        expires=row[7],
        lease=row[8],
        max_retries=row[9],
        loss_base=row[10],
        loss_cap=row[11],
        keep=row[12],
        headers=headers(row[13]),
        created=row[14],
        state=STATES[row[STATE]],
        attempts=row[15],
        losses=row[16],
        deliveries=row[17],
        generation=row[18],
        first_started=row[19],
        ended=row[ENDED],
        worker=row[_WORKER],
        error=row[20],
        unique=None if row[_UNIQUE] is None else _unique(row[_UNIQUE]),
        result=row[_RESULT],
        lane=lane(row),
        history=tuple(history),
    )


def lane(row: Row) -> Lane | None:
    """The job's lane; of one that was set aside because its task is paused, the lane that it came from."""
    name: str | None = row[LANE]
    if name is not None and name.startswith(ASIDE):
        name = name.split(ASIDE, 2)[2] or None
    return None if name is None or name == ANNOUNCED else Lane.parse(name, row[WEIGHT] or 1.0)


def started(row: Row) -> float | None:
    """The mark of the present run, of a row with all columns."""
    mark: float | None = row[_STARTED]
    return mark


def tries(row: Row) -> int:
    """How many bad ends were recorded, of a row with all columns."""
    count: int = row[_TRIES]
    return count


def headers(data: bytes | None) -> dict[str, Any]:
    """The user's headers."""
    if data is None:
        return {}
    found: dict[str, Any] = msgpack.unpackb(data, strict_map_key=False)
    return found


def _unique(data: bytes) -> Unique:
    return Unique(*msgpack.unpackb(data))


def moved(job: Job, seq: int, tries: int) -> Row:
    """Parameters of ``queries.MOVE``: ``job`` as it is afterwards."""
    return (
        CODES[job.state],
        job.queue,
        -job.priority,
        job.due,
        job.attempts,
        job.losses,
        job.deliveries,
        job.generation,
        job.first_started,
        job.ended,
        moves.forget_at(job),
        job.error,
        job.result,
        tries,
        seq,
    )


def recorded(attempt: Attempt, seq: int, n: int) -> Row:
    """Parameters of ``queries.RECORD``."""
    return (
        seq,
        n,
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


def attempt(row: Row) -> Attempt:
    """The bad end of a row of ``queries.HISTORY``, less its first column."""
    return Attempt(
        number=row[0],
        generation=row[1],
        worker=row[2],
        started=row[3],
        ended=row[4],
        error_type=row[5],
        message=row[6],
        traceback=row[7],
        delay=row[8],
    )
