"""One worker's session on a file of jobs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from functools import partial
from sqlite3 import Connection
from typing import Final

from taskq.backend import Consumer, Extended, Note, Taken
from taskq.backends.sqlite import lanes, queries, settle
from taskq.backends.sqlite.bells import LOOK, Bell, Waiting
from taskq.backends.sqlite.change import Change, at_boot
from taskq.backends.sqlite.claim import Claim
from taskq.backends.sqlite.jobfile import JobFile
from taskq.backends.sqlite.locks import LifeLock
from taskq.backends.turns import Turns
from taskq.clock import monotonic
from taskq.errors import BackendError, BackendUnavailableError
from taskq.job import Outcome, Reservation, Settlement

#: Shortest sleep for something that is due already but cannot be taken, in seconds.
_SHORTEST: Final = 0.01


class SQLiteConsumer(Consumer):
    """Claims and settles on the process's writer; sleeps on a bell of its own."""

    def __init__(self, file: JobFile, turns: Turns, worker: str, ageing: float | None = None) -> None:
        self._file = file
        self._turns = turns
        self._worker = worker
        self._claim = Claim(turns, worker, ageing)
        self._queues = list(turns.weights)
        self._names = json.dumps(self._queues)
        self._pid = os.getpid()
        # Held by whoever uses the bell, so that a close from elsewhere waits until it is out of use.
        self._using = threading.RLock()
        self._bell: Bell | None = None
        self._life: LifeLock | None = None
        self._woken_early = False
        self._closed = False
        file.consuming()
        file.sessions.add(self)

    # -- taking -----------------------------------------------------------------------

    def take(self, limit: int, timeout: float = 0.0, *, job_id: str | None = None) -> Taken:
        self._check_open()
        with self._using:
            bell = self._own_bell()
            taken = self._attempt(limit, job_id)
            if taken.reservations or timeout <= 0:
                return taken
            end = monotonic() + timeout
            while not taken.reservations and not bell.woken() and (left := end - monotonic()) > 0:
                called = self._sleep(bell, left, limit, job_id)
                self._check_open()
                taken = self._attempt(limit, job_id)
                if called:
                    break
            if 0 < limit <= len(taken.reservations):
                # There may be more than this worker can take: let the next idle one look.
                self._file.bells.ring_takers(dict.fromkeys(self._turns.weights, 1))
            return taken

    def claim(self, ids: Sequence[str]) -> list[Reservation]:
        self._check_open()
        if not ids:
            return []
        taken = self._file.change(lambda change: self._hold(self._claim.claim(change, ids)))
        return taken.reservations

    def _attempt(self, limit: int, job_id: str | None) -> Taken:
        """Claim, if a look says that there is something."""
        any_now, next_due = self._look(limit, job_id)
        if not any_now:
            return Taken([], next_due)
        return self._file.change(lambda change: self._take(change, limit, job_id))

    def _look(self, limit: int, job_id: str | None) -> tuple[bool, float | None]:
        """Whether such a take would bring something now, and when the next job is due or has room."""
        any_now, due = self._file.read(
            self._look_at if job_id is None else partial(self._look_for, job_id=job_id)
        )
        return (any_now or (due is not None and due <= self._file.clock.now())) and limit > 0, due

    def _look_at(self, db: Connection) -> tuple[bool, float | None]:
        pending, due, laned = db.execute(queries.LOOK, (self._names,)).fetchone()
        if not laned:
            return bool(pending), due
        any_now = bool(pending) or lanes.any_open(db, self._queues)
        return any_now, lanes.earlier(db, self._names, due, self._file.clock)

    def _look_for(self, db: Connection, job_id: str) -> tuple[bool, float | None]:
        pending, due = db.execute(queries.LOOK_AT, (self._names, job_id)).fetchone()
        return bool(pending), due

    def _take(self, change: Change, limit: int, job_id: str | None = None) -> Taken:
        return self._hold(self._claim.take(change, limit, job_id))

    def _hold(self, taken: Taken) -> Taken:
        if self._life is None and any(r.job.lease <= 0 for r in taken.reservations):
            self._life = LifeLock(self._file.bells.folder, self._worker)
        return taken

    def _sleep(self, bell: Bell, left: float, limit: int, job_id: str | None) -> bool:
        with bell.idle(Waiting.JOBS, self._turns.weights):
            any_now, due = self._look(limit, job_id)  # what came before the flag was up has rung nobody
            if any_now:
                return False
            until_due = LOOK if due is None else due - self._file.clock.now()
            return bell.sleep(min(left, LOOK, max(until_due, _SHORTEST)))

    # -- settling ---------------------------------------------------------------------

    def settle(self, outcomes: Sequence[Outcome]) -> list[Settlement]:
        return self.exchange(outcomes, 0)[0] if outcomes else []

    def exchange(self, outcomes: Sequence[Outcome], limit: int) -> tuple[list[Settlement], Taken]:
        self._check_open()
        if not outcomes:
            return [], self.take(limit)
        durable = any(outcome.pushes for outcome in outcomes)
        write = settle.settle

        def both(change: Change) -> tuple[list[Settlement], Taken]:
            settlements = write(change, outcomes, self._file.deleted)
            return settlements, self._take(change, limit) if limit > 0 else Taken([], None)

        try:
            return self._file.change(both, durable=durable)
        except settle.UNSTORABLE:
            write = settle.settle_carefully
            return self._file.change(both, durable=durable)

    def release(self, reservations: Sequence[Reservation]) -> None:
        self._check_open()
        if reservations:
            self._file.change(lambda change: settle.release(change, reservations))

    # -- while jobs run ---------------------------------------------------------------

    def extend(self, reservations: Sequence[Reservation], seconds: float | None = None) -> Extended:
        self._check_open()
        if not reservations:
            return Extended([], [])
        clock = self._file.clock

        def prolong(change: Change) -> Extended:
            (known,) = change.db.execute(queries.BOOT).fetchone()
            at_boot(change, known, clock.boot_id())
            return settle.extend(change, reservations, clock.lease_time(), seconds)

        return self._file.change(prolong)

    def note(self, notes: Sequence[Note]) -> list[str]:
        self._check_open()
        return self._file.change(lambda change: settle.note(change, notes)) if notes else []

    def cancellations(self) -> list[str]:
        self._check_open()
        found = self._file.read(lambda db: db.execute(queries.REQUESTED_OF, (self._worker,)).fetchall())
        return [job_id for (job_id,) in found]

    # -- the session ------------------------------------------------------------------

    def wake(self) -> None:
        if self._bell is None:
            self._woken_early = True
        else:
            self._bell.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.wake()
        self._file.sessions.discard(self)
        with self._using:
            if self._bell is not None:
                self._bell.close()
            if self._life is not None:
                self._life.release()

    def forget_parent(self) -> None:
        """In the child of a fork: let go of the parent's bell and lock, so that they die with the parent."""
        self._closed = True
        if self._bell is not None:
            self._bell.close()
        if self._life is not None:
            self._life.release()

    def _own_bell(self) -> Bell:
        if self._bell is None:
            self._bell = self._file.new_bell(self._worker)
            if self._woken_early:
                self._bell.wake()
        return self._bell

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise BackendError("a consumer does not cross a fork: open one in the child")
        if self._closed:
            raise BackendUnavailableError("this consumer is closed")
        self._file.check_open()
