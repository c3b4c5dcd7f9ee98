"""Settling: what runs decided, written in one transaction."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from taskq.backend import Extended, Note
from taskq.backends import moves
from taskq.backends.sqlite import connection, keys, queries, rows
from taskq.backends.sqlite.change import NEVER, Change, numbers
from taskq.backends.sqlite.rows import Row
from taskq.job import Attempt, Outcome, Reservation, Settlement, State, Verdict

#: Takes whose deleted jobs are remembered.
_REMEMBERED: Final = 1_000
#: In ``settle``: the state of a row that this batch has dealt with.
_DONE: Final = -1

SETTLED, ALREADY_YOURS, LOST = Settlement.SETTLED, Settlement.ALREADY_YOURS, Settlement.LOST

#: What a value that cannot be stored raises, on its way to SQLite or there.
UNSTORABLE: Final = (
    *connection.UNSTORABLE,
    OverflowError,
    TypeError,
    ValueError,
    AttributeError,
)


class Deleted:
    """Which jobs this process settled and deleted, of the latest takes.

    A row that is kept remembers the token that settled it. One that was deleted cannot, and a note in the file
    for each would cost as much as keeping it; the only one who repeats a settle is the process that made it.
    """

    def __init__(self) -> None:
        self._takes: OrderedDict[int, set[int]] = OrderedDict()

    def remember(self, reservations: Iterable[Reservation]) -> None:
        for reservation in reservations:
            self._takes.setdefault(reservation.token, set()).add(reservation.handle)
        while len(self._takes) > _REMEMBERED:
            self._takes.popitem(last=False)

    def __contains__(self, reservation: Reservation) -> bool:
        return reservation.handle in self._takes.get(reservation.token, ())


def settle(change: Change, outcomes: Sequence[Outcome], deleted: Deleted) -> list[Settlement]:
    """Write ``outcomes`` where their tokens hold; raises one of ``UNSTORABLE`` where one cannot be written."""
    seqs = numbers(outcome.reservation.handle for outcome in outcomes)
    facts = {seq: (token, state) for seq, token, state in change.db.execute(queries.HELD, (seqs,))}
    requests = change.requests(seqs)
    answers: list[Settlement] = []
    finished: list[Outcome] = []
    others: list[Outcome] = []
    for outcome in outcomes:
        reservation = outcome.reservation
        fact = facts.get(reservation.handle)
        if fact != (reservation.token, rows.RESERVED):
            again = fact[0] == reservation.token if fact else reservation in deleted
            answers.append(ALREADY_YOURS if again else LOST)
            continue
        facts[reservation.handle] = (reservation.token, _DONE)
        answers.append(SETTLED)
        plain = outcome.verdict is Verdict.COMPLETE and outcome.attempt is None
        (finished if plain else others).append(outcome)
        if outcome.pushes:
            keys.store(change, outcome.pushes)
    _finish(change, finished, deleted)
    _move(change, others, requests, deleted)
    if requests:
        change.db.execute(queries.DROP_REQUESTS, (seqs,))
    return answers


def settle_carefully(change: Change, outcomes: Sequence[Outcome], deleted: Deleted) -> list[Settlement]:
    """The same one by one; an outcome that cannot be stored buries its job instead, and harms no other."""
    answers: list[Settlement] = []
    for outcome in outcomes:
        saved = change.save()
        try:
            answers += settle(change, [outcome], deleted)
        except UNSTORABLE as error:
            change.restore(saved)
            answers += settle(change, [_unstorable(outcome, error)], deleted)
    return answers


def release(change: Change, reservations: Sequence[Reservation]) -> None:
    """Give back what is still held."""
    seqs, held = _held(change, reservations)
    requests = change.requests(seqs)
    kept = [r for r in held if r.handle not in requests]
    _end_in_lanes(change, kept, unstarted=True)
    change.db.executemany(queries.RELEASE, [(r.handle,) for r in kept])
    for reservation in kept:
        queue = reservation.job.queue
        change.count(queue, rows.RESERVED, -1)
        change.count(queue, rows.PENDING, 1)
        change.ready[queue] = change.ready.get(queue, 0) + 1
    if requests:
        for row in change.db.execute(queries.BY_SEQ, (numbers(requests),)).fetchall():
            job = moves.released(rows.full(row), change.now, cancel=requests[row[0]])
            change.move(row, moves.Move(job))
        change.db.execute(queries.DROP_REQUESTS, (seqs,))


def extend(
    change: Change, reservations: Sequence[Reservation], lease_time: float, seconds: float | None
) -> Extended:
    """Prolong what is still held."""
    seqs, held = _held(change, reservations)
    deadlines = []
    for reservation in held:
        lease = reservation.job.lease
        timeless = seconds is None and lease <= 0
        deadline = NEVER if timeless else lease_time + (lease if seconds is None else seconds)
        deadlines.append((deadline, reservation.handle))
    change.db.executemany(queries.EXTEND, deadlines)
    requests = change.requests(seqs)
    return Extended(_others(reservations, held), [r.job.id for r in held if r.handle in requests])


def note(change: Change, notes: Sequence[Note]) -> list[str]:
    """Write marks on what is still held; returns the ids of the rest."""
    reservations = [note.reservation for note in notes]
    _, held = _held(change, reservations)
    fences = {(r.handle, r.token) for r in held}
    marks = [
        {"started": n.started, "progress": n.progress, "seq": n.reservation.handle}
        for n in notes
        if (n.reservation.handle, n.reservation.token) in fences
    ]
    if any(r.job.lane is not None for r in held):
        _note_in_lanes(change, [n.reservation for n in notes if n.started is not None], fences)
    change.db.executemany(queries.NOTE, marks)
    return _others(reservations, held)


def _end_in_lanes(change: Change, reservations: Sequence[Reservation], *, unstarted: bool = False) -> None:
    """Reservations are over; where one had a lane, there may be room for another job now."""
    laned = [r for r in reservations if r.job.lane is not None]
    if not laned:
        return
    unnoted = change.unnoted(r.handle for r in laned)
    for reservation in laned:
        job = reservation.job
        assert job.lane is not None
        name = job.lane.name
        change.accounts().back(name, known=reservation.handle not in unnoted, unstarted=unstarted)
        if unstarted:
            change.accounts().enter(name, job.queue, -job.priority, job.lane.weight)
        change.ready[job.queue] = change.ready.get(job.queue, 0) + 1


def _note_in_lanes(change: Change, reservations: Sequence[Reservation], held: set[tuple[int, int]]) -> None:
    laned = {
        r.handle: r.job.lane for r in reservations if (r.handle, r.token) in held and r.job.lane is not None
    }
    for seq in change.unnoted(laned):
        change.accounts().noted(laned[seq].name)


def _finish(change: Change, outcomes: Sequence[Outcome], deleted: Deleted) -> None:
    """The common end, in few statements."""
    dropped: list[Reservation] = []
    updates: list[Row] = []
    now = change.now
    _end_in_lanes(change, [outcome.reservation for outcome in outcomes])
    for outcome in outcomes:
        reservation = outcome.reservation
        job = reservation.job
        change.count(job.queue, rows.RESERVED, -1)
        change.ended.append(job.id)
        if job.unique is not None:
            change.db.execute(queries.LET_GO, (job.id, now))
        if job.keep <= 0:
            dropped.append(reservation)
        else:
            change.count(job.queue, rows.COMPLETED, 1)
            updates.append((now, now + job.keep, outcome.result, reservation.handle))
    if updates:
        change.db.executemany(queries.FINISH, updates)
    if dropped:
        change.db.execute(queries.DELETE, (numbers(r.handle for r in dropped),))
        deleted.remember(dropped)


def _move(change: Change, outcomes: Sequence[Outcome], requests: Mapping[int, str], deleted: Deleted) -> None:
    """Every other end, job by job."""
    if not outcomes:
        return
    seqs = numbers(outcome.reservation.handle for outcome in outcomes)
    found = {row[0]: row for row in change.db.execute(queries.BY_SEQ, (seqs,)).fetchall()}
    for outcome in outcomes:
        seq = outcome.reservation.handle
        move = moves.settled(rows.full(found[seq]), outcome, change.now, cancel=requests.get(seq))
        change.move(found[seq], move)
        if move.job.state is State.COMPLETED and move.job.keep <= 0:
            change.retire(queries.FORGET, (json.dumps([move.job.id]),))
            deleted.remember([outcome.reservation])


def _held(change: Change, reservations: Sequence[Reservation]) -> tuple[str, list[Reservation]]:
    """Their rows' numbers, and those of them whose token still holds."""
    seqs = numbers(reservation.handle for reservation in reservations)
    facts = {
        (seq, token)
        for seq, token, state in change.db.execute(queries.HELD, (seqs,))
        if state == rows.RESERVED
    }
    return seqs, [r for r in reservations if (r.handle, r.token) in facts]


def _others(reservations: Sequence[Reservation], held: Sequence[Reservation]) -> list[str]:
    fences = {(r.handle, r.token) for r in held}
    return [r.job.id for r in reservations if (r.handle, r.token) not in fences]


def _unstorable(outcome: Outcome, error: Exception) -> Outcome:
    message = f"the outcome cannot be stored: {error}".encode("utf-8", "backslashreplace").decode()
    attempts = outcome.reservation.job.attempts + 1
    attempt = Attempt(number=attempts, error_type=type(error).__name__, message=message)
    return Outcome(reservation=outcome.reservation, verdict=Verdict.BURY, attempt=attempt)
