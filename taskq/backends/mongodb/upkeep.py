"""What somebody must do now and then: take back what the dead held, stage, expire, forget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from taskq.backend import Reclaimed
from taskq.backends import moves
from taskq.backends.mongodb import documents, gates
from taskq.backends.mongodb.changing import STEP, Change, expire, stage, take_back, write
from taskq.backends.mongodb.connection import Connection, Rooms
from taskq.backends.mongodb.documents import (
    ANNOUNCED,
    ASIDE,
    COMPLETED,
    LANED,
    PENDING,
    RESERVED,
    SCHEDULED,
    Document,
)
from taskq.backends.mongodb.moments import NEVER
from taskq.backends.mongodb.pushing import let_go, line_id
from taskq.backends.mongodb.sessions import SILENCE, holders_gone
from taskq.job import State

#: Longest time between two calls of ``housekeep``, in seconds.
_LONGEST_WISH: Final = 10.0
#: Lines and gates that nothing has used for this long are forgotten, in seconds; a rate's window may be longer.
_UNUSED: Final = 3600.0


class Upkeep:
    """The upkeep of one backend."""

    def __init__(self, connection: Connection, max_finished: int) -> None:
        self._connection = connection
        self._max_finished = max_finished
        self.queues: set[str] = set()  #: where the latest step has brought something to take
        self.ended = False

    # -- what the dead held -----------------------------------------------------------

    def reclaim(self, limit: int) -> Reclaimed:
        """Take back reservations that are over, first by time, then by proof of death."""
        self.queues, self.ended = set(), False
        found = Reclaimed([], [], [])
        # A comparison in ``$expr`` finds what has no date, or none at all, to be before every date.
        over = {
            "e": {"$type": "date", "$lt": NEVER},
            "$expr": {"$lte": ["$e", self._connection.moments.lease()]},
        }
        n = self._take_back(over, limit, found)
        if n < limit:
            gone = self._connection.run(lambda rooms: holders_gone(self._connection, rooms))
            if gone:
                self._take_back({"s": RESERVED, "w": {"$in": gone}, "e": NEVER}, limit - n, found)
        return found

    def _take_back(self, which: Document, limit: int, found: Reclaimed) -> int:
        def act(rooms: Rooms) -> int:
            overdue = list(rooms.jobs.find(which, {"h": 0, "pr": 0, "rs": 0}).sort("e", 1).limit(limit))
            # Whether it still is, and not prolonged meanwhile, is decided by the write.
            changes = [_lost(self._connection, each) for each in overdue]
            self._record(rooms, overdue)
            for change in write(self._connection, rooms, changes, still=["e", "st"]):
                self._enter(change, found)
            return len(overdue)

        return self._connection.run(act)

    def _record(self, rooms: Rooms, overdue: Iterable[Document]) -> None:
        unseen = [each for each in overdue if "g" in each and "st" not in each]
        lanes = [documents.job_of(each).lane for each in unseen]
        gates.record(self._connection, rooms, [lane for lane in lanes if lane is not None])

    def _enter(self, change: Change, found: Reclaimed) -> None:
        self.queues.add(change.job.queue)
        self.ended |= change.job.state.ended
        if change.job.state is State.DEAD:
            found.buried.append(change.job.id)
        elif change.attempt is not None:
            found.retried.append(change.job.id)
        elif change.job.state is State.PENDING:
            found.suspects.append(change.job.id)

    # -- one step of everything else --------------------------------------------------

    def housekeep(self) -> float | None:
        """One small step of each kind; returns when to come again."""
        self.queues, self.ended = set(), False
        times: list[float] = []
        full = [
            self._connection.run(step, times)
            for step in (self._stage, self._expire, self._forget, self._keys, self._lines, self._aside)
        ]
        full.append(self._connection.run(self._surplus))
        if any(full):
            return 0.0
        now = self._connection.moments.now()
        return min(max(0.0, min(times) - now), _LONGEST_WISH) if times else None

    def _stage(self, rooms: Rooms, times: list[float]) -> bool:
        now = self._connection.moments.now()
        more = False
        for queue in rooms.jobs.distinct("q", {"s": SCHEDULED}):
            staged = stage(self._connection, rooms, [queue], now)
            if staged:
                self.queues.add(queue)
                more |= staged >= STEP
            place = {"s": SCHEDULED, "q": queue}
            first = rooms.jobs.find(place, {"d": 1}).sort([("r", 1), ("d", 1)]).limit(1)
            times.extend(each["d"] for each in first)
        return more

    def _expire(self, rooms: Rooms, times: list[float]) -> bool:
        waiting = {"$in": [PENDING, SCHEDULED, LANED, ANNOUNCED, ASIDE]}
        now = self._connection.moments.now()
        due = {"s": waiting, "x": {"$lte": now}}
        late = [each["_id"] for each in rooms.jobs.find(due, {"_id": 1}).sort("x", 1).limit(STEP)]
        if late:
            self.ended |= expire(self._connection, rooms, late)
        ahead = {"s": waiting, "x": {"$gt": now}}
        times.extend(each["x"] for each in rooms.jobs.find(ahead, {"x": 1}).sort("x", 1).limit(1))
        return len(late) >= STEP

    def _forget(self, rooms: Rooms, times: list[float]) -> bool:
        now = self._connection.moments.now()
        spent = rooms.jobs.find({"f": {"$lte": now}}, {"_id": 1}).sort("f", 1).limit(STEP)
        names = [each["_id"] for each in spent]
        if names:
            rooms.jobs.delete_many({"_id": {"$in": names}, "f": {"$lte": now}})
        times.extend(
            each["f"] for each in rooms.jobs.find({"f": {"$gt": now}}, {"f": 1}).sort("f", 1).limit(1)
        )
        return len(names) >= STEP

    def _surplus(self, rooms: Rooms) -> bool:
        """Forget the oldest completed jobs where a queue has more than are remembered."""
        more = False
        for queue in rooms.jobs.distinct("q", {"s": COMPLETED}):
            kept = {"s": COMPLETED, "q": queue}
            n = rooms.jobs.count_documents(kept, limit=self._max_finished + STEP)
            surplus = min(n - self._max_finished, STEP)
            if surplus > 0:
                ordered = rooms.jobs.find(kept, {"_id": 1}).sort([("r", 1), ("d", 1), ("n", 1)])
                oldest = documents.ids(ordered.limit(surplus))
                rooms.jobs.delete_many({"_id": {"$in": oldest}, "s": COMPLETED})
                more |= surplus >= STEP
        return more

    def _keys(self, rooms: Rooms, times: list[float]) -> bool:
        """Forget keys whose period is over and whose job is gone or has ended."""
        now = self._connection.moments.now()
        spent = list(rooms.keys.find({"ends": {"$gt": 0, "$lte": now}}).limit(STEP))
        there = rooms.jobs.find(
            {"_id": {"$in": [each["job"] for each in spent]}, "f": None, "en": None}, {"_id": 1}
        )
        alive = {each["_id"] for each in there}
        for each in spent:
            held = {"_id": each["_id"], "job": each["job"], "ends": each["ends"]}
            if each["job"] in alive and each["until"] != "period":
                rooms.keys.update_one(held, {"$set": {"ends": 0.0}})
            else:
                rooms.keys.delete_one(held)
        times.extend(
            each["ends"] for each in rooms.keys.find({"ends": {"$gt": now}}).sort("ends", 1).limit(1)
        )
        return len(spent) >= STEP

    def _lines(self, rooms: Rooms, times: list[float]) -> bool:
        """Open lines that somebody could not open any more, and forget what nothing uses."""
        standing = rooms.jobs.aggregate(
            [
                {"$match": {"l": {"$exists": True}, "s": LANED}},
                {"$group": {"_id": {"l": "$l", "q": "$q", "r": "$r"}}},
            ]
        )
        lines = {
            line_id(each["_id"]["q"], each["_id"]["l"], each["_id"]["r"]): each["_id"] for each in standing
        }
        if lines:
            known = rooms.lanes.find({"_id": {"$in": list(lines)}, "open": True}, {"_id": 1})
            for name in lines.keys() - {each["_id"] for each in known}:
                facts = {**lines[name], "open": True}
                change: Document = {"$set": facts, "$inc": {"n": 1}, "$setOnInsert": {"v": 0.0, "w": 1.0}}
                rooms.lanes.update_one({"_id": name}, change, upsert=True)
                self.queues.add(lines[name]["q"])
        self._forget_unused(rooms)
        return False

    def _forget_unused(self, rooms: Rooms) -> None:
        tick = self._connection.moments.tick()
        rooms.signals.delete_many({"seen": {"$lt": tick - _UNUSED}})
        rooms.workers.delete_many({"session": {"$exists": True}, "seen": {"$lt": tick - 2 * SILENCE}})

    def _aside(self, rooms: Rooms, times: list[float]) -> bool:
        """End a resume that was interrupted, or met by a take that did not know of it yet."""
        tasks = set(rooms.jobs.distinct("t", {"s": ASIDE}))
        if not tasks:
            return False
        stopped = {each["name"] for each in rooms.facts.find({"kind": "pause", "what": "task"})}
        return max((take_back(rooms, task) for task in tasks - stopped), default=0) >= STEP


def _lost(connection: Connection, document: Document) -> Change:
    job = documents.job_of(document)
    move = moves.lost(job, documents.started(document), connection.moments.now(), cancel=document.get("c"))
    return Change(document, move, unfence=True)


def drop(rooms: Rooms, which: Sequence[Document]) -> int:
    """Delete these jobs as they were read; returns how many were still so."""
    from pymongo import DeleteOne

    if not which:
        return 0
    let_go(rooms, map(documents.job_of, which))
    writes: list[Any] = [DeleteOne(documents.fence(each)) for each in which]
    return rooms.jobs.bulk_write(writes, ordered=False).deleted_count


__all__ = ["Upkeep", "drop"]
