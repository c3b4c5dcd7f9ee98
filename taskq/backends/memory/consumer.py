"""One worker's session on the jobs in memory."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from taskq.backend import (
    Consumer,
    Extended,
    Note,
    Taken,
)
from taskq.backends import moves
from taskq.backends.memory.lanes import next_time
from taskq.backends.memory.shelf import MAX_FINISHED, Row, Shelf
from taskq.backends.turns import Turns
from taskq.clock import monotonic
from taskq.errors import BackendUnavailableError
from taskq.job import (
    Outcome,
    Reservation,
    Settlement,
    State,
    Verdict,
)

#: Longest sleep of a blocked wait: the wall clock may be stepped under it.
_LOOK: Final = 1.0


class MemoryConsumer(Consumer):
    def __init__(self, shelf: Shelf, turns: Turns, worker: str) -> None:
        self._shelf = shelf
        self._turns = turns
        self._worker = worker
        self._woken = False
        self._closed = False

    # -- taking -----------------------------------------------------------------------

    def take(self, limit: int, timeout: float = 0.0, *, job_id: str | None = None) -> Taken:
        end = monotonic() + timeout
        with self._open():
            while True:
                taken = self._take(limit, job_id)
                left = end - monotonic()
                if taken.reservations or self._woken or left <= 0 or self._worker in self._shelf.called:
                    self._woken = False
                    self._shelf.called.discard(self._worker)
                    return taken
                due = float("inf") if taken.next_due is None else taken.next_due - self._shelf.clock.now()
                self._shelf.changed.wait(max(0.0, min(left, due, _LOOK)))
                self._open()

    def _take(self, limit: int, job_id: str | None) -> Taken:
        shelf = self._shelf
        queues = [queue for queue in self._turns.weights if queue not in shelf.lanes.stopped["queue"]]
        next_due = shelf.stage(queues)
        shelf.lanes.begin()
        if limit <= 0:
            return Taken([], next_due)
        rows = self._one(job_id, queues) if job_id is not None else self._next(limit, queues)
        shelf.token += bool(rows)
        return Taken([self._lend(row) for row in rows], next_time(shelf.lanes, shelf.clock, next_due))

    def claim(self, ids: Sequence[str]) -> list[Reservation]:
        shelf = self._shelf
        with self._open():
            open_queues = self._turns.weights.keys() - shelf.lanes.stopped["queue"]
            rows = [shelf.rows[job_id] for job_id in ids if job_id in shelf.announced]
            for row in rows:
                shelf.disclose(row)
                if moves.expired(row.job, shelf.clock.now()):
                    shelf.place(
                        row, moves.end(row.job, State.CANCELLED, shelf.clock.now(), error=moves.EXPIRED)
                    )
            found = [row for row in rows if self._one(row.job.id, list(open_queues))]
            shelf.token += bool(found)
            return [self._lend(row) for row in found]

    def _next(self, limit: int, queues: Sequence[str]) -> list[Row]:
        lanes = self._shelf.lanes
        lines = {queue: self._line(queue, limit) for queue in queues}
        plans = {
            queue: lanes.plan(queue, limit, lines[queue], self._shelf.waits)
            for queue in queues
            if lanes.special(queue)
        }
        available = {queue: len(plans.get(queue, line)) for queue, line in lines.items()}
        turns = self._turns.share(limit, available)
        for queue, plan in plans.items():
            lines[queue] = lanes.serve(queue, plan, turns.count(queue), self._shelf.waits)
        kept = {queue: iter(line) for queue, line in lines.items()}
        return [row for queue in turns if (row := next(kept[queue], None)) is not None]

    def _line(self, queue: str, limit: int) -> list[Row]:
        """The first ``limit`` jobs of ``queue``; those too late to start end here."""
        shelf = self._shelf
        heap = shelf.pending[queue]
        found: dict[int, Row] = {}  # by seq: a job that came back may stand in the heap twice
        stopped: list[Row] = []
        if shelf.lanes.ageing is not None:
            limit = len(heap)
        while len(found) < limit and (row := shelf.head(heap, State.PENDING, queue)):
            heapq.heappop(heap)
            if moves.expired(row.job, shelf.clock.now()):
                ended = moves.end(row.job, State.CANCELLED, shelf.clock.now(), error=moves.EXPIRED)
                shelf.place(row, ended)
            elif row.job.task in shelf.lanes.stopped["task"]:
                stopped.append(row)
            else:
                found[row.seq] = row
        for row in [*found.values(), *stopped]:
            heapq.heappush(heap, (*row.order(), row.job.id))
        return list(found.values())

    def _one(self, job_id: str, queues: Sequence[str]) -> list[Row]:
        row = self._shelf.rows.get(job_id)
        if row is None or row.job.state is not State.PENDING or row.job.queue not in queues:
            return []
        lendable = self._shelf.lanes.one(row, self._shelf.waits)
        return [row] if lendable and not moves.expired(row.job, self._shelf.clock.now()) else []

    def _lend(self, row: Row) -> Reservation:
        clock = self._shelf.clock
        job = row.job
        job = replace(job, state=State.RESERVED, worker=self._worker, deliveries=job.deliveries + 1)
        self._shelf.place(row, job)
        row.token, row.boot = self._shelf.token, clock.boot_id()
        row.deadline = clock.lease_time() + job.lease if job.lease > 0 else None
        return Reservation(job, row.token, row.seq)

    # -- settling ---------------------------------------------------------------------

    def settle(self, outcomes: Sequence[Outcome]) -> list[Settlement]:
        with self._open():
            answers = [self._settle(outcome) for outcome in outcomes]
            self._shelf.changed.notify_all()
            return answers

    def _settle(self, outcome: Outcome) -> Settlement:
        shelf, reservation = self._shelf, outcome.reservation
        key = (reservation.job.id, reservation.token)
        row = self._held(reservation)
        if row is None:
            known = shelf.rows.get(reservation.job.id)
            again = known.token == reservation.token if known else key in shelf.gone
            return Settlement.ALREADY_YOURS if again else Settlement.LOST
        move = moves.settled(row.job, outcome, shelf.clock.now(), cancel=row.cancel)
        shelf.apply(row, move)
        if outcome.verdict is Verdict.COMPLETE and row.job.keep <= 0:
            shelf.drop([row])
            shelf.gone[key] = None
            if len(shelf.gone) > MAX_FINISHED:
                del shelf.gone[next(iter(shelf.gone))]
        for job in outcome.pushes:
            shelf.insert(job)
        return Settlement.SETTLED

    def release(self, reservations: Sequence[Reservation]) -> None:
        def give_back(row: Row) -> None:
            self._shelf.place(row, moves.released(row.job, self._shelf.clock.now(), cancel=row.cancel))

        self._each(reservations, give_back)

    # -- while it runs ----------------------------------------------------------------

    def extend(self, reservations: Sequence[Reservation], seconds: float | None = None) -> Extended:
        cancelled: list[str] = []

        def prolong(row: Row) -> None:
            clock, lease = self._shelf.clock, row.job.lease
            timeless = seconds is None and lease <= 0
            row.deadline = None if timeless else clock.lease_time() + (lease if seconds is None else seconds)
            row.boot = clock.boot_id()
            if row.cancel is not None:
                cancelled.append(row.job.id)

        return Extended(self._each(reservations, prolong), cancelled)

    def note(self, notes: Sequence[Note]) -> list[str]:
        lost: list[str] = []
        for note in notes:

            def mark(row: Row, note: Note = note) -> None:
                if note.started is not None:
                    if row.started is None and row.job.lane is not None:
                        self._shelf.lanes.noted(row.job.lane)
                    row.started = note.started
                    row.job = replace(row.job, first_started=row.job.first_started or note.started)
                row.progress = note.progress if note.progress is not None else row.progress

            lost += self._each([note.reservation], mark)
        return lost

    def cancellations(self) -> list[str]:
        with self._open():
            rows = self._shelf.rows.values()
            return [r.job.id for r in rows if r.cancel is not None and r.job.worker == self._worker]

    def wake(self) -> None:
        with self._shelf.changed:
            self._woken = True
            self._shelf.changed.notify_all()

    def close(self) -> None:
        with self._shelf.changed:
            if not self._closed:
                self._closed = True
                self._shelf.open_workers[self._worker] -= 1
            self._shelf.changed.notify_all()

    # -- holding ----------------------------------------------------------------------

    def _open(self) -> threading.Condition:
        if self._closed:
            raise BackendUnavailableError("this consumer is closed")
        return self._shelf.open()

    def _held(self, reservation: Reservation) -> Row | None:
        row = self._shelf.rows.get(reservation.job.id)
        if row is None or row.job.state is not State.RESERVED or row.token != reservation.token:
            return None
        return row

    def _each(self, reservations: Sequence[Reservation], act: Callable[[Row], None]) -> list[str]:
        """Do ``act`` to each row that is still held; returns the ids of the others."""
        lost: list[str] = []
        with self._open():
            for reservation in reservations:
                row = self._held(reservation)
                if row is None:
                    lost.append(reservation.job.id)
                else:
                    act(row)
            self._shelf.changed.notify_all()
        return lost
