"""One worker's session on the jobs of a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from taskq.backend import Consumer, Extended, Note, Taken
from taskq.backends.mongodb.claiming import Claim
from taskq.backends.mongodb.connection import Connection
from taskq.backends.mongodb.sessions import Session
from taskq.backends.mongodb.settling import Settled, Settling
from taskq.backends.mongodb.signals import ENDS, Signals, Waiter, queue_name, worker_name
from taskq.backends.turns import Turns
from taskq.clock import monotonic
from taskq.errors import BackendUnavailableError
from taskq.job import Outcome, Reservation, Settlement

#: Shortest sleep for something that is due already but cannot be taken, in seconds.
_SHORTEST: Final = 0.005


class MongoConsumer(Consumer):
    """Claims and settles; sleeps until something is signalled, or due."""

    def __init__(
        self,
        connection: Connection,
        signals: Signals,
        settling: Settling,
        turns: Turns,
        worker: str,
        ageing: float | None = None,
    ) -> None:
        self._connection = connection
        self._signals = signals
        self._settling = settling
        self._worker = worker
        self._claim = Claim(connection, turns, worker, ageing)
        self._names = [*(queue_name(queue) for queue in turns.weights), worker_name(worker)]
        self._session = Session(connection, worker)
        self._waiter: Waiter | None = None
        self._woken = False
        self._closed = False

    # -- taking -----------------------------------------------------------------------

    def take(self, limit: int, timeout: float = 0.0, *, job_id: str | None = None) -> Taken:
        self._check_open()
        self._session.renew()
        end = monotonic() + timeout
        taken = self._attempt(limit, job_id)
        if not taken.reservations and timeout > 0 and not self._woken:
            taken = self._wait(limit, end, job_id)
        if timeout > 0:
            self._woken = False
        return taken

    def _wait(self, limit: int, end: float, job_id: str | None) -> Taken:
        waiter = self._own_waiter()
        called = True  # perhaps: what came before this session signed in rang nobody
        with self._signals.waiting(waiter) as longest:
            while True:
                waiter.clear()
                self._check_open()
                taken = self._attempt(limit, job_id)
                left = end - monotonic()
                if taken.reservations or self._woken or left <= 0 or (called and self._called()):
                    return taken
                due = float("inf")
                if taken.next_due is not None and limit > 0:
                    due = max(_SHORTEST, taken.next_due - self._connection.moments.now())
                called = worker_name(self._worker) in waiter.sleep(max(0.0, min(left, due, longest)))

    def _attempt(self, limit: int, job_id: str | None) -> Taken:
        lent = self._claim.take(limit, job_id)
        if lent.ended:
            self._signals.ring([ENDS])
        if lent.reservations:
            self._session.holds(lent.reservations)
        return Taken(lent.reservations, lent.due)

    def claim(self, ids: Sequence[str]) -> list[Reservation]:
        self._check_open()
        if not ids:
            return []
        lent = self._claim.announced(ids)
        self._signals.ring([ENDS] if lent.ended else [])
        self._session.holds(lent.reservations)
        return lent.reservations

    def _own_waiter(self) -> Waiter:
        if self._waiter is None:
            self._waiter = self._signals.waiter(self._names)
        return self._waiter

    # -- what is lent -----------------------------------------------------------------

    def settle(self, outcomes: Sequence[Outcome]) -> list[Settlement]:
        self._check_open()
        if not outcomes:
            return []
        effects = Settled()
        try:
            return self._settling.settle(outcomes, effects)
        finally:
            self._ring(effects)

    def release(self, reservations: Sequence[Reservation]) -> None:
        self._check_open()
        self._ring(self._settling.release(reservations))

    def _ring(self, effects: Settled) -> None:
        self._signals.ring(
            [*(queue_name(queue) for queue in effects.queues), *([ENDS] if effects.ended else [])]
        )

    def extend(self, reservations: Sequence[Reservation], seconds: float | None = None) -> Extended:
        self._check_open()
        self._session.renew()
        return self._settling.extend(reservations, seconds)

    def note(self, notes: Sequence[Note]) -> list[str]:
        self._check_open()
        return self._settling.note(notes)

    def cancellations(self) -> list[str]:
        self._check_open()
        self._session.renew()
        found = self._asked()
        self._session.called(found)
        return found

    def _asked(self) -> list[str]:
        asked = {"w": self._worker, "c": {"$exists": True}, "s": 1}
        found = self._connection.run(lambda rooms: list(rooms.fresh.find(asked, {"_id": 1})))
        return [each["_id"] for each in found]

    def _called(self) -> bool:
        """Whether somebody has asked for a cancel that this session was not woken for yet."""
        return self._session.called(self._asked())

    # -- ending -----------------------------------------------------------------------

    def wake(self) -> None:
        self._woken = True
        waiter = self._waiter
        if waiter is not None:
            waiter.ring()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.wake()
        self._session.end()

    def _check_open(self) -> None:
        if self._closed:
            raise BackendUnavailableError("this consumer is closed")
        self._connection.check_open()
