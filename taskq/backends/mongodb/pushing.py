"""Jobs in: in one trip where nothing has to be agreed upon, else in a small transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from taskq.backends import holding, moves, overflow
from taskq.backends.holding import Hold, Meeting
from taskq.backends.mongodb import documents
from taskq.backends.mongodb.connection import CALLERS, Connection, Rooms, unstorable
from taskq.backends.mongodb.documents import ASIDE, LANED, Document
from taskq.backends.mongodb.moments import STEP
from taskq.errors import (
    BackendUnavailableError,
    NotPublishedError,
    PayloadTooLargeError,
    PublishUnknownError,
)
from taskq.job import Job, Lane, State

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

#: Largest document, in bytes: the servers' limit, less what a job gathers while it lives.
LARGEST: Final = 16 * 1024 * 1024 - 64 * 1024
_DUPLICATE_KEY: Final = 11000


class Pushed:
    """What became of a push."""

    def __init__(self, ids: list[str], queues: Iterable[str], ended: bool) -> None:
        self.ids = ids
        self.queues = set(queues)  #: where something may be taken now
        self.ended = ended  #: whether jobs ended by it


def push(connection: Connection, jobs: Sequence[Job], *, announced: bool = False) -> Pushed:
    """Store ``jobs``, as :meth:`taskq.backend.Backend.push` says."""
    session = CALLERS.get()
    try:
        if session is not None:
            return store(connection, connection.of(session.client), session, jobs, announced=announced)
        if any(agrees(job) for job in jobs):
            return connection.transact(
                lambda rooms, own: store(connection, rooms, own, jobs, may_refuse=True, announced=announced),
                "unique keys, bounded lines and ordered keys",
            )
        return _insert(connection, jobs, announced=announced)
    except BackendUnavailableError as error:
        connection.check_open()
        raise _failure(error, jobs) from error


def agrees(job: Job) -> bool:
    """Whether it depends on other jobs what becomes of the push of this one."""
    lane = job.lane
    return job.unique is not None or (lane is not None and (lane.ordered or lane.most is not None))


def _failure(error: BackendUnavailableError, jobs: Sequence[Job]) -> Exception:
    from pymongo.errors import ServerSelectionTimeoutError

    if isinstance(error.__cause__, ServerSelectionTimeoutError):
        return NotPublishedError(f"no job is stored: {error}")
    return PublishUnknownError(
        f"the jobs may or may not be stored: {error}", job_ids=tuple(job.id for job in jobs)
    )


# -- in one trip ----------------------------------------------------------------------


def _insert(connection: Connection, jobs: Sequence[Job], *, announced: bool) -> Pushed:
    made = made_of(connection, jobs, announced=announced)

    def insert(rooms: Rooms) -> None:
        try:
            if len(made) == 1:
                rooms.jobs.insert_one(made[0])
            else:
                rooms.jobs.insert_many(made, ordered=False)
        except Exception as error:
            if not _only_known(error):
                raise
        line_up(rooms, made)

    connection.run(insert)
    return Pushed([job.id for job in jobs], {job.queue for job in jobs}, ended=False)


def _only_known(error: Exception) -> bool:
    """Whether all that failed is that jobs of these ids are there already."""
    from pymongo.errors import BulkWriteError, DuplicateKeyError

    if isinstance(error, BulkWriteError):
        details = error.details or {}
        found = details.get("writeErrors", [])
        return not details.get("writeConcernErrors") and all(each["code"] == _DUPLICATE_KEY for each in found)
    return isinstance(error, DuplicateKeyError)


def made_of(connection: Connection, jobs: Sequence[Job], *, announced: bool = False) -> list[Document]:
    """The documents of ``jobs``; raises ``PayloadTooLargeError`` where one is larger than the servers take."""
    number = connection.stamp(len(jobs))
    now = connection.moments.now()
    with unstorable():
        made = [
            documents.stored(job, now, number + at * STEP, announced=announced) for at, job in enumerate(jobs)
        ]
    for each in made:
        if len(each["b"]) > LARGEST - 4096:
            raise PayloadTooLargeError(
                f"job {each['_id']} is {len(each['b']):,} bytes, more than the {LARGEST - 4096:,} that MongoDB takes"
            )
    return made


def line_up(rooms: Rooms, made: Iterable[Document], session: ClientSession | None = None) -> None:
    """Let takes know of the lines that these documents stand in; after they are there."""
    lines = {(each["q"], each["l"], each["r"]): each for each in made if each["s"] == LANED}
    if not lines:
        return
    from pymongo import UpdateOne

    writes = []
    for (queue, name, rank), each in lines.items():
        facts = {"q": queue, "l": name, "r": rank, "open": True, "w": _weight(each)}
        # A counter, so that a take that closes the line meanwhile meets this write.
        change = {"$set": facts, "$inc": {"n": 1}, "$setOnInsert": {"v": 0.0}}
        writes.append(UpdateOne({"_id": line_id(queue, name, rank)}, change, upsert=True))
    rooms.lanes.bulk_write(writes, ordered=False, session=session)


def line_id(queue: str, name: str, rank: int) -> str:
    """The id of a line's document."""
    return f"{rank}\x1e{name}\x1e{queue}"


def _weight(document: Document) -> float:
    lane = documents.job_of(document).lane
    return lane.weight if lane else 1.0


# -- where jobs agree with others -----------------------------------------------------


def store(
    connection: Connection,
    rooms: Rooms,
    session: ClientSession,
    jobs: Sequence[Job],
    *,
    may_refuse: bool = False,
    announced: bool = False,
) -> Pushed:
    """Store ``jobs`` within the transaction of ``session``, each by the rules of its key and line."""
    wanted = {"_id": {"$in": [job.id for job in jobs]}}
    known = {found["_id"] for found in rooms.jobs.find(wanted, {"_id": 1}, session=session)}
    some = _Some(connection, rooms, session, may_refuse=may_refuse, announced=announced)
    ids = [job.id if job.id in known else some.store(job) for job in jobs]
    some.write()
    return Pushed(ids, some.queues, some.ended)


class _Some:
    """The jobs of one push, and what they meet."""

    def __init__(
        self,
        connection: Connection,
        rooms: Rooms,
        session: ClientSession,
        *,
        may_refuse: bool,
        announced: bool,
    ) -> None:
        self._connection = connection
        self._rooms = rooms
        self._session = session
        self._may_refuse = may_refuse
        self._announced = announced
        self._now = connection.moments.now()
        self._new: dict[str, Document] = {}
        self.queues: set[str] = set()
        self.ended = False

    def store(self, job: Job) -> str:
        if job.id in self._new:
            return job.id
        standing = self._meet(job) if job.unique else None
        if standing is not None:
            return standing
        lane = overflow.bounded(job, self._now)
        full = lane is not None and self._full(lane)
        if lane and full and lane.overflow == "raise" and self._may_refuse:
            overflow.refuse(job, lane)
        (made,) = made_of(self._connection, [job], announced=self._announced)
        if job.lane is not None and job.lane.ordered:
            made["n"] = self._in_sequence(job.lane, made["n"])
        self._new[job.id] = made
        self.queues.add(job.queue)
        if job.unique is not None:
            self._take_key(job.unique.key, holding.taken(job, self._now))
        if lane and full:
            self._spill(job, lane)
        return job.id

    def write(self) -> None:
        from pymongo import UpdateOne

        if not self._new:
            return
        made = list(self._new.values())
        # An upsert, because an id that is there already must not end the transaction.
        writes = [
            UpdateOne({"_id": each["_id"]}, {"$setOnInsert": _without_id(each)}, upsert=True) for each in made
        ]
        self._rooms.jobs.bulk_write(writes, session=self._session)
        line_up(self._rooms, made, self._session)

    # -- keys -------------------------------------------------------------------------

    def _meet(self, job: Job) -> str | None:
        """Deal with the holder of the job's key; returns the id that stands for the job, ``None`` to store it."""
        assert job.unique is not None
        hold, document = look(self._rooms, self._session, job.unique.key, self._new)
        holder = documents.job_of(document) if document else None
        meeting = holding.meet(job, hold, holder, self._now)
        if hold is None or meeting is Meeting.FREE:
            return None
        if meeting is Meeting.REFUSED and self._may_refuse:
            holding.refuse(job, hold.job_id)
        if document and holder and meeting is Meeting.REPLACE:
            self._move(document, holding.replaced(holder, job, self._now))
            return None
        if document and holder and meeting is Meeting.RESCHEDULE:
            changed = holding.rescheduled(holder, job, hold.latest, self._now)
            self._move(document, changed, b=documents.repacked(changed))
        return hold.job_id

    def _take_key(self, key: str, hold: Hold) -> None:
        take_key(self._rooms, self._session, key, hold)

    # -- lines ------------------------------------------------------------------------

    def _full(self, lane: Lane) -> bool:
        """Whether the line is full without one more; only one push at a time may ask."""
        self._rooms.gates.update_one(
            {"_id": f"line:{lane.name}"},
            {"$inc": {"n": 1}, "$set": {"seen": self._now}},
            upsert=True,
            session=self._session,
        )
        coming = sum(each["s"] == LANED and each["l"] == lane.name for each in self._new.values())
        waiting = {"l": lane.name, "s": {"$in": [LANED, ASIDE]}}
        most = lane.most or 0
        there = self._rooms.jobs.count_documents(waiting, limit=max(1, most), session=self._session)
        full: bool = coming + there >= most
        return full

    def _spill(self, job: Job, lane: Lane) -> None:
        """End the newest or the oldest job of a line that holds one too many."""
        if lane.overflow != "drop_oldest":
            new = self._new[job.id]
            self._move(new, overflow.dropped(documents.job_of(new), self._now))
            return
        oldest = self._oldest(lane, job.id)
        self._move(oldest, overflow.displaced(documents.job_of(oldest), job, self._now))

    def _oldest(self, lane: Lane, but: str) -> Document:
        waiting = {"l": lane.name, "s": {"$in": [LANED, ASIDE]}}
        found = (
            self._rooms.jobs.find(waiting, session=self._session)
            .sort([("r", -1), ("d", 1), ("n", 1)])
            .limit(1)
        )
        coming = [
            e for e in self._new.values() if e["s"] == LANED and e["l"] == lane.name and e["_id"] != but
        ]
        return min([*found, *coming], key=lambda each: (-each["r"], each["d"], each["n"]))

    def _in_sequence(self, lane: Lane, number: int) -> int:
        """A number greater than those of all that were pushed into this lane before, whoever did."""
        found = self._rooms.gates.find_one_and_update(
            {"_id": f"last:{lane.name}"},
            [{"$set": {"n": {"$max": [{"$add": [{"$ifNull": ["$n", 0]}, 1]}, number]}, "seen": self._now}}],
            upsert=True,
            return_document=True,
            session=self._session,
        )
        assert found is not None
        return int(found["n"])

    def _move(self, document: Document, job: Job, **extra: Any) -> None:
        """Let a job that waits be ``job``, whether it is stored already or comes with this push."""
        self.ended |= job.state.ended
        self.queues.add(job.queue)
        change = documents.change(document, moves.Move(job), **extra)
        if job.id in self._new:
            apply(self._new[job.id], change)
        elif change:
            change.setdefault("$set", {})["z"] = self._connection.stamp()
            self._rooms.jobs.update_one(documents.fence(document), change, session=self._session)
            apply(document, change)
            line_up(self._rooms, [document], self._session)
        if job.state.ended:
            let_go(self._rooms, [job], self._session)


def _without_id(document: Document) -> Document:
    return {name: value for name, value in document.items() if name != "_id"}


def apply(document: Document, change: Document) -> None:
    """Do to ``document`` what the update would."""
    document.update(change.get("$set", {}))
    for name in change.get("$unset", {}):
        document.pop(name, None)


def look(
    rooms: Rooms, session: ClientSession, key: str, new: dict[str, Document] | None = None
) -> tuple[Hold | None, Document | None]:
    """Who has the key, and the document of its job."""
    found = rooms.keys.find_one({"_id": key}, session=session)
    if found is None:
        return None, None
    hold = Hold(found["job"], found["until"], found["ends"], found.get("latest"))
    document = (new or {}).get(hold.job_id) or rooms.jobs.find_one({"_id": hold.job_id}, session=session)
    if document is not None:
        ended = documents.job_of(document)
        if ended.state.ended and not holding.outlives(hold, ended):
            return None, None  # its holder could not let go of it any more
    return hold, document


def take_key(rooms: Rooms, session: ClientSession, key: str, hold: Hold) -> None:
    """Let ``hold`` be the hold of ``key``."""
    facts = {"job": hold.job_id, "until": hold.until, "ends": hold.ends, "latest": hold.latest}
    rooms.keys.update_one({"_id": key}, {"$set": facts, "$inc": {"n": 1}}, upsert=True, session=session)


def let_go(rooms: Rooms, ended: Iterable[Job], session: ClientSession | None = None) -> None:
    """Forget the keys of jobs that have ended, or are gone, where nothing keeps them."""
    from pymongo import DeleteOne

    writes = []
    for job in ended:
        if job.unique is not None:
            mine: Document = {"_id": job.unique.key, "job": job.id}
            if job.state is State.COMPLETED:
                mine["ends"] = {"$lte": job.ended or 0.0}
            writes.append(DeleteOne(mine))
    if writes:
        rooms.keys.bulk_write(writes, ordered=False, session=session)
