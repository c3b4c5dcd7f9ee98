"""Lanes: which jobs with limits, sequences or fair shares a take may lend, and whose turn it is.

A claim looks at lanes, not at their jobs, so what waits in a lane that has no room costs nothing, however much it
is. ``open`` of lanes and gates is a hint: whatever may make room sets it (triggers in the schema, time, a new
declaration), and a claim that finds no room takes it back. The gates' accounts decide.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgpack

from taskq.backends.shares import Gate, Line, key_gate, pick, task_gate
from taskq.backends.sqlite import queries, rows
from taskq.backends.sqlite.accounts import ASIDE
from taskq.backends.sqlite.change import Change, numbers
from taskq.backends.sqlite.rows import Row
from taskq.clock import Clock
from taskq.job import MAX_PRIORITY
from taskq.limits import Limits, Rate

#: Separates task and key in the names of lanes and gates.
_UNIT: Final = "\x1f"
#: Ageing raises a priority to this at most.
_HIGHEST: Final = 99


class Special(NamedTuple):
    """What keeps a take from being a plain claim."""

    queues: frozenset[str] = frozenset()  #: that are paused
    tasks: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    lanes: bool = False  #: jobs wait in lanes


def special(db: sqlite3.Connection) -> Special | None:
    """What is special at present; ``None`` for nothing."""
    found = db.execute(queries.SPECIAL).fetchall()
    if not found:
        return None
    queues, tasks, keys = (
        frozenset(name for kind, name in found if kind == what) for what in ("queue", "task", "key")
    )
    return Special(queues, tasks, keys, ("lane", "") in found)


@dataclass(slots=True)
class Place:
    """What a line of a plan stands for: a lane, or the numbers of jobs without one."""

    rank: int
    name: str | None = None
    gates: tuple[str, ...] = ()
    seqs: Sequence[int] = ()


@dataclass(slots=True)
class Plan:
    """Whose turn it would be in one queue."""

    queue: str
    order: list[Line]
    clocks: dict[int, float]
    plain: dict[int, float]


class Lanes:
    """The lanes as one transaction sees them."""

    def __init__(self, change: Change, stopped: Special | None, ageing: float | None = None) -> None:
        self._change = change
        self._db = change.db
        self._stopped = stopped or Special()
        self._ageing = ageing
        self._now = change.clock.lease_time()
        self._gates: dict[str, Gate] = {}
        self._rules: dict[str, Limits | None] = {}
        if change.lanes is not None:
            change.lanes.flush(change.db)  # what this transaction has settled counts already
        if self._stopped.lanes:
            self._open_due()

    # -- what is there ----------------------------------------------------------------

    def concerned(self, queue: str) -> bool:
        """Whether a plain claim would not do for ``queue``."""
        if self._ageing is not None or self._stopped.tasks:
            return True
        return self._stopped.lanes and bool(self._db.execute(queries.LANES, (queue,)).fetchone()[0])

    def _open_due(self) -> None:
        """Open the gates whose time has come."""
        for (name,) in self._db.execute(queries.DUE_GATES, (self._now,)).fetchall():
            self._db.execute(queries.OPEN_GATE, (name,))
            if _UNIT in name:
                self._db.execute(queries.OPEN_KEY, (name, name))

    def plan(self, queue: str, limit: int) -> Plan:
        """Whose turn it is, for at most ``limit`` jobs of ``queue``."""
        turns = self._db.execute(queries.TURNS, (queue,)).fetchall()
        clocks = {rank: vtime for rank, vtime, _ in turns}
        plain = {rank: had for rank, _, had in turns}
        lines = [*self._plain_lines(queue, limit, plain)]
        for task in tasks_waiting(self._db, queue):
            if task not in self._stopped.tasks:
                lines += self._task_lines(queue, task, limit)
        return Plan(queue, pick(limit, lines, clocks), clocks, plain)

    def one(self, job_id: str, names: str) -> tuple[Plan, int] | None:
        """A plan for that job alone, if it waits in a lane that has room now; and its number."""
        found = self._db.execute(queries.ONE_LANE, (job_id, names)).fetchone()
        if found is None:
            return None
        seq, queue, rank, name, vtime, weight, task, key = found
        if task in self._stopped.tasks:
            return None
        if task and self._gate(task).room <= 0:
            self._shut_gate(task)
            return None
        line = self._line(queue, task, (name, rank, vtime, weight, 1, key))
        if line is None or (name[0] == "=" and self._db.execute(queries.HEAD, (name,)).fetchone()[0] != seq):
            return None
        turns = self._db.execute(queries.TURNS, (queue,)).fetchall()
        clocks = {rank: vtime for rank, vtime, _ in turns}
        return Plan(queue, pick(1, [line], clocks), clocks, {rank: had for rank, _, had in turns}), seq

    # -- lines ------------------------------------------------------------------------

    def _plain_lines(self, queue: str, limit: int, had: Mapping[int, float]) -> Iterator[Line]:
        if self._ageing is None:
            found = self._db.execute(queries.PLAIN, (queue, limit)).fetchall()
        else:
            found = []
            for rank in range(-MAX_PRIORITY, 1):
                found += self._db.execute(queries.PLAIN_OF, (queue, rank, limit)).fetchall()
        ranked = sorted((self._aged(rank, due), due, seq) for seq, rank, due in found)[:limit]
        groups: dict[int, list[int]] = {}
        for rank, _, seq in ranked:
            groups.setdefault(rank, []).append(seq)
        for rank, seqs in groups.items():
            yield Line(rank, had.get(rank, 0.0), len(seqs), tag=Place(rank, seqs=seqs))

    def _aged(self, rank: int, due: float) -> int:
        if self._ageing is None:
            return rank
        return max(-_HIGHEST, rank - int(max(0.0, self._change.now - due) / self._ageing))

    def _task_lines(self, queue: str, task: str, limit: int) -> list[Line]:
        if task and self._gate(task).room <= 0:
            self._shut_gate(task)
            return []
        lines: list[Line] = []
        for query, which in self._open_lanes(queue, task):
            while True:
                found = self._db.execute(query, (*which, limit)).fetchall()
                self._load(f"{task}{_UNIT}{lane[5]}" for lane in found if task)
                made = [line for lane in found if (line := self._line(queue, task, lane)) is not None]
                # Those without room were shut, and leave the index: the next look finds others.
                if len(made) == len(found) or len(found) < limit:
                    break
            lines += made
        return lines

    def _open_lanes(self, queue: str, task: str) -> list[tuple[str, tuple[Any, ...]]]:
        if self._ageing is None:
            return [(queries.OPEN_LANES, (queue, task))]
        return [(queries.OPEN_LANES_OF, (queue, task, rank)) for rank in range(-MAX_PRIORITY, 1)]

    def _line(self, queue: str, task: str, lane: Row) -> Line | None:
        """A line for a lane; ``None``, and the lane shut, where it has no room."""
        name, rank, vtime, weight, pending, key = lane
        gates = (task, f"{task}{_UNIT}{key}") if task else ()
        if key in self._stopped.keys and key:
            self._db.execute(queries.SHUT_LINE, (name, queue, rank))
            return None
        if gates and self._gate(gates[1]).room <= 0:
            self._shut_gate(gates[1])
            return None
        if name[0] == "=":
            head = self._db.execute(queries.HEAD, (name,)).fetchone()
            if head is None or head[1:] != (rows.PENDING, queue, rank):
                self._db.execute(queries.SHUT_LINE, (name, queue, rank))
                return None
            pending = 1
        aged = rank
        if self._ageing is not None:
            _, due = self._db.execute(queries.IN_LANE, (name, queue, rank, 1)).fetchone()
            aged = self._aged(rank, due)
        place = Place(rank, name, gates)
        return Line(aged, vtime, pending, weight, [self._gate(gate) for gate in gates], place)

    # -- claiming ---------------------------------------------------------------------

    def claim(self, plan: Plan, n: int, lease: tuple[int, str, float], seq: int | None = None) -> list[Row]:
        """Lend the first ``n`` jobs of ``plan``, or the job ``seq``, for which the plan was made."""
        order = plan.order[:n]
        taken = Counter(map(id, order))
        chosen: dict[int, list[int]] = {}
        for line in {id(line): line for line in plan.order}.values():
            count = taken[id(line)]
            self._give_back(line, line.taken - count)
            if count:
                chosen[id(line)] = [seq] if seq is not None else self._seqs(plan.queue, line.tag, count)
        seqs = [each for some in chosen.values() for each in some]
        found = {
            row[0]: row for row in self._db.execute(queries.CLAIM_SEQS, (*lease, numbers(seqs))).fetchall()
        }
        self._change.count(plan.queue, rows.PENDING, -len(found))
        self._change.count(plan.queue, rows.RESERVED, len(found))
        for row in found.values():
            if row[rows.LANE] is not None:
                self._change.accounts().leave(row[rows.LANE], plan.queue, row[rows.RANK])
                self._change.accounts().lent(row[rows.LANE])
        if self._change.lanes is not None:
            self._change.lanes.flush(self._db)
        self._account(plan, order, taken)
        queues = {line: iter(some) for line, some in chosen.items()}
        return [found[seq] for line in order if (seq := next(queues[id(line)], None)) is not None]

    def _seqs(self, queue: str, place: Place, count: int) -> list[int]:
        if place.name is None:
            return list(place.seqs[:count])
        if place.name[0] == "=":
            return [self._db.execute(queries.HEAD, (place.name,)).fetchone()[0]]
        found = self._db.execute(queries.IN_LANE, (place.name, queue, place.rank, count)).fetchall()
        return [seq for seq, _ in found]

    def _give_back(self, line: Line, surplus: int) -> None:
        """Another queue's turn took precedence over a part of the plan."""
        if surplus > 0:
            line.vtime -= surplus / line.weight
            for gate in line.gates:
                gate.room += surplus

    def _account(self, plan: Plan, order: Sequence[Line], taken: Mapping[int, int]) -> None:
        """Write what the lines have had now, and shut the gates that have no room left."""
        lines = {id(line): line for line in order}.values()
        touched: set[str] = set()
        for line in lines:
            place: Place = line.tag
            started = line.vtime - 1.0 / line.weight  # where its last turn began
            plan.clocks[line.rank] = max(plan.clocks.get(line.rank, 0.0), started)
            if place.name is None:
                plan.plain[line.rank] = line.vtime
            else:
                self._db.execute(queries.SERVED, (line.vtime, place.name, plan.queue, place.rank))
            for gate in line.gates:
                gate.lend(taken[id(line)])
            touched.update(place.gates)
        for rank in {line.rank for line in lines}:
            turn = (plan.queue, rank, plan.clocks[rank], plan.plain.get(rank, 0.0))
            self._db.execute(queries.SET_TURN, turn)
        for name in touched:
            self._gates[name].look(self._now)
            if self._gates[name].room <= 0:
                self._shut_gate(name)

    # -- gates ------------------------------------------------------------------------

    def _gate(self, name: str) -> Gate:
        if name not in self._gates:
            self._load([name])
        return self._gates[name]

    def _load(self, names: Iterable[str]) -> None:
        wanted = [name for name in names if name not in self._gates]
        if not wanted:
            return
        for name in wanted:
            self._gates[name] = self._new_gate(name)
        for row in self._db.execute(queries.GATES, (json.dumps(wanted),)).fetchall():
            fill(self._gates[row[0]], row, self._change)
        for name in wanted:
            self._gates[name].look(self._now)

    def _new_gate(self, name: str) -> Gate:
        task, _, _ = name.partition(_UNIT)
        if task not in self._rules:
            self._rules[task] = limits_of(self._db, task)
        rules = self._rules[task]
        return key_gate(rules) if _UNIT in name else task_gate(rules)

    def _shut_gate(self, name: str) -> None:
        self._db.execute(queries.SHUT_GATE, (name, self._gates[name].until))
        if _UNIT in name:
            self._db.execute(queries.SHUT_KEY, (name, name))

    def record(self) -> None:
        """Enter the starts that have become known into the logs of their gates."""
        for row in self._db.execute(queries.FRESH_GATES).fetchall():
            gate = self._new_gate(row[0])
            fill(gate, row, self._change)
            clock = self._change.clock
            shift = clock.now() - self._now
            void = self._now + (gate.rate.seconds if gate.rate else 0.0)
            log = msgpack.packb(gate.log) if gate.log else None
            self._db.execute(queries.LOG, (log, clock.boot_id(), shift, void, row[0]))


def fill(gate: Gate, row: Row, change: Change) -> None:
    """Let ``gate`` know what its row says."""
    _, gate.running, gate.unseen, fresh, log, boot, shift = row
    clock = change.clock
    now = clock.lease_time()
    if log is not None:
        gate.log = [(at, n) for at, n in msgpack.unpackb(log)]
        if boot != clock.boot_id():
            # Through the wall clock, the only one that two boots share.
            gate.moved(shift - (clock.now() - now), now)
    gate.record(fresh, now)


def set_aside(change: Change, claimed: Sequence[Row], stopped: Special | None) -> list[Row]:
    """Put jobs of paused tasks, lent a moment ago, where no claim meets them again; returns the others."""
    if stopped is None or not stopped.tasks:
        return list(claimed)
    aside = [row for row in claimed if row[rows.TASK] in stopped.tasks]
    if aside:
        change.db.execute(queries.SET_ASIDE, (numbers(row[0] for row in aside),))
        for row in aside:
            change.count(row[rows.QUEUE], rows.RESERVED, -1)
            change.count(row[rows.QUEUE], rows.PENDING, 1)
            if row[rows.LANE] is not None:
                change.accounts().back(row[rows.LANE], known=False, unstarted=True)
    return [row for row in claimed if row[rows.TASK] not in stopped.tasks]


def take_back(change: Change, task: str, limit: int) -> int:
    """Give jobs that were set aside the places they had; returns how many."""
    prefix = f"{ASIDE}{task}{ASIDE}"
    found = change.db.execute(queries.TAKE_BACK, (prefix, prefix + "\U0010ffff", limit)).fetchall()
    for queue, rank, name, weight in found:
        if name is not None:
            change.accounts().enter(name, queue, rank, weight)
        change.ready[queue] = change.ready.get(queue, 0) + 1
    return len(found)


def forgotten_aside(db: sqlite3.Connection) -> str | None:
    """A task that is not paused and has jobs set aside: a resume did not come to its end."""
    stopped = {name for (name,) in db.execute(queries.PAUSED_OF, ("task",)).fetchall()}
    after = ""
    while (found := db.execute(queries.ANY_ASIDE, (after,)).fetchone()) is not None:
        task: str = found[0].split(ASIDE)[1]
        if task not in stopped:
            return task
        after = f"{ASIDE}{task}\x02"
    return None


def tasks_waiting(db: sqlite3.Connection, queue: str) -> Iterator[str]:
    """The tasks that have open lanes in ``queue``; one step in the index for each."""
    (task,) = db.execute(queries.FIRST_TASK, (queue, "")).fetchone()
    while task is not None:
        yield task
        (task,) = db.execute(queries.NEXT_TASK, (queue, task)).fetchone()


def any_open(db: sqlite3.Connection, names: Sequence[str]) -> bool:
    """Whether a claim on these queues might find a job in a lane."""
    stopped = special(db) or Special()
    for queue in names:
        for task in tasks_waiting(db, queue) if queue not in stopped.queues else ():
            gate = db.execute(queries.GATE_OPEN, (task,)).fetchone()
            if task not in stopped.tasks and (gate is None or gate[0]):
                return True
    return False


def earlier(db: sqlite3.Connection, names: str, due: float | None, clock: Clock) -> float | None:
    """``due``, or the moment before it at which time alone makes room for a job of these queues."""
    found = db.execute(queries.NEXT_GATE, {"queues": names}).fetchone()
    if found is None:
        return due
    room: float = clock.now() + max(0.0, found[0] - clock.lease_time())
    return room if due is None else min(due, room)


def limits_of(db: sqlite3.Connection, task: str) -> Limits | None:
    """What ``task`` declares."""
    row = db.execute(queries.LIMITS_OF, (task,)).fetchone()
    return None if row is None else limits(row)


def limits(row: Row) -> Limits:
    """The limits of a row."""
    task, rate, concurrency, key_rate, key_concurrency = row
    return Limits(
        task=task,
        rate=_unpacked(rate),
        concurrency=concurrency,
        key_rate=_unpacked(key_rate),
        key_concurrency=key_concurrency,
    )


def declaration(limits: Limits) -> Row:
    """The row of limits."""
    return (
        limits.task,
        _packed(limits.rate),
        limits.concurrency,
        _packed(limits.key_rate),
        limits.key_concurrency,
    )


def _packed(rate: Rate | None) -> bytes | None:
    return None if rate is None else msgpack.packb([rate.count, rate.seconds, rate.burst])


def _unpacked(data: bytes | None) -> Rate | None:
    return None if data is None else Rate(*msgpack.unpackb(data))
