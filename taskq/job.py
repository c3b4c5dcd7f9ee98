"""The job: its record, its states, the legal moves between them, and what a run decided about it.

Times in these records are Unix seconds (UTC) and durations are seconds: they are what travels between a
backend and a worker. The public faces (``AsyncResult``, ``Queue``, the command line) show aware datetimes.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses

    def dataclass(*, frozen: bool, **how: Any) -> Any:
        """Frozen for type checkers only: at run time that would cost a call for each field of each record."""
        return dataclasses.dataclass(unsafe_hash=frozen, **how)


#: Queue used where none is named.
DEFAULT_QUEUE: Final = "tasks"
#: Priorities run from 0 (the default) to this; higher runs first.
MAX_PRIORITY: Final = 9
#: The lease of a job that names none, in seconds.
DEFAULT_LEASE: Final = 300.0
#: Attempts remembered per job, the latest ones.
KEPT_ATTEMPTS: Final = 20


class State(enum.StrEnum):
    """Where a job stands."""

    BLOCKED = "blocked"  #: waits for workflow parents
    SCHEDULED = "scheduled"  #: due later, first time or retry
    PENDING = "pending"  #: due now
    RESERVED = "reserved"  #: lent to a worker
    WAITING = "waiting"  #: a durable task that gave its slot back
    COMPLETED = "completed"
    DEAD = "dead"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the job will not run again by itself."""
        return self in ENDED


ENDED: Final = frozenset({State.COMPLETED, State.DEAD, State.CANCELLED})

#: From each state, where a job may go. Everything else is a bug.
MOVES: Final[Mapping[State, frozenset[State]]] = MappingProxyType(
    {
        State.BLOCKED: frozenset({State.PENDING, State.SCHEDULED, State.DEAD, State.CANCELLED}),
        State.SCHEDULED: frozenset({State.PENDING, State.CANCELLED}),
        State.PENDING: frozenset({State.RESERVED, State.CANCELLED}),
        State.RESERVED: frozenset(
            {State.PENDING, State.SCHEDULED, State.WAITING, State.COMPLETED, State.DEAD, State.CANCELLED}
        ),
        State.WAITING: frozenset({State.PENDING, State.SCHEDULED, State.DEAD, State.CANCELLED}),
        State.COMPLETED: frozenset(),
        State.DEAD: frozenset({State.PENDING, State.SCHEDULED}),
        State.CANCELLED: frozenset(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run that ended badly."""

    number: int  #: 1 for the first
    generation: int = 0
    worker: str = ""
    started: float | None = None
    ended: float | None = None
    error_type: str = ""  #: ``ValueError``, ``WorkerLost``, ``TimeLimitExceeded``, …
    message: str = ""
    traceback: str = ""
    delay: float | None = None  #: seconds until the retry; ``None`` where there is none

    @property
    def error(self) -> str:
        """Type and message in one line."""
        return f"{self.error_type}: {self.message}" if self.message else self.error_type


class Unique(NamedTuple):
    """The key that a job holds: while it does, a push of another job with that key is a conflict.

    A key is held by one job, whatever happens to it: the job's own state decides, so a key whose job has ended
    (or is gone) never blocks anybody, unless a ``period`` says so.
    """

    key: str
    until: Literal["ended", "started", "period"] = (
        "ended"  #: ``started``: lent to a worker for the first time
    )
    period: float = 0.0  #: held for this long after the push in any case, unless it dies or is cancelled
    #: What a push that meets this key does. ``return`` and ``raise`` leave the holder alone. ``replace`` cancels a
    #: holder that waits; ``reschedule`` gives it the new call's due time (no later than ``latest``, and only if
    #: it is not due yet) and arguments; both return a holder that does not wait.
    conflict: Literal["return", "raise", "replace", "reschedule"] = "return"
    latest: float | None = None  #: a holder is never put off beyond this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What a job waits for besides its due time; worked out by the producer, so that lending needs no task's code.

    Jobs of one queue and priority with the same ``task`` and ``key`` wait in one line. Lines are served by weight.
    A job without a lane waits for nothing, and costs nothing.
    """

    task: str = ""  #: whose declared limits it is under; empty for none
    key: str = ""  #: whose line of that task it is in: a tenant, an account; empty for the line of all others
    weight: float = 1.0  #: share of this line among those of the queue; the latest push decides
    ordered: bool = False  #: starts only when everything pushed before it into the line has ended
    #: A push that finds this many pending jobs in the line (of all queues) meets its ``overflow`` policy: ``raise``
    #: stores nothing of the batch, ``drop_newest`` stores the job as cancelled, ``drop_oldest`` cancels the job of
    #: the lowest priority that is due longest. Jobs that become due later, and retries, always enter.
    most: int | None = None
    overflow: Literal["raise", "drop_newest", "drop_oldest"] = "raise"

    @property
    def name(self) -> str:
        """One text that tells this line from others; :meth:`parse` reads it."""
        return f"{'=' if self.ordered else '-'}{self.task}\x1f{self.key}"

    @staticmethod
    def parse(name: str, weight: float = 1.0) -> Lane:
        """The lane that ``name`` stands for."""
        task, _, key = name[1:].partition("\x1f")
        return Lane(task=task, key=key, weight=weight, ordered=name[0] == "=")

    def packed(self) -> list[Any]:
        """Plain values, to send elsewhere; :meth:`unpacked` reads them."""
        return [self.name, self.weight, self.most, self.overflow]

    @staticmethod
    def unpacked(values: Sequence[Any]) -> Lane:
        """The lane of :meth:`packed`."""
        name, weight, most, overflow = values
        return replace(Lane.parse(name, weight), most=most, overflow=overflow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One intended run of a task, or one payload of a plain queue."""

    id: str
    queue: str = DEFAULT_QUEUE
    task: str = ""  #: registered name; empty for a payload of a plain queue
    payload: bytes = b""  #: the encoded call; opaque to backends
    priority: int = 0
    due: float = 0.0  #: not before this time; 0 means at once
    expires: float | None = None  #: not started after this time
    lease: float = DEFAULT_LEASE  #: visibility timeout; <= 0 is reclaimed only on proof of death
    max_retries: int | None = 3  #: runs after the first; ``None`` for ever
    loss_base: float = 1.0  #: delay after the first loss (a dead worker, a hard limit); doubles with each
    loss_cap: float = 600.0  #: no such delay is longer
    keep: float = 3600.0  #: how long the finished job and its result are remembered; 0 not at all
    headers: Mapping[str, Any] = field(default_factory=dict)  #: the user's; the framework never reads them
    created: float = 0.0
    unique: Unique | None = None  #: the key it holds, if any
    lane: Lane | None = None  #: limits, sequence and fair share; ``None`` for jobs that have none

    state: State = State.PENDING
    attempts: int = 0  #: runs that ended badly, in this generation
    losses: int = 0  #: disappearances that nobody could be blamed for
    deliveries: int = 0  #: starts of any kind, for display
    generation: int = 0  #: grows when a dead job is revived
    first_started: float | None = None
    ended: float | None = None
    worker: str | None = None  #: who holds it
    error: str | None = None  #: the latest failure in one line
    result: bytes | None = None
    history: tuple[Attempt, ...] = ()  #: filled by ``find`` and listings, not by ``take``


@dataclass(frozen=True, slots=True)
class Reservation:
    """A job lent to one worker until a deadline."""

    job: Job
    token: int  #: the fence: grows with every take, checked by every write
    handle: Any = None  #: the backend's own address of the job


class Verdict(enum.Enum):
    """What becomes of a reserved job."""

    COMPLETE = "complete"
    RETRY = "retry"  #: a counted attempt, due again at ``Outcome.due``
    SNOOZE = "snooze"  #: due again at ``Outcome.due``, uncounted
    BURY = "bury"  #: to the dead letters
    CANCEL = "cancel"
    RELEASE = "release"  #: given back at once, uncounted


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run decided, ready to be settled."""

    reservation: Reservation
    verdict: Verdict
    result: bytes | None = None
    due: float = 0.0  #: for RETRY and SNOOZE; 0 means at once
    attempt: Attempt | None = None  #: recorded, and counted unless ``counted`` is false
    counted: bool = True
    error: str | None = None
    queue: str | None = None  #: for RETRY: move to this queue
    priority: int | None = None  #: for RETRY: change to this priority
    pushes: tuple[Job, ...] = ()  #: jobs stored by the same write, only if this settles
    suspect: bool = False  #: for RELEASE: it may be what ended its process; ``losses + 1``


class Settlement(enum.Enum):
    """What a settle did to one job."""

    SETTLED = "settled"
    ALREADY_YOURS = "already yours"  #: an earlier call with this token settled it
    LOST = "lost"  #: the reservation passed on; nothing was written


def loss_delay(job: Job) -> float:
    """Seconds before a job that was lost (a dead worker, a hard limit) runs again.

    Exponential backoff from numbers that travel on the job, because whoever reclaims it may not have the
    task's code.
    """
    if job.loss_base <= 0:
        return 0.0
    # 2**60 seconds is past any cap; the bound keeps the shift small.
    return float(min(job.loss_cap, job.loss_base * (1 << min(job.attempts, 60))))


def exhausted(job: Job, attempts: int) -> bool:
    """Whether ``attempts`` bad ends use up the job's retries."""
    return job.max_retries is not None and attempts > job.max_retries


_VERSION_AND_VARIANT: Final = (0x7 << 76) | (0b10 << 62)
_RANDOM_BITS: Final = ((1 << 12) - 1) << 64 | ((1 << 62) - 1)


def new_id() -> str:
    """A time-ordered unique id: a UUID of version 7 (RFC 9562, 5.7) as 32 hex digits.

    Ordered ids keep a database's unique index growing at its right edge.
    """
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10)) & _RANDOM_BITS
    return f"{milliseconds << 80 | _VERSION_AND_VARIANT | random:032x}"
