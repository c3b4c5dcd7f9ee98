"""What the Kafka backend does in a bare loop beside the raw client: no tasks, no worker.

Run as ``python -m benchmarks.kafka_bare [jobs]`` with the server of ``python -m tests.servers up kafka``. Both produce with
``acks=all`` and confirm each message, and both commit every batch before they take the next.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from taskq.backends import from_url
from taskq.job import Job, Outcome, Verdict, new_id
from tests import servers

BATCH = 500
PAYLOAD = b"x" * 100


def jobs(n: int) -> list[Job]:
    return [Job(id=new_id(), task="bench.noop", payload=PAYLOAD, keep=0.0) for _ in range(n)]


def url(prefix: str, partitions: int) -> str:
    return f"{servers.url('kafka')}?prefix={prefix}&partitions={partitions}"


def bootstrap() -> dict[str, object]:
    return {"bootstrap.servers": str(servers.url("kafka")).removeprefix("kafka://")}


# -- taskq ----------------------------------------------------------------------------


def push(prefix: str, partitions: int, n: int, size: int) -> float:
    backend = from_url(url(prefix, partitions))
    backend.push(jobs(10))
    prepared = jobs(n)
    start = time.perf_counter()
    for at in range(0, n, size):
        backend.push(prepared[at : at + size])
    elapsed = time.perf_counter() - start
    backend.close()
    return n / elapsed


def push_by_threads(prefix: str, partitions: int, n: int, count: int) -> float:
    backend = from_url(url(prefix, partitions))
    backend.push(jobs(10))
    shares = [jobs(n // count) for _ in range(count)]

    def each(share: Sequence[Job]) -> None:
        for job in share:
            backend.push([job])

    threads = [threading.Thread(target=each, args=(share,)) for share in shares]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    backend.close()
    return n / elapsed


def drain(prefix: str, partitions: str) -> None:
    """Complete everything; print how many, when the first came, and when the last was settled."""
    backend = from_url(url(prefix, int(partitions)))
    consumer = backend.consume({"tasks": 1}, f"bench-{uuid.uuid4().hex}")
    done, began, ended = 0, 0.0, 0.0
    reservations = consumer.take(BATCH, 20.0).reservations
    while reservations:
        began = began or time.time()
        outcomes = [Outcome(reservation=one, verdict=Verdict.COMPLETE) for one in reservations]
        settlements, taken = consumer.exchange(outcomes, BATCH)
        done, ended = done + len(settlements), time.time()
        reservations = taken.reservations or consumer.take(BATCH, 2.0).reservations
    print(done, began, ended, flush=True)
    backend.close()


# -- the raw client -------------------------------------------------------------------


def raw_push(topic: str, n: int, size: int) -> float:
    """Produce, and wait for the confirmation of each ``size`` messages."""
    producer = Producer({**bootstrap(), "acks": "all", "enable.idempotence": True, "compression.type": "lz4"})
    start = time.perf_counter()
    for _ in range(0, n, size):
        for _ in range(size):
            producer.produce(topic, PAYLOAD)
        producer.flush()
    return n / (time.perf_counter() - start)


def raw_drain(topic: str) -> None:
    """Read and commit, batch by batch."""
    consumer = Consumer(
        {
            **bootstrap(),
            "group.id": topic,
            "group.protocol": "consumer",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([topic])
    done, began, ended = 0, 0.0, 0.0
    quiet_from = time.time()
    while time.time() - quiet_from < (2.0 if done else 20.0):
        messages = consumer.consume(BATCH, 0.05)
        if not messages:
            continue
        began = began or time.time()
        last = {message.partition(): message.offset() or 0 for message in messages}
        offsets = [TopicPartition(topic, partition, offset + 1) for partition, offset in last.items()]
        consumer.commit(offsets=offsets, asynchronous=False)
        done, ended = done + len(messages), time.time()
        quiet_from = ended
    print(done, began, ended, flush=True)
    consumer.close()


# -- side by side ---------------------------------------------------------------------


def timed(count: int, *command: str) -> tuple[int, float]:
    """Run ``count`` drains at once; how many messages they had, and how many a second."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kafka_bare", *command], stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    lines = [process.communicate()[0].split() for process in processes]
    rows = [(int(done), float(began), float(ended)) for done, began, ended in lines if int(done)]
    total = sum(done for done, _, _ in rows)
    return total, total / (max(ended for _, _, ended in rows) - min(began for _, began, _ in rows))


def show(name: str, figure: float, beside: float | None = None) -> None:
    ratio = f"{figure / beside:>8.0%} of the raw client" if beside else ""
    print(f"{name:<52}{figure:>10,.0f} jobs/s{ratio}", flush=True)


def fresh(partitions: int) -> str:
    topic = f"raw{uuid.uuid4().hex[:10]}"
    admin = AdminClient(bootstrap())
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result()
    return topic


def pushes(n: int) -> None:
    place: Callable[[], str] = lambda: f"bench{uuid.uuid4().hex[:10]}"  # noqa: E731
    raw = raw_push(fresh(12), n, 1000)
    show("raw client, push, 1,000 at a time", raw)
    show("push, 1,000 at a time", push(place(), 12, n, 1000), raw)
    show("raw client, push, one at a time", one := raw_push(fresh(12), n // 20, 1))
    show("push, one at a time", push(place(), 12, n // 20, 1), one)
    show("push, one at a time, 8 threads", push_by_threads(place(), 12, n // 8, 8))


def drains(n: int) -> None:
    for partitions in (1, 12):
        for children in (1, 2, 4):
            if children > partitions > 1 or (partitions == 1 and children > 1):
                continue
            topic = fresh(partitions)
            raw_push(topic, n, 1000)
            _, raw = timed(children, "raw_drain", topic)
            prefix = f"bench{uuid.uuid4().hex[:10]}"
            push(prefix, partitions, n, 1000)
            total, ours = timed(children, "drain", prefix, str(partitions))
            assert total == n + 10, f"{total} of {n + 10}"
            what = f"{partitions} partitions, {children} processes"
            show(f"raw client, drain, {what}", raw)
            show(f"drain, {what}", ours, raw)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        globals()[sys.argv[1]](*sys.argv[2:])
    else:
        count = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
        pushes(count)
        drains(count)
