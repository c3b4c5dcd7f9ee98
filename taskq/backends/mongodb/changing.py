"""Changes of jobs: each written only if the job is still what it was when it was read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from taskq.backends import moves
from taskq.backends.mongodb import documents
from taskq.backends.mongodb.connection import Connection, Rooms
from taskq.backends.mongodb.documents import ANNOUNCED, ASIDE, LANED, PENDING, SCHEDULED, Document
from taskq.backends.mongodb.pushing import let_go, line_up
from taskq.job import Job, State

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

#: Jobs changed by one step.
STEP: Final = 500


class Change:
    """One job, before and after."""

    def __init__(self, before: Document, move: moves.Move, *, unfence: bool = False) -> None:
        self.before = before
        self.job: Job = move.job
        self.attempt = move.attempt
        self.update = documents.change(before, move, unfence=unfence)


def write(
    connection: Connection,
    rooms: Rooms,
    changes: Sequence[Change],
    session: ClientSession | None = None,
    *,
    call: int | None = None,
    still: Sequence[str] = (),
) -> list[Change]:
    """Write the changes whose jobs are as they were, marked with the number ``call``; returns those.

    ``still`` names fields besides the fence that must not have changed either.
    """
    if not changes:
        return []
    from pymongo import UpdateOne

    call = call or connection.stamp()
    writes = []
    for change in changes:
        change.update.setdefault("$set", {})["z"] = call
        fence = documents.fence(change.before) | {name: change.before.get(name) for name in still}
        writes.append(UpdateOne(fence, change.update))
    found = rooms.jobs.bulk_write(writes, ordered=False, session=session)
    written = list(changes)
    if found.matched_count != len(changes):
        names = [change.before["_id"] for change in changes]
        marked = rooms.jobs.find({"_id": {"$in": names}, "z": call}, {"_id": 1}, session=session)
        mine = {each["_id"] for each in marked}
        written = [change for change in changes if change.before["_id"] in mine]
    _follow(rooms, written, session)
    return written


def _follow(rooms: Rooms, written: Sequence[Change], session: ClientSession | None) -> None:
    """What else a change brings with it."""
    let_go(rooms, [change.job for change in written if change.job.state.ended], session)
    back = [change for change in written if change.job.state is State.PENDING and change.job.lane is not None]
    if back:
        names = [change.job.id for change in back]
        line_up(rooms, list(rooms.jobs.find({"_id": {"$in": names}, "s": LANED}, session=session)), session)


def stage(connection: Connection, rooms: Rooms, queues: Sequence[str], now: float) -> int:
    """Let jobs that have become due be pending, a step of each queue; returns how many."""
    staged = 0
    for queue in queues:
        due = {"s": SCHEDULED, "q": queue, "r": 0, "d": {"$lte": now}}
        found = list(
            rooms.fresh.find(due, {"l": 1, "p": 1, "q": 1, "b": 1} | _BODY)
            .sort([("d", 1), ("n", 1)])
            .limit(STEP)
        )
        laned = [each for each in found if "l" in each]
        for kind, some in ((PENDING, [each for each in found if "l" not in each]), (LANED, laned)):
            if some:
                chosen = {"_id": {"$in": documents.ids(some)}, "s": SCHEDULED, "d": {"$lte": now}}
                changed = rooms.jobs.update_many(chosen, [{"$set": {"s": kind, "r": "$p"}}])
                staged += changed.modified_count
        if laned:
            line_up(rooms, [{**each, "s": LANED, "r": each["p"]} for each in laned])
    return staged


#: What a job is read from.
_BODY: Final[dict[str, Any]] = dict.fromkeys(("s", "u", "d", "r", "n", "ls", "t"), 1)


def expire(connection: Connection, rooms: Rooms, names: Sequence[str]) -> bool:
    """End jobs that wait, and that it is too late to start; whether one ended."""
    now = connection.moments.now()
    waiting = {"$in": [PENDING, SCHEDULED, LANED, ANNOUNCED, ASIDE]}
    found = rooms.jobs.find({"_id": {"$in": list(names)}, "s": waiting, "x": {"$lte": now}})
    changes = []
    for document in found:
        job = documents.job_of(document)
        changes.append(
            Change(document, moves.Move(moves.end(job, State.CANCELLED, now, error=moves.EXPIRED)))
        )
    return bool(write(connection, rooms, changes))


def take_back(rooms: Rooms, task: str) -> int:
    """Give a step of the jobs that were set aside with their task the places they had; returns how many."""
    found = list(rooms.jobs.find({"s": ASIDE, "t": task}).limit(STEP))
    laned = [each for each in found if "l" in each]
    for kind, some in ((PENDING, [each for each in found if "l" not in each]), (LANED, laned)):
        if some:
            chosen = {"_id": {"$in": documents.ids(some)}, "s": ASIDE}
            rooms.jobs.update_many(chosen, {"$set": {"s": kind}})
    line_up(rooms, [{**each, "s": LANED} for each in laned])
    return len(found)
