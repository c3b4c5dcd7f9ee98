"""Messages and finished offsets in one write."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from taskq.backends.kafka.delays import Letter
from taskq.backends.kafka.failures import told
from taskq.backends.kafka.place import Place
from taskq.clock import monotonic
from taskq.errors import BackendError, BackendUnavailableError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

#: A transaction of a worker that died holds up the readers of what it wrote for no longer than this, in seconds, and
#: the time that the server takes to notice (``transaction.abort.timed.out.transaction.cleanup.interval.ms``).
TIMEOUT: Final = 10.0
#: Producers that take turns: the server is busy with the end of the last transaction while the next begins.
_PRODUCERS: Final = 2


class InDoubtError(BackendUnavailableError):
    """The server may or may not have committed; :meth:`Transactions.decide` finds out."""


class Transactions:
    """Transactions one after the other. Driven by one thread at a time."""

    def __init__(self, place: Place, name: str, *, producers: int = _PRODUCERS) -> None:
        self._place = place
        self._names = [f"{place.prefix}-{name}-{n}" for n in range(producers)]
        self._ready: dict[str, Producer] = {}
        self._broken: set[str] = set()  #: those whose connections have failed
        self._turn = 0
        self._doubted: str | None = None

    def run(
        self, letters: Sequence[Letter], offsets: Sequence[TopicPartition] = (), group: Any = None
    ) -> dict[int, int]:
        """Write all or nothing; returns the offsets of those letters that have a key, by their places.

        Raises ``BackendUnavailableError`` where nothing is written, :class:`InDoubtError` where that is not known.
        """
        self._turn = (self._turn + 1) % len(self._names)
        name = self._names[self._turn]
        attempt = _Attempt(lambda: self._attempt(name, letters, offsets, group))
        if not attempt.done.wait(TIMEOUT * 2):
            # The driver can wait for ever for a server that was away. Whatever it still does, the next producer of
            # this name fences it.
            self._discard(name)
            self._doubted = name
            raise InDoubtError(f"{self._place.location}: a transaction did not end within {TIMEOUT * 2:g} s")
        if attempt.error is not None:
            if not isinstance(attempt.error, BackendError):
                self._discard(name)
                self._doubted = name
                raise InDoubtError(f"{self._place.location}: {attempt.error}") from attempt.error
            raise attempt.error
        return attempt.written

    def _attempt(
        self, name: str, letters: Sequence[Letter], offsets: Sequence[TopicPartition], group: Any
    ) -> dict[int, int]:
        from confluent_kafka import KafkaException

        try:
            producer = self._whole(name)
            written = self._write(producer, letters, offsets, group)
        except (KafkaException, BufferError) as error:
            self._abort(name)
            raise self._told(error) from error
        self._commit(name, producer)
        producer.poll(0)
        return written

    def _write(
        self, producer: Producer, letters: Sequence[Letter], offsets: Sequence[TopicPartition], group: Any
    ) -> dict[int, int]:
        written: dict[int, int] = {}
        producer.begin_transaction()
        for place, letter in enumerate(letters):
            try:
                self._produce(producer, letter, place, written)
            except BufferError:
                producer.poll(1.0)
                self._produce(producer, letter, place, written)
        if offsets:
            producer.send_offsets_to_transaction(list(offsets), group, TIMEOUT)
        return written

    def _produce(self, producer: Producer, letter: Letter, place: int, written: dict[int, int]) -> None:
        topic, partition, key, value, stamp = letter
        if key is None:
            producer.produce(topic, value, key, partition, timestamp=stamp)
            return

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is None and (offset := message.offset()) is not None:
                written[place] = offset

        producer.produce(topic, value, key, partition, timestamp=stamp, on_delivery=delivered)

    def _commit(self, name: str, producer: Producer) -> None:
        from confluent_kafka import KafkaException

        end = monotonic() + TIMEOUT
        while True:
            try:
                producer.commit_transaction(max(0.1, end - monotonic()))
            except KafkaException as error:
                reason = error.args[0]
                if reason.txn_requires_abort():
                    self._abort(name)
                    raise self._told(error) from error
                if not reason.retriable() or monotonic() > end:
                    self._discard(name)
                    self._doubted = name
                    raise InDoubtError(str(self._told(error))) from error
            else:
                return

    def decide(self) -> None:
        """End what is in doubt: afterwards the committed offsets tell which way. Raises ``BackendUnavailableError``."""
        from confluent_kafka import KafkaException

        if self._doubted is None:
            return
        try:
            self._producer(self._doubted)
        except KafkaException as error:
            self._discard(self._doubted)
            raise self._told(error) from error
        self._doubted = None

    def prepare(self) -> None:
        """Fence others of the same name: what they have open ends, and they commit no more."""
        from confluent_kafka import KafkaException

        for name in self._names:
            try:
                self._producer(name)
            except KafkaException as error:
                self._discard(name)
                raise self._told(error) from error

    def _whole(self, name: str) -> Producer:
        """The producer of that name, a new one if the connection of the last has broken."""
        producer = self._producer(name)
        producer.poll(0)
        if name in self._broken:
            self._discard(name)
            producer = self._producer(name)
        return producer

    def _producer(self, name: str) -> Producer:
        producer = self._ready.get(name)
        if producer is None:
            from confluent_kafka import Producer

            producer = Producer(
                self._place.client(
                    transactional_id=name,
                    transaction_timeout_ms=int(TIMEOUT * 1000),
                    message_max_bytes=100_000_000,
                    linger_ms=0,
                    compression_type="lz4",
                    error_cb=lambda error: self._broken.add(name),
                )
            )
            producer.init_transactions(TIMEOUT)
            self._ready[name] = producer
        return producer

    def _abort(self, name: str) -> None:
        """Leave no transaction open; a producer that cannot abort is given up, and with it its transaction."""
        from confluent_kafka import KafkaException

        producer = self._ready.get(name)
        if producer is None:
            return
        try:
            producer.abort_transaction(TIMEOUT / 2)
        except KafkaException:
            self._discard(name)

    def _discard(self, name: str) -> None:
        producer = self._ready.pop(name, None)
        self._broken.discard(name)
        if producer is not None:
            with contextlib.suppress(BufferError):
                producer.purge()

    def _told(self, error: KafkaException | BufferError) -> BackendUnavailableError:
        if isinstance(error, BufferError):
            return BackendUnavailableError(f"{self._place.location}: the driver's queue is full")
        reason = told(error.args[0], "a transaction", self._place.location)
        return BackendUnavailableError(str(reason))

    def close(self) -> None:
        for name in list(self._ready):
            self._discard(name)


class _Attempt:
    """Something done by a thread of its own, which may never end."""

    def __init__(self, do: Callable[[], dict[int, int]]) -> None:
        self.done = threading.Event()
        self.written: dict[int, int] = {}
        self.error: Exception | None = None
        self._do = do
        threading.Thread(target=self._run, name="taskq-kafka-transaction", daemon=True).start()

    def _run(self) -> None:
        try:
            self.written = self._do()
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            self.error = error
        finally:
            self.done.set()
