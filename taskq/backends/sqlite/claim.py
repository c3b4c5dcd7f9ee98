"""Claiming: jobs lent to one worker, in one transaction."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Final

from taskq.backend import Taken
from taskq.backends.sqlite import lanes, queries, rows
from taskq.backends.sqlite.change import Change, at_boot, numbers
from taskq.backends.sqlite.rows import EXPIRES, Row
from taskq.backends.turns import Turns
from taskq.job import Reservation

# What UPDATE … RETURNING returns comes in the order of the rows, not in the one they were chosen by.
#: Claims of one take: more follow only where what was claimed could not be lent.
_ROUNDS: Final = 50
_ORDER: Final = itemgetter(rows.RANK, rows.DUE, 0)


class Claim:
    """One worker's way of taking jobs."""

    def __init__(self, turns: Turns, worker: str, ageing: float | None = None) -> None:
        self._turns = turns
        self._worker = worker
        self._ageing = ageing
        self._queues = list(turns.weights)
        self._names = json.dumps(self._queues)

    def take(self, change: Change, limit: int, job_id: str | None) -> Taken:
        """Lend at most ``limit`` jobs; those too late to start end instead."""
        stopped = lanes.special(change.db)
        queues = self._open_queues(stopped)
        next_due = self._stage(change, queues)
        if limit <= 0 or not queues:
            return Taken([], next_due)
        clock, lease = change.clock, self._lease(change)
        token = lease[0]
        found: list[Row] = []
        for _ in range(_ROUNDS):
            claimed = self._claim(change, queues, limit - len(found), job_id, (stopped, lease))
            ready = lanes.set_aside(change, _without_late(change, claimed), stopped)
            found += ready
            if len(ready) == len(claimed) or len(found) >= limit:
                break
        if stopped is not None and stopped.lanes:
            next_due = lanes.earlier(change.db, self._names, next_due, clock)
        worker = self._worker
        return Taken([Reservation(rows.lent(row, worker), token, row[0]) for row in found], next_due)

    def claim(self, change: Change, ids: Sequence[str]) -> Taken:
        """Lend the announced jobs among ``ids``, as far as they may be lent."""
        stopped = lanes.special(change.db)
        queues = self._open_queues(stopped)
        disclosed = change.db.execute(queries.DISCLOSE, (json.dumps(list(ids)),)).fetchall()
        chosen = [seq for seq, queue in disclosed if queue in queues]
        for _, queue in disclosed:
            if queue not in queues:
                change.ready[queue] = change.ready.get(queue, 0) + 1
        lease = self._lease(change)
        claimed = change.db.execute(queries.CLAIM_SEQS, (*lease, numbers(chosen))).fetchall()
        claimed.sort(key=_ORDER)
        for queue, n in Counter(row[rows.QUEUE] for row in claimed).items():
            _count(change, queue, n)
        found = lanes.set_aside(change, _without_late(change, claimed), stopped)
        return Taken([Reservation(rows.lent(row, self._worker), lease[0], row[0]) for row in found], None)

    def _open_queues(self, stopped: lanes.Special | None) -> list[str]:
        return [queue for queue in self._queues if stopped is None or queue not in stopped.queues]

    def _lease(self, change: Change) -> tuple[int, str, float]:
        """What a row is given that is lent now: token, worker, and the time that its lease counts from."""
        token, known = change.db.execute(queries.FENCE).fetchone()
        at_boot(change, known, change.clock.boot_id())
        return token, self._worker, change.clock.lease_time()

    def _stage(self, change: Change, queues: Sequence[str]) -> float | None:
        times = (change.stage(queue) for queue in queues)
        return min((due for due in times if due is not None), default=None)

    def _claim(
        self,
        change: Change,
        queues: Sequence[str],
        limit: int,
        job_id: str | None,
        how: tuple[lanes.Special | None, tuple[int, str, float]],
    ) -> list[Row]:
        stopped, lease = how
        if job_id is not None:
            return self._claim_one(change, queues, job_id, how)
        plans: dict[str, lanes.Plan] = {}
        if stopped is not None or self._ageing is not None:
            some = lanes.Lanes(change, stopped, self._ageing)
            plans = {queue: some.plan(queue, limit) for queue in queues if some.concerned(queue)}
        if not plans and len(queues) == 1:
            return _claim_from(change, queues[0], limit, lease)
        announced = change.db.execute(queries.ANY_ANNOUNCED, (self._names,)).fetchone()[0]
        pending = partial(_lendable, change, limit=limit) if announced else change.pending
        available = {queue: len(plans[queue].order) if queue in plans else pending(queue) for queue in queues}
        turns = self._turns.share(limit, available)
        lines = {
            queue: iter(
                some.claim(plans[queue], n, lease) if queue in plans else _claim_from(change, queue, n, lease)
            )
            for queue, n in Counter(turns).items()
        }
        return [row for queue in turns if (row := next(lines[queue], None)) is not None]

    def _claim_one(
        self,
        change: Change,
        queues: Sequence[str],
        job_id: str,
        how: tuple[lanes.Special | None, tuple[int, str, float]],
    ) -> list[Row]:
        stopped, lease = how
        names = json.dumps(queues)
        claimed = change.db.execute(queries.CLAIM_ONE, (*lease, job_id, names)).fetchall()
        if claimed:
            _count(change, claimed[0][rows.QUEUE], 1)
            return claimed
        some = lanes.Lanes(change, stopped, self._ageing)
        found = some.one(job_id, names)
        return [] if found is None else some.claim(found[0], 1, lease, found[1])


def _lendable(change: Change, queue: str, limit: int) -> int:
    """How many of ``limit`` jobs a plain claim would find, where the counters count announced ones too."""
    (n,) = change.db.execute(queries.LENDABLE, (queue, limit)).fetchone()
    return n  # type: ignore[no-any-return]


def _claim_from(change: Change, queue: str, n: int, lease: tuple[int, str, float]) -> list[Row]:
    claimed = change.db.execute(queries.CLAIM, (*lease, queue, n)).fetchall()
    if claimed:
        claimed.sort(key=_ORDER)
        _count(change, queue, len(claimed))
    return claimed


def _count(change: Change, queue: str, n: int) -> None:
    change.count(queue, rows.PENDING, -n)
    change.count(queue, rows.RESERVED, n)


def _without_late(change: Change, claimed: list[Row]) -> list[Row]:
    now = change.now
    late = [row[0] for row in claimed if row[EXPIRES] is not None and row[EXPIRES] <= now]
    if not late:
        return claimed
    change.expire(change.db.execute(queries.BY_SEQ, (numbers(late),)).fetchall())
    gone = set(late)
    return [row for row in claimed if row[0] not in gone]
