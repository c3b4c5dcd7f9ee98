"""What one write transaction does to jobs, its bookkeeping included."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final

from taskq.backends import moves
from taskq.backends.sqlite import queries, rows
from taskq.backends.sqlite.accounts import ANNOUNCED, Accounts
from taskq.backends.sqlite.rows import CODES, Row
from taskq.clock import Clock
from taskq.job import Job, State

#: Rows that one transaction stages, expires or deletes at most: others wait for it.
STAGED = 200
RETIRED = 500
#: The deadline of a lease that does not end by time; the statements know it as 9e15.
NEVER = 9e15

_QUEUE_AND_STATE: Final = itemgetter(1, -1)

Saved = tuple[dict[tuple[str, int], int], dict[str, int], list[str], Accounts | None]


class Change:
    """Moves rows, keeps the counters in step, and remembers whom to wake once it is committed."""

    __slots__ = ("_counts", "clock", "db", "ended", "lanes", "now", "ready")

    def __init__(self, db: sqlite3.Connection, clock: Clock) -> None:
        self.db = db
        self.clock = clock
        self.now = clock.now()
        self.lanes: Accounts | None = None  #: where jobs in lanes were moved
        self.ready: dict[str, int] = {}  #: jobs that became pending, per queue
        self.ended: list[str] = []
        self._counts: dict[tuple[str, int], int] = {}

    # -- counters ---------------------------------------------------------------------

    def count(self, queue: str, code: int, n: int) -> None:
        """``n`` more jobs of ``queue`` are in this state (or fewer)."""
        key = (queue, code)
        self._counts[key] = self._counts.get(key, 0) + n

    def flush(self) -> None:
        """Write the counters; the last thing before the commit."""
        if self.lanes is not None:
            self.lanes.flush(self.db)
        changed = [(queue, code, n) for (queue, code), n in self._counts.items() if n]
        if changed:
            self.db.executemany(queries.COUNT, changed)

    def accounts(self) -> Accounts:
        """Where to say what becomes of jobs in lanes."""
        if self.lanes is None:
            self.lanes = Accounts()
        return self.lanes

    def pending(self, queue: str) -> int:
        """How many jobs of ``queue`` are pending, this transaction's included."""
        row = self.db.execute(queries.PENDING_COUNT, (queue,)).fetchone()
        return (row[0] if row else 0) + self._counts.get((queue, rows.PENDING), 0)

    # -- undoing a part ---------------------------------------------------------------

    def save(self) -> Saved:
        """A point to go back to."""
        self.db.execute("SAVEPOINT part")
        accounts = None if self.lanes is None else self.lanes.copy()
        return self._counts.copy(), self.ready.copy(), self.ended.copy(), accounts

    def restore(self, saved: Saved) -> None:
        """Undo what was done since."""
        self.db.execute("ROLLBACK TO part")
        self._counts, self.ready, self.ended, self.lanes = saved

    # -- in ---------------------------------------------------------------------------

    def insert(self, inserts: Sequence[Row]) -> int:
        """Store rows of ``rows.inserted``, and say how many; those whose id is there already change nothing."""
        stored = 0
        for row in inserts:
            if self.db.execute(queries.PUSH, row).rowcount:
                self._count_in([row])
                stored += 1
        return stored

    def insert_new(self, inserts: Sequence[Row]) -> bool:
        """The same, faster, for rows of which none is there yet; false, and to be undone, where one was."""
        if self.db.executemany(queries.PUSH, inserts).rowcount != len(inserts):
            return False
        self._count_in(inserts)
        return True

    def _count_in(self, inserts: Sequence[Row]) -> None:
        for (queue, code), n in Counter(map(_QUEUE_AND_STATE, inserts)).items():
            self.count(queue, code, n)
            if code == rows.PENDING:
                self.ready[queue] = self.ready.get(queue, 0) + n
        for row in inserts:
            lane = row[rows.INSERTED_LANE]
            if lane == ANNOUNCED:
                self.ready[row[1]] -= 1
            elif lane is not None and row[-1] == rows.PENDING:
                self.accounts().enter(*rows.lane_entry(row))

    # -- one job ----------------------------------------------------------------------

    def move(self, row: Row, move: moves.Move) -> None:
        """Let the job of ``row`` (all columns) be what ``move`` says."""
        job, attempt = move.job, move.attempt
        seq, tries = row[0], rows.tries(row)
        if attempt is not None:
            tries += 1
            self.db.execute(queries.RECORD, rows.recorded(attempt, seq, tries))
            self.db.execute(queries.RECORD_BOUND, (seq, tries))
        self.db.execute(queries.MOVE, rows.moved(job, seq, tries))
        self.count(row[rows.QUEUE], row[rows.STATE], -1)
        self.count(job.queue, CODES[job.state], 1)
        if job.state is State.PENDING:
            self.ready[job.queue] = self.ready.get(job.queue, 0) + 1
        elif job.state.ended:
            self.ended.append(job.id)
            if job.unique is not None:
                # Where the job completed, the rest of the period is kept.
                kept_from = self.now if job.state is State.COMPLETED else NEVER
                self.db.execute(queries.LET_GO, (job.id, kept_from))

        if row[rows.LANE] is not None:
            self._move_in_lane(row, job)

    def _move_in_lane(self, row: Row, job: Job) -> None:
        accounts, name, before = self.accounts(), row[rows.LANE], row[rows.STATE]
        accounts.moved(name)
        if before == rows.PENDING:
            accounts.leave(name, row[rows.QUEUE], row[rows.RANK])
        elif before == rows.RESERVED:
            unstarted = job.deliveries < rows.deliveries(row)
            accounts.back(name, known=rows.started(row) is not None, unstarted=unstarted)
            self.ready[job.queue] = self.ready.get(job.queue, 0) + 1  # there may be room for another now
        if job.state is State.PENDING:
            accounts.enter(name, job.queue, -job.priority, row[rows.WEIGHT])

    def unnoted(self, seqs: Iterable[int]) -> set[int]:
        """Which of these rows have no mark of their run."""
        return {seq for (seq,) in self.db.execute(queries.UNNOTED, (numbers(seqs),))}

    def reschedule(self, row: Row, job: Job) -> None:
        """Let the waiting job of ``row`` be ``job``, which differs in due time, arguments and expiry."""
        seq, queue, code = row[0], job.queue, CODES[job.state]
        self.db.execute(queries.RESCHEDULE, (code, job.due, job.payload, job.expires, seq))
        if code != row[rows.STATE]:
            if row[rows.LANE] is not None:
                self._move_in_lane(row, job)
            self.count(queue, row[rows.STATE], -1)
            self.count(queue, code, 1)
            self.ready[queue] = self.ready.get(queue, 0) + 1

    # -- many jobs --------------------------------------------------------------------

    def requests(self, seqs: str) -> dict[int, str]:
        """Cancel requests for these rows, with their reasons."""
        if not self.db.execute(queries.ANY_REQUEST).fetchone()[0]:
            return {}
        return dict(self.db.execute(queries.REQUESTS, (seqs,)).fetchall())

    def stage(self, queue: str) -> float | None:
        """Make a few jobs pending that have become due; returns when the next one is."""
        (due,) = self.db.execute(queries.NEXT_DUE, (queue,)).fetchone()
        if due is None or due > self.now:
            return due  # type: ignore[no-any-return]
        found = self.db.execute(queries.STAGE, (queue, self.now, STAGED)).fetchall()
        staged = len(found)
        for name, rank, weight in found:
            if name is not None:
                self.accounts().moved(name)
                self.accounts().enter(name, queue, rank, weight)
        self.count(queue, rows.SCHEDULED, -staged)
        self.count(queue, rows.PENDING, staged)
        self.ready[queue] = self.ready.get(queue, 0) + staged
        (due,) = self.db.execute(queries.NEXT_DUE, (queue,)).fetchone()
        return due  # type: ignore[no-any-return]

    def expire(self, late: Iterable[Row]) -> None:
        """End jobs that it is too late to start."""
        for row in late:
            job = rows.full(row)
            if job.state is State.RESERVED:  # claimed a moment ago, in this transaction
                job = replace(job, deliveries=job.deliveries - 1)
            self.move(row, moves.Move(moves.end(job, State.CANCELLED, self.now, error=moves.EXPIRED)))

    def retire(self, query: str, parameters: Sequence[object]) -> int:
        """Delete rows by a statement that returns their queues and states."""
        deleted = self.db.execute(query, parameters).fetchall()
        for queue, code, name, rank in deleted:
            self.count(queue, code, -1)
            if name is not None:
                self.accounts().moved(name)
                if code == rows.PENDING:
                    self.accounts().leave(name, queue, rank)
        return len(deleted)


def numbers(values: Iterable[int]) -> str:
    """A JSON list of numbers, for ``json_each``."""
    return f"[{','.join(map(str, values))}]"


def lost(change: Change, overdue: Sequence[Row]) -> list[tuple[Job, moves.Move]]:
    """Take back reservations that are over."""
    seqs = numbers(row[0] for row in overdue)
    requests = change.requests(seqs)
    found = []
    for row in overdue:
        job = rows.full(row)
        move = moves.lost(job, rows.started(row), change.now, cancel=requests.get(row[0]))
        change.move(row, move)
        found.append((job, move))
    if overdue:
        change.db.execute(queries.UNFENCE, (seqs,))
    if requests:
        change.db.execute(queries.DROP_REQUESTS, (seqs,))
    return found


def at_boot(change: Change, known: str, boot: str) -> None:
    """End every reservation of another boot at once: its clock means nothing in this one."""
    if known != boot:
        change.db.execute(queries.END_LEASES)
        for query in queries.OPEN_ALL:
            change.db.execute(query)
        change.db.execute(queries.SET_BOOT, (boot,))
