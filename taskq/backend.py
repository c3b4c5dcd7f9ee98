"""The seam to whatever holds jobs: what every backend promises.

A backend is shared by the threads of a process and opens nothing before its first use. Where a promise
depends on the server, :class:`Capabilities` says which of the named forms holds.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from taskq.errors import ConfigurationError
from taskq.job import Job, Outcome, Reservation, Settlement, State
from taskq.limits import Limits

#: What can be paused.
Scope = Literal["queue", "task", "key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend does itself and in which form a promise holds on it."""

    name: str
    leases: Literal[
        "timed", "connection"
    ]  #: a lost worker's jobs return after a deadline, or with its connection
    fencing: bool  #: every write of a run is checked against its token
    attempts: Literal["exact", "after-crash approximate"]
    priority: Literal["strict", "within prefetch"]
    size: Literal["exact", "ready only", "unavailable"]
    scheduled: Literal["visible", "opaque"]  #: whether waiting jobs can be counted, listed, found by id
    dead_listing: Literal["safe", "intrusive"]
    revive: Literal["once", "at least once"]
    pause: Literal["durable", "needs a store"]
    order: Literal["fifo", "fifo except give-backs"]
    persistent: bool  #: jobs outlive the process
    shared: bool  #: several processes may use it at once
    stores: bool  #: is its own store
    lease_clock: Literal["machine", "server"] = (
        "machine"  #: whose time ends a lease: with ``machine``, a reboot ends all
    )


class Taken(NamedTuple):
    """What one take brought."""

    reservations: list[Reservation]
    next_due: float | None  #: when the next job of these queues is due or has room again, where known


class Extended(NamedTuple):
    """What one extend learned; both hold job ids."""

    lost: list[str]  #: the reservation has passed on: stop the run, nothing it writes will be kept
    cancelled: list[str]  #: somebody asked for this running job to be cancelled


class Reclaimed(NamedTuple):
    """What one reclaim did; each holds job ids."""

    retried: list[str]  #: were marked started: counted, due again
    buried: list[str]  #: were marked started: counted, retries used up
    suspects: list[str]  #: nobody knows whether they ran: uncounted, ``losses + 1``


class Cancellation(enum.Enum):
    """What a cancel did to one job."""

    CANCELLED = "cancelled"  #: it waited; it will never start
    REQUESTED = "requested"  #: it runs; its worker is told
    ENDED = "ended"  #: too late
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A mark on a running job, written only while its reservation holds."""

    reservation: Reservation
    started: float | None = None  #: when the run began; makes a later loss attributable
    progress: bytes | None = None  #: encoded progress, for whoever watches the result


class Page(NamedTuple):
    """A slice of a listing."""

    jobs: list[Job]
    cursor: str | None  #: pass it to get the next slice; ``None`` at the end


class Backend(abc.ABC):
    """Holds jobs until they end. All methods are thread-safe."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities: ...

    @property
    @abc.abstractmethod
    def location(self) -> str:
        """Where the jobs are, for people: an absolute file name, or a URL with its password masked."""

    @abc.abstractmethod
    def push(self, jobs: Sequence[Job]) -> list[str]:
        """Store jobs, all or none where one server write can hold them.

        Returns only when they are stored: nothing it returned for is lost. A job with ``due`` in the future is
        SCHEDULED, else PENDING. Pushing an id that is already there changes nothing (a repeat after an unknown
        outcome is safe). Returns, per job, the id that stands for it.

        A job with ``unique`` whose key is held (by the rules of :class:`taskq.job.Unique`, decided in the same write) is not
        stored: what becomes of it and of the holder is its ``conflict`` policy, and the holder's id stands for it.
        Of many pushes at once, one gets the key. ``raise`` raises ``DuplicateJobError`` and stores nothing of the
        batch; jobs that a settle or a schedule pushes are never refused so, but dropped as by ``return``.

        A job whose line has as many waiting jobs as its ``lane`` allows meets its ``overflow`` policy, in the same write;
        ``raise`` raises ``LineFullError`` for pushes by callers, and drops the job for those of a settle or schedule.

        Raises ``NotPublishedError`` where none is stored, ``PublishUnknownError`` where that cannot be known.
        """

    @abc.abstractmethod
    def consume(self, queues: Mapping[str, int], worker: str) -> Consumer:
        """Open ``worker``'s session on ``queues`` (name to weight; at least one)."""

    @abc.abstractmethod
    def counts(self, queue: str | None = None) -> dict[str, dict[State, int]]:
        """Jobs per queue and state; zero counts may be left out. Costs no scan of jobs."""

    def size(self, queue: str, state: State = State.PENDING) -> int:
        """How many jobs of ``queue`` are in ``state``."""
        return self.counts(queue).get(queue, {}).get(state, 0)

    @abc.abstractmethod
    def list_jobs(self, queue: str, state: State, *, limit: int = 100, cursor: str | None = None) -> Page:
        """A bounded slice of the jobs of ``queue`` in ``state``, with their history; changes nothing.

        Pending and scheduled ones come in the order they would be taken, ended ones in the order they ended,
        others oldest first.
        """

    @abc.abstractmethod
    def revive(self, queue: str, ids: Sequence[str] | None = None, *, due: float = 0.0) -> list[str]:
        """Give dead jobs (all of the queue, or those of ``ids``) a new life: generation + 1, attempts 0.

        Each dead job is revived by one caller only. A job that holds its key until it has ended takes the key
        again, or stays dead where another job holds it by now. Returns the ids revived, oldest first.
        """

    @abc.abstractmethod
    def hasten(self, queue: str, ids: Sequence[str]) -> list[str]:
        """Make scheduled jobs due now; returns the ids of those that were scheduled."""

    @abc.abstractmethod
    def purge(self, queue: str, state: State) -> int:
        """Delete the jobs of ``queue`` in ``state``, which must not be RESERVED; returns how many."""

    @abc.abstractmethod
    def forget(self, ids: Sequence[str]) -> int:
        """Delete ended jobs and their results; returns how many."""

    @abc.abstractmethod
    def pause(self, name: str, what: Scope = "queue") -> None:
        """Lend no more jobs of this queue, task or key, on every worker, until resumed. Idempotent.

        A key is that of ``Job.lane``, in every queue and of every task. What is lent already goes on.
        """

    @abc.abstractmethod
    def resume(self, name: str, what: Scope = "queue") -> None:
        """Undo :meth:`pause`; the jobs have the places they had. Idempotent."""

    @abc.abstractmethod
    def paused(self, what: Scope = "queue") -> set[str]:
        """The queues, tasks or keys that are paused."""

    def declare_limits(self, limits: Sequence[Limits]) -> list[str]:
        """Make these the limits of their tasks, for the jobs that wait already too: the last declaration wins.

        Returns the tasks whose limits this changed. They bind every take on every worker: see
        :meth:`Consumer.take`. To be called before a job with a ``lane`` is pushed, also with no limits at all:
        raises ``ConfigurationError`` where the backend has no lanes.
        """
        raise ConfigurationError(
            f"limits, keys and fair shares need a backend that keeps lanes; {self.capabilities.name} has none"
        )

    def limits(self) -> dict[str, Limits]:
        """The limits declared last, by task."""
        return {}

    @abc.abstractmethod
    def cancel(self, ids: Sequence[str], *, reason: str = "") -> dict[str, Cancellation]:
        """Cancel jobs: waiting ones end now, running ones are asked to through their worker's session.

        A running job may still complete or fail for good. If it would wait again instead (a retry, a snooze, given
        back, lost with its worker), it ends CANCELLED. Asking also ends a blocked ``take`` of its worker.
        """

    @abc.abstractmethod
    def reclaim(self, *, limit: int = 500) -> Reclaimed:
        """Take back at most ``limit`` expired reservations.

        Those marked started are counted (``WorkerLost``: retried after ``loss_delay``, or buried when
        ``max_retries`` is used up); the others become suspects: uncounted, ``losses + 1``, due at once. A lease
        of 0 or less is taken back only on proof that its worker is gone. Safe to run anywhere, at any time, by
        many at once.
        """

    @abc.abstractmethod
    def housekeep(self) -> float | None:
        """Do one small step of staging, expiry and retention; returns the seconds until it wants to be called
        again, ``None`` for no wish. Safe to run anywhere, by many at once; never holds others up for long."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of connections and files. Idempotent; frees every blocked wait; nothing stored is lost."""


class Consumer(abc.ABC):
    """One worker's session: what it has been lent.

    Driven by one thread at a time, except :meth:`wake` and :meth:`close`.
    """

    @abc.abstractmethod
    def take(self, limit: int, timeout: float = 0.0, *, job_id: str | None = None) -> Taken:
        """Reserve at most ``limit`` due jobs of the open queues, waiting up to ``timeout`` seconds for the first.

        Per queue: higher priority first, then due time, then first in, first out; across queues by weight, no
        share left unused. A paused queue lends nothing. Atomic: no job is lent twice while its lease lives. A
        job past ``expires`` is not lent but ends CANCELLED with the error ``expired``. The reservations come in
        the order they should run. Waiting costs no busy polling; :meth:`wake` ends it early. ``job_id`` takes
        that job alone, if it is pending and has room.

        Jobs with a ``lane``: within a priority of a queue, lanes take turns by weight, and the jobs without a
        lane together as one of weight 1; a lane that was empty is owed nothing. A job is lent only while every
        limit declared for its task and its key has room, and one of an ordered lane only when all that were
        pushed into the lane before it have ended; jobs that must wait stand in nobody's way. Room is counted over
        all workers and comes back with every end of a reservation, ``reclaim`` included. ``next_due`` counts the
        moment at which time alone makes room.
        """

    def claim(self, ids: Sequence[str]) -> list[Reservation]:
        """Reserve those of ``ids`` that are announced, and due to be lent: see :class:`taskq.store.Ledger`.

        Those of a paused queue or task, and of queues that are not open, wait on as ordinary jobs. Atomic for each.
        """
        raise NotImplementedError(f"{type(self).__name__} is no session of a ledger")

    def credit(self, n: int) -> None:  # noqa: B027 - nothing to do where the server does not push
        """How many jobs this worker can hold at once; steers prefetch where the server pushes."""

    @abc.abstractmethod
    def settle(self, outcomes: Sequence[Outcome]) -> list[Settlement]:
        """Write what runs decided, each only if its token still holds; answers in order.

        One write for all where the server can: results, retries, burials, follow-up pushes. One bad outcome
        never fails its batch. Repeating a settle answers ALREADY_YOURS and changes nothing. COMPLETE with
        ``keep`` 0 deletes the job. RETRY whose count exceeds ``max_retries`` is written as BURY.
        """

    def exchange(self, outcomes: Sequence[Outcome], limit: int) -> tuple[list[Settlement], Taken]:
        """Settle, and take what is at hand; in one write where the backend can.

        Taking nothing does not mean that nothing is due: only a :meth:`take` looks for that.
        """
        settlements = self.settle(outcomes) if outcomes else []
        return settlements, self.take(limit) if limit > 0 else Taken([], None)

    @abc.abstractmethod
    def extend(self, reservations: Sequence[Reservation], seconds: float | None = None) -> Extended:
        """Prolong each job's own lease from now (or by ``seconds``), where the token still holds."""

    @abc.abstractmethod
    def note(self, notes: Sequence[Note]) -> list[str]:
        """Write marks where the token still holds; returns the ids where it does not."""

    @abc.abstractmethod
    def release(self, reservations: Sequence[Reservation]) -> None:
        """Give back jobs that were not started: uncounted, deliveries undone, to the place they had."""

    @abc.abstractmethod
    def cancellations(self) -> list[str]:
        """Ids of jobs lent to this session that somebody asked to cancel. Cheap enough to ask every second."""

    @abc.abstractmethod
    def wake(self) -> None:
        """End a blocked :meth:`take` early. May be called from any thread and from a signal handler."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the session. Idempotent. What is still lent comes back when its lease runs out."""


def store_needed(feature: str, location: str) -> ConfigurationError:
    """The error of what only a store can do, on a backend that has none beside it."""
    return ConfigurationError(
        f"{feature} need a store beside {location}: TaskQ(url, store='mongodb://…') or TASKQ_STORE_URL"
    )
