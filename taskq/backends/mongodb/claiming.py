"""Lending: jobs of one or more queues to one worker."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from taskq.backends.mongodb import documents, lines
from taskq.backends.mongodb.changing import expire, stage
from taskq.backends.mongodb.connection import Connection, Rooms
from taskq.backends.mongodb.documents import ANNOUNCED, ASIDE, LANED, PENDING, RESERVED, SCHEDULED, Document
from taskq.backends.mongodb.moments import lease_end
from taskq.backends.turns import Turns
from taskq.clock import monotonic
from taskq.errors import BackendUnavailableError
from taskq.job import Reservation

#: Where many claim at once, each looks at this many times as many as it wants, and tries for some of them.
_CROWD: Final = 4
#: How often a claim that lost every race tries again at once.
_TRIES: Final = 5
#: How long a claim may go by what it has seen of pauses and lanes, in seconds; a pause takes as long to hold.
LASTS: Final = 0.05
#: First pause after a lost race, in seconds.
_PAUSE: Final = 0.002
#: Takes that failed, and are asked about by the next one.
_DOUBTS: Final = 20

#: What is not read when a job is lent.
_UNREAD: Final = {"h": 0, "pr": 0}


@dataclass
class View:
    """What a take finds."""

    paused: dict[str, set[str]] = field(default_factory=lambda: {"queue": set(), "task": set(), "key": set()})
    laned: set[str] = field(default_factory=set)  #: queues with jobs in lines
    dues: dict[str, float] = field(default_factory=dict)  #: when the next scheduled job is due, by its queue

    def due(self) -> float | None:
        return min(self.dues.values(), default=None)

    def dues_over(self, now: float) -> list[str]:
        """Queues in which something has become due."""
        return [queue for queue, at in self.dues.items() if at <= now]


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
        self._view = View()
        self._seen = float("-inf")  #: when, on the monotonic clock
        self._ended = False

    # -- any job ----------------------------------------------------------------------

    def take(self, limit: int, job_id: str | None = None) -> Lent:
        """Lend at most ``limit`` jobs, or the one of that id, if it can be lent."""
        self._ended = False
        if limit <= 0:
            return Lent([], self._look().due(), ended=False)
        if job_id is not None:
            return self._one(job_id)
        if self._doubts and (recovered := self._recovered()):
            return Lent(self._reservations(recovered), None, ended=False)
        return self._at_once(limit) or self._some(limit)

    def _some(self, limit: int) -> Lent:
        for attempt in range(_TRIES):
            view = self._look()
            queues = self._open(view)
            if self._ageing is not None or not view.laned.isdisjoint(queues):
                return self._in_lines(view, queues, limit)
            chosen = self._choose(self._waiting(view, queues, limit * self._crowd), limit)
            won = self._claim(chosen, PENDING) if chosen else []
            if won or not chosen:
                return Lent(self._reservations(won), view.due(), self._ended)
            self._connection.closed.wait(_PAUSE * (1 << attempt) * random.random())  # noqa: S311 - no secret
        return Lent([], self._connection.moments.now(), self._ended)

    def _at_once(self, limit: int) -> Lent | None:
        """What a plain claim brings, where a look a moment ago found nothing that is more than plain."""
        view = self._view
        plain = self._ageing is None and not view.laned and not view.paused["task"]
        if not plain or monotonic() > self._seen + LASTS or view.dues_over(self._connection.moments.now()):
            return None
        chosen = self._choose(self._waiting(view, self._open(view), limit * self._crowd), limit)
        won = self._claim(chosen, PENDING) if chosen else []
        return Lent(self._reservations(won), view.due(), self._ended) if won else None

    def _open(self, view: View) -> list[str]:
        return [queue for queue in self._turns.weights if queue not in view.paused["queue"]]

    def _look(self) -> View:
        """What a take must know; what has become due is staged first."""
        while True:
            self._seen = monotonic()
            view = self._view = self._connection.run(_look, list(self._turns.weights))
            now = self._connection.moments.now()
            due = view.dues_over(now)
            if not due:
                return view
            self._connection.run(partial(stage, self._connection), due, now)

    def _waiting(self, view: View, queues: Sequence[str], limit: int) -> dict[str, list[Document]]:
        """The first jobs that wait in each queue, without a lane; what must not be lent is put away."""
        while True:
            found = self._connection.run(_fronts, queues, limit)
            if not self._put_away(view, [each for waiting in found.values() for each in waiting]):
                return found

    def _put_away(self, view: View, waiting: Sequence[Document]) -> bool:
        """End what is too late, set aside what is stopped; whether there was such."""
        now = self._connection.moments.now()
        late = [each["_id"] for each in waiting if each.get("x") is not None and each["x"] <= now]
        stopped = [each["_id"] for each in waiting if each.get("t") in view.paused["task"]]
        if late:
            self._ended |= self._connection.run(partial(expire, self._connection), late)
        if stopped:
            self._connection.run(_set_aside, stopped)
        return bool(late or stopped)

    def _choose(self, waiting: Mapping[str, list[Document]], limit: int) -> list[Document]:
        """Which of those that wait are tried for: in order, or some of them where others try for the same."""
        turns = self._turns.share(limit, {queue: len(some) for queue, some in waiting.items()})
        rows = {}
        for queue, n in Counter(turns).items():
            surplus = len(waiting[queue]) - n
            first = random.randint(0, surplus) if self._crowd > 1 else 0  # noqa: S311 - no secret
            rows[queue] = iter(waiting[queue][first:])
        return [next(rows[queue]) for queue in turns]

    def _claim(self, chosen: Sequence[Document], kind: int) -> list[Document]:
        """Those of ``chosen`` that were still to be had, as they are now."""
        token = self._connection.stamp()
        names = documents.ids(chosen)
        # What has not been touched since it was pushed is still what was read, and need not be read again.
        untouched = not any("k" in each or "z" in each for each in chosen)
        wanted: Document = {"_id": {"$in": names}, "s": kind}
        if untouched:
            wanted |= {"k": None, "z": None}
        tries = 0

        def act(rooms: Rooms) -> list[Document]:
            nonlocal tries
            tries += 1
            # Harmless to repeat: what an earlier try has got bears the token already.
            got = rooms.jobs.update_many(wanted, self.lending(token)).matched_count
            if untouched and tries == 1 and got in (0, len(chosen)):
                return [self._lent(each, token) for each in chosen] if got else []
            return self._mine(rooms, token, names)

        try:
            found = self._connection.run(act)
        except BackendUnavailableError:
            self._doubts = [*self._doubts[-_DOUBTS:], (token, names)]
            raise
        self._crowd = max(1, self._crowd // 2) if len(found) == len(names) else min(_CROWD, self._crowd * 2)
        place = {name: at for at, name in enumerate(names)}
        return sorted(found, key=lambda document: place[document["_id"]])

    def _lent(self, document: Document, token: int) -> Document:
        """What :meth:`lending` makes of a document, as far as a job is read from it."""
        return {**document, "s": RESERVED, "k": token, "w": self._worker, "de": document.get("de", 0) + 1}

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
            found += self._connection.run(self._mine, token, names)
            self._doubts.pop()
        return found

    def _reservations(self, found: Iterable[Document]) -> list[Reservation]:
        now = self._connection.moments.lease_now()
        return [Reservation(documents.job_of(each), each["k"], lease_over(each, now)) for each in found]

    # -- one job, announced jobs, jobs in lines ---------------------------------------

    def _one(self, job_id: str) -> Lent:
        view = self._look()
        queues = self._open(view)
        wanted = {"_id": job_id, "q": {"$in": queues}, "s": {"$in": [PENDING, LANED]}}
        document = self._connection.run(lambda rooms: rooms.fresh.find_one(wanted, _UNREAD))
        if document is None or document.get("t") in view.paused["task"] or self._put_away(view, [document]):
            return Lent([], view.due(), self._ended)
        if document["s"] == PENDING:
            return Lent(self._reservations(self._claim([document], PENDING)), view.due(), ended=False)
        return self._in_lines(view, queues, 1, document)

    def announced(self, names: Sequence[str]) -> Lent:
        """Lend those of the announced jobs ``names`` that may be lent; the others wait on as ordinary ones."""
        self._ended = False
        view = self._look()
        queues = self._open(view)
        wanted = {"_id": {"$in": list(names)}, "s": ANNOUNCED}
        found = self._connection.run(lambda rooms: list(rooms.fresh.find(wanted, _UNREAD)))
        now = self._connection.moments.now()
        chosen = []
        for each in found:
            late = each.get("x") is not None and each["x"] <= now
            if each["q"] in queues and each.get("t") not in view.paused["task"] and not late:
                chosen.append(each)
        others = {each["_id"] for each in found} - {each["_id"] for each in chosen}
        if others:
            self._connection.run(_disclose, list(others))
            self._ended |= self._connection.run(partial(expire, self._connection), list(others))
        chosen.sort(key=lambda each: (each["r"], each["d"], each["n"]))
        won = self._claim(chosen, ANNOUNCED) if chosen else []
        return Lent(self._reservations(won), None, self._ended)

    def _in_lines(self, view: View, queues: Sequence[str], limit: int, only: Document | None = None) -> Lent:
        token = self._connection.stamp()
        how = lines.How(limit, queues, view.paused, self._ageing, token, self.lending(token), only)

        def act(rooms: Rooms, session: Any) -> tuple[lines.Served, Turns]:
            turns = copy.deepcopy(self._turns)  # a try that comes to nothing has no turn
            return lines.Lines(self._connection, rooms, session, how).serve(turns), turns

        served, self._turns = self._connection.transact(act, "lanes")
        while served.again and not served.documents:
            served, self._turns = self._connection.transact(act, "lanes")
        dues = [due for due in (view.due(), served.room) if due is not None]
        return Lent(
            self._reservations(served.documents), min(dues, default=None), self._ended or served.ended
        )


def lease_over(document: Document, now: float) -> float:
    """When the lease of a job that was lent at ``now`` is over, on the clock of leases."""
    seconds: float = document["ls"]
    return now + seconds if seconds > 0 else float("inf")


def _look(rooms: Rooms, queues: Sequence[str]) -> View:
    view = View()
    here = {"q": {"$in": list(queues)}}
    for each in rooms.facts.find({"kind": "pause"}):
        view.paused[each["what"]].add(each["name"])
    if rooms.lanes.find_one({**here, "open": True}, {"_id": 1}) is not None:
        view.laned = set(rooms.lanes.distinct("q", {**here, "open": True}))
    open_queues = [queue for queue in queues if queue not in view.paused["queue"]]
    due = {"s": SCHEDULED, "q": {"$in": open_queues}, "r": 0}
    for each in rooms.fresh.find(due, {"q": 1, "d": 1}).sort("d", 1).limit(1):
        view.dues[each["q"]] = each["d"]
    return view


def _fronts(rooms: Rooms, queues: Sequence[str], limit: int) -> dict[str, list[Document]]:
    found = {}
    for queue in queues:
        waiting = rooms.fresh.find({"s": PENDING, "q": queue}, _UNREAD)
        found[queue] = list(waiting.sort([("r", 1), ("d", 1), ("n", 1)]).limit(limit).batch_size(limit + 1))
    return found


def _set_aside(rooms: Rooms, names: Sequence[str]) -> None:
    rooms.jobs.update_many({"_id": {"$in": list(names)}, "s": PENDING}, {"$set": {"s": ASIDE}})


def _disclose(rooms: Rooms, names: Sequence[str]) -> None:
    rooms.jobs.update_many({"_id": {"$in": list(names)}, "s": ANNOUNCED}, {"$set": {"s": PENDING}})
