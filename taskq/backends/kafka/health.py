"""Whether the server answers, as far as the member of this process knows."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from taskq.backends.kafka.failures import told
from taskq.backends.kafka.place import Place
from taskq.clock import monotonic
from taskq.errors import BackendUnavailableError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError

#: How long a probe takes at most, and how often one is made, in seconds.
_PROBE: Final = 1.0


class Health:
    """What is wrong, if anything; changes are told to those who wait on ``changed``."""

    def __init__(self, place: Place, changed: threading.Condition) -> None:
        self.failure: BackendUnavailableError | None = None
        self._place = place
        self._changed = changed
        self._probe_after = 0.0

    def well(self) -> None:
        """The server has answered."""
        self.failure = None

    def failed(self, error: KafkaError | Exception) -> None:
        """The server does not answer, or not as it should."""
        text = str(error if isinstance(error, Exception) else told(error, "working", self._place.location))
        with self._changed:
            self.failure = BackendUnavailableError(text)
            self._changed.notify_all()

    def hear(self, error: KafkaError) -> None:
        """The driver says that something is wrong; only a part of that means that work cannot go on."""
        from confluent_kafka import KafkaError

        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            # Said of idle connections too: a probe will tell.
            self.failed(error)
        elif error.fatal() or error.code() in {
            KafkaError._AUTHENTICATION,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
        }:
            self.failed(error)

    def probe(self, consumer: Consumer) -> None:
        """Where something was wrong: ask whether somebody answers, once in a while."""
        from confluent_kafka import KafkaException

        if self.failure is None or monotonic() < self._probe_after:
            return
        try:
            consumer.list_topics(topic=self._place.delays, timeout=_PROBE)
        except KafkaException as error:
            self.failed(error.args[0])
        else:
            self.well()
        self._probe_after = monotonic() + _PROBE
