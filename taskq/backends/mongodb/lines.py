"""Jobs in lanes: which of them a take may lend, and whose turn it is.

A line is the jobs of one lane that wait in one queue at one priority; its document says how much it has had, and
whether jobs may stand in it. How many jobs are lent through a gate is counted from the jobs themselves, so no account
can be wrong; a take writes to the document of each gate with a limit, so that two at once cannot lend the same room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from taskq.backends import moves
from taskq.backends.mongodb import documents
from taskq.backends.mongodb.changing import Change, write
from taskq.backends.mongodb.connection import Connection, Rooms
from taskq.backends.mongodb.documents import ASIDE, LANED, PENDING, Document
from taskq.backends.mongodb.gates import Gates
from taskq.backends.mongodb.pushing import line_id
from taskq.backends.shares import Line, gate_names, pick
from taskq.backends.turns import Turns
from taskq.job import MAX_PRIORITY, Lane, State

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

#: Ageing raises a priority to this at most.
_HIGHEST: Final = 99
#: Lines whose jobs are looked up by one question.
_AT_ONCE: Final = 50
_SMALL: Final = {"q": 1, "r": 1, "d": 1, "n": 1, "x": 1, "t": 1, "l": 1, "s": 1}


@dataclass(frozen=True)
class How:
    """What a take wants."""

    limit: int
    queues: Sequence[str]
    paused: Mapping[str, set[str]]
    ageing: float | None
    token: int
    lending: list[Document]
    only: Document | None = None  #: the one job that is wanted


class Served(NamedTuple):
    """What it got."""

    documents: list[Document]
    room: float | None  #: when time alone makes room for what was passed over
    ended: bool
    again: bool  #: whether something was put away, behind which others may stand


@dataclass
class _Place:
    """What a line of a plan stands for: one with its document, or the jobs of a rank without a lane."""

    rank: int
    jobs: list[Document]
    document: Document | None = None


@dataclass
class _Plan:
    """Whose turn it would be in one queue."""

    order: list[Line] = field(default_factory=list)
    turns: dict[int, Document] = field(default_factory=dict)


class Lines:
    """The lines of some queues, as one transaction sees them."""

    def __init__(self, connection: Connection, rooms: Rooms, session: ClientSession, how: How) -> None:
        self._connection = connection
        self._rooms = rooms
        self._session = session
        self._how = how
        self._now = connection.moments.now()
        self._gates = Gates(connection, rooms, session)
        self._late: list[Document] = []
        self._aside: list[str] = []
        self._closed: list[str] = []
        self._sequences: set[str] = set()  #: lanes with a head

    def serve(self, turns: Turns) -> Served:
        """Lend what may be lent."""
        plans = {queue: self._plan(queue) for queue in self._how.queues if self._concerns(queue)}
        chosen = turns.share(self._how.limit, {queue: len(plan.order) for queue, plan in plans.items()})
        lent: dict[str, Iterator[Document]] = {}
        names: dict[str, Document] = {}
        for queue, n in Counter(chosen).items():
            some = self._taken(plans[queue], n)
            names |= {each["_id"]: each for each in some}
            lent[queue] = iter(some)
        self._put_away()
        found = self._lend(list(names.values()))
        order = [next(lent[queue])["_id"] for queue in chosen]
        return Served(
            [found[name] for name in order],
            self._gates.until,
            bool(self._late),
            bool(self._late or self._aside),
        )

    def _concerns(self, queue: str) -> bool:
        return self._how.only is None or self._how.only["q"] == queue

    # -- whose turn it is -------------------------------------------------------------

    def _plan(self, queue: str) -> _Plan:
        plan = _Plan()
        kept = self._rooms.lanes.find({"q": queue, "turn": True}, session=self._session)
        plan.turns = {each["r"]: each for each in kept}
        had = {rank: each.get("had", 0.0) for rank, each in plan.turns.items()}
        lines = [*self._plain(queue, had), *self._open(queue)]
        clocks = {rank: each.get("v", 0.0) for rank, each in plan.turns.items()}
        plan.order = pick(self._how.limit, lines, clocks)
        return plan

    def _plain(self, queue: str, had: Mapping[int, float]) -> Iterator[Line]:
        """The jobs without a lane, as one line of each rank."""
        if self._how.only is not None:
            return
        ranks: dict[int, list[Document]] = {}
        found = sorted(self._without_lane(queue), key=lambda e: (self._aged(e["r"], e["d"]), e["d"], e["n"]))
        for each in found[: self._how.limit]:
            ranks.setdefault(self._aged(each["r"], each["d"]), []).append(each)
        for rank, jobs in ranks.items():
            yield Line(rank, had.get(rank, 0.0), len(jobs), tag=_Place(rank, jobs))

    def _without_lane(self, queue: str) -> Iterator[Document]:
        whole: Document = {"s": PENDING, "q": queue}
        ranks = [whole]
        if self._how.ageing is not None:  # each rank's oldest may have become the first of all
            ranks = [whole | {"r": rank} for rank in range(-MAX_PRIORITY, 1)]
        for wanted in ranks:
            found = self._rooms.jobs.find(wanted, _SMALL, session=self._session)
            left = self._how.limit
            for each in found.sort([("r", 1), ("d", 1), ("n", 1)]).batch_size(self._how.limit):
                if self._good(each):
                    yield each
                    left -= 1
                if not left:
                    break

    def _aged(self, rank: int, due: float) -> int:
        if self._how.ageing is None:
            return rank
        return max(-_HIGHEST, rank - int(max(0.0, self._now - due) / self._how.ageing))

    def _good(self, job: Document) -> bool:
        """Whether it may be lent; what is too late or stopped is put away."""
        if job.get("x") is not None and job["x"] <= self._now:
            self._late.append(job)
            return False
        if job.get("t") in self._how.paused["task"]:
            self._aside.append(job["_id"])
            return False
        return True

    def _open(self, queue: str) -> list[Line]:
        """The lines with room that could have a turn: the first so many, in the order of what they have had."""
        lines: list[Line] = []
        for some in _chunks(self._documents(queue), _AT_ONCE):
            lanes = {each["_id"]: Lane.parse(each["l"], each["w"]) for each in some}
            free = [each for each in some if not self._stopped(lanes[each["_id"]])]
            self._gates.load(name for each in free for name in gate_names(lanes[each["_id"]]) or ())
            roomy = [each for each in free if self._gates.room(lanes[each["_id"]])]
            for each, jobs in zip(roomy, self._jobs_of(roomy, lanes), strict=True):
                if jobs:
                    lines.append(self._line(each, lanes[each["_id"]], jobs))
            # A line beyond as many as are wanted has no turn before each of them has had one.
            if len(lines) >= self._how.limit and self._how.ageing is None:
                break
        return lines

    def _documents(self, queue: str) -> Iterable[Document]:
        only = self._how.only
        if only is None:
            wanted: Document = {"q": queue, "open": True}
        else:
            wanted = {"_id": line_id(queue, only["l"], only["r"])}
        return self._rooms.lanes.find(wanted, session=self._session).sort([("r", 1), ("v", 1)])

    def _stopped(self, lane: Lane) -> bool:
        return lane.task in self._how.paused["task"] or (
            bool(lane.key) and lane.key in self._how.paused["key"]
        )

    def _line(self, document: Document, lane: Lane, jobs: list[Document]) -> Line:
        rank = self._aged(document["r"], jobs[0]["d"])
        place = _Place(document["r"], jobs, document)
        return Line(rank, document["v"], len(jobs), lane.weight, self._gates.of(lane), place)

    # -- the jobs of lines ------------------------------------------------------------

    def _jobs_of(self, some: Sequence[Document], lanes: Mapping[str, Lane]) -> list[list[Document]]:
        """The first jobs of each line; a line in which none stands is closed."""
        if not some:
            return []
        found: dict[str, list[Document]] = {each["_id"]: [] for each in some}
        if self._how.only is not None:
            (line,) = some
            found[line["_id"]] = self._single(lanes[line["_id"]], self._how.only)
            return list(found.values())
        for each in self._first_jobs(some, lanes):
            found[line_id(each["q"], each["l"], each["r"])].append(each)
        for name, jobs in found.items():
            if not jobs and not (lanes[name].ordered and lanes[name].name in self._sequences):
                self._closed.append(name)
            good = [job for job in jobs if self._good(job)]
            if len(good) < len(jobs) == self._how.limit and not lanes[name].ordered:
                good = self._more(jobs[0], good)
            # Where the head of a sequence is put away, the next take finds the next.
            found[name] = good
        return list(found.values())

    def _first_jobs(self, some: Sequence[Document], lanes: Mapping[str, Lane]) -> Iterator[Document]:
        for ordered in (False, True):
            names = [each["_id"] for each in some if lanes[each["_id"]].ordered == ordered]
            if not names:
                continue
            looked_up = self._heads() if ordered else self._fronts()
            pipeline: list[Mapping[str, Any]] = [
                {"$match": {"_id": {"$in": names}}},
                {"$lookup": looked_up},
                {"$project": {"jobs": 1}},
            ]
            for line in self._rooms.lanes.aggregate(pipeline, session=self._session):
                for each in line["jobs"]:
                    # The head of a sequence may stand in another queue, or not stand at all.
                    self._sequences.add(each["l"])
                    if each["s"] == LANED and line_id(each["q"], each["l"], each["r"]) == line["_id"]:
                        yield each

    def _fronts(self) -> Document:
        """A look-up of the first jobs that wait in a line."""
        here = {"$and": [{"$eq": ["$q", "$$q"]}, {"$eq": ["$r", "$$r"]}]}
        return {
            "from": self._rooms.jobs.name,
            "localField": "l",
            "foreignField": "l",
            "let": {"q": "$q", "r": "$r"},
            "pipeline": [
                {"$match": {"s": LANED, "$expr": here}},
                {"$sort": {"r": 1, "d": 1, "n": 1}},
                {"$limit": self._how.limit},
                {"$project": _SMALL},
            ],
            "as": "jobs",
        }

    def _heads(self) -> Document:
        """A look-up of the first job of a lane that has not ended, wherever it is."""
        return {
            "from": self._rooms.jobs.name,
            "localField": "l",
            "foreignField": "o",
            "pipeline": [{"$sort": {"n": 1}}, {"$limit": 1}, {"$project": _SMALL}],
            "as": "jobs",
        }

    def _more(self, first: Document, good: list[Document]) -> list[Document]:
        """As many good jobs of a line as are wanted, where some of the first were not."""
        seen = {*self._aside, *(each["_id"] for each in self._late), *(each["_id"] for each in good)}
        waiting = {"l": first["l"], "s": LANED, "q": first["q"], "r": first["r"]}
        found = self._rooms.jobs.find(waiting, _SMALL, session=self._session).sort([("d", 1), ("n", 1)])
        for each in found:
            if len(good) >= self._how.limit:
                break
            if each["_id"] not in seen and self._good(each):
                good.append(each)
        return good

    def _single(self, lane: Lane, job: Document) -> list[Document]:
        found = self._rooms.jobs.find_one({"_id": job["_id"], "s": LANED}, _SMALL, session=self._session)
        if found is None or not self._good(found):
            return []
        if lane.ordered:
            head = (
                self._rooms.jobs.find({"o": job["l"]}, {"_id": 1}, session=self._session).sort("n").limit(1)
            )
            if [each["_id"] for each in head] != [job["_id"]]:
                return []
        return [found]

    # -- lending ----------------------------------------------------------------------

    def _taken(self, plan: _Plan, n: int) -> list[Document]:
        """The first ``n`` jobs of a plan; writes what its lines have had."""
        order = plan.order[:n]
        counts = Counter(map(id, order))
        for line in {id(line): line for line in plan.order}.values():
            line.vtime -= (line.taken - counts[id(line)]) / line.weight
        for line in {id(line): line for line in order}.values():
            self._account(plan, line, counts[id(line)])
        self._write_turns(plan, order)
        rows = {id(line): iter(line.tag.jobs) for line in order}
        return [next(rows[id(line)]) for line in order]

    def _account(self, plan: _Plan, line: Line, n: int) -> None:
        place: _Place = line.tag
        turn = plan.turns.setdefault(line.rank, {})
        turn["v"] = max(turn.get("v", 0.0), line.vtime - 1.0 / line.weight)
        if place.document is None:
            turn["had"] = line.vtime
        else:
            facts = {"v": line.vtime, "seen": self._now}
            self._rooms.lanes.update_one(
                {"_id": place.document["_id"]}, {"$set": facts}, session=self._session
            )
        self._gates.lend(line.gates, n)

    def _write_turns(self, plan: _Plan, order: Sequence[Line]) -> None:
        from pymongo import UpdateOne

        writes = []
        queue = order[0].tag.jobs[0]["q"]
        for rank in {line.rank for line in order}:
            turn = plan.turns[rank]
            facts = {"q": queue, "turn": True, "r": rank, "v": turn["v"], "had": turn.get("had", 0.0)}
            writes.append(UpdateOne({"_id": f"turn\x1e{rank}\x1e{queue}"}, {"$set": facts}, upsert=True))
        self._rooms.lanes.bulk_write(writes, ordered=False, session=self._session)

    def _lend(self, jobs: Sequence[Document]) -> dict[str, Document]:
        if not jobs:
            return {}
        from pymongo import UpdateMany

        lanes: dict[str | None, list[str]] = {}
        for job in jobs:
            lanes.setdefault(job.get("l"), []).append(job["_id"])
        writes = []
        for name, some in lanes.items():
            through = documents.gates(Lane.parse(name)) if name else None
            lending = [{"$set": {**self._how.lending[0]["$set"], **({"g": through} if through else {})}}]
            writes.append(UpdateMany({"_id": {"$in": some}, "s": {"$in": [PENDING, LANED]}}, lending))
        self._rooms.jobs.bulk_write(writes, ordered=False, session=self._session)
        wanted = {"_id": {"$in": documents.ids(jobs)}, "k": self._how.token}
        found = self._rooms.jobs.find(wanted, {"h": 0, "pr": 0}, session=self._session)
        return {each["_id"]: each for each in found}

    def _put_away(self) -> None:
        """End what is too late, set aside what is stopped, close lines that are empty."""
        if self._late:
            names = documents.ids(self._late)
            found = self._rooms.jobs.find({"_id": {"$in": names}}, session=self._session)
            changes = [Change(each, _late(each, self._now)) for each in found]
            write(self._connection, self._rooms, changes, self._session)
        if self._aside:
            aside = {"_id": {"$in": self._aside}}
            self._rooms.jobs.update_many(aside, {"$set": {"s": ASIDE}}, session=self._session)
        if self._closed:
            closed = {"_id": {"$in": self._closed}}
            self._rooms.lanes.update_many(
                closed, {"$set": {"open": False, "seen": self._now}}, session=self._session
            )


def _late(document: Document, now: float) -> moves.Move:
    return moves.Move(moves.end(documents.job_of(document), State.CANCELLED, now, error=moves.EXPIRED))


def _chunks(found: Iterable[Document], size: int) -> Iterator[list[Document]]:
    some: list[Document] = []
    for each in found:
        some.append(each)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some
