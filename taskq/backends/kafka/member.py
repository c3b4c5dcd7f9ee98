"""This process as a member of the group of workers: one thread that alone touches the driver's consumer.

It reads, commits, and runs transactions, one thing at a time, so that what is committed is always what the shelf
says. It never waits in the driver for messages: it looks, and sleeps where it can be woken.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from taskq.backends.kafka import parts as bounds
from taskq.backends.kafka import wire
from taskq.backends.kafka.delays import HOPS, Letter, Post
from taskq.backends.kafka.failures import told
from taskq.backends.kafka.marks import Marks
from taskq.backends.kafka.parts import Held, Part
from taskq.backends.kafka.place import Place
from taskq.backends.kafka.shelf import Shelf, sure
from taskq.backends.kafka.topics import Slot, Topics
from taskq.backends.kafka.transactions import InDoubtError, Transactions
from taskq.clock import Clock, monotonic
from taskq.errors import BackendError, BackendUnavailableError, DecodeError
from taskq.job import Job

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

#: Messages handled between two looks at what else there is to do.
_BATCH: Final = 500
#: What was lent is committed after this long at the latest, in seconds: then a crash makes it a suspect.
_LENT_COMMIT: Final = 0.025
#: How long the thread sleeps between two looks for messages, in seconds: while there is work, and after a while.
_BRISK: Final = 0.002
_CALM: Final = 0.010
_CALM_AFTER: Final = 1.0
#: How long an answer of the server may take before a take says that it is away, in seconds.
_PATIENCE: Final = 5.0
#: How long a probe takes at most, and how often one is made, in seconds.
_PROBE: Final = 1.0
#: Delayed jobs forwarded by one transaction.
_FORWARDED: Final = 500
#: Where the driver begins a partition of which nothing is committed.
_BEGINNING: Final = -2
#: How long one waits to be assigned a partition of a queue before there is taken to be none to spare, in seconds.
_JOIN: Final = 10.0


@dataclass(slots=True, eq=False)
class Order:
    """Jobs that end, each with the messages that are written with its end; written in one transaction."""

    entries: list[tuple[Held, list[Letter]]]
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


class Member:
    def __init__(self, place: Place, topics: Topics, post: Post, clock: Clock, timeout: float) -> None:
        self.shelf = Shelf(clock)
        self.failure: BackendUnavailableError | None = None  #: why the server does not answer
        self._place = place
        self._topics = topics
        self._post = post
        self._clock = clock
        self._timeout = timeout
        self._queues: Counter[str] = Counter()  #: sessions per queue
        self._subscribed: set[str] = set()
        self._joined: set[str] = set()  #: queues for which an assignment was waited for
        self._orders: deque[Order] = deque()
        self._doubted: Doubt | None = None
        self._transactions = Transactions(place, f"w-{uuid.uuid4().hex}")
        self._closing = False
        self._ended = False
        self._busy_since: float | None = None
        self._quiet_since = monotonic()
        self._commit_after = 0.0
        self._probe_after = 0.0
        self._awaited: set[Part] = set()  #: somebody waits until these are committed
        self._consumer = self._open()
        self._thread = threading.Thread(target=self._run, name="taskq-kafka-member", daemon=True)
        self._thread.start()

    # -- sessions ---------------------------------------------------------------------

    def join(self, queues: Iterable[str]) -> None:
        """A session serves ``queues``, whose topics are there."""
        with self.shelf.changed:
            self._queues.update(queues)
            self.shelf.changed.notify_all()

    def leave(self, queues: Iterable[str]) -> bool:
        """It does no longer; returns whether nobody is left."""
        with self.shelf.changed:
            self._queues.subtract(queues)
            self._queues = +self._queues
            self.shelf.changed.notify_all()
            return not self._queues

    def catch_up(self, queues: Iterable[str], timeout: float) -> dict[Slot, int]:
        """Return when everything that stands in this member's partitions of ``queues`` now has been read.

        Waits for transactions that are open there, for ``timeout`` seconds at most. Returns where they end.
        """
        changed, shelf = self.shelf.changed, self.shelf
        queues = set(queues)
        end = monotonic() + timeout
        with changed:
            changed.wait_for(lambda: self._is_joined(queues) or self._unwell(), min(timeout, _JOIN))
            self._joined |= queues
            parts = [part for part in shelf.parts.values() if part.queue in queues and part.hop is None]
        ends = self._topics.ends([part.slot for part in parts])

        def caught_up() -> bool:
            return self._unwell() or all(
                part.reached >= ends[part.slot] or part.paused or not part.live for part in parts
            )

        with changed:
            changed.wait_for(caught_up, max(0.0, end - monotonic()))
            self.raise_failure()
        return ends

    def _is_joined(self, queues: set[str]) -> bool:
        return all(queue in self._joined or self.shelf.by_queue.get(queue) for queue in queues)

    def _unwell(self) -> bool:
        return self._closing or self.failure is not None

    def raise_failure(self) -> None:
        """Raise where the server is away; the caller holds the lock."""
        if self._closing:
            raise BackendUnavailableError(f"{self._place.location} is closed")
        if self.failure is not None:
            raise BackendUnavailableError(str(self.failure))
        if self._busy_since is not None and monotonic() - self._busy_since > _PATIENCE:
            raise BackendUnavailableError(f"{self._place.location} does not answer")

    def serves(self, queue: str) -> bool:
        return queue in self._queues

    def purge(self, ends: Mapping[Slot, int]) -> int:
        """End what waits in those of these partitions that are this member's, up to their ends; returns how many."""
        with self.shelf.changed:
            parts = [part for slot in ends if (part := self.shelf.parts.get(slot)) is not None]
            purged = sum(self.shelf.purge(part, ends[part.slot]) for part in parts)
            self.write(None, [(part, part.version) for part in parts])
            return purged

    # -- writing ----------------------------------------------------------------------

    def write(self, order: Order | None, needs: Sequence[tuple[Part, int]]) -> None:
        """Return when ``order`` is written and ``needs`` are committed, or their partitions gone. Holds the lock."""
        changed = self.shelf.changed
        if order is not None:
            self._orders.append(order)
        self._awaited.update(part for part, version in needs if part.saved < version)
        changed.notify_all()

        def written() -> bool:
            return self._ended or (sure(needs) and (order is None or order.done))

        if not changed.wait_for(written, self._timeout) or self._ended:
            if order is not None and not order.done and order in self._orders:
                self._orders.remove(order)
                order.done = True
            raise BackendUnavailableError(
                f"{self._place.location} did not confirm within {self._timeout:g} s"
                if not self._ended
                else f"{self._place.location} is closed"
            )
        if order is not None and order.error is not None:
            raise order.error

    # -- the thread -------------------------------------------------------------------

    def _open(self) -> Consumer:
        from confluent_kafka import Consumer

        return Consumer(
            self._place.client(
                group_id=self._place.group,
                group_protocol="consumer",
                isolation_level="read_committed",
                enable_auto_commit=False,
                enable_auto_offset_store=False,
                auto_offset_reset="earliest",
                enable_partition_eof=True,
                fetch_wait_max_ms=100,
                fetch_queue_backoff_ms=5,
                fetch_error_backoff_ms=20,
                queued_min_messages=4000,
                queued_max_messages_kbytes=32768,
                socket_timeout_ms=10_000,
                error_cb=self._on_error,
            )
        )

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        self._subscribe()
        self._busy_since = monotonic()
        busy = self._read()
        busy = self._transact() or busy
        self._commit()
        self._busy_since = None
        self._balance()
        if self.failure is not None:
            self._probe()
        with self.shelf.changed:
            if busy:
                self._quiet_since = monotonic()
                self.shelf.changed.notify_all()
            elif not self._orders and not self._awaited and not self._closing:
                calm = monotonic() - self._quiet_since > _CALM_AFTER
                self.shelf.changed.wait(_CALM if calm else _BRISK)

    def _subscribe(self) -> None:
        topics = {topic for queue in self._queues for topic in self._place.bands(queue)}
        if topics:
            topics.add(self._place.delays)
        if topics == self._subscribed or (not topics and not self._subscribed):
            return
        self._subscribed = topics
        if topics:
            self._consumer.subscribe(
                sorted(topics), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )

    # -- reading ----------------------------------------------------------------------

    def _read(self) -> bool:
        if not self._subscribed:
            return False
        messages = self._consumer.consume(_BATCH, 0)
        if messages:
            with self.shelf.changed:
                for message in messages:
                    self._arrived(message)
                self.failure = None
        return bool(messages)

    def _arrived(self, message: Message) -> None:
        from confluent_kafka import KafkaError

        offset, error = message.offset(), message.error()
        part = self.shelf.parts.get((message.topic() or "", message.partition() or 0))
        if error is not None:
            if part is not None and error.code() == KafkaError._PARTITION_EOF and offset is not None:
                part.read_to(offset)
            return
        if part is None or offset is None:
            return
        value = message.value()
        try:
            parcel = wire.unpack(value)
        except DecodeError as broken:
            job = Job(id=f"{part.slot[0]}-{part.slot[1]}-{offset}", queue=part.queue, payload=value or b"")
            held = Held(part, offset, job, 0)
            part.add(held)
            part.read_to(offset + 1)
            self.shelf.broken.append((held, str(broken)))
            return
        self.shelf.arrive(part, offset, message.timestamp()[1], parcel)

    def _balance(self) -> None:
        """Stop reading what is held in plenty, go on with what runs low."""
        with self.shelf.changed:
            parts = list(self.shelf.parts.values())
            above = {
                queue: max((part.band for part in of if len(part.heap) >= bounds.LOW), default=-1)
                for queue, of in self.shelf.by_queue.items()
            }
            stop, go = [], []
            for part in parts:
                held = len(part.open)
                behind = part.hop is None and part.band < above[part.queue]
                if not part.paused and (held >= bounds.FULL or behind):
                    stop.append(part)
                elif part.paused and held < bounds.LOW and not behind:
                    go.append(part)
            for part in (*stop, *go):
                part.paused = part in stop
        if stop:
            self._consumer.pause([_named(part.slot) for part in stop])
        if go:
            self._consumer.resume([_named(part.slot) for part in go])

    # -- assignments ------------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        known = self._committed(partitions)
        delays = self._place.delays
        queues = {
            topic: (queue, band)
            for queue in self._queues
            for band, topic in enumerate(self._place.bands(queue))
        }
        starts = []
        with self.shelf.changed:
            for named in known:
                slot = (named.topic, named.partition)
                there = named.offset >= 0
                queue, band = queues.get(named.topic, ("", 0))
                hop = HOPS[named.partition] if named.topic == delays else None
                if hop is None and not queue:
                    queue = named.topic
                base = named.offset if there else -1
                self.shelf.drop(slot)
                self.shelf.assign(Part(slot, queue, band, hop, base, (named.metadata or "") if there else ""))
                starts.append(_named(slot, named.offset if there else _BEGINNING))
        consumer.incremental_assign(starts)

    def _committed(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """What was committed last, once nothing about it is open any more."""
        from confluent_kafka import KafkaException

        if not partitions:
            return []
        while not self._closing:
            try:
                found = self._consumer.committed(
                    [_named((p.topic, p.partition)) for p in partitions], timeout=5.0
                )
            except KafkaException as error:
                self._failed(error.args[0])
                continue
            if all(named.error is None for named in found):
                return found
        return []

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        slots = {(p.topic, p.partition) for p in partitions}
        self._save([part for part in self.shelf.dirty() if part.slot in slots])
        self._drop(slots)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._drop({(p.topic, p.partition) for p in partitions})

    def _drop(self, slots: set[Slot]) -> None:
        with self.shelf.changed:
            for slot in slots:
                self.shelf.drop(slot)

    # -- committing -------------------------------------------------------------------

    def _commit(self) -> None:
        """Commit what somebody waits for at once, else what is a little old."""
        if self._doubted is not None:
            return
        now = monotonic()
        with self.shelf.changed:
            self._awaited = {part for part in self._awaited if part.live and part.version > part.saved}
            if not self._awaited and now < self._commit_after:
                return
            dirty = list(self.shelf.dirty())
        if dirty:
            self._commit_after = now + _LENT_COMMIT
            self._save(dirty)

    def _save(self, parts: Sequence[Part]) -> bool:
        """Commit these; where that fails they stay as they are, to be committed again."""
        from confluent_kafka import KafkaException

        if not parts or self._doubted is not None:
            return False
        with self.shelf.changed:
            versions = {part: part.version for part in parts}
            offsets = [_named(part.slot, *part.marks()) for part in parts if part.reached >= 0]
        if not offsets:
            return False
        try:
            answers = self._consumer.commit(offsets=offsets, asynchronous=False) or []
        except KafkaException as error:
            self._failed(error.args[0])
            return False
        wrong = {(named.topic, named.partition) for named in answers if named.error is not None}
        with self.shelf.changed:
            for part, version in versions.items():
                if part.slot not in wrong:
                    part.saved = max(part.saved, version)
            self.shelf.changed.notify_all()
        return not wrong

    # -- transactions -----------------------------------------------------------------

    def _transact(self) -> bool:
        """One transaction for all that waits for one."""
        if self._doubted is not None and not self._decide():
            return False
        orders = self._gather()
        if orders:
            self._run_orders(orders)
        return bool(orders)

    def _gather(self) -> list[Order]:
        """Everything that goes with messages."""
        with self.shelf.changed:
            orders = list(self._orders)
            self._orders.clear()
            moving = self.shelf.leaving(_FORWARDED)
        if moving:
            now = self._clock.now()
            try:
                orders.append(Order([(held, [self._post.letter(job, now)]) for held, job in moving]))
            except BackendError as error:
                self.failure = BackendUnavailableError(str(error))
                with self.shelf.changed:
                    self.shelf.stay(held for held, _ in moving)
        return orders

    def _run_orders(self, orders: Sequence[Order]) -> None:
        with self.shelf.changed:
            entries = [entry for order in orders for entry in order.entries if self.shelf.stands(entry[0])]
            ends = {held for held, _ in entries}
            touched = {held.part for held in ends}
            versions = {part: part.version for part in touched}
            written = {part: part.marks(ends) for part in touched}
        letters = [letter for _, of in entries for letter in of]
        try:
            if entries:
                offsets = [_named(part.slot, *marks) for part, marks in written.items()]
                self._transactions.run(letters, offsets, self._consumer.consumer_group_metadata())
        except InDoubtError as error:
            self._doubted = Doubt(list(orders), ends, versions, written)
            self.failure = error
        except BackendError as error:
            self._refuse(orders, error)
        else:
            self._finish(orders, ends, versions)

    def _finish(self, orders: Sequence[Order], ends: set[Held], versions: Mapping[Part, int]) -> None:
        """It is written."""
        with self.shelf.changed:
            self.failure = None
            for part, version in versions.items():
                clean = part.version == version
                gone = [held for held in ends if held.part is part]
                for held in gone:
                    if held.session is not None:
                        self.shelf.settled[held.job.id, held.token] = (part, 0)
                    self.shelf.end(held)
                part.saved = part.version if clean else version
            for order in orders:
                order.written = ends
                order.done = True
            self.shelf.changed.notify_all()

    def _refuse(self, orders: Sequence[Order], error: BackendError) -> None:
        """Nothing of it is written."""
        with self.shelf.changed:
            for order in orders:
                order.error = error
                order.done = True
                self.shelf.stay(held for held, _ in order.entries)
            self.shelf.changed.notify_all()

    def _decide(self) -> bool:
        """Find out what became of the transaction in doubt; returns whether that is known now."""
        doubt = self._doubted
        if doubt is None:
            return True
        try:
            self._transactions.decide()
        except BackendUnavailableError as error:
            self.failure = error
            return False
        found = self._committed([_named(part.slot) for part in doubt.written])
        if not found:
            return False
        said = {(named.topic, named.partition): (named.offset, named.metadata or "") for named in found}
        landed = all(said[part.slot] == marks for part, marks in doubt.written.items() if part.live)
        self._doubted = None
        if landed:
            self._finish(doubt.orders, doubt.ends, doubt.versions)
        else:
            self._refuse(
                doubt.orders, BackendUnavailableError(f"{self._place.location}: a transaction was aborted")
            )
        return True

    # -- the server's health ----------------------------------------------------------

    def _on_error(self, error: KafkaError) -> None:
        """The driver says that something is wrong. It is believed only of what means that nobody answers."""
        from confluent_kafka import KafkaError

        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._probe()
        elif error.fatal() or error.code() in {
            KafkaError._AUTHENTICATION,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
        }:
            self._failed(error)

    def _failed(self, error: KafkaError) -> None:
        with self.shelf.changed:
            self.failure = BackendUnavailableError(str(told(error, "working", self._place.location)))
            self.shelf.changed.notify_all()

    def _probe(self) -> None:
        """Ask whether somebody answers, once in a while."""
        from confluent_kafka import KafkaException

        if monotonic() < self._probe_after:
            return
        self._probe_after = monotonic() + _PROBE
        try:
            self._consumer.list_topics(topic=self._place.delays, timeout=_PROBE)
        except KafkaException as error:
            self._failed(error.args[0])
        else:
            self.failure = None

    # -- the end ----------------------------------------------------------------------

    def close(self) -> None:
        """Commit what is known, and leave the group."""
        with self.shelf.changed:
            self._closing = True
            self.shelf.changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE * 2)

    def _end(self) -> None:
        try:
            with self.shelf.changed:
                dirty = list(self.shelf.dirty())
            if self._doubted is None or self._decide():
                self._save(dirty)
            self._consumer.close()
            self._transactions.close()
        finally:
            with self.shelf.changed:
                self._ended = self._closing = True
                self.shelf.changed.notify_all()


def _named(slot: Slot, offset: int = -1001, text: str | None = None) -> TopicPartition:
    from confluent_kafka import TopicPartition

    if text is None:
        return TopicPartition(*slot, offset)
    return TopicPartition(*slot, offset, text)
