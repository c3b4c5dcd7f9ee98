"""Pushes: one idempotent producer for all threads, each message confirmed by the replicas."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from taskq.backends.kafka.delays import Letter
from taskq.backends.kafka.place import Place
from taskq.errors import (
    BackendUnavailableError,
    NotPublishedError,
    PayloadTooLargeError,
    PublishUnknownError,
)

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

#: What a message costs besides its value, at most, in bytes.
OVERHEAD: Final = 512


class _Batch:
    """Messages on their way, and what became of them."""

    def __init__(self, n: int) -> None:
        self.left = n
        self.done = threading.Event()
        self.failed: dict[int, KafkaError] = {}
        self._lock = threading.Lock()

    def report(self, place: int, error: KafkaError | None) -> None:
        with self._lock:
            if error is not None:
                self.failed[place] = error
            self.left -= 1
            if not self.left:
                self.done.set()


class Publisher:
    def __init__(self, place: Place, timeout: float) -> None:
        from confluent_kafka import Producer

        self._place = place
        self._timeout = timeout
        self._closed = threading.Event()
        self._producer: Producer = Producer(
            place.client(
                enable_idempotence=True,
                acks="all",
                linger_ms=0,
                message_timeout_ms=max(1, int(timeout * 1000)),
                message_max_bytes=100_000_000,
                queue_buffering_max_messages=200_000,
                compression_type="lz4",
            )
        )
        self._thread = threading.Thread(target=self._serve, name="taskq-kafka-publisher", daemon=True)
        self._thread.start()

    def publish(self, letters: Sequence[Letter], ids: Sequence[str]) -> None:
        """Returns when all are stored. Raises ``NotPublishedError`` or ``PublishUnknownError``."""
        batch = _Batch(len(letters))
        for place, letter in enumerate(letters):
            self._produce(letter, batch, place)
        # The driver gives up by itself; this is for a driver that does not.
        batch.done.wait(self._timeout + 5.0)
        if self._closed.is_set() and batch.left:
            raise PublishUnknownError(f"{self._place.location} was closed meanwhile", job_ids=tuple(ids))
        if batch.failed or batch.left:
            self._refuse(batch, letters, ids)

    def _produce(self, letter: Letter, batch: _Batch, place: int) -> None:
        from confluent_kafka import KafkaException

        def report(error: KafkaError | None, message: Message, place: int = place) -> None:
            batch.report(place, error)

        while True:
            try:
                self._producer.produce(
                    letter.topic,
                    letter.value,
                    letter.key,
                    letter.partition,
                    on_delivery=report,
                    timestamp=letter.stamp,
                )
            except BufferError:  # as many wait as the driver takes
                self._producer.poll(0.05)
            except KafkaException as error:
                batch.report(place, error.args[0])
                return
            else:
                return

    def _refuse(self, batch: _Batch, letters: Sequence[Letter], ids: Sequence[str]) -> None:
        from confluent_kafka import KafkaError

        surely_not = {
            KafkaError.MSG_SIZE_TOO_LARGE,
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            KafkaError._UNKNOWN_TOPIC,
            KafkaError._UNKNOWN_PARTITION,
            KafkaError.INVALID_RECORD,
        }
        if not batch.failed:
            raise PublishUnknownError(f"{self._place.location} does not answer", job_ids=tuple(ids))
        error = next(iter(batch.failed.values()))
        text = f"{len(batch.failed)} of {len(ids)} jobs, to {letters[0].topic} at {self._place.location}: {error.str()}"
        if len(batch.failed) == len(ids) and all(e.code() in surely_not for e in batch.failed.values()):
            raise NotPublishedError(f"not stored: {text}")
        failed = tuple(ids[place] for place in sorted(batch.failed))
        raise PublishUnknownError(f"perhaps not stored: {text}", job_ids=failed)

    def _serve(self) -> None:
        while not self._closed.is_set():
            self._producer.poll(0.1)

    def close(self) -> None:
        """Let what is on its way arrive, for a moment."""
        self._producer.flush(1.0)
        self._closed.set()
        self._thread.join(2.0)


def refuse_large(letter: Letter, job_id: str, limit: int, location: str) -> None:
    """Raise for a message that the topic would not take."""
    size = len(letter.value or b"") + OVERHEAD
    if size > limit:
        raise PayloadTooLargeError(
            f"job {job_id} makes a message of {size:,} bytes; {letter.topic} at {location} takes {limit:,} "
            f"(max.message.bytes)"
        )


def closed(location: str) -> BackendUnavailableError:
    """The error of using what was closed."""
    return BackendUnavailableError(f"{location} is closed")
