"""One worker's session: what it is lent, and what becomes of that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from taskq.backend import Consumer, Extended, Note, Taken, store_needed
from taskq.backends import moves
from taskq.backends.rabbitmq.address import Address
from taskq.backends.rabbitmq.lane import Delivery, Standing
from taskq.backends.rabbitmq.lanes import Lanes, finish
from taskq.backends.rabbitmq.link import Link
from taskq.backends.rabbitmq.post import Post
from taskq.backends.rabbitmq.publisher import Fate, Parcel
from taskq.backends.rabbitmq.topology import Topology
from taskq.backends.rabbitmq.wire import undecodable
from taskq.backends.turns import Turns
from taskq.clock import Clock, monotonic
from taskq.errors import BackendError, BackendUnavailableError, DecodeError, TaskQError
from taskq.job import Job, Outcome, Reservation, Settlement, State, Verdict, new_id

#: The outcome of a job that took longer than this is acknowledged at once, in seconds.
_LONG: Final = 1.0


class RabbitConsumer(Consumer):
    def __init__(
        self,
        backend: Desk,
        queues: Mapping[str, int],
        worker: str,
        on_close: Callable[[RabbitConsumer], None],
    ) -> None:
        self._desk = backend
        self._worker = worker
        self._turns = Turns(queues)
        self._on_close = on_close
        self._bell = threading.Event()
        self._woken = False
        self._closed = False
        self._credit = 0
        self._lent: set[Delivery] = set()
        self.lanes = backend.lanes(queues, self._bell.set)

    # -- taking -----------------------------------------------------------------------

    def take(self, limit: int, timeout: float = 0.0, *, job_id: str | None = None) -> Taken:
        if job_id is not None:
            raise store_needed("takes of a job by its id", self._desk.address.location)
        end = monotonic() + timeout
        while True:
            self._bell.clear()
            self._ready()
            found = self._thorough(limit) if timeout <= 0 else self._collect(limit)
            left = end - monotonic()
            if found or self._woken or left <= 0:
                self._woken = False
                return Taken(found, None)
            self._want(limit)
            self._bell.wait(left)

    def exchange(self, outcomes: Sequence[Outcome], limit: int) -> tuple[list[Settlement], Taken]:
        settlements = self.settle(outcomes) if outcomes else []
        if limit <= 0:
            return settlements, Taken([], None)
        try:
            self._ready()
            self._want(limit)
            found = self._collect(limit)
            if (
                outcomes and not found and not self._credit
            ):  # who tells no credit does not wait for what is sent
                self.lanes.look(limit, self._desk.address.connect_timeout)
                found = self._collect(limit)
        except BackendError:
            if not outcomes:
                raise
            found = []  # the outcomes are written: whoever looks next learns that the broker is away
        return settlements, Taken(found, None)

    def credit(self, n: int) -> None:
        self._credit = n

    def _ready(self) -> None:
        """Raise if nothing can be taken; else see that there are queues."""
        self._check_open()
        link = self._desk.link
        if link.connection is None and link.failure is not None:
            raise link.failure
        trouble, self.lanes.trouble = self.lanes.trouble, None
        if trouble is not None:
            self._desk.topology.forget()
            raise trouble
        for queue in self._turns.weights:
            self._desk.topology.ensure(queue, self._desk.address.connect_timeout)

    def _want(self, limit: int) -> None:
        if limit > 0:
            self.lanes.want(limit, max(self._credit, len(self._lent) + limit))

    def _thorough(self, limit: int) -> list[Reservation]:
        """At most ``limit``, whatever the broker has included."""
        found: list[Reservation] = []
        while len(found) < limit:
            missing = limit - len(found)
            if sum(self.lanes.available().values()) < missing:
                self.lanes.look(missing, self._desk.address.connect_timeout)
            if not any(self.lanes.available().values()):
                break
            found += self._collect(missing)
        return found

    def _collect(self, limit: int) -> list[Reservation]:
        """At most ``limit`` of those at hand."""
        found: list[Reservation] = []
        while len(found) < limit:
            turns = self._turns.share(limit - len(found), self.lanes.available())
            if not turns:
                break
            token = self._desk.token()
            for queue in turns:
                delivery = self.lanes.pop(queue)
                if delivery is not None:
                    found += self._lend(delivery, token)
        return found

    def _lend(self, delivery: Delivery, token: int) -> list[Reservation]:
        """One reservation, or none where the job is not to be run."""
        try:
            job = delivery.read(self._worker).job
        except DecodeError as error:
            self._bury(delivery, error)
            return []
        if moves.expired(job, self._desk.clock.now()):
            self._finish([delivery])
            return []
        delivery.standing, delivery.token, delivery.lent_at = Standing.LENT, token, monotonic()
        self._lent.add(delivery)
        return [Reservation(job, token, delivery)]

    def _bury(self, delivery: Delivery, error: DecodeError) -> None:
        """A message that is no job goes to the dead letters as it is."""
        queue = delivery.lane.queue
        job, history = undecodable(
            delivery.body, queue, delivery.message_id or new_id(), error, self._desk.clock.now()
        )
        self._desk.post.send([self._desk.post.dead(job, history, queue)])
        self._finish([delivery])

    # -- settling ---------------------------------------------------------------------

    def settle(self, outcomes: Sequence[Outcome]) -> list[Settlement]:
        self._check_open()
        answers: list[Settlement] = []
        parting: list[tuple[Delivery, list[Parcel]]] = []
        with self._desk.claims:
            for outcome in outcomes:
                answer = _claim(outcome.reservation)
                answers.append(answer)
                if answer is Settlement.SETTLED:
                    plain = outcome.verdict is Verdict.COMPLETE and not outcome.pushes
                    sent = [] if plain else self._parcels(outcome)
                    parting.append((outcome.reservation.handle, sent))
        self._part(parting)
        return answers

    def release(self, reservations: Sequence[Reservation]) -> None:
        self._check_open()
        if any(map(_held, reservations)):
            self.lanes.silence(self._desk.address.connect_timeout)  # or they would come back here
        parting: list[tuple[Delivery, list[Parcel]]] = []
        with self._desk.claims:
            for reservation in reservations:
                if _claim(reservation) is Settlement.SETTLED:
                    job = moves.released(reservation.job, self._desk.clock.now())
                    delivery: Delivery = reservation.handle
                    parting.append((delivery, [self._given_back(job, delivery)]))
        self._part(parting)

    def _part(self, parting: Sequence[tuple[Delivery, list[Parcel]]]) -> None:
        """Send what is to be sent, and only then acknowledge; what could not be sent is still lent."""
        parcels = [parcel for _, sent in parting for parcel in sent]
        try:
            if parcels:
                self._desk.post.send(parcels)
        finally:
            done = [one for one, sent in parting if all(p.fate is Fate.CONFIRMED for p in sent)]
            for delivery, _ in parting:
                delivery.standing = Standing.LENT
            for delivery in done:
                delivery.standing = Standing.SETTLED
            self._finish(done)

    def _finish(self, deliveries: list[Delivery]) -> None:
        self._lent.difference_update(deliveries)
        before = monotonic() - _LONG
        at_once = not self._lent or any(d.lent_at < before or d.lane.alone for d in deliveries)
        self._desk.link.call(lambda: finish(deliveries, at_once=at_once))

    def _parcels(self, outcome: Outcome) -> list[Parcel]:
        """The messages that an outcome is written as; the acknowledgement aside."""
        try:
            return self._written(outcome)
        except TaskQError as error:  # one that cannot be written must not fail the others
            return self._written(
                replace(outcome, verdict=Verdict.BURY, pushes=(), error=f"not written: {error}")
            )

    def _written(self, outcome: Outcome) -> list[Parcel]:
        post, delivery = self._desk.post, outcome.reservation.handle
        parcels = [post.new(job) for job in outcome.pushes]
        move = moves.settled(outcome.reservation.job, outcome, self._desk.clock.now())
        job, attempt = move.job, move.attempt
        history = delivery.letter.history if attempt is None else (*delivery.letter.history, attempt)
        if job.state is State.DEAD:
            parcels.append(post.dead(job, history, outcome.reservation.job.queue))
        elif outcome.verdict is Verdict.RELEASE:
            parcels.append(self._given_back(job, delivery, suspect=outcome.suspect))
        elif not job.state.ended:
            parcels.append(post.again(job, history))
        return parcels

    def _given_back(self, job: Job, delivery: Delivery, *, suspect: bool = False) -> Parcel:
        assert delivery.letter is not None
        history = delivery.letter.history
        if suspect or delivery.lane.alone:
            return self._desk.post.suspect(job, history)
        return self._desk.post.again(job, history, ahead=True)

    # -- while it runs ----------------------------------------------------------------

    def extend(self, reservations: Sequence[Reservation], seconds: float | None = None) -> Extended:
        """A lease lasts as long as the connection: there is nothing to prolong, but to say what was lost."""
        self._check_open()
        return Extended([r.job.id for r in reservations if not _held(r)], [])

    def note(self, notes: Sequence[Note]) -> list[str]:
        self._check_open()
        for note in notes:
            if note.started is not None and isinstance(note.reservation.handle, Delivery):
                note.reservation.handle.started = note.started
        return [note.reservation.job.id for note in notes if not _held(note.reservation)]

    def cancellations(self) -> list[str]:
        self._check_open()
        return []

    def wake(self) -> None:
        self._woken = True
        self._bell.set()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._bell.set()
        self.lanes.close()
        self._on_close(self)

    def lose(self, error: BackendError) -> None:
        """The connection is gone, and every lease with it; on the link's thread."""
        self.lanes.lose(error)
        self._lent.clear()

    def _check_open(self) -> None:
        if self._desk.closed:
            raise BackendUnavailableError("this backend is closed")
        if self._closed:
            raise BackendUnavailableError("this consumer is closed")


class Desk:
    """What the sessions of one backend share."""

    def __init__(
        self,
        address: Address,
        link: Link,
        post: Post,
        topology: Topology,
        clock: Clock,
        lanes: Any,
        token: Callable[[], int],
    ) -> None:
        self.address = address
        self.link = link
        self.post = post
        self.topology = topology
        self.clock = clock
        self.claims = threading.Lock()
        self.lanes: Callable[[Mapping[str, int], Callable[[], None]], Lanes] = lanes
        self.token = token
        self.closed = False


def _held(reservation: Reservation) -> bool:
    delivery = reservation.handle
    return (
        isinstance(delivery, Delivery)
        and delivery.alive
        and delivery.token == reservation.token
        and delivery.standing in {Standing.LENT, Standing.SETTLING}
    )


def _claim(reservation: Reservation) -> Settlement:
    """``SETTLED`` where the caller is the one to settle it; under the lock."""
    delivery = reservation.handle
    if not isinstance(delivery, Delivery) or delivery.token != reservation.token:
        return Settlement.LOST
    if delivery.standing in {Standing.SETTLED, Standing.SETTLING}:
        return Settlement.ALREADY_YOURS
    if not delivery.alive:
        return Settlement.LOST
    delivery.standing = Standing.SETTLING
    return Settlement.SETTLED
