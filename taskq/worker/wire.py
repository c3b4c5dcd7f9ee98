"""Jobs and results as the lists that cross the pipe between supervisor and child."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

from taskq.job import Attempt, Job, Lane, Outcome, Reservation, State, Unique, Verdict
from taskq.worker.executor import Result

#: What packing a message raises for values that it cannot hold.
UNSENDABLE: Final = (TypeError, ValueError, OverflowError)
#: What a run needs of its job; the rest stays with the supervisor.
_CARRIED: Final = (
    "id",
    "queue",
    "task",
    "payload",
    "priority",
    "expires",
    "lease",
    "max_retries",
    "keep",
    "headers",
    "created",
    "attempts",
    "losses",
    "deliveries",
    "generation",
    "first_started",
)
_carried: Final = attrgetter(*_CARRIED)
#: A job that a run pushes has its whole declaration, and no history.
_DECLARED: Final = (
    "id",
    "queue",
    "task",
    "payload",
    "priority",
    "due",
    "expires",
    "lease",
    "max_retries",
    "loss_base",
    "loss_cap",
    "keep",
    "headers",
    "created",
    "unique",
)
_declared: Final = attrgetter(*_DECLARED)
_ATTEMPT: Final = tuple(field.name for field in fields(Attempt))
_attempt: Final = attrgetter(*_ATTEMPT)


def pack_job(reservation: Reservation) -> list[Any]:
    """A lent job, and the fence of its reservation."""
    return [reservation.token, *_carried(reservation.job)]


def unpack_job(packed: list[Any]) -> tuple[int, Job]:
    """The fence and the job."""
    return packed[0], Job(**dict(zip(_CARRIED, packed[1:], strict=True)), state=State.RESERVED)


def pack_result(index: int, seconds: float, result: Result) -> list[Any]:
    """A result; the common one, a completed job, is short."""
    if result.verdict is Verdict.COMPLETE:
        return [index, seconds, result.result]
    return [
        index,
        seconds,
        result.verdict.value,
        result.due,
        None if result.attempt is None else _attempt(result.attempt),
        result.error,
        result.queue,
        result.priority,
        [_pack_declared(job) for job in result.pushes],
    ]


def unsendable(packed: list[Any], error: BaseException) -> list[Any]:
    """What stands for a result that could not be packed into a message."""
    attempt = Attempt(
        number=0, error_type=type(error).__name__, message=f"the outcome cannot travel: {error!r}"
    )
    return pack_result(
        packed[0], packed[1], Result(verdict=Verdict.BURY, attempt=attempt, error=attempt.error)
    )


def unpack_result(packed: list[Any], reservation: Reservation) -> Outcome:
    """The outcome that settles ``reservation``."""
    if len(packed) == 3:
        return Outcome(reservation=reservation, verdict=Verdict.COMPLETE, result=packed[2])
    _, _, verdict, due, attempt, error, queue, priority, pushes = packed
    return Outcome(
        reservation=reservation,
        verdict=Verdict(verdict),
        due=due,
        attempt=None if attempt is None else Attempt(**dict(zip(_ATTEMPT, attempt, strict=True))),
        error=error,
        queue=queue,
        priority=priority,
        pushes=tuple(_unpack_declared(job) for job in pushes),
    )


def _pack_declared(job: Job) -> list[Any]:
    lane = None if job.lane is None else job.lane.packed()
    return [*_declared(job), lane]


def _unpack_declared(packed: list[Any]) -> Job:
    *declared, lane = packed
    fields = dict(zip(_DECLARED, declared, strict=True))
    unique = fields.pop("unique")
    return Job(
        **fields,
        unique=None if unique is None else Unique(*unique),
        lane=None if lane is None else Lane.unpacked(lane),
    )
