"""Jobs in this process's memory: for tests and single-process use, and the shortest statement of the rules."""
# budget: 800 lines: the whole contract in one piece, as the specification that the others are read against

from __future__ import annotations

import heapq
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

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
from taskq.backends import holding, moves, overflow, suggestion
from taskq.backends.memory_lanes import Lanes, next_time, stands
from taskq.backends.turns import Turns
from taskq.clock import SYSTEM_CLOCK, Clock, monotonic
from taskq.errors import BackendUnavailableError, ConfigurationError, IllegalMoveError, InvalidArgumentError
from taskq.job import (
    KEPT_ATTEMPTS,
    MOVES,
    Attempt,
    Job,
    Lane,
    Outcome,
    Reservation,
    Settlement,
    State,
    Verdict,
)
from taskq.limits import Limits
from taskq.store import ScheduleRecord, Store, WorkerInfo

#: Completed jobs remembered per queue.
MAX_FINISHED: Final = 100_000
#: Workers are forgotten when unheard of for this long, in seconds.
WORKER_SILENCE: Final = 120.0
#: Longest sleep of a blocked wait: the wall clock may be stepped under it.
_LOOK: Final = 1.0

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


def open_url(
    url: str, *, clock: Clock = SYSTEM_CLOCK, publish_timeout: float | None = None, **options: Any
) -> MemoryBackend:
    """``memory://``: a new, empty backend with every call. ``ageing`` as in SQLite's."""
    if url.partition("://")[2]:
        raise ConfigurationError(f"{url!r}: memory:// takes no path and no parameters")
    for name in options.keys() - {"ageing", "max_finished"}:
        raise ConfigurationError(
            f"memory:// has no option {name!r}{suggestion(name, ['ageing', 'max_finished'])}"
        )
    return MemoryBackend(clock=clock, **options)


@dataclass(slots=True)
class _Row:
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


class MemoryBackend(Backend, Store):
    """Everything under one lock."""

    def __init__(
        self, *, clock: Clock = SYSTEM_CLOCK, max_finished: int = MAX_FINISHED, ageing: float | None = None
    ) -> None:
        self._clock = clock
        self._max_finished = max_finished
        self._shelf = _Shelf(clock, Lanes(clock, ageing))
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

    def consume(self, queues: Mapping[str, int], worker: str) -> Consumer:
        with self._shelf.open():
            self._shelf.open_workers[worker] += 1
            return _MemoryConsumer(self._shelf, Turns(queues), worker)

    # -- looking ----------------------------------------------------------------------

    def counts(self, queue: str | None = None) -> dict[str, dict[State, int]]:
        with self._shelf.open():
            names = list(self._shelf.counts) if queue is None else [queue]
            found = {name: {s: n for s, n in self._shelf.counts[name].items() if n} for name in names}
        return {name: states for name, states in found.items() if states}

    def list_jobs(self, queue: str, state: State, *, limit: int = 100, cursor: str | None = None) -> Page:
        with self._shelf.open():
            rows = sorted(self._shelf.of(queue, state), key=_Row.order)
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
            rows = sorted(self._shelf.of(queue, State.DEAD), key=_Row.order)
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
            for row in sorted(rows, key=_Row.order):
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

    def _cancel(self, row: _Row | None, reason: str) -> Cancellation:
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

    def _lease_over(self, row: _Row) -> bool:
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
                    self._shelf.drop(sorted(self._shelf.of(queue, State.COMPLETED), key=_Row.order)[:surplus])
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


class _Shelf:
    """All the rows, under one lock. Except ``open``, call nothing without it."""

    def __init__(self, clock: Clock, lanes: Lanes) -> None:
        self.clock = clock
        self.lanes = lanes
        # Re-entrant, so that a signal handler which wakes a consumer cannot deadlock with its own thread.
        self.changed = threading.Condition(threading.RLock())
        self.rows: dict[str, _Row] = {}
        self.counts: defaultdict[str, Counter[State]] = defaultdict(Counter)
        # Heaps per queue of (order..., id); an entry whose row has moved on is skipped when it surfaces.
        self.pending: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self.scheduled: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
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

    def of(self, queue: str, state: State) -> Iterable[_Row]:
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
        row = self.rows[job.id] = _Row(fresh, self._seq)
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

    def _spill(self, row: _Row, lane: Lane) -> None:
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

    def place(self, row: _Row, job: Job) -> None:
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

    def apply(self, row: _Row, move: moves.Move) -> None:
        if move.attempt:
            row.history = [*row.history, move.attempt][-KEPT_ATTEMPTS:]
        self.place(row, move.job)

    def _line_up(self, row: _Row, before: Job | None) -> None:
        if row.job.lane is not None:
            self.lanes.moved(row, before, row.job)
        if row.job.lane is not None and row.job.state is State.PENDING:
            return
        line = {State.PENDING: self.pending, State.SCHEDULED: self.scheduled}.get(row.job.state)
        if line is not None:
            heapq.heappush(line[row.job.queue], (*row.order(), row.job.id))

    def drop(self, rows: Sequence[_Row]) -> int:
        for row in rows:
            del self.rows[row.job.id]
            if row.job.lane is not None:
                self.lanes.moved(row, row.job, None)
            self._let_go(row.job)
            self.counts[row.job.queue][row.job.state] -= 1
        self.changed.notify_all()
        return len(rows)

    def head(self, line: list[tuple[Any, ...]], state: State, queue: str) -> _Row | None:
        while line:
            row = self.rows.get(line[0][-1])
            if row and row.job.state is state and row.job.queue == queue and row.order() == line[0][:-1]:
                return row
            heapq.heappop(line)
        return None

    def waits(self, job_id: str, place: tuple[str, str, int]) -> _Row | None:
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


class _MemoryConsumer(Consumer):
    def __init__(self, shelf: _Shelf, turns: Turns, worker: str) -> None:
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

    def _next(self, limit: int, queues: Sequence[str]) -> list[_Row]:
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

    def _line(self, queue: str, limit: int) -> list[_Row]:
        """The first ``limit`` jobs of ``queue``; those too late to start end here."""
        shelf = self._shelf
        heap = shelf.pending[queue]
        found: dict[int, _Row] = {}  # by seq: a job that came back may stand in the heap twice
        stopped: list[_Row] = []
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

    def _one(self, job_id: str, queues: Sequence[str]) -> list[_Row]:
        row = self._shelf.rows.get(job_id)
        if row is None or row.job.state is not State.PENDING or row.job.queue not in queues:
            return []
        lendable = self._shelf.lanes.one(row, self._shelf.waits)
        return [row] if lendable and not moves.expired(row.job, self._shelf.clock.now()) else []

    def _lend(self, row: _Row) -> Reservation:
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
        def give_back(row: _Row) -> None:
            self._shelf.place(row, moves.released(row.job, self._shelf.clock.now(), cancel=row.cancel))

        self._each(reservations, give_back)

    # -- while it runs ----------------------------------------------------------------

    def extend(self, reservations: Sequence[Reservation], seconds: float | None = None) -> Extended:
        cancelled: list[str] = []

        def prolong(row: _Row) -> None:
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

            def mark(row: _Row, note: Note = note) -> None:
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

    def _held(self, reservation: Reservation) -> _Row | None:
        row = self._shelf.rows.get(reservation.job.id)
        if row is None or row.job.state is not State.RESERVED or row.token != reservation.token:
            return None
        return row

    def _each(self, reservations: Sequence[Reservation], act: Callable[[_Row], None]) -> list[str]:
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


def _parse_cursor(cursor: str) -> tuple[float, ...]:
    try:
        return tuple(json.loads(cursor))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{cursor!r} is not a cursor of this listing") from error
