"""The backend: what is asked of all jobs at once, and the store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from taskq.backend import (
    Cancellation,
    Capabilities,
    Consumer,
    Page,
    Reclaimed,
    Scope,
)
from taskq.backends import holding, moves
from taskq.backends.memory.consumer import MemoryConsumer
from taskq.backends.memory.lanes import Lanes
from taskq.backends.memory.shelf import MAX_FINISHED, Row, Shelf
from taskq.backends.turns import Turns
from taskq.clock import SYSTEM_CLOCK, Clock
from taskq.errors import InvalidArgumentError
from taskq.job import (
    Job,
    State,
)
from taskq.limits import Limits
from taskq.store import Ledger, ScheduleRecord, WorkerInfo

#: Workers are forgotten when unheard of for this long, in seconds.
WORKER_SILENCE: Final = 120.0

_CAPABILITIES = Capabilities(
    name="memory",
    leases="timed",
    fencing=True,
    attempts="exact",
    priority="strict",
    size="exact",
    scheduled="visible",
    dead_listing="safe",
    revive="once",
    pause="durable",
    order="fifo",
    persistent=False,
    shared=False,
    stores=True,
)


class MemoryBackend(Ledger):
    """Everything under one lock."""

    def __init__(
        self, *, clock: Clock = SYSTEM_CLOCK, max_finished: int = MAX_FINISHED, ageing: float | None = None
    ) -> None:
        self._clock = clock
        self._max_finished = max_finished
        self._shelf = Shelf(clock, Lanes(clock, ageing))
        self._workers: dict[str, WorkerInfo] = {}
        self._schedules: dict[str, ScheduleRecord] = {}

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def location(self) -> str:
        return "memory://"

    # -- jobs in ----------------------------------------------------------------------

    def push(self, jobs: Sequence[Job]) -> list[str]:
        with self._shelf.open():
            holding.refuse_any(jobs, self._shelf.hold, self._clock.now())
            self._shelf.refuse_full(jobs)
            ids = [self._shelf.insert(job) for job in jobs]
            self._shelf.changed.notify_all()
        return ids

    def announce(self, jobs: Sequence[Job]) -> list[str]:
        with self._shelf.open():
            new = {job.id for job in jobs if job.lane is None} - self._shelf.rows.keys()
            self._shelf.announced |= new
            try:
                return self.push(jobs)
            finally:
                # Those that were dropped, or are due later, are not announced.
                waiting = {i for i in new if i in self._shelf.rows and self._shelf.is_pending(i)}
                self._shelf.announced -= new - waiting

    def adopt(self, queue: str, before: float, *, limit: int = 500) -> int:
        with self._shelf.open():
            rows = [self._shelf.rows[job_id] for job_id in self._shelf.announced]
            late = [row for row in rows if row.job.queue == queue and row.job.due < before][:limit]
            for row in late:
                self._shelf.disclose(row)
            self._shelf.changed.notify_all()
            return len(late)

    def consume(self, queues: Mapping[str, int], worker: str) -> Consumer:
        with self._shelf.open():
            self._shelf.open_workers[worker] += 1
            return MemoryConsumer(self._shelf, Turns(queues), worker)

    # -- looking ----------------------------------------------------------------------

    def counts(self, queue: str | None = None) -> dict[str, dict[State, int]]:
        with self._shelf.open():
            names = list(self._shelf.counts) if queue is None else [queue]
            found = {name: {s: n for s, n in self._shelf.counts[name].items() if n} for name in names}
        return {name: states for name, states in found.items() if states}

    def list_jobs(self, queue: str, state: State, *, limit: int = 100, cursor: str | None = None) -> Page:
        with self._shelf.open():
            rows = sorted(self._shelf.of(queue, state), key=Row.order)
            if cursor is not None:
                after = _parse_cursor(cursor)
                rows = [row for row in rows if row.order() > after]
            page = rows[:limit]
            more = json.dumps(page[-1].order()) if len(rows) > limit and page else None
            return Page([row.full() for row in page], more)

    def find(self, job_id: str) -> Job | None:
        with self._shelf.open():
            row = self._shelf.rows.get(job_id)
            return row.full() if row else None

    def progress(self, job_id: str) -> bytes | None:
        with self._shelf.open():
            row = self._shelf.rows.get(job_id)
            return row.progress if row else None

    def wait(self, ids: Sequence[str], timeout: float | None = None) -> list[str]:
        with self._shelf.open():
            done: list[str] = []

            def look() -> bool:
                self._shelf.check_open()
                done.extend(
                    i for i in ids if i not in self._shelf.rows or self._shelf.rows[i].job.state.ended
                )
                return bool(done)

            self._shelf.changed.wait_for(look, timeout)
            return done

    # -- changing what waits or has ended ---------------------------------------------

    def revive(self, queue: str, ids: Sequence[str] | None = None, *, due: float = 0.0) -> list[str]:
        with self._shelf.open():
            rows = sorted(self._shelf.of(queue, State.DEAD), key=Row.order)
            wanted = None if ids is None else set(ids)
            chosen = [row for row in rows if wanted is None or row.job.id in wanted]
            revived: list[str] = []
            for row in chosen:
                if self._shelf.retake(row.job):
                    self._shelf.place(row, moves.revived(row.job, due, self._clock.now()))
                    revived.append(row.job.id)
            self._shelf.changed.notify_all()
            return revived

    def hasten(self, queue: str, ids: Sequence[str]) -> list[str]:
        with self._shelf.open():
            wanted = set(ids)
            rows = [row for row in self._shelf.of(queue, State.SCHEDULED) if row.job.id in wanted]
            now = self._clock.now()
            for row in sorted(rows, key=Row.order):
                self._shelf.place(row, moves.hastened(row.job, now))
            self._shelf.changed.notify_all()
            return [row.job.id for row in rows]

    def purge(self, queue: str, state: State) -> int:
        if state is State.RESERVED:
            raise InvalidArgumentError("reserved jobs cannot be purged; cancel them instead")
        with self._shelf.open():
            return self._shelf.drop(list(self._shelf.of(queue, state)))

    def forget(self, ids: Sequence[str]) -> int:
        with self._shelf.open():
            rows = (self._shelf.rows.get(job_id) for job_id in dict.fromkeys(ids))
            return self._shelf.drop([row for row in rows if row and row.job.state.ended])

    def pause(self, name: str, what: Scope = "queue") -> None:
        with self._shelf.open():
            self._shelf.lanes.stopped[what].add(name)

    def resume(self, name: str, what: Scope = "queue") -> None:
        with self._shelf.open():
            self._shelf.lanes.stopped[what].discard(name)
            for row in self._shelf.rows.values():
                if what == "task" and row.job.task == name and row.job.state is State.PENDING:
                    self._shelf.lanes.stand(row)  # a plan may have passed it over for good
            self._shelf.changed.notify_all()

    def paused(self, what: Scope = "queue") -> set[str]:
        with self._shelf.open():
            return set(self._shelf.lanes.stopped[what])

    def declare_limits(self, limits: Sequence[Limits]) -> list[str]:
        with self._shelf.open():
            changed = self._shelf.lanes.declare(limits)
            self._shelf.changed.notify_all()
            return changed

    def limits(self) -> dict[str, Limits]:
        with self._shelf.open():
            return dict(self._shelf.lanes.limits)

    def cancel(self, ids: Sequence[str], *, reason: str = "") -> dict[str, Cancellation]:
        with self._shelf.open():
            answers = {job_id: self._cancel(self._shelf.rows.get(job_id), reason) for job_id in ids}
            self._shelf.changed.notify_all()
            return answers

    def _cancel(self, row: Row | None, reason: str) -> Cancellation:
        if row is None:
            return Cancellation.UNKNOWN
        if row.job.state.ended:
            return Cancellation.ENDED
        if row.job.state is State.RESERVED:
            row.cancel = row.cancel or reason
            self._shelf.called.add(row.job.worker or "")
            return Cancellation.REQUESTED
        self._shelf.place(
            row, moves.end(row.job, State.CANCELLED, self._clock.now(), error=moves.cancelled(reason))
        )
        return Cancellation.CANCELLED

    # -- upkeep -----------------------------------------------------------------------

    def reclaim(self, *, limit: int = 500) -> Reclaimed:
        found = Reclaimed([], [], [])
        with self._shelf.open():
            over = (row for row in self._shelf.rows.values() if self._lease_over(row))
            for row in [row for row, _ in zip(over, range(limit), strict=False)]:
                move = moves.lost(row.job, row.started, self._clock.now(), cancel=row.cancel)
                row.token = 0
                self._shelf.apply(row, move)
                if move.job.state is State.DEAD:
                    found.buried.append(row.job.id)
                elif move.attempt:
                    found.retried.append(row.job.id)
                elif move.job.state is State.PENDING:
                    found.suspects.append(row.job.id)
            self._shelf.changed.notify_all()
        return found

    def _lease_over(self, row: Row) -> bool:
        if row.job.state is not State.RESERVED:
            return False
        if row.boot != self._clock.boot_id():
            return True
        if row.deadline is None:
            # In one process, a session that is closed is the proof that its worker is gone.
            return not self._shelf.open_workers[row.job.worker or ""]
        return row.deadline <= self._clock.lease_time()

    def housekeep(self) -> float | None:
        with self._shelf.open():
            now = self._clock.now()
            self._shelf.stage(list(self._shelf.scheduled))
            waiting = (State.PENDING, State.SCHEDULED)
            for row in list(self._shelf.rows.values()):
                if row.job.state in waiting and moves.expired(row.job, now):
                    self._shelf.place(row, moves.end(row.job, State.CANCELLED, now, error=moves.EXPIRED))
            self._shelf.drop(
                [row for row in self._shelf.rows.values() if (moves.forget_at(row.job) or now + 1) <= now]
            )
            self._shelf.let_go_of_spent()
            for queue in list(self._shelf.counts):
                surplus = self._shelf.counts[queue][State.COMPLETED] - self._max_finished
                if surplus > 0:
                    self._shelf.drop(sorted(self._shelf.of(queue, State.COMPLETED), key=Row.order)[:surplus])
            self._shelf.changed.notify_all()
            return self._next_wish(now)

    def _next_wish(self, now: float) -> float | None:
        times: list[float | None] = []
        for row in self._shelf.rows.values():
            times.append(moves.forget_at(row.job))
            if row.job.state in (State.PENDING, State.SCHEDULED):
                times.append(row.job.expires)
            if row.job.state is State.SCHEDULED:
                times.append(row.job.due)
        known = [t for t in times if t is not None]
        return max(0.0, min(known) - now) if known else None

    # -- workers and schedules --------------------------------------------------------

    def heartbeat(self, worker: WorkerInfo) -> None:
        with self._shelf.open():
            self._workers[worker.id] = worker

    def workers(self) -> list[WorkerInfo]:
        with self._shelf.open():
            oldest = self._clock.now() - WORKER_SILENCE
            self._workers = {i: w for i, w in self._workers.items() if w.seen >= oldest}
            return sorted(self._workers.values(), key=lambda worker: (worker.started, worker.id))

    def forget_worker(self, worker_id: str) -> None:
        with self._shelf.open():
            self._workers.pop(worker_id, None)

    def schedules(self) -> list[ScheduleRecord]:
        with self._shelf.open():
            return [self._schedules[name] for name in sorted(self._schedules)]

    def write_schedule(self, record: ScheduleRecord, jobs: Sequence[Job] = ()) -> bool:
        with self._shelf.open():
            there = self._schedules.get(record.name)
            if record.revision != (there.revision if there else 0):
                return False
            self._schedules[record.name] = replace(record, revision=record.revision + 1)
            for job in jobs:
                self._shelf.insert(job)
            self._shelf.changed.notify_all()
            return True

    def remove_schedule(self, name: str) -> bool:
        with self._shelf.open():
            return self._schedules.pop(name, None) is not None

    def close(self) -> None:
        with self._shelf.changed:
            self._shelf.closed = True
            self._shelf.changed.notify_all()


def _parse_cursor(cursor: str) -> tuple[float, ...]:
    try:
        return tuple(json.loads(cursor))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{cursor!r} is not a cursor of this listing") from error
