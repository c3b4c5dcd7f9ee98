"""Jobs on their way: from the session to the children, and back as outcomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taskq.clock import monotonic
from taskq.job import Outcome, Reservation, Verdict
from taskq.worker import limits, pipes
from taskq.worker.dispatch import Dispatcher
from taskq.worker.pool import ChildHandle
from taskq.worker.portions import Running
from taskq.worker.session import Session
from taskq.worker.watch import Watch


class Flow:
    """Moves jobs between a session and the children; ``taking`` says whether jobs may be begun."""

    def __init__(
        self, dispatcher: Dispatcher, watch: Watch, session: Session, taking: Callable[[], bool]
    ) -> None:
        self._dispatcher = dispatcher
        self._watch = watch
        self._session = session
        self._taking = taking
        self.settled = 0  #: outcomes handed to the session

    def done(self, child: ChildHandle, lane: int, chunk: int, packed: list[Any]) -> int:
        """A child has sent results; returns how many were news."""
        outcomes = self._dispatcher.results(child, lane, chunk, packed, monotonic())
        self._watch.ended(child, lane, chunk, [result[0] for result in packed])
        self.settle(outcomes)
        return len(outcomes)

    def request(self, child: ChildHandle, kind: int, lane: int, chunk: int, index: int, value: Any) -> None:
        """A running job asks for something."""
        reservation = self._dispatcher.find(child, lane, chunk, index)
        if reservation is None:
            return
        if kind == pipes.EXTEND:
            self._session.extend(reservation, value)
        else:
            self._session.progress(reservation, value)

    def settle(self, outcomes: list[Outcome]) -> None:
        """Have these written."""
        if outcomes:
            self.settled += len(outcomes)
            self._watch.settled(outcomes)
            self._session.settle(outcomes)

    def put_back(self, reservations: list[Reservation]) -> None:
        """These were handed out and not begun: to another child, or back to the queue."""
        if self._taking():
            self._dispatcher.put_back(reservations)
        else:
            self._session.release(reservations)

    def hear(self) -> None:
        """Act on what the session has taken or learned."""
        while self._session.inbox:
            what, about = self._session.inbox.popleft()
            if what == "taken" and self._taking():
                self._dispatcher.offer(about)
            elif what == "taken":
                self._session.release(about)
            elif what == "marked":
                self._on_marked(about)
            else:
                self._stop_job(about, limits.LEASE_LOST if what == "lost" else limits.CANCELLED)

    def dispatch(self, now: float) -> None:
        """Hand out what can be, and say how many jobs are worth holding."""
        suspect = self._dispatcher.dispatch(now) if self._taking() else None
        if suspect is not None:
            self._session.mark([suspect], tell=True)
        self._session.want(self._dispatcher.target if self._taking() else 0)

    def _on_marked(self, suspect: Reservation) -> None:
        self._watch.marked(suspect.job.id)
        if not (self._taking() and self._dispatcher.run_alone(suspect, monotonic())):
            self.settle([Outcome(reservation=suspect, verdict=Verdict.RELEASE)])

    def _stop_job(self, job_id: str, kind: str) -> None:
        """A job must not run (any longer): drop it where it waits, interrupt it where it runs."""
        found = self._dispatcher.withdraw(job_id, monotonic())
        if isinstance(found, Running):
            self._watch.interrupt(found, kind)
        elif found is not None and kind == limits.CANCELLED:
            self.settle([Outcome(reservation=found, verdict=Verdict.CANCEL, error="cancelled")])
