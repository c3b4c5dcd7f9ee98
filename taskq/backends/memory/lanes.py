"""Lanes in memory: limits, sequences and fair shares of the jobs that a shelf holds."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from taskq.backends.shares import Gate, Line, gate_names, key_gate, pick, task_gate
from taskq.clock import Clock
from taskq.job import MAX_PRIORITY, Job, Lane, State
from taskq.limits import Limits

#: Queue, lane and rank of a line.
_Place = tuple[str, str, int]


class Row(Protocol):
    """What is asked of a shelf's rows."""

    @property
    def job(self) -> Job: ...

    @property
    def seq(self) -> int: ...

    @property
    def started(self) -> float | None: ...


R = TypeVar("R", bound=Row)
#: The row of an id, where it waits in that line.
Find = Callable[[str, _Place], R | None]


class Lanes:
    """Call nothing without the shelf's lock."""

    def __init__(self, clock: Clock, ageing: float | None) -> None:
        self.limits: dict[str, Limits] = {}
        self.stopped: dict[str, set[str]] = {"queue": set(), "task": set(), "key": set()}
        self.ageing = ageing
        self.until: float | None = None  #: when time alone makes room, of what the latest plan passed over
        self._clock = clock
        self._gates: dict[str, Gate] = {}
        self._waiting: defaultdict[str, dict[tuple[str, int], list[tuple[float, int, str]]]] = defaultdict(
            dict
        )
        self._counts: Counter[_Place] = Counter()
        self._had: dict[_Place, float] = {}
        self._clocks: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._sequences: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._weights: dict[str, float] = {}

    def special(self, queue: str) -> bool:
        """Whether the jobs of ``queue`` are more than one line in order of priority and age."""
        return bool(self._waiting[queue] or self.stopped["task"] or self.ageing)

    def declare(self, limits: Sequence[Limits]) -> list[str]:
        changed = [each for each in limits if self.limits.get(each.task) != each]
        for each in changed:
            self.limits[each.task] = each
            for name, gate in self._gates.items():
                if name == each.task:
                    gate.cap, gate.rate = each.concurrency, each.rate
                elif name.partition("\x1f")[0] == each.task:
                    gate.cap, gate.rate = each.key_concurrency, each.key_rate
        return [each.task for each in changed]

    def waiting(self, lane: Lane) -> int:
        """How many jobs wait in the line, in all queues."""
        return sum(n for (_, name, _), n in self._counts.items() if name == lane.name)

    # -- what happens to jobs ---------------------------------------------------------

    def moved(self, row: Row, before: Job | None, after: Job | None) -> None:
        """A job in a lane has become ``after``; ``None`` before it came and after it was dropped."""
        job = after or before
        assert job is not None
        assert job.lane is not None
        lane = job.lane
        if before is not None and before.state is State.PENDING:
            self._counts[before.queue, lane.name, -before.priority] -= 1
        if before is not None and before.state is State.RESERVED:
            self._back(row, before, after)
        if after is None or after.state.ended:
            self._sequences[lane.name].pop(job.id, None)
        elif lane.ordered:
            self._sequences[lane.name][job.id] = row.seq
        if after is not None and after.state is State.RESERVED:
            for gate in self._gates_of(lane):
                gate.lend(1)
        elif after is not None and after.state is State.PENDING:
            self._weights[lane.name] = lane.weight
            self._counts[after.queue, lane.name, -after.priority] += 1
            self.stand(row)

    def stand(self, row: Row) -> None:
        """Let a pending job stand in its line; again, where it may have been taken out."""
        job = row.job
        if job.lane is not None:
            line = self._waiting[job.queue].setdefault((job.lane.name, -job.priority), [])
            heapq.heappush(line, (job.due, row.seq, job.id))

    def _back(self, row: Row, before: Job, after: Job | None) -> None:
        assert before.lane is not None
        unstarted = after is not None and after.deliveries < before.deliveries
        for gate in self._gates_of(before.lane):
            gate.running -= 1
            if row.started is None:
                gate.unseen -= 1
                gate.record(0 if unstarted else 1, self._clock.lease_time())

    def noted(self, lane: Lane) -> None:
        """A lent job is known to have started."""
        for gate in self._gates_of(lane):
            gate.unseen -= 1
            gate.record(1, self._clock.lease_time())

    def _gates_of(self, lane: Lane) -> list[Gate]:
        names = gate_names(lane)
        if names is None:
            return []
        limits = self.limits.get(lane.task)
        for name, make in zip(names, (task_gate, key_gate), strict=True):
            if name not in self._gates:
                self._gates[name] = make(limits)
                self._gates[name].look(self._clock.lease_time())
        return [self._gates[name] for name in names]

    # -- whose turn it is -------------------------------------------------------------

    def begin(self) -> None:
        """A take begins: what its plans have in common is counted from here."""
        self.until = None
        for gate in self._gates.values():
            gate.look(self._clock.lease_time())

    def plan(self, queue: str, limit: int, plain: Sequence[R], find: Find[R]) -> list[Line]:
        """Whose turn it would be in ``queue``. ``plain`` are the jobs without a lane, in order; ``find`` gives the
        row of an entry that still holds."""
        lines = [*self._plain_lines(queue, plain, limit)]
        for name, rank in list(self._waiting[queue]):
            line = self._line((queue, name, rank), find)
            if line is not None:
                lines.append(line)
        return pick(limit, lines, self._clocks[queue])

    def serve(self, queue: str, order: Sequence[Line], n: int, find: Find[R]) -> list[R]:
        """The first ``n`` jobs of a plan, to be lent now."""
        taken = Counter(map(id, order[:n]))
        rows: dict[int, Iterator[R]] = {}
        for line in {id(line): line for line in order[:n]}.values():
            count = taken[id(line)]
            line.vtime -= (line.taken - count) / line.weight
            clocks = self._clocks[queue]
            clocks[line.rank] = max(clocks.get(line.rank, 0.0), line.vtime - 1.0 / line.weight)
            place, plain = line.tag
            self._had[place] = line.vtime
            rows[id(line)] = iter(self._first(place, count, find) if plain is None else plain)
        return [row for line in order[:n] if (row := next(rows[id(line)], None)) is not None]

    def _plain_lines(self, queue: str, plain: Sequence[R], limit: int) -> Iterable[Line]:
        ranked: defaultdict[int, list[R]] = defaultdict(list)
        order = sorted(plain, key=lambda row: (self._aged(row.job), row.job.due, row.seq))
        for row in order[:limit]:
            ranked[self._aged(row.job)].append(row)
        for rank, rows in ranked.items():
            place = (queue, "", rank)
            yield Line(rank, self._had.get(place, 0.0), len(rows), tag=(place, rows))

    def _line(self, place: _Place, find: Find[R]) -> Line | None:
        queue, name, rank = place
        heap = self._waiting[queue][name, rank]
        while heap and (row := find(heap[0][2], place)) is None:
            heapq.heappop(heap)
        if not heap:
            del self._waiting[queue][name, rank]
            return None
        assert row is not None
        lane = row.job.lane
        assert lane is not None
        if (lane.key and lane.key in self.stopped["key"]) or lane.task in self.stopped["task"]:
            return None
        left = self._counts[place]
        if self.stopped["task"]:
            left = sum(find(entry[2], place) is not None for entry in heap)
        if lane.ordered:
            head = min(self._sequences[name], key=self._sequences[name].__getitem__)
            row = find(head, place)
            if row is None:
                return None
            left = 1
        gates = self._gates_of(lane)
        shut = [gate for gate in gates if gate.room <= 0]
        if shut:
            self._remember(shut)
            return None
        return Line(
            self._aged(row.job), self._had.get(place, 0.0), left, self._weights[name], gates, (place, None)
        )

    def _remember(self, shut: Sequence[Gate]) -> None:
        times = [gate.until for gate in shut]
        if None not in times:
            until = max(time for time in times if time is not None)
            self.until = until if self.until is None else min(until, self.until)

    def _aged(self, job: Job) -> int:
        if self.ageing is None:
            return -job.priority
        years = int(max(0.0, self._clock.now() - job.due) / self.ageing)
        return -min(99, job.priority + years) if years <= 99 else -99 - MAX_PRIORITY

    def _first(self, place: _Place, n: int, find: Find[R]) -> list[R]:
        """The first ``n`` of a line; they stay in it until they are lent."""
        queue, name, rank = place
        if name[0] == "=":
            rows = [find(min(self._sequences[name], key=self._sequences[name].__getitem__), place)]
            return [row for row in rows if row is not None]
        heap = self._waiting[queue][name, rank]
        found: dict[int, R] = {}
        entries = []
        while heap and len(found) < n:
            entry = heapq.heappop(heap)
            row = find(entry[2], place)
            if row is not None and entry[:2] == (row.job.due, row.seq) and row.seq not in found:
                found[row.seq] = row
                entries.append(entry)
        for entry in entries:
            heapq.heappush(heap, entry)
        return list(found.values())

    def one(self, row: R, find: Find[R]) -> bool:
        """Whether a pending job could be lent now, by itself."""
        job, lane = row.job, row.job.lane
        if job.task in self.stopped["task"]:
            return False
        if lane is None:
            return True
        for gate in self._gates_of(lane):
            gate.look(self._clock.lease_time())
        line = self._line((job.queue, lane.name, -job.priority), find)
        if lane.ordered and self._sequences[lane.name][job.id] != min(self._sequences[lane.name].values()):
            return False
        return line is not None and line.open


def next_time(lanes: Lanes, clock: Clock, due: float | None) -> float | None:
    """``due``, or the moment before it at which a lane that was passed over has room."""
    if lanes.until is None:
        return due
    room = clock.now() + max(0.0, lanes.until - clock.lease_time())
    return room if due is None else min(due, room)


def stands(job: Job, place: _Place) -> bool:
    """Whether ``job`` waits in that line."""
    queue, name, rank = place
    here = job.queue == queue and job.lane is not None and job.lane.name == name and -job.priority == rank
    return here and job.state is State.PENDING
