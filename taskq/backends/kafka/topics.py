"""The topics: made, checked, measured and cut, through one administrative client."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from taskq.backends.kafka.delays import HOPS
from taskq.backends.kafka.failures import told, translated
from taskq.backends.kafka.place import Place
from taskq.errors import BackendError, ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

#: What every topic must say; nothing that waits may be deleted by age or size.
_KEPT: Final = {"retention.ms": "-1", "retention.bytes": "-1"}
_WORK: Final = {**_KEPT, "cleanup.policy": "delete"}
_DEAD: Final = {**_KEPT, "cleanup.policy": "compact"}

#: The largest message of topics that are made here, in bytes.
LARGEST: Final = 8 << 20

#: A partition by name.
Slot = tuple[str, int]


class Committed(NamedTuple):
    """What the group has committed for a partition."""

    offset: int  #: below 0 where nothing was
    text: str


class Topics:
    """Knows the topics of one place. Thread-safe."""

    def __init__(self, place: Place, timeout: float) -> None:
        self._place = place
        self._timeout = timeout
        self._admin: AdminClient | None = None
        self._lock = threading.Lock()
        self._declared: set[str] = set()
        self._widths: dict[str, int] = {}  #: partitions of the topics that were checked
        self._limits: dict[str, int] = {}  #: largest batch that each takes, in bytes

    # -- making -----------------------------------------------------------------------

    def declare(self, queue: str) -> None:
        """Make the topics of ``queue``, or check those that are there."""
        if queue in self._declared:
            return
        place = self._place
        wanted = dict.fromkeys(place.bands(queue), (place.partitions, _WORK))
        self._ensure({**wanted, place.dead(queue): (1, _DEAD)})
        self._declared.add(queue)

    def declare_delays(self) -> None:
        """Make the topic of delays."""
        self._ensure({self._place.delays: (len(HOPS), _WORK)})

    def width(self, topic: str) -> int:
        """How many partitions a declared topic has."""
        return self._widths[topic]

    def limit(self, topic: str) -> int:
        """The largest message that a declared topic takes, in bytes."""
        return self._limits[topic]

    def _ensure(self, wanted: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
        with self._lock:
            missing = {topic: how for topic, how in wanted.items() if topic not in self._widths}
            if not missing:
                return
            there = self._create(missing)
            self._check({topic: how for topic, how in missing.items() if topic in there})
            for topic in missing.keys() - there:
                self._widths[topic], self._limits[topic] = missing[topic][0], LARGEST

    def _create(self, wanted: Mapping[str, tuple[int, Mapping[str, str]]]) -> set[str]:
        """Make these topics; returns those that are there already, or must be."""
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import NewTopic

        replicas = min(3, self._brokers())
        secure = {"min.insync.replicas": str(max(1, replicas - 1)), "max.message.bytes": str(LARGEST)}
        new = [
            NewTopic(topic, num_partitions=width, replication_factor=replicas, config={**config, **secure})
            for topic, (width, config) in wanted.items()
        ]
        there: set[str] = set()
        for topic, future in self._client().create_topics(new, request_timeout=self._timeout).items():
            try:
                future.result()
            except KafkaException as error:
                reason = error.args[0]
                # Without the right to make it, it may be there; if not, the check says how to make it.
                if reason.code() not in {
                    KafkaError.TOPIC_AUTHORIZATION_FAILED,
                    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
                    KafkaError.TOPIC_ALREADY_EXISTS,
                }:
                    raise told(reason, f"making the topic {topic}", self._place.location) from error
                there.add(topic)
        return there

    def _check(self, wanted: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
        from confluent_kafka.admin import ConfigResource, ResourceType

        if not wanted:
            return
        widths = self._partitions(wanted)
        resources = {topic: ConfigResource(ResourceType.TOPIC, topic) for topic in wanted}
        futures = self._client().describe_configs(list(resources.values()), request_timeout=self._timeout)
        for topic, (width, config) in wanted.items():
            with translated(f"looking at the topic {topic}", self._place.location):
                there = {name: entry.value for name, entry in futures[resources[topic]].result().items()}
            self._refuse_other(topic, config, there)
            if topic == self._place.delays and widths[topic] != width:
                raise ConfigurationError(
                    f"{topic} has {widths[topic]} partitions, not {width}: it was not made by taskq"
                )
            self._limits[topic] = int(there.get("max.message.bytes") or LARGEST)
            self._widths[topic] = widths[topic]

    def _refuse_other(self, topic: str, config: Mapping[str, str], there: Mapping[str, str | None]) -> None:
        wrong = {name: value for name, value in config.items() if there.get(name) not in {value, None}}
        if wrong:
            given = ", ".join(f"{name}={there[name]}" for name in wrong)
            wanted = ",".join(f"{name}={value}" for name, value in wrong.items())
            raise ConfigurationError(
                f"the topic {topic} has {given}, which would lose jobs; run: kafka-configs.sh --bootstrap-server "
                f"{self._place.servers} --alter --entity-type topics --entity-name {topic} --add-config {wanted}"
            )

    def _partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """Partitions of those of ``topics`` that the server knows by now."""
        with translated("listing topics", self._place.location):
            known = self._client().list_topics(timeout=self._timeout).topics
        missing = [topic for topic in topics if topic not in known]
        if missing:
            known = self._wait_for(missing)
        return {topic: len(known[topic].partitions) for topic in topics if topic in known}

    def _wait_for(self, missing: Sequence[str]) -> Any:
        pause = threading.Event()
        for _ in range(int(self._timeout / 0.02)):
            with translated("listing topics", self._place.location):
                known = self._client().list_topics(timeout=self._timeout).topics
            if all(topic in known for topic in missing):
                return known
            pause.wait(0.02)
        raise ConfigurationError(
            "topics are missing and this user may not make them; run: "
            + "; ".join(self._command(topic) for topic in missing)
        )

    def _command(self, topic: str) -> str:
        dead = topic.endswith(".dead")
        width = 1 if dead else len(HOPS) if topic == self._place.delays else self._place.partitions
        config = " ".join(f"--config {name}={value}" for name, value in (_DEAD if dead else _WORK).items())
        return (
            f"kafka-topics.sh --bootstrap-server {self._place.servers} --create --topic {topic} "
            f"--partitions {width} {config}"
        )

    def _brokers(self) -> int:
        with translated("asking for the brokers", self._place.location):
            return len(self._client().list_topics(timeout=self._timeout).brokers)

    # -- looking ----------------------------------------------------------------------

    def there(self) -> dict[str, int]:
        """All topics of this place, and how many partitions they have."""
        with translated("listing topics", self._place.location):
            topics = self._client().list_topics(timeout=self._timeout).topics
        start = f"{self._place.prefix}."
        return {name: len(topic.partitions) for name, topic in topics.items() if name.startswith(start)}

    def ends(self, slots: Iterable[Slot], *, first: bool = False) -> dict[Slot, int]:
        """Where each partition ends, open transactions included; with ``first``, where it begins."""
        from confluent_kafka import TopicPartition
        from confluent_kafka.admin import OffsetSpec

        spec = OffsetSpec.earliest() if first else OffsetSpec.latest()
        asked = {TopicPartition(*slot): spec for slot in slots}
        if not asked:
            return {}
        with translated("asking where partitions end", self._place.location):
            found = self._client().list_offsets(asked, request_timeout=self._timeout)
            self._all(found.values())
            return {(slot.topic, slot.partition): future.result().offset for slot, future in found.items()}

    def committed(self, slots: Sequence[Slot]) -> dict[Slot, Committed]:
        """What the group of the workers has committed."""
        from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition

        request = ConsumerGroupTopicPartitions(self._place.group, [TopicPartition(*slot) for slot in slots])
        nothing = Committed(-1, "")
        if not slots:
            return {}
        with translated("asking what is finished", self._place.location):
            found = self._client().list_consumer_group_offsets([request], request_timeout=self._timeout)
            try:
                partitions = found[self._place.group].result().topic_partitions
            except KafkaException as error:
                if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                    return dict.fromkeys(slots, nothing)
                raise
        said = {(p.topic, p.partition): Committed(p.offset, p.metadata or "") for p in partitions}
        return {slot: said.get(slot, nothing) for slot in slots}

    # -- cutting ----------------------------------------------------------------------

    def cut(self, before: Mapping[Slot, int]) -> None:
        """Delete what stands before these offsets."""
        from confluent_kafka import TopicPartition

        if not before:
            return
        with translated("deleting what is finished", self._place.location):
            found = self._client().delete_records(
                [TopicPartition(topic, number, offset) for (topic, number), offset in before.items()],
                request_timeout=self._timeout,
            )
            self._all(found.values())
            for future in found.values():
                future.result()

    def _all(self, futures: Iterable[Future[Any]]) -> None:
        if wait(futures, self._timeout * 2).not_done:
            raise BackendError(f"{self._place.location} did not answer within {self._timeout * 2:g} s")

    # -- the client -------------------------------------------------------------------

    def _client(self) -> AdminClient:
        if self._admin is None:
            from confluent_kafka.admin import AdminClient

            self._admin = AdminClient(self._place.client())
        return self._admin
