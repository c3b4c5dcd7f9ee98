"""Who may start, and whose turn it is: pure rules that every backend with rows applies inside one take."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from taskq.job import Lane
from taskq.limits import Limits, Rate

#: A log keeps starts closer together than this part of its window as one moment, the later one.
_GRAIN: Final = 64

#: When starts happened, and how many, oldest first.
Log = list[tuple[float, int]]


@dataclass(slots=True)
class Gate:
    """One limit, and what it has lent: of a task, or of one key of a task.

    A start counts against a rate from the moment its job is lent, and for a window after it is *known* to have
    started: when the run is marked, or ends. So no window holds more than the rate, however late a lent job starts;
    one that is given back unstarted counts no more.
    """

    cap: int | None = None  #: most jobs at once
    rate: Rate | None = None
    running: int = 0  #: jobs lent
    unseen: int = 0  #: of those, the ones not yet known to have started
    log: Log = field(default_factory=list)  #: known starts
    room: float = math.inf  #: how many may start now
    until: float | None = None  #: where there is no room: when there will be, if time alone brings it

    def look(self, now: float) -> None:
        """Work out ``room`` and ``until`` at ``now``."""
        self.room, self.until = math.inf, None
        if self.cap is not None:
            self.room = self.cap - self.running
        if self.rate is None:
            return
        times: list[float | None] = []
        for most, window in _windows(self.rate):
            held = self.unseen + sum(n for at, n in self.log if at > now - window)
            self.room = min(self.room, most - held)
            if held >= most:
                times.append(self._free_at(most, window, held, now))
        if times and None not in times and (self.cap is None or self.running < self.cap):
            self.until = max(time for time in times if time is not None)

    def lend(self, n: int) -> None:
        """``n`` jobs are lent."""
        self.running += n
        self.unseen += n

    def record(self, n: int, now: float) -> None:
        """``n`` starts have become known."""
        if self.rate is None or n <= 0:
            return
        windows = [window for _, window in _windows(self.rate)]
        grain = min(windows) / _GRAIN
        kept = [entry for entry in self.log if entry[0] > now - max(windows)]
        if kept and kept[-1][0] // grain == now // grain:
            n += kept.pop()[1]
        self.log = [*kept, (now, n)]

    def moved(self, shift: float, now: float) -> None:
        """Read the log by another clock: times are ``shift`` later there, and none is in the future."""
        self.log = [(min(at + shift, now), n) for at, n in self.log]

    def idle(self, now: float) -> bool:
        """Whether nothing is held that a new gate would not know."""
        longest = max((window for _, window in _windows(self.rate)), default=0.0) if self.rate else 0.0
        return self.running <= 0 and all(at <= now - longest for at, _ in self.log)

    def _free_at(self, most: int, window: float, held: int, now: float) -> float | None:
        for at, n in self.log:
            if at > now - window:
                held -= n
                if held < most:
                    return at + window
        return None


def _windows(rate: Rate) -> list[tuple[int, float]]:
    windows = [(rate.count, rate.seconds)]
    if rate.burst is not None and rate.burst < rate.count:
        windows.append((rate.burst, rate.seconds * rate.burst / rate.count))
    return windows


def task_gate(limits: Limits | None) -> Gate:
    """A new gate of a task."""
    return Gate(limits.concurrency, limits.rate) if limits else Gate()


def key_gate(limits: Limits | None) -> Gate:
    """A new gate of one key of a task."""
    return Gate(limits.key_concurrency, limits.key_rate) if limits else Gate()


def gate_names(lane: Lane) -> tuple[str, str] | None:
    """Under which names a lane's gates are kept, the task's and the key's; ``None`` where it passes none."""
    return (lane.task, f"{lane.task}\x1f{lane.key}") if lane.task else None


@dataclass(slots=True)
class Line:
    """Jobs that wait for the same: a lane at one priority of a queue, or the jobs without one."""

    rank: int  #: smaller is served first
    vtime: float  #: how much this line has had, by weight
    left: int  #: how many jobs it could give
    weight: float = 1.0
    gates: Sequence[Gate] = ()
    tag: Any = None  #: the backend's own
    taken: int = 0

    @property
    def open(self) -> bool:
        return self.left > self.taken and all(gate.room > 0 for gate in self.gates)


def pick(limit: int, lines: Sequence[Line], clocks: Mapping[int, float]) -> list[Line]:
    """Whose turn it is, job by job: higher priority first, then the line that has had least for its weight.

    A line that had nothing to do is owed nothing for it: it goes on from ``clocks``, which say per rank how much
    the line served last had had.
    """
    now = dict(clocks)
    heap = [_standing(line, now, place) for place, line in enumerate(lines) if line.open]
    heapq.heapify(heap)
    order: list[Line] = []
    while heap and len(order) < limit:
        rank, at, _, place = heap[0]
        line = lines[place]
        if not line.open:
            heapq.heappop(heap)
            continue
        now[rank] = max(now.get(rank, 0.0), at)
        line.vtime = at + 1.0 / line.weight
        line.taken += 1
        for gate in line.gates:
            gate.room -= 1
        order.append(line)
        heapq.heapreplace(heap, _standing(line, now, place))
    return order


def _standing(line: Line, now: Mapping[int, float], place: int) -> tuple[int, float, float, int]:
    return line.rank, max(line.vtime, now.get(line.rank, 0.0)), line.vtime, place
