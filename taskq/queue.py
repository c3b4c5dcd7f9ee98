"""A queue of plain payloads: the layer under tasks, for those who want the queue alone."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self

from taskq import backends, codec
from taskq.backend import Backend, Consumer, Note
from taskq.clock import SYSTEM_CLOCK, Duration
from taskq.errors import ConfigurationError, DecodeError, InvalidArgumentError, LeaseLostError
from taskq.job import DEFAULT_LEASE, Attempt, Job, Outcome, Reservation, Settlement, State, Verdict, new_id
from taskq.lent import QueueJob, Renewal
from taskq.options import (
    check_count,
    check_instant,
    check_lease,
    check_list,
    check_priority,
    check_queue,
    check_retries,
    check_seconds,
    nearest,
)
from taskq.registry import current_app

#: What ``size`` and ``purge`` understand.
STATUSES: Final = {
    **{state.value: state for state in State},
    "failed": State.DEAD,
    "dead_letter": State.DEAD,
}
_PAGE: Final = 200


class Queue:
    """A named line of payloads: dicts, lists, anything that can be a task's argument.

    ``backend`` is a URL or a name (``"sqlite"``, ``"memory"``, …), by default the current app's. ``max_retries``
    counts the runs after the first, as everywhere; with ``retry_backoff`` (seconds before a failed job is due
    again) and ``visibility_timeout`` it travels on the jobs pushed here.
    """

    def __init__(
        self,
        name: str = "default",
        backend: str | Backend | None = None,
        max_retries: int | None = 3,
        retry_backoff: Duration = 0,
        visibility_timeout: Duration = DEFAULT_LEASE,
    ) -> None:
        self.name = check_queue(name)
        self.max_retries = check_retries(max_retries)
        self.retry_backoff = check_seconds("retry_backoff", retry_backoff)
        self.visibility_timeout = check_lease(visibility_timeout)
        self._given = backend
        self._owned: Backend | None = None
        self.worker = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(6).hex()}"
        self._consumer: Consumer | None = None
        self._lock = threading.RLock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Queue {self.name}>"

    @property
    def backend(self) -> Backend:
        """Where the payloads are held."""
        if self._closed:
            raise ConfigurationError(f"queue {self.name!r} is closed: make another one")
        if isinstance(self._given, Backend):
            return self._given
        if self._given is None:
            return current_app().backend
        with self._lock:
            if self._owned is None:
                self._owned = backends.from_url(self._given)
        return self._owned

    # -- producing --------------------------------------------------------------------

    def push(
        self,
        payload: Any,
        priority: int = 0,
        delay_seconds: Duration = 0,
        *,
        delay_until: datetime | None = None,
    ) -> str:
        """Store a payload and return its id. ``delay_until`` (aware) wins over ``delay_seconds``."""
        return self.produce(self.name, payload, priority, delay_seconds, delay_until=delay_until)

    def produce(
        self,
        topic: str,
        payload: Any,
        priority: int = 0,
        delay_seconds: Duration = 0,
        delay_until: datetime | None = None,
    ) -> str:
        """:meth:`push` to the queue ``topic``."""
        job = self._job(topic, payload, priority, delay_seconds, delay_until)
        return self.backend.push([job])[0]

    def push_many(self, payloads: Sequence[Any], priority: int = 0, delay_seconds: Duration = 0) -> list[str]:
        """Store payloads by one write and return their ids."""
        jobs = [
            self._job(self.name, each, priority, delay_seconds, None, root=f"payloads[{number}]")
            for number, each in enumerate(check_list("payloads", payloads))
        ]
        return self.backend.push(jobs)

    # -- consuming --------------------------------------------------------------------

    def pop(self) -> QueueJob | None:
        """Reserve the next payload, if any is due. It is yours for ``visibility_timeout`` seconds."""
        jobs = self._take(1)
        return jobs[0] if jobs else None

    def pop_batch(self, count: int) -> list[QueueJob]:
        """Reserve up to ``count`` payloads."""
        return self._take(check_count("count", count))

    def pop_by_id(self, job_id: str) -> QueueJob | None:
        """Reserve that payload, if it is due and not reserved."""
        jobs = self._take(1, job_id=job_id)
        return jobs[0] if jobs else None

    def consume(
        self,
        topic: str | None = None,
        job_id: str | None = None,
        poll_interval: float = 1.0,
        iterations: int = 0,
        batch_size: int = 1,
    ) -> Iterator[Any]:
        """Yield payloads as they come (lists of them where ``batch_size`` > 1), for ever.

        ``poll_interval`` <= 0 stops when nothing is due; ``iterations`` > 0 stops after that many payloads;
        ``job_id`` yields that one alone. While the loop's body works on a payload its lease is renewed. Settle
        each one yourself.
        """
        if topic not in {None, self.name}:
            with self._sibling(topic) as sibling:
                yield from sibling.consume(None, job_id, poll_interval, iterations, batch_size)
            return
        check_count("batch_size", batch_size)
        left: int | None = check_count("iterations", iterations) if iterations else None
        poll_interval = check_seconds("poll_interval", poll_interval)
        while left is None or left > 0:
            size = batch_size if left is None else min(batch_size, left)
            jobs = self._take(size, timeout=0.0 if job_id else max(0.0, poll_interval), job_id=job_id)
            if not jobs and (poll_interval <= 0 or job_id):
                return
            if jobs:
                with Renewal(self, jobs):
                    yield jobs if batch_size > 1 else jobs[0]
                left = None if left is None else left - len(jobs)
                if job_id:
                    return

    def process(
        self,
        handler: Callable[[Any], object],
        topic: str | None = None,
        *,
        max_jobs: int | None = None,
        batch_size: int = 1,
    ) -> int:
        """Hand everything that is due to ``handler`` and stop; returns how many payloads that were.

        A return completes what the handler has not settled itself; an exception fails it and goes on with the
        next. With ``batch_size`` > 1 the handler gets lists.
        """
        handled = 0
        for given in self.consume(topic, poll_interval=0, iterations=max_jobs or 0, batch_size=batch_size):
            jobs = given if isinstance(given, list) else [given]
            handled += len(jobs)
            try:
                handler(given)
            except Exception as error:  # noqa: BLE001 - the handler's failure is the job's, not the loop's
                for job in jobs:
                    if not job.settled:
                        job.fail(error)
            else:
                for job in jobs:
                    if not job.settled:
                        job.complete()
        return handled

    # -- looking and mending ----------------------------------------------------------

    def size(self, status: str = "pending") -> int:
        """How many payloads are ``pending`` (due now), ``scheduled`` (due later), ``reserved``, ``completed``,
        ``cancelled`` or ``dead`` (the same as ``failed`` and ``dead_letter``)."""
        return self.backend.size(self.name, _state(status))

    def failed(self) -> list[QueueJob]:
        """Payloads that have failed at least once and will be tried again, soonest first."""
        return [
            self._shown(job)
            for state in (State.PENDING, State.SCHEDULED)
            for job in self._listed(state)
            if job.attempts > 0
        ]

    def dead_letters(self) -> list[QueueJob]:
        """Payloads that were given up, oldest first, with their ``error``."""
        return [self._shown(job) for job in self._listed(State.DEAD)]

    def retry(self, job_id: str | None = None, delay_seconds: Duration = 0) -> bool:
        """Revive that dead letter, or all of them, with all their retries before them; whether there was one."""
        delay = check_seconds("delay_seconds", delay_seconds)
        due = SYSTEM_CLOCK.now() + delay if delay > 0 else 0.0
        return bool(self.backend.revive(self.name, None if job_id is None else [job_id], due=due))

    def retry_failed(self) -> int:
        """Make the :meth:`failed` payloads that wait out their backoff due now; returns how many."""
        waiting = [job.id for job in self._listed(State.SCHEDULED) if job.attempts > 0]
        return len(self.backend.hasten(self.name, waiting)) if waiting else 0

    def purge(self, status: str) -> int:
        """Delete the payloads of a status (not ``reserved``); returns how many."""
        state = _state(status)
        if state is State.RESERVED:
            raise InvalidArgumentError("reserved payloads are being worked on: cancel them, or let them end")
        return self.backend.purge(self.name, state)

    def clear(self) -> int:
        """Delete the payloads that wait, due or not; returns how many."""
        return self.purge("pending") + self.purge("scheduled")

    def pause(self) -> None:
        """Lend nothing more from this queue, in any process, until :meth:`resume`."""
        self.backend.pause(self.name)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self.backend.resume(self.name)

    def close(self) -> None:
        """End the session; the queue is spent. Idempotent. Unsettled payloads come back by their timeout."""
        with self._lock:
            consumer, self._consumer = self._consumer, None
            owned, self._owned = self._owned, None
            self._closed = True
        if consumer is not None:
            consumer.close()
        if owned is not None:
            owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------

    def _sibling(self, topic: str | None) -> Queue:
        return Queue(
            topic or self.name, self.backend, self.max_retries, self.retry_backoff, self.visibility_timeout
        )

    def _job(
        self,
        topic: str,
        payload: Any,
        priority: int,
        delay_seconds: Duration,
        delay_until: datetime | None,
        *,
        root: str = "payload",
    ) -> Job:
        now = SYSTEM_CLOCK.now()
        delay = check_seconds("delay_seconds", delay_seconds)
        due = now + delay if delay > 0 else 0.0
        return Job(
            id=new_id(),
            queue=check_queue(topic),
            payload=codec.encode(payload, root=root),
            priority=check_priority(priority),
            due=due if delay_until is None else check_instant("delay_until", delay_until),
            lease=self.visibility_timeout,
            max_retries=self.max_retries,
            loss_base=self.retry_backoff,
            created=now,
        )

    def _session(self) -> Consumer:
        if self._consumer is None:
            self._consumer = self.backend.consume({self.name: 1}, self.worker)
        return self._consumer

    def _take(self, count: int, *, timeout: float = 0.0, job_id: str | None = None) -> list[QueueJob]:
        with self._lock:
            consumer = self._session()
            taken = consumer.take(count, 0.0, job_id=job_id)
            if not taken.reservations:
                # No worker need be running: whoever pops takes back what a dead process held.
                self.backend.reclaim()
                taken = consumer.take(count, timeout, job_id=job_id)
            now = SYSTEM_CLOCK.now()
            if taken.reservations:
                consumer.note([Note(reservation=each, started=now) for each in taken.reservations])
            return [job for each in taken.reservations if (job := self._opened(consumer, each)) is not None]

    def _opened(self, consumer: Consumer, reservation: Reservation) -> QueueJob | None:
        job = reservation.job
        try:
            args, kwargs = codec.decode_call(job.payload) if job.task else ((), {})
            payload = (
                {"task": job.task, "args": list(args), "kwargs": kwargs}
                if job.task
                else codec.decode(job.payload)
            )
        except DecodeError as error:
            attempt = Attempt(number=job.attempts + 1, error_type="DecodeError", message=str(error))
            outcome = Outcome(
                reservation=reservation, verdict=Verdict.BURY, attempt=attempt, error=attempt.error
            )
            consumer.settle([outcome])
            return None
        return QueueJob(self, job, payload, reservation)

    def _shown(self, job: Job) -> QueueJob:
        try:
            payload = codec.decode(job.payload, opaque=True)
        except DecodeError:
            payload = job.payload
        return QueueJob(self, job, payload)

    def _listed(self, state: State) -> Iterator[Job]:
        cursor = None
        while True:
            page = self.backend.list_jobs(self.name, state, limit=_PAGE, cursor=cursor)
            yield from page.jobs
            cursor = page.cursor
            if cursor is None:
                return

    def settle(self, outcome: Outcome) -> None:
        """Write what became of a payload."""
        with self._lock:
            (settlement,) = self._session().settle([outcome])
        if settlement is Settlement.LOST:
            raise LeaseLostError(
                f"job {outcome.reservation.job.id} was not settled: its visibility timeout had passed; "
                "use a longer one, or job.extend(seconds)"
            )

    def extend(self, jobs: Sequence[QueueJob], seconds: float | None = None) -> None:
        """Hold payloads for ``seconds``, or their visibility timeout, from now."""
        held = [job.lent for job in jobs if job.lent is not None]
        if held:
            with self._lock:
                self._session().extend(held, seconds)


def _state(status: str) -> State:
    if status not in STATUSES:
        raise InvalidArgumentError(f"unknown status {status!r}{nearest(status, STATUSES)}")
    return STATUSES[status]
