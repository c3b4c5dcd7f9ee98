"""The MongoDB backend: what is asked of all jobs at once, and the store."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgpack

from taskq.backend import Cancellation, Capabilities, Consumer, Page, Reclaimed, Scope
from taskq.backends import holding, moves
from taskq.backends.mongodb import documents, gates, pushing
from taskq.backends.mongodb.changing import STEP, Change, take_back, write
from taskq.backends.mongodb.claiming import LASTS
from taskq.backends.mongodb.connection import TIMEOUT, Connection, Rooms
from taskq.backends.mongodb.consumer import MongoConsumer
from taskq.backends.mongodb.documents import (
    ANNOUNCED,
    CANCELLED,
    COMPLETED,
    DEAD,
    KINDS,
    PENDING,
    RESERVED,
    SCHEDULED,
    STATES,
    UNENDED,
    Document,
)
from taskq.backends.mongodb.settling import Settling
from taskq.backends.mongodb.signals import ENDS, Signals, queue_name, worker_name
from taskq.backends.mongodb.upkeep import Upkeep, drop
from taskq.backends.turns import Turns
from taskq.clock import SYSTEM_CLOCK, Clock, monotonic
from taskq.errors import InvalidArgumentError
from taskq.job import Job, State
from taskq.limits import Limits
from taskq.store import Ledger, ScheduleRecord, WorkerInfo

#: Completed jobs remembered per queue.
MAX_FINISHED: Final = 100_000
#: Workers are forgotten when unheard of for this long, in seconds.
WORKER_SILENCE: Final = 120.0

_ORDER: Final = [("r", 1), ("d", 1), ("n", 1)]

_CAPABILITIES = Capabilities(
    name="mongodb",
    leases="timed",
    fencing=True,
    attempts="exact",
    priority="strict",
    size="exact",
    scheduled="visible",
    dead_listing="safe",
    revive="once",
    pause="durable",
    order="fifo",
    persistent=True,
    shared=True,
    stores=True,
    lease_clock="server",
)


class MongoBackend(Ledger):
    """Jobs in the collections of one database."""

    def __init__(
        self,
        url: str,
        database: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        prefix: str = "",
        timeout: float = TIMEOUT,
        max_finished: int = MAX_FINISHED,
        ageing: float | None = None,
    ) -> None:
        self._connection = Connection(url, database, prefix=prefix, timeout=timeout, clock=clock)
        self._moments = self._connection.moments
        self._signals = Signals(self._connection)
        self._settling = Settling(self._connection)
        self._upkeep = Upkeep(self._connection, max_finished)
        self._ageing = ageing

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def location(self) -> str:
        return self._connection.location

    # -- jobs in and out --------------------------------------------------------------

    def push(self, jobs: Sequence[Job]) -> list[str]:
        return self._push(jobs, announced=False)

    def announce(self, jobs: Sequence[Job]) -> list[str]:
        return self._push(jobs, announced=True)

    def _push(self, jobs: Sequence[Job], *, announced: bool) -> list[str]:
        self._connection.check_open()
        if not jobs:
            return []
        pushed = pushing.push(self._connection, jobs, announced=announced)
        self._ring(pushed.queues, pushed.ended)
        return pushed.ids

    def adopt(self, queue: str, before: float, *, limit: int = 500) -> int:
        def some(rooms: Rooms) -> int:
            late = {"s": ANNOUNCED, "q": queue, "d": {"$lt": before}}
            names = documents.ids(rooms.jobs.find(late, {"_id": 1}).sort(_ORDER).limit(limit))
            chosen = {"_id": {"$in": names}, "s": ANNOUNCED}
            return rooms.jobs.update_many(chosen, {"$set": {"s": PENDING}}).modified_count

        adopted = self._connection.run(some)
        self._ring({queue} if adopted else set())
        return adopted

    def consume(self, queues: Mapping[str, int], worker: str) -> Consumer:
        self._connection.check_open()
        return MongoConsumer(
            self._connection, self._signals, self._settling, Turns(queues), worker, self._ageing
        )

    def _ring(self, queues: set[str], ended: bool = False) -> None:
        self._signals.ring([*map(queue_name, queues), *([ENDS] if ended else [])])

    # -- looking ----------------------------------------------------------------------

    def counts(self, queue: str | None = None) -> dict[str, dict[State, int]]:
        pipeline: list[Mapping[str, Any]] = [
            # The filter keeps it to the keys of an index.
            {"$match": {"s": {"$gte": 0}, **({} if queue is None else {"q": queue})}},
            {"$group": {"_id": {"q": "$q", "s": "$s"}, "n": {"$sum": 1}}},
        ]
        found: dict[str, dict[State, int]] = {}
        for each in self._connection.run(lambda rooms: list(rooms.jobs.aggregate(pipeline, hint="place"))):
            states = found.setdefault(each["_id"]["q"], {})
            state = STATES[each["_id"]["s"]]
            states[state] = states.get(state, 0) + each["n"]
        return found

    def size(self, queue: str, state: State = State.PENDING) -> int:
        wanted = {"s": {"$in": list(KINDS[state])}, "q": queue}
        return self._connection.run(lambda rooms: rooms.jobs.count_documents(wanted, hint="place"))

    def list_jobs(self, queue: str, state: State, *, limit: int = 100, cursor: str | None = None) -> Page:
        order = _listing(state)
        wanted: Document = {"s": {"$in": list(KINDS[state])}, "q": queue}
        if cursor is not None:
            wanted["$or"] = _after(order, _parse_cursor(cursor, len(order)))
        sort = [(name, 1) for name in order]
        found = self._connection.run(
            lambda rooms: list(rooms.jobs.find(wanted, {"z": 0}).sort(sort).limit(limit + 1))
        )
        page = [documents.job_of(each, history=True) for each in found[:limit]]
        more = len(found) > limit > 0
        return Page(page, json.dumps([found[limit - 1][name] for name in order]) if more else None)

    def find(self, job_id: str) -> Job | None:
        found = self._connection.run(lambda rooms: rooms.jobs.find_one({"_id": job_id}))
        return None if found is None else documents.job_of(found, history=True)

    def progress(self, job_id: str) -> bytes | None:
        found = self._connection.run(lambda rooms: rooms.jobs.find_one({"_id": job_id}, {"pr": 1}))
        return None if found is None else found.get("pr")

    def wait(self, ids: Sequence[str], timeout: float | None = None) -> list[str]:
        done = self._ended(ids)
        if done or not ids:
            return done
        end = float("inf") if timeout is None else monotonic() + timeout
        waiter = self._signals.waiter([ENDS])
        with self._signals.waiting(waiter) as longest:
            while True:
                waiter.clear()
                done = self._ended(ids)
                left = end - monotonic()
                if done or left <= 0:
                    return done
                waiter.sleep(min(left, longest))

    def _ended(self, ids: Sequence[str]) -> list[str]:
        wanted = {"_id": {"$in": list(ids)}, "s": {"$in": list(UNENDED)}}
        found = self._connection.run(lambda rooms: list(rooms.jobs.find(wanted, {"_id": 1})))
        unended = {each["_id"] for each in found}
        return [job_id for job_id in ids if job_id not in unended]

    # -- changing what waits or has ended ---------------------------------------------

    def revive(self, queue: str, ids: Sequence[str] | None = None, *, due: float = 0.0) -> list[str]:
        revived: list[tuple[float, int, str]] = []
        if ids is not None:
            for step in _steps(ids):
                named = {"_id": {"$in": list(step)}, "s": DEAD, "q": queue}
                revived += self._revive(self._connection.run(_read, named, STEP), due)
        place: Document | None = None
        while ids is None:
            wanted: Document = {"s": DEAD, "q": queue}
            if place is not None:
                wanted["$or"] = _after(("d", "n"), [place["d"], place["n"]])
            dead = self._connection.run(_read, wanted, STEP)
            revived += self._revive(dead, due)
            if len(dead) < STEP:
                break
            place = dead[-1]
        self._ring({queue} if revived else set())
        return [job_id for *_, job_id in sorted(revived)]

    def _revive(self, dead: Sequence[Document], due: float) -> list[tuple[float, int, str]]:
        now = self._moments.now()
        free: list[Change] = []
        keyed: list[Change] = []
        for each in dead:
            job = documents.job_of(each)
            change = Change(each, moves.Move(moves.revived(job, due, now)))
            (keyed if holding.retakes(job) else free).append(change)
        done = self._connection.run(lambda rooms: write(self._connection, rooms, free))
        for change in keyed:
            done += self._connection.transact(partial(self._retake, change=change), "unique keys")
        return [(change.before["d"], change.before["n"], change.before["_id"]) for change in done]

    def _retake(self, rooms: Rooms, session: Any, change: Change) -> list[Change]:
        job = change.job
        assert job.unique is not None
        hold, holder = pushing.look(rooms, session, job.unique.key)
        held_by = documents.job_of(holder) if holder else None
        if hold and hold.job_id != job.id and holding.holds(hold, held_by, self._moments.now()):
            return []
        pushing.take_key(rooms, session, job.unique.key, holding.Hold(job.id, job.unique.until, 0.0, None))
        return write(self._connection, rooms, [change], session)

    def hasten(self, queue: str, ids: Sequence[str]) -> list[str]:
        now = self._moments.now()

        def some(rooms: Rooms, names: Sequence[str]) -> list[str]:
            waiting = {"_id": {"$in": list(names)}, "s": SCHEDULED, "q": queue}
            found = rooms.jobs.find(waiting).sort(_ORDER)
            changes = [
                Change(each, moves.Move(moves.hastened(documents.job_of(each), now))) for each in found
            ]
            return [change.job.id for change in write(self._connection, rooms, changes)]

        hastened: list[str] = []
        for step in _steps(ids):
            hastened += self._connection.run(some, step)
        self._ring({queue} if hastened else set())
        return hastened

    def purge(self, queue: str, state: State) -> int:
        if state is State.RESERVED:
            raise InvalidArgumentError("reserved jobs cannot be purged; cancel them instead")
        wanted = {"s": {"$in": list(KINDS[state])}, "q": queue}
        total = 0
        while True:
            found = self._connection.run(_read, wanted, STEP)
            total += self._connection.run(drop, found)
            if len(found) < STEP:
                self._ring({queue}, ended=True)
                return total

    def forget(self, ids: Sequence[str]) -> int:
        total = 0
        ended = {"$in": [COMPLETED, DEAD, CANCELLED]}
        for step in _steps(ids):
            wanted = {"_id": {"$in": list(step)}, "s": ended}
            found = self._connection.run(_read, wanted, STEP)
            total += self._connection.run(drop, found)
        self._ring(set(), ended=total > 0)
        return total

    def cancel(self, ids: Sequence[str], *, reason: str = "") -> dict[str, Cancellation]:
        answers = dict.fromkeys(ids, Cancellation.UNKNOWN)
        called: set[str] = set()
        for step in _steps(list(answers)):
            left = list(step)
            while left:  # what has moved on meanwhile is looked at again
                left = self._connection.run(self._cancel, left, reason, answers, called)
        self._signals.ring([*map(worker_name, called), ENDS])
        return answers

    def _cancel(
        self,
        rooms: Rooms,
        names: Sequence[str],
        reason: str,
        answers: dict[str, Cancellation],
        called: set[str],
    ) -> list[str]:
        """Cancel what waits, ask for what runs; returns the ids about which nothing is decided yet."""
        from pymongo import UpdateOne

        now = self._moments.now()
        waiting, left = [], []
        for each in rooms.jobs.find({"_id": {"$in": list(names)}}):
            job = documents.job_of(each)
            if job.state.ended:
                answers[job.id] = Cancellation.ENDED
            elif job.state is State.RESERVED:
                held = {"_id": job.id, "s": RESERVED, "k": each["k"]}
                asked = [{"$set": {"c": {"$ifNull": ["$c", {"$literal": reason}]}}}]
                if rooms.jobs.bulk_write([UpdateOne(held, asked)]).matched_count:
                    answers[job.id] = Cancellation.REQUESTED
                    called.add(job.worker or "")
                else:
                    left.append(job.id)
            else:
                ended = moves.end(job, State.CANCELLED, now, error=moves.cancelled(reason))
                waiting.append(Change(each, moves.Move(ended)))
        written = {change.job.id for change in write(self._connection, rooms, waiting)}
        answers.update(dict.fromkeys(written, Cancellation.CANCELLED))
        return left + [change.job.id for change in waiting if change.job.id not in written]

    # -- pauses and limits ------------------------------------------------------------

    def pause(self, name: str, what: Scope = "queue") -> None:
        facts = {"kind": "pause", "what": what, "name": name}
        self._connection.run(
            lambda rooms: rooms.facts.update_one(
                {"_id": f"pause:{what}:{name}"}, {"$set": facts}, upsert=True
            )
        )
        # Whoever has not seen it by then looks again.
        self._connection.closed.wait(LASTS + 0.01)

    def resume(self, name: str, what: Scope = "queue") -> None:
        self._connection.run(lambda rooms: rooms.facts.delete_one({"_id": f"pause:{what}:{name}"}))
        if what == "task":
            while self._connection.run(lambda rooms: take_back(rooms, name)) == STEP:
                pass
        self._ring({name} if what == "queue" else self._queues())

    def paused(self, what: Scope = "queue") -> set[str]:
        wanted = {"kind": "pause", "what": what}
        return {each["name"] for each in self._connection.run(lambda rooms: list(rooms.facts.find(wanted)))}

    def _queues(self) -> set[str]:
        """Those whose takes somebody waits for."""
        signed = {"_id": {"$gte": "q", "$lt": "r"}}
        found = self._connection.run(lambda rooms: list(rooms.signals.find(signed, {"_id": 1})))
        return {each["_id"][1:] for each in found}

    def declare_limits(self, limits: Sequence[Limits]) -> list[str]:
        if not limits:
            return []
        changed = self._connection.run(lambda rooms: gates.declare(rooms, limits))
        self._ring(self._queues() if changed else set())
        return changed

    def limits(self) -> dict[str, Limits]:
        return self._connection.run(gates.limits_of)

    # -- upkeep -----------------------------------------------------------------------

    def reclaim(self, *, limit: int = 500) -> Reclaimed:
        found = self._upkeep.reclaim(limit)
        self._ring(self._upkeep.queues, self._upkeep.ended)
        return found

    def housekeep(self) -> float | None:
        wish = self._upkeep.housekeep()
        self._ring(self._upkeep.queues, self._upkeep.ended)
        return wish

    # -- workers and schedules --------------------------------------------------------

    def heartbeat(self, worker: WorkerInfo) -> None:
        facts = {"info": msgpack.packb(dataclasses.asdict(worker)), "seen": worker.seen}

        def beat(rooms: Rooms) -> None:
            rooms.workers.update_one({"_id": f"worker:{worker.id}"}, {"$set": facts}, upsert=True)
            silent = {"info": {"$exists": True}, "seen": {"$lt": self._moments.now() - WORKER_SILENCE}}
            rooms.workers.delete_many(silent)

        self._connection.run(beat)

    def workers(self) -> list[WorkerInfo]:
        wanted = {"info": {"$exists": True}, "seen": {"$gte": self._moments.now() - WORKER_SILENCE}}
        found = self._connection.run(lambda rooms: list(rooms.workers.find(wanted)))
        infos = [msgpack.unpackb(each["info"]) for each in found]
        workers = [WorkerInfo(**{**info, "queues": tuple(info["queues"])}) for info in infos]
        return sorted(workers, key=lambda worker: (worker.started, worker.id))

    def forget_worker(self, worker_id: str) -> None:
        self._connection.run(lambda rooms: rooms.workers.delete_one({"_id": f"worker:{worker_id}"}))

    def schedules(self) -> list[ScheduleRecord]:
        found = self._connection.run(lambda rooms: list(rooms.schedules.find().sort("_id", 1)))
        return [
            ScheduleRecord(
                name=each["_id"],
                revision=each["revision"],
                **msgpack.unpackb(each["record"], strict_map_key=False),
            )
            for each in found
        ]

    def write_schedule(self, record: ScheduleRecord, jobs: Sequence[Job] = ()) -> bool:
        fields = dataclasses.asdict(record)
        name, revision = fields.pop("name"), fields.pop("revision")
        facts = {"revision": revision + 1, "record": msgpack.packb(fields)}

        def act(rooms: Rooms, session: Any) -> pushing.Pushed | None:
            there = rooms.schedules.find_one({"_id": name}, session=session)
            if revision != (there["revision"] if there else 0):
                return None
            rooms.schedules.update_one({"_id": name}, {"$set": facts}, upsert=True, session=session)
            return pushing.store(self._connection, rooms, session, jobs)

        pushed = self._connection.transact(act, "schedules")
        if pushed is None:
            return False
        self._ring(pushed.queues, pushed.ended)
        return True

    def remove_schedule(self, name: str) -> bool:
        return self._connection.run(lambda rooms: rooms.schedules.delete_one({"_id": name}).deleted_count) > 0

    def close(self) -> None:
        self._connection.close()
        self._signals.close()


def _read(rooms: Rooms, wanted: Document, limit: int) -> list[Document]:
    return list(rooms.jobs.find(wanted).sort(_ORDER).limit(limit))


def _listing(state: State) -> tuple[str, ...]:
    """The fields that a listing is ordered by."""
    if state in (State.PENDING, State.SCHEDULED) or state.ended:
        return ("r", "d", "n")
    return ("n",)


def _after(order: Sequence[str], place: Sequence[float]) -> list[Document]:
    """Filters, one of which holds for whatever stands after ``place``."""
    return [
        {**dict(zip(order[:at], place[:at], strict=True)), order[at]: {"$gt": place[at]}}
        for at in range(len(order))
    ]


def _parse_cursor(cursor: str, width: int) -> list[float]:
    try:
        place = json.loads(cursor)
    except ValueError:
        place = None
    if not isinstance(place, list) or len(place) != width or not all(type(n) in (int, float) for n in place):
        raise InvalidArgumentError(f"{cursor!r} is not a cursor of this listing")
    return place


def _steps(ids: Sequence[str]) -> list[Sequence[str]]:
    unique = list(dict.fromkeys(ids))
    return [unique[at : at + STEP] for at in range(0, len(unique), STEP)]
