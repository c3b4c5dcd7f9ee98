"""What the RabbitMQ backend does in a bare loop, beside the driver alone on the same server: no tasks, no worker.

Run as ``python -m benchmarks.rabbitmq_bare [jobs] [rounds]``; prints the median of the rounds. The driver's part is the
least that could be done: one select connection, one quorum queue, ready-made bodies of the same size, confirms and
``mandatory``, acknowledgements of a hundred at once.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pika

from taskq.backends.rabbitmq import open_url
from taskq.backends.rabbitmq.backend import RabbitBackend
from taskq.job import Job, Outcome, Verdict, new_id
from tests import servers
from tests.servers import rabbitmq

PAYLOAD = b"x" * 100
#: What the backend's message about such a job is long.
BODY = b"x" * 240
BATCH = 64
IN_FLIGHT = 2000


def jobs(n: int) -> list[Job]:
    return [Job(id=new_id(), task="bench.noop", payload=PAYLOAD, keep=0.0) for _ in range(n)]


# -- the backend ----------------------------------------------------------------------


@contextlib.contextmanager
def opened() -> Iterator[RabbitBackend]:
    url = f"{servers.url('rabbitmq')}?prefix=b{uuid.uuid4().hex[:8]}."
    backend = open_url(url)
    try:
        backend.push(jobs(1))
        yield backend
    finally:
        backend.close()
        rabbitmq.sweep(url, ())


def push_one_by_one(n: int) -> float:
    with opened() as backend:
        prepared = jobs(n)
        start = time.perf_counter()
        for job in prepared:
            backend.push([job])
        return n / (time.perf_counter() - start)


def push_from_threads(n: int) -> float:
    with opened() as backend:
        share = [jobs(n // 8) for _ in range(8)]
        threads = [threading.Thread(target=lambda s=s: [backend.push([job]) for job in s]) for s in share]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return n / (time.perf_counter() - start)


def push_in_bulk(n: int) -> float:
    with opened() as backend:
        prepared = jobs(n)
        start = time.perf_counter()
        backend.push(prepared)
        return n / (time.perf_counter() - start)


def exchange(n: int) -> float:
    with opened() as backend:
        for at in range(0, n, 5000):
            backend.push(jobs(min(5000, n - at)))
        consumer = backend.consume({"tasks": 1}, "bench")
        consumer.credit(2 * 193)
        start = time.perf_counter()
        settled = 0
        reservations = consumer.take(BATCH, 5.0).reservations
        while settled < n:
            outcomes = [Outcome(reservation=r, verdict=Verdict.COMPLETE) for r in reservations]
            settled += len(outcomes)
            reservations = consumer.exchange(outcomes, BATCH)[1].reservations
            if not reservations and settled < n:
                reservations = consumer.take(BATCH, 5.0).reservations
        elapsed = time.perf_counter() - start
        consumer.close()
        return n / elapsed


# -- the driver alone -----------------------------------------------------------------


class Raw:
    """One select connection in the calling thread."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.name = f"bench.{uuid.uuid4().hex[:8]}"
        self.sent = self.done = 0
        self.start = self.elapsed = 0.0

    def run(self, ready: Callable[[pika.channel.Channel], None]) -> None:
        parameters = pika.URLParameters(f"{servers.url('rabbitmq')}%2f")
        self.connection = pika.SelectConnection(
            parameters, on_open_callback=lambda c: c.channel(on_open_callback=ready)
        )
        self.connection.ioloop.start()

    def over(self) -> None:
        self.elapsed = time.perf_counter() - self.start
        self.connection.ioloop.stop()
        self.connection.close()
        self.connection.ioloop.start()

    def declare(self, channel: pika.channel.Channel, then: Callable[..., None]) -> None:
        channel.queue_declare(self.name, durable=True, arguments={"x-queue-type": "quorum"}, callback=then)

    def publish(self) -> float:
        properties = pika.BasicProperties(delivery_mode=2, message_id="0" * 32, headers={"n": 1})

        def ready(channel: pika.channel.Channel) -> None:
            def pump() -> None:
                while self.sent < self.n and self.sent - self.done < IN_FLIGHT:
                    self.sent += 1
                    channel.basic_publish("", self.name, BODY, properties, mandatory=True)

            def confirmed(frame: object) -> None:
                self.done = frame.method.delivery_tag  # type: ignore[attr-defined]
                if self.done == self.n:
                    self.connection.ioloop.stop()
                pump()

            def begin(_: object) -> None:
                self.start = time.perf_counter()
                pump()

            self.declare(channel, lambda _: channel.confirm_delivery(confirmed, begin))

        self.run(ready)
        self.elapsed = time.perf_counter() - self.start
        self.connection.close()
        return self.n / self.elapsed

    def consume(self) -> float:
        def ready(channel: pika.channel.Channel) -> None:
            def message(_: object, method: object, __: object, ___: bytes) -> None:
                self.done += 1
                if self.done % 100 == 0 or self.done == self.n:
                    channel.basic_ack(method.delivery_tag, multiple=True)  # type: ignore[attr-defined]
                if self.done == self.n:
                    self.connection.ioloop.stop()

            def begin(_: object) -> None:
                self.done, self.start = 0, time.perf_counter()
                channel.basic_consume(self.name, message)

            channel.basic_qos(prefetch_count=2000, callback=begin)

        self.run(ready)
        self.elapsed = time.perf_counter() - self.start
        self.connection.close()
        return self.n / self.elapsed

    def delete(self) -> None:
        connection = pika.BlockingConnection(pika.URLParameters(f"{servers.url('rabbitmq')}%2f"))
        connection.channel().queue_delete(self.name)
        connection.close()


def raw_publish(n: int) -> float:
    raw = Raw(n)
    try:
        return raw.publish()
    finally:
        raw.delete()


def raw_consume(n: int) -> float:
    raw = Raw(n)
    try:
        raw.publish()
        return raw.consume()
    finally:
        raw.delete()


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 30_000
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    measures: list[tuple[str, Callable[[int], float], int]] = [
        ("pika, publish with confirms", raw_publish, n),
        ("push, one at a time", push_one_by_one, n // 20),
        ("push, 8 threads, one at a time", push_from_threads, n // 2),
        ("push, in bulk", push_in_bulk, n),
        ("pika, consume and ack", raw_consume, n),
        ("exchange(64)", exchange, n),
    ]
    for name, measure, count in measures:
        figures = [measure(count) for _ in range(rounds)]
        print(f"{name:<34}{statistics.median(figures):>10,.0f} jobs/s", flush=True)


if __name__ == "__main__":
    main()
