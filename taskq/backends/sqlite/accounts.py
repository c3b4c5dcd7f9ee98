"""The accounts of lanes and gates: what a transaction's moves of jobs in lanes add up to.

Kept here and not by triggers, because even a trigger that has nothing to do costs every job an eighth of its time.
Whatever moves a job that has a lane says so here; jobs without one never come by.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Final

from taskq.backends.sqlite import queries

#: Begins the lane of a job that is set aside, because its task was found paused; such lanes have no account.
ASIDE: Final = "\x01"
#: The lane of a job that is announced: no claim but by its id meets it, and it has no account either.
ANNOUNCED: Final = "\x02"
_UNCOUNTED: Final = (ASIDE, ANNOUNCED)


class Accounts:
    """Additions and subtractions, written by :meth:`flush`."""

    __slots__ = ("_gates", "_lines", "_moved", "_weights", "started")

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str, int], int] = {}
        self._weights: dict[str, float] = {}
        self._gates: dict[str, list[int]] = {}
        self._moved: set[str] = set()
        self.started = False  #: starts have become known: see ``lanes.Lanes.record``

    def copy(self) -> Accounts:
        twin = Accounts()
        twin._lines, twin._weights, twin._moved = self._lines.copy(), self._weights.copy(), self._moved.copy()
        twin._gates = {name: list(sums) for name, sums in self._gates.items()}
        twin.started = self.started
        return twin

    def enter(self, name: str, queue: str, rank: int, weight: float | None) -> None:
        """A job waits in a lane."""
        if not name.startswith(_UNCOUNTED):
            self._add(name, queue, rank, 1)
            self._weights[name] = weight or 1.0

    def leave(self, name: str, queue: str, rank: int) -> None:
        """It waits there no more."""
        if not name.startswith(_UNCOUNTED):
            self._add(name, queue, rank, -1)

    def moved(self, name: str) -> None:
        """Something else happened to a job of this lane, which may let the next one start."""
        self._moved.add(name)

    def lent(self, name: str) -> None:
        """A job of this lane is lent."""
        self._count(name, 1, 1, 0)

    def noted(self, name: str) -> None:
        """One that is lent is known to have started."""
        self._count(name, 0, -1, 1)

    def back(self, name: str, *, known: bool, unstarted: bool = False) -> None:
        """A reservation is over. ``known``: its start had been noted; ``unstarted``: it never began."""
        self._moved.add(name)
        if known:
            self._count(name, -1, 0, 0)
        else:
            self._count(name, -1, -1, 0 if unstarted else 1)

    def flush(self, db: sqlite3.Connection) -> None:
        """Write what has come together since the last time."""
        for (name, queue, rank), n in self._lines.items():
            if n > 0:
                task, _, key = name[1:].partition("\x1f")
                db.execute(
                    queries.ENTER_LANE, (name, queue, rank, task, key, self._weights.get(name, 1.0), n)
                )
            elif n < 0:
                db.execute(queries.LEAVE_LANE, (-n, name, queue, rank))
        for name, sums in self._gates.items():
            if any(sums):
                db.execute(queries.COUNT_GATE, (name, *sums))
        db.executemany(queries.MOVED_LANE, self._names(self._moved))
        self._lines, self._gates, self._weights, self._moved = {}, {}, {}, set()

    def _names(self, names: Iterable[str]) -> list[tuple[str]]:
        return [(name,) for name in names]

    def _add(self, name: str, queue: str, rank: int, n: int) -> None:
        line = (name, queue, rank)
        self._lines[line] = self._lines.get(line, 0) + n

    def _count(self, name: str, running: int, unseen: int, fresh: int) -> None:
        self.started |= fresh > 0
        task = name[1:].partition("\x1f")[0]
        for gate in (task, name[1:]) if task else ():
            sums = self._gates.setdefault(gate, [0, 0, 0])
            sums[0] += running
            sums[1] += unseen
            sums[2] += fresh
