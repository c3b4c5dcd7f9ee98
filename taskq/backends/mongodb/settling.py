"""Settling: what runs decided, each written only if its token still holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from taskq.backend import Extended, Note
from taskq.backends import moves
from taskq.backends.mongodb import documents, gates, pushing
from taskq.backends.mongodb.changing import Change, write
from taskq.backends.mongodb.connection import Connection, Rooms
from taskq.backends.mongodb.documents import COMPLETED, RESERVED, Document
from taskq.backends.mongodb.moments import lease_end
from taskq.errors import BackendError, BackendUnavailableError
from taskq.job import Attempt, Outcome, Reservation, Settlement, State, Verdict

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

#: Takes whose deleted jobs are remembered.
_REMEMBERED: Final = 1_000
#: A lease that has this long to go is surely held, in seconds.
_MARGIN: Final = 2.0

SETTLED, ALREADY_YOURS, LOST = Settlement.SETTLED, Settlement.ALREADY_YOURS, Settlement.LOST


class Deleted:
    """Which jobs this process settled and deleted, of the latest takes.

    A job that is kept remembers the token that settled it. One that was deleted cannot; the only one who repeats a
    settle is the process that made it.
    """

    def __init__(self) -> None:
        self._takes: OrderedDict[int, set[str]] = OrderedDict()

    def remember(self, reservations: Iterable[Reservation]) -> None:
        for reservation in reservations:
            self._takes.setdefault(reservation.token, set()).add(reservation.job.id)
        while len(self._takes) > _REMEMBERED:
            self._takes.popitem(last=False)

    def __contains__(self, reservation: Reservation) -> bool:
        return reservation.job.id in self._takes.get(reservation.token, ())


class Settled:
    """What one settle did."""

    def __init__(self) -> None:
        self.ended = False
        self.queues: set[str] = set()  #: where there may be something to take now


class Settling:
    """Settles of one process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._deleted = Deleted()

    # -- settling ---------------------------------------------------------------------

    def settle(self, outcomes: Sequence[Outcome], effects: Settled) -> list[Settlement]:
        """Write ``outcomes``, each by itself; an answer for each."""
        answers: dict[int, Settlement] = {}
        firsts: dict[tuple[str, int], int] = {}
        for at, outcome in enumerate(outcomes):
            key = (outcome.reservation.job.id, outcome.reservation.token)
            firsts.setdefault(key, at)
        chosen = list(firsts.values())
        call = self._connection.stamp()
        simple = [at for at in chosen if _is_simple(outcomes[at])]
        others = [at for at in chosen if not _is_simple(outcomes[at])]
        for some, act in ((simple, self._finish), (others, self._move)):
            if some:
                found = act([outcomes[at] for at in some], call, effects)
                answers |= dict(zip(some, found, strict=True))
        return [
            answers[at] if at in answers else self._repeated(answers[firsts[_key(outcome)]])
            for at, outcome in enumerate(outcomes)
        ]

    def _repeated(self, first: Settlement) -> Settlement:
        """The answer to an outcome whose reservation was named before in the same batch."""
        return LOST if first is LOST else ALREADY_YOURS

    # -- completions, in few writes ---------------------------------------------------

    def _finish(self, outcomes: Sequence[Outcome], call: int, effects: Settled) -> list[Settlement]:
        tried: set[str] = set()

        def act(rooms: Rooms) -> list[Settlement]:
            if not tried and all(map(self._surely_held, outcomes)):
                tried.update(outcome.reservation.job.id for outcome in outcomes)
                written = self._write_finished(rooms, outcomes, call)
                if len(written) == len(outcomes):
                    return [SETTLED] * len(outcomes)
                tried.intersection_update(written)
            held, others = self._held(rooms, [outcome.reservation for outcome in outcomes])
            mine = [outcome for outcome in outcomes if outcome.reservation.job.id in held]
            self._record(rooms, held.values())
            tried.update(held)
            written = self._write_finished(rooms, mine, call)
            return [
                (SETTLED if outcome.reservation.job.id in written else ALREADY_YOURS)
                if outcome.reservation.job.id in held
                else self._other(outcome.reservation, others, call, tried)
                for outcome in outcomes
            ]

        answers = self._connection.run(act)
        self._finished(outcomes, answers, effects)
        return answers

    def _surely_held(self, outcome: Outcome) -> bool:
        """Whether nobody can have taken the job away, so that it need not be read first."""
        reservation = outcome.reservation
        over = reservation.handle
        if reservation.job.lane is not None or not isinstance(over, float) or reservation in self._deleted:
            return False
        return self._connection.moments.lease_now() + _MARGIN < over

    def _finished(self, outcomes: Sequence[Outcome], answers: Sequence[Settlement], effects: Settled) -> None:
        for outcome, answer in zip(outcomes, answers, strict=True):
            if answer is SETTLED:
                effects.ended = True
                if outcome.reservation.job.lane is not None:
                    effects.queues.add(outcome.reservation.job.queue)

    def _write_finished(self, rooms: Rooms, outcomes: Sequence[Outcome], call: int) -> set[str]:
        """Write the ends of what was held a moment ago; returns the ids for which this call did."""
        dropped = [outcome.reservation for outcome in outcomes if outcome.reservation.job.keep <= 0]
        kept = [outcome for outcome in outcomes if outcome.reservation.job.keep > 0]
        written = self._keep(rooms, kept, call) if kept else set()
        if dropped:
            written |= self._delete(rooms, dropped)
        now = self._connection.moments.now()
        keyed = [o.reservation.job for o in outcomes if o.reservation.job.unique is not None]
        pushing.let_go(rooms, [moves.end(job, State.COMPLETED, now) for job in keyed])
        return written

    def _delete(self, rooms: Rooms, dropped: Sequence[Reservation]) -> set[str]:
        """Delete what is held; returns the ids of what is gone by this call."""
        from pymongo import DeleteMany

        # Remembered first: should the answer be lost, what is gone is ours.
        self._deleted.remember(dropped)
        writes = [
            DeleteMany({"_id": {"$in": names}, "k": token, "s": RESERVED})
            for token, names in _by_token(dropped).items()
        ]
        n = rooms.jobs.bulk_write(writes, ordered=False).deleted_count
        everyone = [reservation.job.id for reservation in dropped]
        if n < len(everyone):
            there = {each["_id"] for each in rooms.jobs.find({"_id": {"$in": everyone}}, {"_id": 1})}
            # Where another thread has settled some of them meanwhile, which are whose cannot be told, but how many.
            everyone = [name for name in everyone if name not in there][:n]
        return set(everyone)

    def _keep(self, rooms: Rooms, outcomes: Sequence[Outcome], call: int) -> set[str]:
        from pymongo import UpdateMany, UpdateOne

        now = self._connection.moments.now()
        alike: dict[tuple[int, float], list[str]] = {}
        writes: list[Any] = []
        for outcome in outcomes:
            job, token = outcome.reservation.job, outcome.reservation.token
            if outcome.result is None:
                alike.setdefault((token, job.keep), []).append(job.id)
                continue
            change = _completed(now, job.keep, call, rs=outcome.result)
            writes.append(UpdateOne({"_id": job.id, "k": token, "s": RESERVED}, change))
        for (token, keep), names in alike.items():
            held = {"_id": {"$in": names}, "k": token, "s": RESERVED}
            writes.append(UpdateMany(held, _completed(now, keep, call)))
        done = rooms.jobs.bulk_write(writes, ordered=False).matched_count
        everyone = {outcome.reservation.job.id for outcome in outcomes}
        if done == len(everyone):
            return everyone
        marked = {"_id": {"$in": list(everyone)}, "z": call}
        return {each["_id"] for each in rooms.jobs.find(marked, {"_id": 1})}

    # -- every other end --------------------------------------------------------------

    def _move(self, outcomes: Sequence[Outcome], call: int, effects: Settled) -> list[Settlement]:
        together = [outcome for outcome in outcomes if not outcome.pushes]
        answers: dict[int, Settlement] = {}
        if together:
            answers |= self._moved(together, call, effects)
        for outcome in outcomes:
            if outcome.pushes:
                answers |= self._moved_with_pushes(outcome, call, effects)
        return [answers[id(outcome)] for outcome in outcomes]

    def _moved(self, outcomes: Sequence[Outcome], call: int, effects: Settled) -> dict[int, Settlement]:
        def act(rooms: Rooms) -> list[Settlement]:
            return self._write_moves(rooms, outcomes, call, effects)

        try:
            answers = self._connection.run(act)
        except BackendUnavailableError:
            raise
        except (BackendError, *UNSTORABLE) as error:
            if len(outcomes) == 1:
                buried = [_unstorable(outcomes[0], error)]
                answers = self._connection.run(lambda rooms: self._write_moves(rooms, buried, call, effects))
            else:  # one by one: what cannot be stored harms no other
                return {
                    name: answer
                    for outcome in outcomes
                    for name, answer in self._moved([outcome], call, effects).items()
                }
        return {id(outcome): answer for outcome, answer in zip(outcomes, answers, strict=True)}

    def _moved_with_pushes(self, outcome: Outcome, call: int, effects: Settled) -> dict[int, Settlement]:
        """An end and the jobs that it pushes: both or none."""

        def act(rooms: Rooms, session: ClientSession) -> list[Settlement]:
            answers = self._write_moves(rooms, [outcome], call, effects, session)
            if answers == [SETTLED]:
                pushed = pushing.store(self._connection, rooms, session, outcome.pushes)
                effects.queues |= pushed.queues
                effects.ended |= pushed.ended
            return answers

        try:
            answers = self._connection.transact(act, "jobs that a job pushes as it ends")
        except BackendUnavailableError:
            raise
        except (BackendError, *UNSTORABLE) as error:
            buried = [_unstorable(outcome, error)]
            answers = self._connection.run(lambda rooms: self._write_moves(rooms, buried, call, effects))
        return {id(outcome): answers[0]}

    def _write_moves(
        self,
        rooms: Rooms,
        outcomes: Sequence[Outcome],
        call: int,
        effects: Settled,
        session: ClientSession | None = None,
    ) -> list[Settlement]:
        held, others = self._held(rooms, [outcome.reservation for outcome in outcomes], session)
        self._record(rooms, held.values())
        now = self._connection.moments.now()
        changes = []
        for outcome in outcomes:
            document = held.get(outcome.reservation.job.id)
            if document is not None:
                move = moves.settled(documents.job_of(document), outcome, now, cancel=document.get("c"))
                changes.append(Change(document, move))
        written = write(self._connection, rooms, changes, session, call=call)
        self._drop(rooms, written, session)
        for change in written:
            effects.ended |= change.job.state.ended
            effects.queues |= {change.job.queue, change.before["q"]}
        mine = {change.before["_id"] for change in written}
        return [
            SETTLED if outcome.reservation.job.id in mine else self._other(outcome.reservation, others, call)
            for outcome in outcomes
        ]

    def _drop(self, rooms: Rooms, written: Sequence[Change], session: ClientSession | None) -> None:
        """Delete what has completed and is not kept."""
        names = [
            change.job.id
            for change in written
            if change.job.state is State.COMPLETED and change.job.keep <= 0
        ]
        if names:
            self._deleted.remember(
                Reservation(change.job, change.before["k"]) for change in written if change.job.id in names
            )
            rooms.jobs.delete_many({"_id": {"$in": names}, "s": COMPLETED}, session=session)

    # -- who holds --------------------------------------------------------------------

    def _held(
        self, rooms: Rooms, reservations: Sequence[Reservation], session: ClientSession | None = None
    ) -> tuple[dict[str, Document], dict[str, Document]]:
        """The documents of those whose token holds, and those of the others that are there."""
        tokens = {reservation.job.id: reservation.token for reservation in reservations}
        found = rooms.jobs.find({"_id": {"$in": list(tokens)}}, {"h": 0, "pr": 0, "rs": 0}, session=session)
        held: dict[str, Document] = {}
        others: dict[str, Document] = {}
        for each in found:
            mine = each["s"] == RESERVED and each.get("k") == tokens[each["_id"]]
            (held if mine else others)[each["_id"]] = each
        return held, others

    def _other(
        self,
        reservation: Reservation,
        others: Mapping[str, Document],
        call: int,
        tried: Iterable[str] = (),
    ) -> Settlement:
        """The answer for a reservation that does not hold."""
        document = others.get(reservation.job.id)
        if document is None:
            if reservation.job.id in tried:
                return SETTLED  # an earlier try of this very settle deleted it
            return ALREADY_YOURS if reservation in self._deleted else LOST
        if document.get("z") == call:
            return SETTLED
        return ALREADY_YOURS if document.get("k") == reservation.token else LOST

    def _record(self, rooms: Rooms, held: Iterable[Document], *, unstarted: bool = False) -> None:
        """Enter starts that become known by an end into the logs of their gates."""
        unseen = [document for document in held if "g" in document and "st" not in document]
        if unseen:
            lanes = [documents.job_of(document).lane for document in unseen]
            gates.record(self._connection, rooms, [lane for lane in lanes if lane is not None])

    # -- giving back, prolonging, marking ---------------------------------------------

    def release(self, reservations: Sequence[Reservation]) -> Settled:
        """Give back what is still held."""
        effects = Settled()

        def act(rooms: Rooms) -> None:
            held, _ = self._held(rooms, reservations)
            now = self._connection.moments.now()
            changes = [
                Change(each, moves.Move(moves.released(documents.job_of(each), now, cancel=each.get("c"))))
                for each in held.values()
            ]
            for change in write(self._connection, rooms, changes):
                effects.ended |= change.job.state.ended
                effects.queues.add(change.job.queue)

        if reservations:
            self._connection.run(act)
        return effects

    def extend(self, reservations: Sequence[Reservation], seconds: float | None) -> Extended:
        """Prolong what is still held."""
        if not reservations:
            return Extended([], [])
        lease = self._connection.moments.lease()
        if seconds is None:
            end: Any = lease_end(lease, "$ls")
        else:
            end = {"$add": [lease, int(seconds * 1000)]}

        def act(rooms: Rooms) -> Extended:
            for token, names in _by_token(reservations).items():
                held = {"_id": {"$in": names}, "k": token, "s": RESERVED}
                rooms.jobs.update_many(held, [{"$set": {"e": end}}])
            wanted = {"_id": {"$in": [r.job.id for r in reservations]}, "s": RESERVED}
            found = {each["_id"]: each for each in rooms.jobs.find(wanted, {"k": 1, "c": 1})}
            mine = [r for r in reservations if found.get(r.job.id, {}).get("k") == r.token]
            held_ids = {(r.job.id, r.token) for r in mine}
            lost = [r.job.id for r in reservations if (r.job.id, r.token) not in held_ids]
            return Extended(lost, [r.job.id for r in mine if "c" in found[r.job.id]])

        return self._connection.run(act)

    def note(self, notes: Sequence[Note]) -> list[str]:
        """Write marks on what is still held; returns the ids of the rest."""
        if not notes:
            return []

        def act(rooms: Rooms) -> list[str]:
            held, _ = self._held(rooms, [note.reservation for note in notes])
            mine = [note for note in notes if note.reservation.job.id in held]
            starts = {note.reservation.job.id for note in mine if note.started is not None}
            self._record(rooms, [held[name] for name in starts])
            writes = [write for note in mine if (write := _mark(note, held[note.reservation.job.id]))]
            if writes:
                rooms.jobs.bulk_write(writes, ordered=False)
            return [note.reservation.job.id for note in notes if note.reservation.job.id not in held]

        return self._connection.run(act)


#: What a value that cannot be stored raises, on its way.
UNSTORABLE: Final = (OverflowError, TypeError, ValueError, AttributeError)


def _is_simple(outcome: Outcome) -> bool:
    plain = outcome.verdict is Verdict.COMPLETE and outcome.attempt is None and not outcome.pushes
    return plain and (outcome.result is None or isinstance(outcome.result, bytes))


def _key(outcome: Outcome) -> tuple[str, int]:
    return outcome.reservation.job.id, outcome.reservation.token


def _by_token(reservations: Iterable[Reservation]) -> dict[int, list[str]]:
    tokens: dict[int, list[str]] = {}
    for reservation in reservations:
        tokens.setdefault(reservation.token, []).append(reservation.job.id)
    return tokens


def _completed(now: float, keep: float, call: int, **facts: Any) -> Document:
    """The update of the common end."""
    ended = {"s": COMPLETED, "r": 0, "d": now, "en": now, "f": now + keep, "z": call, **facts}
    return {"$set": ended, "$unset": dict.fromkeys(("e", "st", "c", "g", "w", "x", "l", "o"), "")}


def _mark(note: Note, document: Document) -> Any:
    from pymongo import UpdateOne

    facts: Document = {}
    if note.started is not None:
        facts["st"] = note.started
        if document.get("fs") is None:
            facts["fs"] = note.started
    if note.progress is not None:
        facts["pr"] = note.progress
    if not facts:
        return None
    held = {"_id": note.reservation.job.id, "k": note.reservation.token, "s": RESERVED}
    return UpdateOne(held, {"$set": facts})


def _unstorable(outcome: Outcome, error: Exception) -> Outcome:
    message = f"the outcome cannot be stored: {error}".encode("utf-8", "backslashreplace").decode()
    attempts = outcome.reservation.job.attempts + 1
    attempt = Attempt(number=attempts, error_type=type(error).__name__, message=message)
    return Outcome(reservation=outcome.reservation, verdict=Verdict.BURY, attempt=attempt)
