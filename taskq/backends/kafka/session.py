"""One worker's session: what it was lent by the member of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from taskq.backend import Consumer, Extended, Note, Taken, store_needed
from taskq.backends import moves
from taskq.backends.kafka.delays import Letter
from taskq.backends.kafka.marks import Mark
from taskq.backends.kafka.member import Member
from taskq.backends.kafka.parts import Held, Part
from taskq.backends.kafka.shelf import Shelf, remembering
from taskq.backends.kafka.writer import Order
from taskq.backends.turns import Turns
from taskq.clock import monotonic
from taskq.errors import BackendUnavailableError, PayloadTooLargeError
from taskq.job import Job, Outcome, Reservation, Settlement, State, Verdict

if TYPE_CHECKING:
    from taskq.backends.kafka.backend import KafkaBackend

#: How long a look at what the server has may take, in seconds: with nothing at hand, and with something.
_LOOK: Final = 15.0
_GLANCE: Final = 1.0
#: How long a blocked take sleeps before it looks whether the server still answers, in seconds.
_NAP: Final = 1.0


class KafkaConsumer(Consumer):
    def __init__(self, backend: KafkaBackend, queues: Mapping[str, int], worker: str) -> None:
        self._backend = backend
        self._turns = Turns(queues)
        self._worker = worker
        self._woken = False
        self.closed = False
        self._member: Member | None = None

    # -- taking -----------------------------------------------------------------------

    def take(self, limit: int, timeout: float = 0.0, *, job_id: str | None = None) -> Taken:
        self._check()
        if job_id is not None:
            raise store_needed("jobs taken by their id", self._backend.location)
        end = monotonic() + timeout
        member = self._joined()
        with member.shelf.changed:
            lent = self._lend(member, limit)
        if timeout <= 0:
            if len(lent) < limit:
                self._look(member, lent)
                with member.shelf.changed:
                    lent += self._lend(member, limit - len(lent))
        elif not lent:
            lent = self._wait(member, limit, end)
        return Taken(lent, None)

    def _lend(self, member: Member, limit: int) -> list[Reservation]:
        self._check()
        return member.shelf.lend(self._turns, limit, self, self._worker)

    def _look(self, member: Member, lent: Sequence[Reservation]) -> None:
        """See what the server has. While it is away, what was lent before is handed out."""
        try:
            member.catch_up(self._turns.weights, _GLANCE if lent else _LOOK)
        except BackendUnavailableError:
            if not lent:
                raise

    def _wait(self, member: Member, limit: int, end: float) -> list[Reservation]:
        changed = member.shelf.changed
        with changed:
            while True:
                lent = self._lend(member, limit)
                if lent:
                    return lent
                member.raise_failure()
                left = end - monotonic()
                if self._woken or left <= 0:
                    self._woken = False
                    return []
                due = member.shelf.stage()
                nap = _NAP if due is None else max(0.001, min(_NAP, due - member.shelf.clock.now()))
                changed.wait(min(left, nap))

    def exchange(self, outcomes: Sequence[Outcome], limit: int) -> tuple[list[Settlement], Taken]:
        settlements = self.settle(outcomes) if outcomes else []
        self._check()
        member = self._joined()
        with member.shelf.changed:
            return settlements, Taken(self._lend(member, limit), None)

    # -- settling ---------------------------------------------------------------------

    def settle(self, outcomes: Sequence[Outcome]) -> list[Settlement]:
        self._check()
        member = self._joined()
        batch = _Batch(member.shelf)
        with member.shelf.changed:
            member.at_rest(outcome.reservation for outcome in outcomes)
            answers = [batch.add(outcome) for outcome in outcomes]
        try:
            order = self._order(batch.moving)
        except BaseException:
            with member.shelf.changed:
                member.shelf.stay(held for held, _ in batch.moving)
            raise
        with member.shelf.changed:
            member.write(order, [needed for needed in batch.needs if needed is not None])
        return [answer or batch.answer(place, order) for place, answer in enumerate(answers)]

    def _order(self, moving: Sequence[tuple[Held, list[Job]]]) -> Order | None:
        if not moving:
            return None
        return Order([(held, self._letters(held, jobs)) for held, jobs in moving])

    def _letters(self, held: Held, jobs: Sequence[Job]) -> list[Letter]:
        """The messages of ``jobs``. Where one is too large for its topic, the job that has ended is buried instead."""
        now = self._backend.clock.now()
        letters = [self._backend.post.letter(job, now) for job in jobs]
        try:
            for letter, job in zip(letters, jobs, strict=True):
                self._backend.refuse_large(letter, job.id)
        except PayloadTooLargeError as error:
            plain = replace(held.job, history=(), result=None)
            dead = moves.end(plain, State.DEAD, now, error=f"{type(error).__name__}: {error}")
            return [self._backend.post.letter(dead, now)]
        return letters

    def release(self, reservations: Sequence[Reservation]) -> None:
        now = self._backend.clock.now()

        def give_back(shelf: Shelf, held: Held) -> None:
            shelf.give_back(held, moves.released(held.job, now))

        self._each(reservations, give_back)

    # -- while it runs ----------------------------------------------------------------

    def extend(self, reservations: Sequence[Reservation], seconds: float | None = None) -> Extended:
        """The connection is the lease: this tells what is lost."""
        self._check()
        shelf = self._joined().shelf
        with shelf.changed:
            return Extended([one.job.id for one in reservations if shelf.held(one) is None], [])

    def note(self, notes: Sequence[Note]) -> list[str]:
        lost: list[str] = []
        for note in notes:

            def mark(shelf: Shelf, held: Held, started: float | None = note.started) -> None:
                if started is not None and held.mark is not Mark.STARTED:
                    held.started = started
                    held.part.mark(held, Mark.STARTED)

            lost += self._each([note.reservation], mark)
        return lost

    def cancellations(self) -> list[str]:
        self._check()
        return []

    def _each(self, reservations: Sequence[Reservation], act: Callable[[Shelf, Held], None]) -> list[str]:
        """Do ``act`` to each that is still held; returns the ids of the others."""
        self._check()
        member = self._joined()
        shelf = member.shelf
        lost: list[str] = []
        with shelf.changed:
            member.at_rest(reservations)
            for reservation in reservations:
                held = shelf.held(reservation)
                if held is None:
                    lost.append(reservation.job.id)
                elif not held.settling:
                    act(shelf, held)
        return lost

    # -- the session ------------------------------------------------------------------

    def wake(self) -> None:
        self._woken = True
        member = self._member
        if member is not None:
            with member.shelf.changed:
                member.shelf.changed.notify_all()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        member = self._member
        if member is not None:
            with member.shelf.changed:
                member.shelf.close_session(self)
                member.shelf.changed.notify_all()
            self._backend.left(member, self._turns.weights)

    def _joined(self) -> Member:
        """The member of this process, which serves the queues of this session from now on."""
        if self._member is None:
            self._member = self._backend.joined(self._turns.weights)
        return self._member

    def _check(self) -> None:
        self._backend.check_open()
        if self.closed:
            raise BackendUnavailableError("this consumer is closed")


class _Batch:
    """The outcomes of one settle; callers hold the lock of the shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._now = shelf.clock.now()
        self._helds: list[Held | None] = []
        self.moving: list[tuple[Held, list[Job]]] = []  #: those that end with messages
        self.needs: list[tuple[Part, int] | None] = []  #: what must be committed, by place

    def add(self, outcome: Outcome) -> Settlement | None:
        """The answer for ``outcome``, where it is known already."""
        shelf, reservation = self._shelf, outcome.reservation
        held = shelf.held(reservation)
        self._helds.append(held)
        self.needs.append(None)
        if held is None:
            return self._known(reservation)
        if held.settling:  # by an outcome before this one: what others write was waited for
            return Settlement.ALREADY_YOURS
        if outcome.verdict is Verdict.COMPLETE and not outcome.pushes:
            self._finish(held)
            return None
        move = moves.settled(held.job, outcome, self._now)
        if outcome.verdict is Verdict.RELEASE and not outcome.suspect:
            shelf.settled[held.job.id, held.token] = (held.part, 0)
            shelf.give_back(held, move.job)
            return Settlement.SETTLED
        self._end(held, move, outcome)
        return None

    def _end(self, held: Held, move: moves.Move, outcome: Outcome) -> None:
        stays = move.job.state is State.DEAD or not move.job.state.ended
        if stays or outcome.pushes:
            held.settling = True
            self.moving.append((held, [*([remembering(move)] if stays else []), *outcome.pushes]))
        else:
            self._finish(held)

    def _finish(self, held: Held) -> None:
        """It ends without a message."""
        self._shelf.end(held)
        self._shelf.remember(held.job.id, held.token, held.part)
        self.needs[-1] = (held.part, held.part.version)

    def _known(self, reservation: Reservation) -> Settlement:
        known = self._shelf.settled.get((reservation.job.id, reservation.token))
        if known is None:
            return Settlement.LOST
        self.needs[-1] = known
        return Settlement.ALREADY_YOURS

    def answer(self, place: int, order: Order | None) -> Settlement:
        """The answer for the outcome at ``place``, once all is written."""
        held, needed = self._helds[place], self.needs[place]
        if needed is not None:
            part, version = needed
            return Settlement.SETTLED if part.saved >= version else Settlement.LOST
        assert order is not None
        return Settlement.SETTLED if held in order.written else Settlement.LOST
