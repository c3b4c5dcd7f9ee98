"""A broker with a store beside it: the store keeps the jobs, the broker says whose turn it is.

A push writes the job to the store, *announced*, and then sends the broker a message that bears its id. Who receives
the message claims the job in the store, which answers once for each, and only then acknowledges the message. From
there on the store alone decides: leases, retries, results, cancels. So no message that is lost, doubled or late can
lose a job or run one twice, and no acknowledgement waits for a run.

Jobs that wait for more than their turn (due later, in a lane, retried) are ordinary jobs of the store, which lends
them itself. A job whose message was lost becomes one too: see :meth:`Beside.housekeep`.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from taskq.backend import (
    Backend,
    Cancellation,
    Capabilities,
    Consumer,
    Extended,
    Note,
    Page,
    Reclaimed,
    Scope,
    Taken,
)
from taskq.backends.messages import Messages
from taskq.clock import SYSTEM_CLOCK, Clock, monotonic
from taskq.errors import BackendError
from taskq.job import Job, Outcome, Reservation, Settlement, State
from taskq.limits import Limits
from taskq.store import Ledger, ScheduleRecord, WorkerInfo

#: A message that has not come after this long counts as lost, in seconds, where the broker has no more of the queue.
GRACE: Final = 10.0
#: The same where the broker has more, or cannot say.
LONG_GRACE: Final = 300.0
#: Jobs adopted by one step of housekeeping, per queue.
_ADOPTED: Final = 500
#: A broker that failed is not asked by pushes for this long, in seconds: the store takes them alone meanwhile.
_PAUSE: Final = 30.0

#: Marks a message that only bears an id. Others are jobs of a broker that stood alone.
ANNOUNCEMENT: Final = "taskq-announces"

T = TypeVar("T")


def announcement(job: Job) -> Job:
    """The message about ``job``."""
    return Job(
        id=job.id,
        queue=job.queue,
        task=job.task,
        priority=job.priority,
        lease=max(job.lease, 1.0),
        max_retries=None,
        keep=0.0,
        headers={ANNOUNCEMENT: 1},
        created=job.created,
    )


class Beside(Ledger):
    """One backend made of two. The store's promises hold, but for the order: see :attr:`capabilities`."""

    def __init__(self, broker: Backend, store: Ledger, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._broker = broker
        self._store = store
        self._clock = clock
        self._well_from = 0.0  #: on the monotonic clock: until then the broker is left alone
        self.broker_failure: BackendError | None = None  #: the latest, for those who ask

    @property
    def capabilities(self) -> Capabilities:
        """Those of the store; order and priority only within what the broker has handed out."""
        broker, store = self._broker.capabilities, self._store.capabilities
        return replace(
            store,
            name=f"{broker.name} with {store.name}",
            priority="within prefetch",
            order="fifo except give-backs",
            persistent=store.persistent,
            shared=broker.shared and store.shared,
        )

    @property
    def location(self) -> str:
        return f"{self._broker.location} with {self._store.location}"

    # -- jobs in and out --------------------------------------------------------------

    def push(self, jobs: Sequence[Job]) -> list[str]:
        """Returns when the store has the jobs. A broker that fails delays them, by :data:`GRACE`; it loses none."""
        if monotonic() < self._well_from:
            return self._store.push(jobs)
        ids = self._store.announce(jobs)
        now = self._clock.now()
        messages = [
            announcement(job)
            for job, stored in zip(jobs, ids, strict=True)
            if stored == job.id and job.lane is None and job.due <= now
        ]
        if messages:
            self._publish(messages)
        return ids

    def _publish(self, messages: Sequence[Job]) -> None:
        try:
            self._broker.push(messages)
        except BackendError as error:
            self.broker_failure = error
            self._well_from = monotonic() + _PAUSE

    def announce(self, jobs: Sequence[Job]) -> list[str]:
        return self._store.announce(jobs)

    def adopt(self, queue: str, before: float, *, limit: int = 500) -> int:
        return self._store.adopt(queue, before, limit=limit)

    def consume(self, queues: Mapping[str, int], worker: str) -> Consumer:
        own = self._store.consume(queues, worker)
        try:
            messages = Messages(self._broker.consume(queues, worker), own.wake)
        except BaseException:
            own.close()
            raise
        return _BesideConsumer(self._store, own, messages)

    # -- upkeep -----------------------------------------------------------------------

    def housekeep(self) -> float | None:
        """One step of each, and jobs whose message does not come are adopted by the store, which lends them itself."""
        waiting = self._waiting_queues()
        adopted = [self._adopt_late(queue) for queue in waiting]
        wishes = [self._store.housekeep(), self._from_broker(self._broker.housekeep)]
        wishes.append(GRACE / 2 if waiting else None)
        return (
            0.0 if _ADOPTED in adopted else min((wish for wish in wishes if wish is not None), default=None)
        )

    def _waiting_queues(self) -> list[str]:
        return [queue for queue, states in self._store.counts().items() if states.get(State.PENDING)]

    def _adopt_late(self, queue: str) -> int:
        known = self._broker.capabilities.size != "unavailable"
        empty = known and not self._from_broker(lambda: self._broker.size(queue))
        grace = GRACE if empty else LONG_GRACE
        return self._store.adopt(queue, self._clock.now() - grace, limit=_ADOPTED)

    def _from_broker(self, ask: Callable[[], T]) -> T | None:
        """The broker's answer, or ``None`` while it is away: the store's part goes on."""
        try:
            return ask()
        except BackendError as error:
            self.broker_failure = error
            return None

    def reclaim(self, *, limit: int = 500) -> Reclaimed:
        self._from_broker(lambda: self._broker.reclaim(limit=limit))
        return self._store.reclaim(limit=limit)

    def close(self) -> None:
        try:
            self._broker.close()
        finally:
            self._store.close()

    # -- what the store does alone ----------------------------------------------------

    def counts(self, queue: str | None = None) -> dict[str, dict[State, int]]:
        return self._store.counts(queue)

    def list_jobs(self, queue: str, state: State, *, limit: int = 100, cursor: str | None = None) -> Page:
        return self._store.list_jobs(queue, state, limit=limit, cursor=cursor)

    def revive(self, queue: str, ids: Sequence[str] | None = None, *, due: float = 0.0) -> list[str]:
        return self._store.revive(queue, ids, due=due)

    def hasten(self, queue: str, ids: Sequence[str]) -> list[str]:
        return self._store.hasten(queue, ids)

    def purge(self, queue: str, state: State) -> int:
        return self._store.purge(queue, state)

    def forget(self, ids: Sequence[str]) -> int:
        return self._store.forget(ids)

    def pause(self, name: str, what: Scope = "queue") -> None:
        self._store.pause(name, what)

    def resume(self, name: str, what: Scope = "queue") -> None:
        self._store.resume(name, what)

    def paused(self, what: Scope = "queue") -> set[str]:
        return self._store.paused(what)

    def declare_limits(self, limits: Sequence[Limits]) -> list[str]:
        return self._store.declare_limits(limits)

    def limits(self) -> dict[str, Limits]:
        return self._store.limits()

    def cancel(self, ids: Sequence[str], *, reason: str = "") -> dict[str, Cancellation]:
        return self._store.cancel(ids, reason=reason)

    def find(self, job_id: str) -> Job | None:
        return self._store.find(job_id)

    def wait(self, ids: Sequence[str], timeout: float | None = None) -> list[str]:
        return self._store.wait(ids, timeout)

    def progress(self, job_id: str) -> bytes | None:
        return self._store.progress(job_id)

    def heartbeat(self, worker: WorkerInfo) -> None:
        self._store.heartbeat(worker)

    def workers(self) -> list[WorkerInfo]:
        return self._store.workers()

    def forget_worker(self, worker_id: str) -> None:
        self._store.forget_worker(worker_id)

    def schedules(self) -> list[ScheduleRecord]:
        return self._store.schedules()

    def write_schedule(self, record: ScheduleRecord, jobs: Sequence[Job] = ()) -> bool:
        return self._store.write_schedule(record, jobs)

    def remove_schedule(self, name: str) -> bool:
        return self._store.remove_schedule(name)


def _turn(reservation: Reservation) -> tuple[int, float]:
    return -reservation.job.priority, reservation.job.due


class _BesideConsumer(Consumer):
    """Takes turns between the messages and what the store lends itself, so that neither starves the other."""

    def __init__(self, store: Ledger, own: Consumer, messages: Messages) -> None:
        self._store = store
        self._own = own
        self._messages = messages
        self._odd = False

    # -- taking -----------------------------------------------------------------------

    def take(self, limit: int, timeout: float = 0.0, *, job_id: str | None = None) -> Taken:
        if job_id is not None:
            claimed = self._own.claim([job_id]) if limit > 0 else []
            return Taken(claimed, None) if claimed else self._own.take(limit, timeout, job_id=job_id)
        if limit <= 0:
            return self._own.take(limit, timeout)
        end = monotonic() + timeout
        taken = self._attempt(limit, ask=timeout <= 0)
        left = end - monotonic()
        if not taken.reservations and left > 0:
            with self._messages.awaited(limit):
                taken = self._own.take(limit, left)
            if not taken.reservations:
                taken = self._attempt(limit, ask=False)
        failure = self._messages.failure
        if failure is not None and not taken.reservations:
            raise failure
        return taken

    def exchange(self, outcomes: Sequence[Outcome], limit: int) -> tuple[list[Settlement], Taken]:
        settlements, (own, next_due) = self._own.exchange(outcomes, self._share(limit))
        claimed: list[Reservation] = []
        # The outcomes are written: whoever looks next learns that the store is away.
        with contextlib.suppress(BackendError):
            self._claim_announced(claimed, limit - len(own), ask=False)
        return settlements, Taken(list(heapq.merge(own, claimed, key=_turn)), next_due)

    def claim(self, ids: Sequence[str]) -> list[Reservation]:
        return self._own.claim(ids)

    def _share(self, limit: int) -> int:
        """How many of ``limit`` the store may lend before messages are looked at."""
        self._odd = not self._odd
        return (limit + self._odd) // 2

    def _attempt(self, limit: int, *, ask: bool) -> Taken:
        """What is there now. Where the store goes away midway, what it lent before."""
        half = self._share(limit)
        own, next_due = self._own.take(half)
        claimed: list[Reservation] = []
        try:
            self._claim_announced(claimed, limit - len(own), ask=ask)
            if len(own) == half < limit - len(claimed):
                rest, next_due = self._own.take(limit - len(own) - len(claimed))
                own += rest
        except BackendError:
            if not own and not claimed:
                raise
        return Taken(list(heapq.merge(own, claimed, key=_turn)), next_due)

    def _claim_announced(self, claimed: list[Reservation], limit: int, *, ask: bool) -> None:
        """Fill ``claimed`` with at most ``limit`` jobs that messages announce; stale messages are done with."""
        while len(claimed) < limit and (messages := self._messages.take(limit - len(claimed), ask=ask)):
            try:
                claimed.extend(self._claim([message.job for message in messages]))
            except BackendError:
                self._messages.put_back(messages)
                raise
            self._messages.acknowledge(messages)

    def _claim(self, announced: Sequence[Job]) -> list[Reservation]:
        strays = [job for job in announced if ANNOUNCEMENT not in job.headers]
        if strays:
            self._store.announce([replace(job, due=0.0) for job in strays])
        claimed = {lent.job.id: lent for lent in self._own.claim([job.id for job in announced])}
        return [claimed[job.id] for job in announced if job.id in claimed]

    def credit(self, n: int) -> None:
        self._own.credit(n)
        self._messages.credit(n)

    # -- what the store does alone ----------------------------------------------------

    def settle(self, outcomes: Sequence[Outcome]) -> list[Settlement]:
        return self._own.settle(outcomes)

    def extend(self, reservations: Sequence[Reservation], seconds: float | None = None) -> Extended:
        return self._own.extend(reservations, seconds)

    def note(self, notes: Sequence[Note]) -> list[str]:
        return self._own.note(notes)

    def release(self, reservations: Sequence[Reservation]) -> None:
        self._own.release(reservations)

    def cancellations(self) -> list[str]:
        return self._own.cancellations()

    def wake(self) -> None:
        self._own.wake()

    def close(self) -> None:
        self._own.close()
        self._messages.close()
