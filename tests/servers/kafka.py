"""Kafka as one node that is broker and controller, with transactions and share groups."""

from __future__ import annotations

import base64
import pathlib
import shutil
import uuid

from tests.servers.processes import Running, ServerError, run

#: The newest first; an older one serves where the newest cannot be had.
VERSIONS = ("4.4.0", "4.3.1", "4.3.0", "4.2.1")
_LOGGING = "2.25.5"

_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>taskq.tests</groupId>
  <artifactId>kafka</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{kafka}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId><version>{logging}</version>
    </dependency>
  </dependencies>
</project>
"""

_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=BROKER://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=BROKER://127.0.0.1:{broker}
listener.security.protocol.map=BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=BROKER
log.dirs={data}
num.partitions=4
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=4
log.cleaner.dedupe.buffer.size=4194304
log.index.size.max.bytes=65536
group.consumer.assignment.interval.ms=0
group.consumer.heartbeat.interval.ms=200
group.consumer.min.heartbeat.interval.ms=200
group.consumer.session.timeout.ms=3000
group.consumer.min.session.timeout.ms=3000
transaction.abort.timed.out.transaction.cleanup.interval.ms=1000
"""

_LOG4J = """\
status=error
appender.console.type=Console
appender.console.name=console
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d %p %m (%c)%n
rootLogger.level=warn
rootLogger.appenderRef.console.ref=console
"""


def install(directory: pathlib.Path) -> None:
    """Fetch the jars with Maven, once."""
    jars = directory / "jars"
    if jars.exists():
        return
    if shutil.which("mvn") is None or shutil.which("java") is None:
        raise ServerError("Kafka needs Maven and Java 17: apt-get install maven openjdk-17-jre-headless")
    problem: ServerError | None = None
    for version in VERSIONS:
        try:
            _fetch(directory, version)
        except ServerError as error:
            problem = problem or error
        else:
            return
    assert problem is not None
    raise problem


def _fetch(directory: pathlib.Path, version: str) -> None:
    draft = directory / "jars.new"
    shutil.rmtree(draft, ignore_errors=True)
    pom = directory / "pom.xml"
    pom.write_text(_POM.format(kafka=version, logging=_LOGGING), encoding="utf-8")
    copy = ["mvn", "-B", "-q", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={draft}"]
    run([*copy, "-DincludeScope=runtime"], f"fetching Kafka {version}")
    draft.replace(directory / "jars")


def start(running: Running) -> str:
    """Start it; returns the URL once clients see the broker and its group coordinator."""
    broker, controller = running.port("broker"), running.port("controller")
    etc, data = running.folder("etc"), running.folder("data")
    properties, log4j = etc / "server.properties", etc / "log4j2.properties"
    properties.write_text(
        _PROPERTIES.format(broker=broker, controller=controller, data=data), encoding="utf-8"
    )
    log4j.write_text(_LOG4J, encoding="utf-8")
    java = [
        str(shutil.which("java")),
        *("-Xms256m", "-Xmx768m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
        f"-Dlog4j2.configurationFile={log4j}",
        *("-cp", f"{running.directory / 'jars'}/*"),
    ]
    if not (data / "meta.properties").exists():
        cluster = base64_id(uuid.uuid4())
        run(
            [*java, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(properties)],
            "formatting Kafka's storage",
        )
    running.spawn([*java, "kafka.Kafka", properties])
    running.wait("kafka", lambda: _answers(broker))
    return f"kafka://127.0.0.1:{broker}"


def base64_id(value: uuid.UUID) -> str:
    """A UUID the way Kafka writes one."""
    return base64.urlsafe_b64encode(value.bytes).decode("ascii").rstrip("=")


def _answers(port: int) -> bool:
    try:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient
    except ImportError as error:
        raise ServerError("starting Kafka needs confluent-kafka: pip install 'taskq[kafka]'") from error
    client = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0})
    try:
        client.list_consumer_groups(request_timeout=5.0).result(timeout=6.0)
        return bool(client.list_topics(timeout=5.0).brokers)
    except (KafkaException, TimeoutError):
        return False
