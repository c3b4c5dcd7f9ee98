"""This process as a member of the group of workers: one thread that alone touches the driver's consumer.

It reads, commits, and runs transactions, one thing at a time, so that what is committed is always what the shelf
says. It never waits in the driver for messages: it looks, and sleeps where it can be woken.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from taskq.backends.kafka import parts as bounds
from taskq.backends.kafka import wire
from taskq.backends.kafka.delays import HOPS, Letter, Post
from taskq.backends.kafka.health import Health
from taskq.backends.kafka.parts import Held, Part
from taskq.backends.kafka.place import Place
from taskq.backends.kafka.shelf import Shelf, sure
from taskq.backends.kafka.topics import Slot, Topics
from taskq.backends.kafka.writer import Order, Writer, named
from taskq.clock import Clock, monotonic
from taskq.errors import BackendUnavailableError, DecodeError
from taskq.job import Job, Reservation

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message, TopicPartition

#: Messages handled between two looks at what else there is to do.
_BATCH: Final = 500
#: How long the thread sleeps between two looks for messages, in seconds: while there is work, and after a while.
_BRISK: Final = 0.002
_CALM: Final = 0.010
_CALM_AFTER: Final = 1.0
_TROUBLED: Final = 0.1  # while something is wrong
#: How long an answer of the server may take before a take says that it is away, in seconds.
_PATIENCE: Final = 5.0
#: How long partitions that pass on are held for jobs that can neither end nor move, in seconds.
_HANDOVER: Final = 30.0
#: How often their last commit is tried.
_SAVES: Final = 3
#: Where the driver begins a partition of which nothing is committed.
_BEGINNING: Final = -2
#: How long one waits to be assigned a partition of a queue before there is taken to be none to spare, in seconds.
_JOIN: Final = 10.0


class Member:
    def __init__(self, place: Place, topics: Topics, post: Post, clock: Clock, timeout: float) -> None:
        self.shelf = Shelf(clock)
        self.health = Health(place, self.shelf.changed)
        self._place = place
        self._topics = topics
        self._post = post
        self._clock = clock
        self._timeout = timeout
        self._queues: Counter[str] = Counter()  #: sessions per queue
        self._subscribed: set[str] = set()
        self._joined: set[str] = set()  #: queues for which an assignment was waited for
        self._closing = False
        self._ended = False
        self._busy_since: float | None = None
        self._quiet_since = monotonic()
        self._consumer = self._open()
        self._writer = Writer(place, self.shelf, post, clock, self._consumer, self.health)
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
        return self._closing or self.health.failure is not None

    def raise_failure(self) -> None:
        """Raise where the server is away; the caller holds the lock."""
        if self._closing:
            raise BackendUnavailableError(f"{self._place.location} is closed")
        if self.health.failure is not None:
            raise BackendUnavailableError(str(self.health.failure))
        if self._busy_since is not None and monotonic() - self._busy_since > _PATIENCE:
            raise BackendUnavailableError(f"{self._place.location} does not answer")

    def serves(self, queue: str) -> bool:
        return queue in self._queues

    def ended(self) -> dict[Slot, int]:
        """What has ended for sure and was not named before: offsets before which messages can be deleted."""
        with self.shelf.changed:
            parts = [part for part in self.shelf.parts.values() if part.base > max(0, part.cut)]
            for part in parts:
                part.cut = part.base
            return {part.slot: part.base for part in parts}

    def purge(self, ends: Mapping[Slot, int]) -> int:
        """End what waits in those of these partitions that are this member's, up to their ends; returns how many."""
        with self.shelf.changed:
            parts = [part for slot in ends if (part := self.shelf.parts.get(slot)) is not None]
            purged = sum(self.shelf.purge(part, ends[part.slot]) for part in parts)
            self.write(None, [(part, part.version) for part in parts])
            return purged

    def at_rest(self, reservations: Iterable[Reservation]) -> None:
        """Return when nothing is being written about ``reservations``, nor are they moved. Holds the lock."""
        asked = list(reservations)
        rest = lambda: self._ended or not self.shelf.in_motion(asked)  # noqa: E731
        if not self.shelf.changed.wait_for(rest, self._timeout):
            raise BackendUnavailableError(f"{self._place.location}: an earlier write is not confirmed yet")

    # -- writing ----------------------------------------------------------------------

    def write(self, order: Order | None, needs: Sequence[tuple[Part, int]]) -> None:
        """Return when ``order`` is written and ``needs`` are committed, or their partitions gone. Holds the lock."""
        changed = self.shelf.changed
        if order is not None:
            self._writer.orders.append(order)
        self._writer.awaited.update(part for part, version in needs if part.saved < version)
        changed.notify_all()

        def written() -> bool:
            return self._ended or (sure(needs) and (order is None or order.done))

        if not changed.wait_for(written, self._timeout) or self._ended:
            if order is not None and not order.done and order in self._writer.orders:
                self._writer.orders.remove(order)
                order.done = True
                self.shelf.stay(held for held, _ in order.entries)
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
                group_remote_assignor="range",
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
                error_cb=self.health.hear,
            )
        )

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - whatever it is, the sessions shall hear of it
                    self.health.failed(error)
        finally:
            self._end()

    def _turn(self) -> None:
        self._subscribe()
        self._busy_since = monotonic()
        busy = self._read()
        busy = self._writer.transact() or busy
        self._writer.commit()
        self._busy_since = None
        self._balance()
        self.health.probe(self._consumer)
        with self.shelf.changed:
            if busy:
                self._quiet_since = monotonic()
                self.shelf.changed.notify_all()
            elif self.health.failure is not None:
                self.shelf.changed.wait(_TROUBLED)
            elif not self._writer.orders and not self._writer.awaited and not self._closing:
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
                self.health.well()
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
        self.shelf.arrive(part, offset, message.timestamp()[1], message.key(), parcel)

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
            self._consumer.pause([named(part.slot) for part in stop])
        if go:
            self._consumer.resume([named(part.slot) for part in go])

    # -- assignments ------------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        known = self._writer.committed(partitions)
        delays = self._place.delays
        queues = {
            topic: (queue, band)
            for queue in self._queues
            for band, topic in enumerate(self._place.bands(queue))
        }
        starts = []
        with self.shelf.changed:
            for one in known:
                slot = (one.topic, one.partition)
                there = one.offset >= 0
                queue, band = queues.get(one.topic, ("", 0))
                hop = HOPS[one.partition] if one.topic == delays else None
                if hop is None and not queue:
                    queue = one.topic
                base = one.offset if there else -1
                self.shelf.drop(slot)
                self.shelf.assign(Part(slot, queue, band, hop, base, (one.metadata or "") if there else ""))
                starts.append(named(slot, one.offset if there else _BEGINNING))
        consumer.incremental_assign(starts)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        slots = {(p.topic, p.partition) for p in partitions}
        if not self._closing:
            self._hand_over(slots)
        for _ in range(_SAVES):
            if self._writer.save([part for part in self.shelf.dirty() if part.slot in slots]):
                break
        self._drop(slots)

    def _hand_over(self, slots: set[Slot]) -> None:
        """Before these partitions pass on: what runs moves to one that stays, or is waited for where none does."""
        shelf = self.shelf
        with shelf.changed:
            for slot in slots & shelf.parts.keys():
                shelf.parts[slot].leaving = True
        end = monotonic() + _HANDOVER
        while self._writer.transact() or (
            self._still_runs(slots) and not self._unwell() and monotonic() < end
        ):
            self._writer.commit()
            with shelf.changed:
                shelf.changed.wait(_CALM)

    def _still_runs(self, slots: set[Slot]) -> bool:
        """Move what runs; returns whether something is left that cannot be."""
        with self.shelf.changed:
            running = [held for held in self.shelf.running(slots) if not held.settling]
            moving = [(held, part) for held in running if (part := self.shelf.refuge(held.part)) is not None]
            for held, _ in moving:
                held.settling = True
        if moving:
            stamp = int(self._clock.now() * 1000)
            entries = [(held, [_moved(held, part, stamp)]) for held, part in moving]
            self._writer.run([Order(entries, moves=True)])
        return len(moving) < len(running)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._drop({(p.topic, p.partition) for p in partitions})

    def _drop(self, slots: set[Slot]) -> None:
        with self.shelf.changed:
            for slot in slots:
                self.shelf.drop(slot)

    # -- the end ----------------------------------------------------------------------

    def close(self) -> None:
        """Commit what is known, and leave the group."""
        with self.shelf.changed:
            self._closing = self._writer.closing = True
            self.shelf.changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE * 2)

    def _end(self) -> None:
        try:
            with self.shelf.changed:
                dirty = list(self.shelf.dirty())
            if self._writer.decide():
                self._writer.save(dirty)
            self._consumer.close()
            self._writer.close()
        finally:
            with self.shelf.changed:
                self._ended = self._closing = True
                self.shelf.changed.notify_all()


def _moved(held: Held, part: Part, stamp: int) -> Letter:
    """The message by which a job that runs moves to ``part``; its key says who has it."""
    value = wire.pack(replace(held.job, deliveries=held.job.deliveries - 1))
    return Letter(*part.slot, f"{held.token}-{uuid.uuid4().hex}".encode(), value, stamp)
