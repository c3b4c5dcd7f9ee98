"""What is written about the partitions of this member: commits, and transactions."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from taskq.backends.kafka.delays import Letter, Post
from taskq.backends.kafka.health import Health
from taskq.backends.kafka.marks import Marks
from taskq.backends.kafka.parts import Held, Part
from taskq.backends.kafka.place import Place
from taskq.backends.kafka.shelf import Shelf
from taskq.backends.kafka.topics import Slot
from taskq.backends.kafka.transactions import InDoubtError, Transactions
from taskq.clock import Clock, monotonic
from taskq.errors import BackendError, BackendUnavailableError, ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, TopicPartition

#: What was lent is committed after this long at the latest, in seconds: then a crash makes it a suspect.
_LENT_COMMIT: Final = 0.025
#: Delayed jobs forwarded by one transaction.
_FORWARDED: Final = 500
#: A pause after jobs could not be addressed, in seconds.
_PAUSE: Final = 1.0


@dataclass(slots=True, eq=False)
class Order:
    """Jobs that end, each with the messages that are written with its end; written in one transaction."""

    entries: list[tuple[Held, list[Letter]]]
    moves: bool = False  #: they do not end: whoever has them has them still
    done: bool = False
    error: BackendError | None = None
    written: set[Held] = field(default_factory=set)  #: those that were not another's by then


@dataclass(slots=True, frozen=True)
class Doubt:
    """A transaction of which nobody knows whether it was committed."""

    orders: list[Order]
    ends: set[Held]
    versions: dict[Part, int]
    written: dict[Part, Marks]


class Writer:
    """Driven by the thread of the member, but for :attr:`orders` and :attr:`awaited`, which the lock guards."""

    def __init__(
        self, place: Place, shelf: Shelf, post: Post, clock: Clock, consumer: Consumer, health: Health
    ) -> None:
        self.orders: deque[Order] = deque()
        self.awaited: set[Part] = set()  #: somebody waits until these are committed
        self.doubted: Doubt | None = None
        self.closing = False
        self._place = place
        self._shelf = shelf
        self._post = post
        self._clock = clock
        self._consumer = consumer
        self._health = health
        self._transactions = Transactions(place, f"w-{uuid.uuid4().hex}")
        self._commit_after = 0.0

    # -- committing -------------------------------------------------------------------

    def commit(self) -> None:
        """Commit what somebody waits for at once, else what is a little old."""
        if self.doubted is not None:
            return
        now = monotonic()
        with self._shelf.changed:
            self.awaited = {part for part in self.awaited if part.live and part.version > part.saved}
            if not self.awaited and now < self._commit_after:
                return
            dirty = list(self._shelf.dirty())
        if dirty:
            self._commit_after = now + _LENT_COMMIT
            self.save(dirty)

    def save(self, parts: Sequence[Part]) -> bool:
        """Commit these; where that fails they stay as they are, to be committed again."""
        from confluent_kafka import KafkaException

        if not parts or self.doubted is not None:
            return False
        with self._shelf.changed:
            versions = {part: part.version for part in parts if part.reached >= 0}
            written = {part: part.marks() for part in parts if part.reached >= 0}
            offsets = [named(part.slot, *marks) for part, marks in written.items()]
        if not offsets:
            return False
        try:
            answers = self._consumer.commit(offsets=offsets, asynchronous=False) or []
        except KafkaException as error:
            self._health.failed(error.args[0])
            return False
        wrong = {(one.topic, one.partition) for one in answers if one.error is not None}
        for failed in answers:
            if failed.error is not None:
                self._health.failed(failed.error)
        with self._shelf.changed:
            for part, version in versions.items():
                if part.slot not in wrong:
                    part.saved = max(part.saved, version)
                    part.base = written[part].base
            self._shelf.changed.notify_all()
        return not wrong

    # -- transactions -----------------------------------------------------------------

    def transact(self) -> bool:
        """One transaction for all that waits for one."""
        if self.doubted is not None and not self.decide():
            return False
        orders = self._gather()
        if orders:
            self.run(orders)
        return bool(orders)

    def _gather(self) -> list[Order]:
        """Everything that goes with messages."""
        with self._shelf.changed:
            orders = list(self.orders)
            self.orders.clear()
            moving = self._shelf.leaving(_FORWARDED)
        if moving:
            now = self._clock.now()
            try:
                orders.append(Order([(held, [self._post.letter(job, now)]) for held, job in moving]))
            except (BackendError, ConfigurationError) as error:
                self._health.failed(error)
                with self._shelf.changed:
                    self._shelf.stay(held for held, _ in moving)
                    self._shelf.changed.wait(_PAUSE)
        return orders

    def run(self, orders: Sequence[Order]) -> None:
        with self._shelf.changed:
            entries = [entry for order in orders for entry in order.entries if self._shelf.stands(entry[0])]
            ends = {held for held, _ in entries}
            touched = {held.part for held in ends}
            versions = {part: part.version for part in touched}
            written = {part: part.marks(ends) for part in touched}
        letters = [letter for _, of in entries for letter in of]
        stand: dict[int, int] = {}
        try:
            if entries:
                offsets = [named(part.slot, *marks) for part, marks in written.items()]
                stand = self._transactions.run(letters, offsets, self._consumer.consumer_group_metadata())
        except InDoubtError as error:
            self.doubted = Doubt(list(orders), ends, versions, written)
            self._health.failed(error)
        except BackendError as error:
            self._refuse(orders, error)
        else:
            stands = {held: (of[0], stand.get(n)) for n, (held, of) in enumerate(entries) if of}
            self._finish(orders, ends, versions, stands)

    def _finish(
        self,
        orders: Sequence[Order],
        ends: set[Held],
        versions: Mapping[Part, int],
        stands: Mapping[Held, tuple[Letter, int | None]],
    ) -> None:
        """It is written; ``stands`` says where those that moved are now."""
        moved = {held for order in orders if order.moves for held, _ in order.entries}
        with self._shelf.changed:
            self._health.well()
            for part, version in versions.items():
                clean = part.version == version
                for held in [held for held in ends if held.part is part]:
                    letter, offset = stands.get(held, (None, None))
                    if held in moved and letter is not None and offset is not None:
                        self._shelf.move(held, letter[:2], offset)
                        continue
                    if held.session is not None and held not in moved:
                        self._shelf.settled[held.job.id, held.token] = (part, 0)
                    self._shelf.end(held)
                part.saved = part.version if clean else version
            for order in orders:
                order.written = ends
                order.done = True
            self._shelf.changed.notify_all()

    def _refuse(self, orders: Sequence[Order], error: BackendError) -> None:
        """Nothing of it is written."""
        with self._shelf.changed:
            for order in orders:
                order.error = error
                order.done = True
                self._shelf.stay(held for held, _ in order.entries)
            self._shelf.changed.notify_all()

    def decide(self) -> bool:
        """Find out what became of the transaction in doubt; returns whether that is known now."""
        doubt = self.doubted
        if doubt is None:
            return True
        try:
            self._transactions.decide()
        except BackendUnavailableError as error:
            self._health.failed(error)
            return False
        found = self.committed([named(part.slot) for part in doubt.written])
        if not found:
            return False
        said = {(one.topic, one.partition): (one.offset, one.metadata or "") for one in found}
        landed = all(said[part.slot] == marks for part, marks in doubt.written.items())
        self.doubted = None
        if landed:
            self._finish(doubt.orders, doubt.ends, doubt.versions, {})
        else:
            self._refuse(
                doubt.orders, BackendUnavailableError(f"{self._place.location}: a transaction was aborted")
            )
        return True

    def committed(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """What was committed last, once nothing about it is open any more."""
        from confluent_kafka import KafkaException

        if not partitions:
            return []
        while not self.closing:
            try:
                found = self._consumer.committed(
                    [named((p.topic, p.partition)) for p in partitions], timeout=5.0
                )
            except KafkaException as error:
                self._health.failed(error.args[0])
                continue
            if all(one.error is None for one in found):
                return found
        return []

    def close(self) -> None:
        self._transactions.close()


def named(slot: Slot, offset: int = -1001, text: str | None = None) -> TopicPartition:
    from confluent_kafka import TopicPartition

    if text is None:
        return TopicPartition(*slot, offset)
    return TopicPartition(*slot, offset, text)
