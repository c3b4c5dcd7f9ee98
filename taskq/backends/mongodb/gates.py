"""Limits of tasks and keys: what is lent through a gate, when it was started, and whether there is room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from taskq.backends.mongodb.connection import Connection, Rooms
from taskq.backends.mongodb.documents import Document
from taskq.backends.shares import Gate, gate_names, key_gate, task_gate
from taskq.job import Lane
from taskq.limits import Limits, as_facts, from_facts

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

_UNIT = "\x1f"


class Gates:
    """The gates of one take, within its transaction."""

    def __init__(self, connection: Connection, rooms: Rooms, session: ClientSession) -> None:
        self._rooms = rooms
        self._session = session
        self._moments = connection.moments
        self._now = connection.moments.lease_now()
        self._rules: dict[str, Limits | None] = {}
        self._gates: dict[str, Gate] = {}
        self._names: dict[int, str] = {}
        self.until: float | None = (
            None  #: when time alone makes room for what was passed over, on the wall clock
        )

    def load(self, names: Iterable[str]) -> None:
        """Learn what these gates have lent, and when."""
        wanted = list(dict.fromkeys(name for name in names if name not in self._gates))
        if not wanted:
            return
        tasks = {name.partition(_UNIT)[0] for name in wanted} - self._rules.keys()
        if tasks:
            self._rules |= dict.fromkeys(tasks) | limits_of(self._rooms, tasks, self._session)
        for name in wanted:
            rules = self._rules[name.partition(_UNIT)[0]]
            gate = key_gate(rules) if _UNIT in name else task_gate(rules)
            self._gates[name] = gate
            self._names[id(gate)] = name
        limited = [name for name in wanted if _limited(self._gates[name])]
        if limited:
            self._count(limited)
            self._read_logs([name for name in limited if self._gates[name].rate is not None])
        for name in wanted:
            self._gates[name].look(self._now)

    def _count(self, names: Sequence[str]) -> None:
        pipeline: list[Mapping[str, Any]] = [
            {"$match": {"g": {"$in": names}}},
            {"$project": {"g": 1, "unseen": {"$cond": [{"$eq": [{"$type": "$st"}, "missing"]}, 1, 0]}}},
            {"$unwind": "$g"},
            {"$match": {"g": {"$in": names}}},
            {"$group": {"_id": "$g", "running": {"$sum": 1}, "unseen": {"$sum": "$unseen"}}},
        ]
        for found in self._rooms.jobs.aggregate(pipeline, session=self._session):
            gate = self._gates[found["_id"]]
            gate.running, gate.unseen = found["running"], found["unseen"]

    def _read_logs(self, names: Sequence[str]) -> None:
        if not names:
            return
        wanted = {"_id": {"$in": [f"gate:{name}" for name in names]}}
        for found in self._rooms.gates.find(wanted, session=self._session):
            gate = self._gates[found["_id"].removeprefix("gate:")]
            gate.log = [(at, n) for at, n in found.get("log", ())]
            for at, n in found.get("fresh", ()):
                gate.record(n, at)

    def of(self, lane: Lane) -> list[Gate]:
        return [self._gates[name] for name in gate_names(lane) or ()]

    def room(self, lane: Lane) -> bool:
        """Whether a job of ``lane`` may start; where not, remembers when time alone will change that."""
        shut = [gate for gate in self.of(lane) if gate.room <= 0]
        times = [gate.until for gate in shut]
        if times and None not in times:
            latest = max(time for time in times if time is not None)
            until = self._moments.now() + max(0.0, latest - self._now)
            self.until = until if self.until is None else min(until, self.until)
        return not shut

    def lend(self, gates: Sequence[Gate], n: int) -> None:
        """Write that ``n`` jobs go through these gates, so that no other take counts on the same room."""
        for gate in gates:
            gate.lend(n)
            if not _limited(gate):
                continue
            facts: Document = {"seen": self._moments.now()}
            if gate.rate is not None:
                facts |= {"log": [list(entry) for entry in gate.log], "fresh": []}
            change = {"$set": facts, "$inc": {"n": 1}}
            name = f"gate:{self._names[id(gate)]}"
            self._rooms.gates.update_one({"_id": name}, change, upsert=True, session=self._session)


def _limited(gate: Gate) -> bool:
    return gate.cap is not None or gate.rate is not None


def record(connection: Connection, rooms: Rooms, starts: Iterable[Lane]) -> None:
    """Enter starts that have become known into the logs of their gates."""
    counts: dict[str, int] = {}
    lanes = [lane for lane in starts if lane.task]
    if not lanes:
        return
    rules = limits_of(rooms, {lane.task for lane in lanes})
    for lane in lanes:
        limits = rules.get(lane.task)
        for name in gate_names(lane) or ():
            gate = key_gate(limits) if _UNIT in name else task_gate(limits)
            if gate.rate is not None:
                counts[name] = counts.get(name, 0) + 1
    if not counts:
        return
    from pymongo import UpdateOne

    now = connection.moments.lease_now()
    facts = {"seen": connection.moments.now()}
    rooms.gates.bulk_write(
        [
            UpdateOne({"_id": f"gate:{name}"}, {"$push": {"fresh": [now, n]}, "$set": facts}, upsert=True)
            for name, n in counts.items()
        ],
        ordered=False,
    )


def limits_of(
    rooms: Rooms, tasks: Iterable[str] | None = None, session: ClientSession | None = None
) -> dict[str, Limits]:
    """The limits declared last, of these tasks or of all."""
    wanted: Document = {"kind": "limits"}
    if tasks is not None:
        wanted["_id"] = {"$in": [f"limits:{task}" for task in tasks]}
    return {
        found["limits"]["task"]: from_facts(found["limits"])
        for found in rooms.facts.find(wanted, session=session)
    }


def declare(rooms: Rooms, limits: Sequence[Limits]) -> list[str]:
    """Make these the limits of their tasks; returns the tasks for which that is a change."""
    known: Mapping[str, Limits] = limits_of(rooms, [each.task for each in limits])
    changed: list[Any] = [each for each in limits if known.get(each.task) != each]
    for each in changed:
        facts = {"kind": "limits", "limits": as_facts(each)}
        rooms.facts.update_one({"_id": f"limits:{each.task}"}, {"$set": facts}, upsert=True)
    return [each.task for each in changed]
