"""Lending: jobs of one or more queues to one worker."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from taskq.backends.mongodb import documents, lines
from taskq.backends.mongodb.changing import expire, stage
from taskq.backends.mongodb.connection import Connection, Rooms
from taskq.backends.mongodb.documents import ANNOUNCED, ASIDE, LANED, PENDING, RESERVED, SCHEDULED, Document
from taskq.backends.mongodb.moments import lease_end
from taskq.backends.turns import Turns
from taskq.errors import BackendUnavailableError
from taskq.job import Reservation

#: Where many claim at once, each looks at this many times as many as it wants, and tries for some of them.
_CROWD: Final = 4
#: How often a claim that lost every race tries again at once.
_TRIES: Final = 5
#: First pause after a lost race, in seconds.
_PAUSE: Final = 0.002
#: Takes that failed, and are asked about by the next one.
_DOUBTS: Final = 20

_SMALL: Final = {"q": 1, "r": 1, "d": 1, "n": 1, "x": 1, "t": 1}
#: What is not read when a job is lent.
_UNREAD: Final = {"h": 0, "z": 0, "pr": 0}


@dataclass
class View:
    """What a take finds."""

    paused: dict[str, set[str]] = field(default_factory=lambda: {"queue": set(), "task": set(), "key": set()})
    laned: set[str] = field(default_factory=set)  #: queues with jobs in lines
    waiting: dict[str, list[Document]] = field(default_factory=dict)  #: jobs without a lane, in order
    dues: dict[str, float] = field(default_factory=dict)  #: when each queue's next scheduled job is due

    def due(self, queues: Iterable[str]) -> float | None:
        return min((self.dues[queue] for queue in queues if queue in self.dues), default=None)


class Lent(NamedTuple):
    """What a take brought."""

    reservations: list[Reservation]
    due: float | None  #: when the next job is due, or has room
    ended: bool  #: whether jobs ended because it was too late for them


class Claim:
    """How one worker's session claims."""

    def __init__(self, connection: Connection, turns: Turns, worker: str, ageing: float | None) -> None:
        self._connection = connection
        self._turns = turns
        self._worker = worker
        self._ageing = ageing
        self._crowd = 1
        self._doubts: list[tuple[int, list[str]]] = []
        self._ended = False

    # -- any job ----------------------------------------------------------------------

    def take(self, limit: int, job_id: str | None = None) -> Lent:
        """Lend at most ``limit`` jobs, or the one of that id, if it can be lent."""
        self._ended = False
        if limit <= 0:
            view = self._look(0)
            return Lent([], view.due(self._open(view)), ended=False)
        found = self._recovered()[:limit] if job_id is None else []
        if found:
            return Lent(self._reservations(found), None, ended=False)
        if job_id is not None:
            return self._one(job_id)
        for attempt in range(_TRIES):
            view = self._look(limit * self._crowd)
            queues = self._open(view)
            if self._special(view, queues):
                return self._in_lines(view, queues, limit)
            chosen = self._choose(view, queues, limit)
            documents_won = self._claim(chosen, PENDING) if chosen else []
            if documents_won or not chosen:
                return Lent(self._reservations(documents_won), view.due(queues), self._ended)
            self._connection.closed.wait(_PAUSE * (1 << attempt) * random.random())  # noqa: S311 - no secret
        return Lent([], self._connection.moments.now(), self._ended)

    def _open(self, view: View) -> list[str]:
        return [queue for queue in self._turns.weights if queue not in view.paused["queue"]]

    def _special(self, view: View, queues: Sequence[str]) -> bool:
        return self._ageing is not None or not view.laned.isdisjoint(queues)

    def _look(self, limit: int) -> View:
        """Everything that a take must know, in one trip; what is due, too late or stopped is dealt with."""
        while True:
            view = self._connection.run(lambda rooms: _look(rooms, list(self._turns.weights), limit))
            now = self._connection.moments.now()
            due = [queue for queue in self._open(view) if view.dues.get(queue, now + 1) <= now]
            if due:
                self._connection.run(lambda rooms, due=due: stage(self._connection, rooms, due, now))
            elif not self._clear(view, now):
                return view

    def _clear(self, view: View, now: float) -> bool:
        """Put away what must not be lent; whether there was such."""
        open_queues = self._open(view)
        waiting = [each for queue in open_queues for each in view.waiting.get(queue, ())]
        late = [each["_id"] for each in waiting if each.get("x") is not None and each["x"] <= now]
        stopped = [each["_id"] for each in waiting if each.get("t") in view.paused["task"]]
        if late:
            self._ended |= self._connection.run(lambda rooms: expire(self._connection, rooms, late))
        if stopped:
            aside = {"_id": {"$in": stopped}, "s": PENDING}
            self._connection.run(lambda rooms: rooms.jobs.update_many(aside, {"$set": {"s": ASIDE}}))
        return bool(late or stopped)

    def _choose(self, view: View, queues: Sequence[str], limit: int) -> list[Document]:
        """Which of those that wait are tried for: in order, or some of them where others try for the same."""
        crowd = {queue: view.waiting.get(queue, []) for queue in queues}
        turns = self._turns.share(limit, {queue: len(waiting) for queue, waiting in crowd.items()})
        firsts = {}
        for queue in set(turns):
            surplus = len(crowd[queue]) - turns.count(queue)
            firsts[queue] = random.randint(0, surplus) if self._crowd > 1 else 0  # noqa: S311 - no secret
        rows = {queue: iter(crowd[queue][first:]) for queue, first in firsts.items()}
        return [next(rows[queue]) for queue in turns]

    def _claim(self, chosen: Sequence[Document], kind: int) -> list[Document]:
        """Those of ``chosen`` that were still to be had, as they are now."""
        token = self._connection.stamp()
        names = documents.ids(chosen)

        def act(rooms: Rooms) -> list[Document]:
            # Harmless to repeat: what an earlier try has got bears the token already.
            rooms.jobs.update_many({"_id": {"$in": names}, "s": kind}, self.lending(token))
            return self._mine(rooms, token, names)

        try:
            found = self._connection.run(act)
        except BackendUnavailableError:
            self._doubts = [*self._doubts[-_DOUBTS:], (token, names)]
            raise
        self._crowd = max(1, self._crowd // 2) if len(found) == len(names) else min(_CROWD, self._crowd * 2)
        place = {name: at for at, name in enumerate(names)}
        return sorted(found, key=lambda document: place[document["_id"]])

    def _mine(self, rooms: Rooms, token: int, names: Sequence[str]) -> list[Document]:
        mine = {"_id": {"$in": list(names)}, "k": token, "w": self._worker, "s": RESERVED}
        return list(rooms.jobs.find(mine, _UNREAD))

    def lending(self, token: int) -> list[Document]:
        """The update that lends a job."""
        facts = {
            "s": RESERVED,
            "k": token,
            "w": self._worker,
            "e": lease_end(self._connection.moments.lease(), "$ls"),
            "de": {"$add": [{"$ifNull": ["$de", 0]}, 1]},
        }
        return [{"$set": facts}]

    def _recovered(self) -> list[Document]:
        """What takes that failed have got all the same."""
        found: list[Document] = []
        while self._doubts:
            token, names = self._doubts[-1]
            found += self._connection.run(lambda rooms, t=token, n=names: self._mine(rooms, t, n))
            self._doubts.pop()
        return found

    def _reservations(self, found: Iterable[Document]) -> list[Reservation]:
        return [Reservation(documents.job_of(document), document["k"]) for document in found]

    # -- one job, announced jobs, jobs in lines ---------------------------------------

    def _one(self, job_id: str) -> Lent:
        view = self._look(0)
        queues = self._open(view)
        waiting = {"_id": job_id, "q": {"$in": queues}, "s": {"$in": [PENDING, LANED]}}
        document = self._connection.run(lambda rooms: rooms.fresh.find_one(waiting))
        if document is None or document.get("t") in view.paused["task"]:
            return Lent([], view.due(queues), ended=False)
        if document.get("x") is not None and document["x"] <= self._connection.moments.now():
            ended = self._connection.run(lambda rooms: expire(self._connection, rooms, [job_id]))
            return Lent([], view.due(queues), ended)
        if document["s"] == PENDING:
            return Lent(self._reservations(self._claim([document], PENDING)), view.due(queues), ended=False)
        return self._in_lines(view, queues, 1, document)

    def announced(self, names: Sequence[str]) -> Lent:
        """Lend those of the announced jobs ``names`` that may be lent; the others wait on as ordinary ones."""
        view = self._look(0)
        queues = self._open(view)
        now = self._connection.moments.now()
        wanted = {"_id": {"$in": list(names)}, "s": ANNOUNCED}
        found = self._connection.run(lambda rooms: list(rooms.fresh.find(wanted, _SMALL)))
        late = [each["_id"] for each in found if each.get("x") is not None and each["x"] <= now]
        chosen = [
            each
            for each in found
            if each["q"] in queues and each.get("t") not in view.paused["task"] and each["_id"] not in late
        ]
        others = list({each["_id"] for each in found} - {each["_id"] for each in chosen})
        if others:
            rest = {"_id": {"$in": others}, "s": ANNOUNCED}
            self._connection.run(lambda rooms: rooms.jobs.update_many(rest, {"$set": {"s": PENDING}}))
        ended = bool(late) and self._connection.run(lambda rooms: expire(self._connection, rooms, late))
        chosen.sort(key=lambda each: (each["r"], each["d"], each["n"]))
        won = self._claim(chosen, ANNOUNCED) if chosen else []
        return Lent(self._reservations(won), None, ended)

    def _in_lines(self, view: View, queues: Sequence[str], limit: int, only: Document | None = None) -> Lent:
        token = self._connection.stamp()
        how = lines.How(limit, queues, view.paused, self._ageing, token, self.lending(token), only)

        def act(rooms: Rooms, session: Any) -> tuple[lines.Served, Turns]:
            turns = copy.deepcopy(self._turns)  # a try that comes to nothing has no turn
            return lines.Lines(self._connection, rooms, session, how).serve(turns), turns

        served, self._turns = self._connection.transact(act, "lanes")
        while served.again and not served.documents:
            served, self._turns = self._connection.transact(act, "lanes")
        dues = [due for due in (view.due(queues), served.room) if due is not None]
        return Lent(
            self._reservations(served.documents), min(dues, default=None), self._ended or served.ended
        )


def _look(rooms: Rooms, queues: Sequence[str], limit: int) -> View:
    first, *others = [part for queue in queues for part in _parts(rooms, queue, limit)]
    pipeline = [{"$match": {"kind": "pause"}}, *({"$unionWith": part} for part in (first, *others))]
    view = View()
    for found in rooms.facts.aggregate(pipeline):
        if "what" in found:
            view.paused[found["what"]].add(found["name"])
        elif "laned" in found:
            view.laned.add(found["laned"])
        elif "due" in found:
            view.dues[found["q"]] = found["due"]
        else:
            view.waiting.setdefault(found["q"], []).append(found)
    return view


def _parts(rooms: Rooms, queue: str, limit: int) -> list[Mapping[str, Any]]:
    ordered = {"$sort": {"r": 1, "d": 1, "n": 1}}
    line: list[Any] = [{"$match": {"q": queue, "open": True}}, {"$limit": 1}, {"$project": {"laned": "$q"}}]
    due: list[Any] = [
        {"$match": {"s": SCHEDULED, "q": queue}},
        ordered,
        {"$limit": 1},
        {"$project": {"q": 1, "due": "$d"}},
    ]
    parts = [{"coll": rooms.lanes.name, "pipeline": line}, {"coll": rooms.jobs.name, "pipeline": due}]
    if limit:
        waiting = [{"$match": {"s": PENDING, "q": queue}}, ordered, {"$limit": limit}, {"$project": _SMALL}]
        parts.append({"coll": rooms.jobs.name, "pipeline": waiting})
    return parts
