"""The dead letters: compacted topics keyed by job id, read without joining any group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from taskq.backends import moves
from taskq.backends.kafka import wire
from taskq.backends.kafka.delays import Letter, Post
from taskq.backends.kafka.failures import translated
from taskq.backends.kafka.place import Place
from taskq.backends.kafka.topics import Slot, Topics
from taskq.backends.kafka.transactions import Transactions
from taskq.clock import Clock, monotonic
from taskq.errors import BackendUnavailableError, DecodeError
from taskq.job import Job, State

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

#: How often one begins anew where another operator revives at the same time.
_ROUNDS = 5


class Reader:
    """Reads partitions without a group. One reading at a time."""

    def __init__(self, place: Place, topics: Topics, timeout: float) -> None:
        self._place = place
        self._topics = topics
        self._timeout = timeout
        self._lock = threading.Lock()
        self._consumer: Consumer | None = None

    def read(self, spans: dict[Slot, int], take: Callable[[Message], None]) -> None:
        """Give ``take`` every message of these partitions from these offsets to their present ends."""
        from confluent_kafka import KafkaError, TopicPartition

        ends = self._topics.ends(spans)
        left = {slot: ends[slot] for slot, start in spans.items() if ends[slot] > start}
        if not left:
            return
        end = monotonic() + self._timeout
        with self._lock, translated("reading", self._place.location):
            consumer = self._open()
            consumer.assign([TopicPartition(*slot, max(0, spans[slot])) for slot in left])
            while left:
                if monotonic() > end:
                    raise BackendUnavailableError(
                        f"{self._place.location} did not answer within {self._timeout:g} s"
                    )
                for message in consumer.consume(1000, 0.02):
                    slot, offset = (message.topic() or "", message.partition() or 0), message.offset() or 0
                    error = message.error()
                    if error is None and offset < ends[slot]:
                        take(message)
                    known = error is None or error.code() == KafkaError._PARTITION_EOF
                    if known and offset + (error is None) >= ends[slot]:
                        left.pop(slot, None)
            consumer.unassign()

    def _open(self) -> Consumer:
        if self._consumer is None:
            from confluent_kafka import Consumer

            self._consumer = Consumer(
                self._place.client(
                    group_id=f"{self._place.group}-looks",
                    isolation_level="read_committed",
                    enable_auto_commit=False,
                    auto_offset_reset="earliest",
                    enable_partition_eof=True,
                    fetch_wait_max_ms=20,
                    fetch_queue_backoff_ms=5,
                )
            )
        return self._consumer

    def close(self) -> None:
        with self._lock:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None


class Graves:
    """The dead jobs of all queues."""

    def __init__(self, place: Place, topics: Topics, post: Post, clock: Clock, reader: Reader) -> None:
        self._place = place
        self._topics = topics
        self._post = post
        self._clock = clock
        self._reader = reader
        self._lock = threading.Lock()
        self._seen: dict[str, _Grave] = {}

    def count(self, queue: str) -> int:
        return len(self._read(queue).ids)

    def jobs(self, queue: str, after: int, limit: int) -> list[tuple[int, Job]]:
        """At most ``limit`` dead jobs that stand beyond the offset ``after``, with theirs, oldest first."""
        grave = self._read(queue)
        found: list[tuple[int, Job]] = []
        wanted = sorted(offset for offset in grave.ids.values() if offset > after)[:limit]
        chosen = set(wanted)

        def take(message: Message) -> None:
            offset = message.offset() or 0
            if offset in chosen and message.value() is not None:
                found.append((offset, _unpacked(queue, message)))

        if wanted:
            self._reader.read({(self._place.dead(queue), 0): wanted[0]}, take)
        return found

    def revive(self, queue: str, ids: Sequence[str] | None, due: float) -> list[str]:
        """One transaction for all: each job to its work topic, and off the dead letters."""
        now = self._clock.now()
        wanted = None if ids is None else set(ids)

        def letters(jobs: Sequence[Job]) -> Iterator[Letter]:
            for job in jobs:
                yield self._post.letter(moves.revived(job, due, now), now)
                yield self._post.tombstone(queue, job.id, now)

        return self._change(queue, wanted, letters)

    def purge(self, queue: str) -> int:
        now = self._clock.now()
        return len(
            self._change(queue, None, lambda jobs: (self._post.tombstone(queue, job.id, now) for job in jobs))
        )

    def _change(
        self, queue: str, wanted: set[str] | None, letters: Callable[[Sequence[Job]], Iterator[Letter]]
    ) -> list[str]:
        """Write ``letters`` about the dead jobs of ``wanted``; nobody else changes them between look and write."""
        with self._lock:
            for attempt in range(_ROUNDS):
                transactions = Transactions(self._place, f"dead-{self._place.dead(queue)}", producers=1)
                try:
                    transactions.prepare()
                    jobs = [
                        job for _, job in self.jobs(queue, -1, 1 << 31) if wanted is None or job.id in wanted
                    ]
                    if jobs:
                        transactions.run(list(letters(jobs)))
                    return [job.id for job in jobs]
                except BackendUnavailableError:
                    if attempt == _ROUNDS - 1:
                        raise
                finally:
                    transactions.close()
        return []

    def _read(self, queue: str) -> _Grave:
        """What is dead now; reads what is new."""
        topic = self._place.dead(queue)
        grave = self._seen.setdefault(queue, _Grave())
        with grave.lock:

            def take(message: Message) -> None:
                key = (message.key() or b"").decode()
                if message.value() is None:
                    grave.ids.pop(key, None)
                else:
                    grave.ids[key] = message.offset() or 0
                grave.read = (message.offset() or 0) + 1

            self._reader.read({(topic, 0): grave.read}, take)
            return grave


class _Grave:
    """What is known of one queue's dead: where each stands."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ids: dict[str, int] = {}
        self.read = 0


def _unpacked(queue: str, message: Message) -> Job:
    try:
        return wire.unpack(message.value(), State.DEAD).job
    except DecodeError as error:
        key = (message.key() or b"").decode(errors="replace")
        return Job(id=key, queue=queue, payload=message.value() or b"", state=State.DEAD, error=str(error))
