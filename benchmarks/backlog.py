"""``python -m benchmarks.backlog``: what a claim and a settle cost on SQLite, by how much is waiting.

Jobs stand in many queues and priorities, nine in ten of them due in the future. One queue is worked on by a bare loop:
one of the backlog's, cold and warm, and one whose jobs are pushed while it runs, beside little and beside much that waits.
Prints microseconds per job, and the file's size.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator

from taskq.backend import Backend
from taskq.backends import from_url
from taskq.job import Job, Outcome, Verdict, new_id

QUEUES = 50
BATCH = 64
PAYLOAD = b"x" * 110
#: One of the queues that have a backlog.
BACKLOG = "queue-9"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backlog", description=__doc__)
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="taskq-bench-", dir=os.environ.get("TASKQ_BENCH_DIR")) as name:
        small, large = (pathlib.Path(name) / file for file in ("small.db", "large.db"))
        fill(small, 10_000)
        fill(large, given.waiting)
        print(f"{large.stat().st_size / 2**20:,.0f} MiB with {given.waiting:,} jobs waiting")
        forget_cache(large)
        cold = list(work(large, BACKLOG, 20))
        print(f"{cold[0]:8.1f} µs per job, the first {BATCH} of a cold file")
        print(f"{statistics.median(cold):8.1f} µs per job, the first {BATCH * len(cold)} of it")
        warm(large)
        old = [statistics.median(work(large, BACKLOG, 100)) for _ in range(given.rounds)]
        print(f"{statistics.median(old):8.1f} µs per job, old ones, each on pages of its own, all in memory")
        both: dict[pathlib.Path, list[float]] = {small: [], large: []}
        for _ in range(given.rounds):
            for path, figures in both.items():
                figures.append(statistics.median(work(path, "fresh", 100)))
        for path, figures in both.items():
            print(
                f"{statistics.median(figures):8.1f} µs per job, {path.stem} ({min(figures):.1f} to {max(figures):.1f})"
            )


def fill(path: pathlib.Path, waiting: int) -> None:
    backend = from_url(f"sqlite:///{path}")
    later = time.time() + 10 * 86_400
    for start in range(0, waiting, 5000):
        backend.push([_job(number, later) for number in range(start, min(waiting, start + 5000))])
    backend.close()


def _job(number: int, later: float) -> Job:
    return Job(
        id=new_id(),
        queue=f"queue-{number % QUEUES}",
        task="bench.noop",
        payload=PAYLOAD,
        priority=number // QUEUES % 10,
        due=0.0 if number % 10 == 9 else later + number,
        keep=0.0,
    )


def work(path: pathlib.Path, queue: str, rounds: int) -> Iterator[float]:
    """Microseconds per job of each round: push as many as are taken and settled, so that what waits stays."""
    backend = from_url(f"sqlite:///{path}")
    consumer = backend.consume({queue: 1}, "bench")
    _push(backend, queue, BATCH)
    lent = consumer.take(BATCH).reservations
    for _ in range(rounds):
        _push(backend, queue, len(lent))
        outcomes = [Outcome(reservation=one, verdict=Verdict.COMPLETE) for one in lent]
        began = time.perf_counter()
        _, taken = consumer.exchange(outcomes, BATCH)
        yield (time.perf_counter() - began) / BATCH * 1e6
        lent = taken.reservations
    consumer.release(lent)
    consumer.close()
    backend.close()


def _push(backend: Backend, queue: str, count: int) -> None:
    backend.push([Job(id=new_id(), queue=queue, payload=PAYLOAD, keep=0.0) for _ in range(count)])


def warm(path: pathlib.Path) -> None:
    """Let the system have all of the file in memory."""
    with path.open("rb") as file:
        while file.read(1 << 24):
            continue


def forget_cache(path: pathlib.Path) -> None:
    """Let the system read the file anew."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


if __name__ == "__main__":
    main()
