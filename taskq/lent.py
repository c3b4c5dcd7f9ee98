"""Payloads lent to this process, and the renewal of their leases while they are worked on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol

from taskq.clock import SYSTEM_CLOCK, Duration, to_datetime
from taskq.errors import InvalidArgumentError
from taskq.job import Attempt, Job, Outcome, Reservation, Verdict
from taskq.options import check_seconds


class Lender(Protocol):
    """The queue that a payload was lent by."""

    worker: str

    def retry(self, job_id: str | None = None, delay_seconds: Duration = 0) -> bool: ...

    def settle(self, outcome: Outcome) -> None: ...

    def extend(self, jobs: Sequence[QueueJob], seconds: float | None = None) -> None: ...


class QueueJob:
    """A payload lent to this process, or found among the dead letters.

    Settle a lent one by exactly one of :meth:`complete`, :meth:`fail`, :meth:`reject` and :meth:`retry`;
    else it comes back when its visibility timeout has passed. Each raises ``LeaseLostError`` if it had passed.
    """

    __slots__ = ("_job", "_queue", "_reservation", "_verdict", "payload", "settled")

    def __init__(self, queue: Lender, job: Job, payload: Any, reservation: Reservation | None = None) -> None:
        self._queue = queue
        self._job = job
        self._reservation = reservation
        self._verdict: Verdict | None = None
        self.payload = payload
        self.settled = reservation is None

    def __repr__(self) -> str:
        return f"<QueueJob {self.id} of {self.queue}>"

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def queue(self) -> str:
        return self._job.queue

    @property
    def data(self) -> Any:
        """The same as ``payload``."""
        return self.payload

    @property
    def priority(self) -> int:
        return self._job.priority

    @property
    def attempts(self) -> int:
        """How often it has failed before."""
        return self._job.attempts

    @property
    def error(self) -> str | None:
        """The latest failure in one line."""
        return self._job.error

    @property
    def created(self) -> datetime:
        return to_datetime(self._job.created)

    @property
    def lent(self) -> Reservation | None:
        """The reservation, until it is settled."""
        return None if self.settled else self._reservation

    @property
    def lease(self) -> float:
        """Its visibility timeout in seconds."""
        return self._job.lease

    def complete(self) -> None:
        """It is done."""
        self._settle(Verdict.COMPLETE)

    def fail(self, error: str | BaseException = "") -> None:
        """It went wrong: due again after the queue's ``retry_backoff``, or dead once its retries are used up."""
        self._settle(Verdict.RETRY, error=error, delay=self._job.loss_base)

    def reject(self, reason: str = "") -> None:
        """To the dead letters at once."""
        self._settle(Verdict.BURY, error=reason or "rejected")

    def retry(self, delay_seconds: Duration = 0) -> None:
        """Put it back, now or later, whatever its retries; costs no attempt. A dead letter is revived."""
        delay = check_seconds("delay_seconds", delay_seconds)
        if self._reservation is None:
            self._queue.retry(self.id, delay_seconds=delay)
        else:
            self._settle(Verdict.SNOOZE, delay=delay)

    def extend(self, seconds: Duration) -> None:
        """Hold it for at least ``seconds`` from now."""
        if self._reservation is not None:
            self._queue.extend([self], check_seconds("seconds", seconds))

    def _settle(self, verdict: Verdict, *, error: str | BaseException = "", delay: float = 0.0) -> None:
        if self._reservation is None:
            raise InvalidArgumentError(f"job {self.id} is a dead letter: retry() revives it")
        if self._verdict not in {None, verdict}:
            raise InvalidArgumentError(f"job {self.id} has been settled already: {self._verdict}")
        self._verdict = verdict
        now = SYSTEM_CLOCK.now()
        attempt = None
        if verdict in {Verdict.RETRY, Verdict.BURY}:
            kind = type(error).__name__ if isinstance(error, BaseException) else "Failed"
            attempt = Attempt(
                number=self._job.attempts + 1,
                generation=self._job.generation,
                worker=self._queue.worker,
                ended=now,
                error_type=kind,
                message=str(error),
                delay=delay if verdict is Verdict.RETRY else None,
            )
        outcome = Outcome(
            reservation=self._reservation,
            verdict=verdict,
            due=now + delay if delay > 0 else 0.0,
            attempt=attempt,
            error=attempt.error if attempt else None,
        )
        self.settled = True
        self._queue.settle(outcome)


class Renewal:
    """Renews the leases of payloads that a loop's body works on, from a thread of its own."""

    def __init__(self, queue: Lender, jobs: Sequence[QueueJob]) -> None:
        self._queue = queue
        self._jobs = jobs
        self._done = threading.Event()
        leases = [job.lease for job in jobs if job.lease > 0]
        self._every = min(leases) / 3 if leases else None
        self._thread = threading.Thread(target=self._run, name="taskq-renewal", daemon=True)

    def __enter__(self) -> None:
        if self._every is not None:
            self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        if self._every is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._every):
            self._queue.extend(self._jobs)
