"""All the jobs, under one lock."""

from __future__ import annotations

import heapq
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from taskq.backends import holding, moves, overflow
from taskq.backends.memory.lanes import Lanes, stands
from taskq.clock import Clock
from taskq.errors import BackendUnavailableError, IllegalMoveError
from taskq.job import (
    KEPT_ATTEMPTS,
    MOVES,
    Attempt,
    Job,
    Lane,
    State,
)

#: Completed jobs remembered per queue.
MAX_FINISHED: Final = 100_000


@dataclass(slots=True)
class Row:
    """One job and what only the backend knows of it."""

    job: Job
    seq: int
    token: int = 0
    deadline: float | None = None  #: on the lease clock; ``None``: never by time
    boot: str = ""
    started: float | None = None
    cancel: str | None = None  #: the reason, once somebody asked
    progress: bytes | None = None
    history: list[Attempt] = field(default_factory=list)

    def order(self) -> tuple[float, ...]:
        """Where the row stands in a listing of its state."""
        job = self.job
        if job.state is State.PENDING:
            return (-job.priority, job.due, self.seq)
        if job.state is State.SCHEDULED:
            return (job.due, self.seq)
        if job.ended is not None:
            return (job.ended, self.seq)
        return (self.seq,)

    def full(self) -> Job:
        return replace(self.job, history=tuple(self.history)) if self.history else self.job


class Shelf:
    """All the rows, under one lock. Except ``open``, call nothing without it."""

    def __init__(self, clock: Clock, lanes: Lanes) -> None:
        self.clock = clock
        self.lanes = lanes
        # Re-entrant, so that a signal handler which wakes a consumer cannot deadlock with its own thread.
        self.changed = threading.Condition(threading.RLock())
        self.rows: dict[str, Row] = {}
        self.counts: defaultdict[str, Counter[State]] = defaultdict(Counter)
        # Heaps per queue of (order..., id); an entry whose row has moved on is skipped when it surfaces.
        self.pending: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self.scheduled: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self.announced: set[str] = set()  # jobs that wait for a broker's message
        self.called: set[str] = set()  # workers that should look at their cancellations
        self.keys: dict[str, holding.Hold] = {}
        self.gone: dict[tuple[str, int], None] = {}  # settled and deleted, latest last
        self.open_workers: Counter[str] = Counter()
        self.token = 0
        self.closed = False
        self._seq = 0

    def open(self) -> threading.Condition:
        self.check_open()
        return self.changed

    def check_open(self) -> None:
        if self.closed:
            raise BackendUnavailableError("this backend is closed")

    def of(self, queue: str, state: State) -> Iterable[Row]:
        return (row for row in self.rows.values() if row.job.state is state and row.job.queue == queue)

    def insert(self, job: Job) -> str:
        """Store ``job``, or do what its key demands; returns the id that stands for it."""
        now = self.clock.now()
        if job.id in self.rows:
            return job.id
        standing = self._meet(job, now)
        if standing is not None:
            return standing
        due, state = moves.arrival(job, now)
        self._seq += 1
        fresh = replace(
            job,
            due=due,
            state=state,
            created=job.created or now,
            ended=None,
            worker=None,
            result=None,
            history=(),
        )
        lane = overflow.bounded(job, now)
        full = lane is not None and lane.most is not None and self.lanes.waiting(lane) >= lane.most
        row = self.rows[job.id] = Row(fresh, self._seq)
        self.counts[job.queue][state] += 1
        self._line_up(row, None)
        if job.unique is not None:
            self.keys[job.unique.key] = holding.taken(fresh, now)
        if lane is not None and full:
            self._spill(row, lane)
        return job.id

    # -- full lines -------------------------------------------------------------------

    def refuse_full(self, jobs: Iterable[Job]) -> None:
        """Raise if one of ``jobs``, pushed in that order, had to be refused because its line is full."""
        now, coming = self.clock.now(), Counter[str]()
        for job in {job.id: job for job in jobs}.values():
            lane = overflow.bounded(job, now)
            held = job.unique is not None and holding.meet(job, *self.hold(job.unique.key), now)
            if lane is None or job.id in self.rows or held not in (False, holding.Meeting.FREE):
                continue
            coming[lane.name] += 1
            if lane.overflow == "raise" and self.lanes.waiting(lane) + coming[lane.name] > (lane.most or 0):
                overflow.refuse(job, lane)

    def _spill(self, row: Row, lane: Lane) -> None:
        """End the newest or the oldest job of a line that holds one too many."""
        now = self.clock.now()
        if lane.overflow == "drop_oldest":
            others = (
                other
                for other in self.rows.values()
                if other is not row
                and other.job.state is State.PENDING
                and other.job.lane is not None
                and other.job.lane.name == lane.name
            )
            oldest = min(others, key=lambda other: (other.job.priority, other.job.due, other.seq))
            self.place(oldest, overflow.displaced(oldest.job, row.job, now))
        else:
            self.place(row, overflow.dropped(row.job, now))

    # -- unique keys ------------------------------------------------------------------

    def hold(self, key: str) -> tuple[holding.Hold | None, Job | None]:
        hold = self.keys.get(key)
        row = self.rows.get(hold.job_id) if hold else None
        return hold, row.job if row else None

    def _meet(self, job: Job, now: float) -> str | None:
        """Deal with the holder of the job's key; returns the id that stands for the job, ``None`` to store it."""
        hold, holder = self.hold(job.unique.key) if job.unique else (None, None)
        meeting = holding.meet(job, hold, holder, now)
        if hold is None or meeting is holding.Meeting.FREE:
            return None
        if holder is not None and meeting is holding.Meeting.REPLACE:
            self.place(self.rows[holder.id], holding.replaced(holder, job, now))
            return None
        if holder is not None and meeting is holding.Meeting.RESCHEDULE:
            row, changed = self.rows[holder.id], holding.rescheduled(holder, job, hold.latest, now)
            if changed.state is not holder.state:
                self.place(row, changed)
            else:
                row.job = changed
                self._line_up(row, holder)
        return hold.job_id

    def retake(self, job: Job) -> bool:
        """Before a revival: take the job's key again; false where another holds it."""
        if job.unique is None or not holding.retakes(job):
            return True
        hold, holder = self.hold(job.unique.key)
        if hold and hold.job_id != job.id and holding.holds(hold, holder, self.clock.now()):
            return False
        self.keys[job.unique.key] = holding.Hold(job.id, job.unique.until, 0.0, None)
        return True

    def _let_go(self, job: Job) -> None:
        hold = self.keys.get(job.unique.key) if job.unique else None
        if job.unique and hold and hold.job_id == job.id and not holding.outlives(hold, job):
            del self.keys[job.unique.key]

    def let_go_of_spent(self) -> None:
        now = self.clock.now()
        for key, hold in list(self.keys.items()):
            if hold.ends <= now and hold.job_id not in self.rows:
                del self.keys[key]

    # -- rows -------------------------------------------------------------------------

    def place(self, row: Row, job: Job) -> None:
        """Let ``row`` be ``job`` from now on: the one place where a state changes."""
        before, row.job = row.job, job
        if job.state not in MOVES[before.state]:
            raise IllegalMoveError(f"job {job.id} cannot go from {before.state} to {job.state}")
        self.counts[before.queue][before.state] -= 1
        self.counts[job.queue][job.state] += 1
        self._line_up(row, before)
        if job.state is not State.RESERVED:
            row.started = row.deadline = None
        if job.state.ended:
            row.cancel = None
            self._let_go(job)

    def apply(self, row: Row, move: moves.Move) -> None:
        if move.attempt:
            row.history = [*row.history, move.attempt][-KEPT_ATTEMPTS:]
        self.place(row, move.job)

    def is_pending(self, job_id: str) -> bool:
        return self.rows[job_id].job.state is State.PENDING

    def disclose(self, row: Row) -> None:
        """Let takes see a job that was announced."""
        self.announced.discard(row.job.id)
        self._line_up(row, row.job)

    def _line_up(self, row: Row, before: Job | None) -> None:
        if row.job.id in self.announced:
            if row.job.state is State.PENDING:
                return
            self.announced.discard(row.job.id)
        if row.job.lane is not None:
            self.lanes.moved(row, before, row.job)
        if row.job.lane is not None and row.job.state is State.PENDING:
            return
        line = {State.PENDING: self.pending, State.SCHEDULED: self.scheduled}.get(row.job.state)
        if line is not None:
            heapq.heappush(line[row.job.queue], (*row.order(), row.job.id))

    def drop(self, rows: Sequence[Row]) -> int:
        for row in rows:
            del self.rows[row.job.id]
            self.announced.discard(row.job.id)
            if row.job.lane is not None:
                self.lanes.moved(row, row.job, None)
            self._let_go(row.job)
            self.counts[row.job.queue][row.job.state] -= 1
        self.changed.notify_all()
        return len(rows)

    def head(self, line: list[tuple[Any, ...]], state: State, queue: str) -> Row | None:
        while line:
            row = self.rows.get(line[0][-1])
            if row and row.job.state is state and row.job.queue == queue and row.order() == line[0][:-1]:
                return row
            heapq.heappop(line)
        return None

    def waits(self, job_id: str, place: tuple[str, str, int]) -> Row | None:
        """The row, if it waits in that line and its task is not paused; one that is too late ends here."""
        row = self.rows.get(job_id)
        if row is None or not stands(row.job, place) or row.job.task in self.lanes.stopped["task"]:
            return None
        if moves.expired(row.job, self.clock.now()):
            self.place(row, moves.end(row.job, State.CANCELLED, self.clock.now(), error=moves.EXPIRED))
            return None
        return row

    def stage(self, queues: Iterable[str]) -> float | None:
        """Move what is due from SCHEDULED to PENDING; returns when the next one is due."""
        now = self.clock.now()
        times: list[float] = []
        for queue in queues:
            line = self.scheduled[queue]
            while (row := self.head(line, State.SCHEDULED, queue)) and row.job.due <= now:
                self.place(row, replace(row.job, state=State.PENDING))
            if row:
                times.append(row.job.due)
        return min(times, default=None)
