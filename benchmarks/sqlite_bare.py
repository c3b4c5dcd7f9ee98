"""What the SQLite backend does in a bare loop: no tasks, no worker, one process.

Run as ``python benchmarks/sqlite_bare.py [jobs] [rounds]``; prints the median of the rounds. The file stands in
``TASKQ_BENCH_DIR``, or in the present directory, because a temporary directory may be in memory.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from taskq.backends.sqlite import SQLiteBackend
from taskq.job import Job, Outcome, Verdict, new_id

BATCH = 64
PAYLOAD = b"x" * 100


def jobs(n: int, keep: float) -> list[Job]:
    return [Job(id=new_id(), task="bench.noop", payload=PAYLOAD, keep=keep) for _ in range(n)]


def push_one_by_one(backend: SQLiteBackend, n: int) -> float:
    prepared = jobs(n, 0.0)
    start = time.perf_counter()
    for job in prepared:
        backend.push([job])
    return n / (time.perf_counter() - start)


def push_batches(backend: SQLiteBackend, n: int) -> float:
    prepared = jobs(n, 0.0)
    start = time.perf_counter()
    for at in range(0, n, 1000):
        backend.push(prepared[at : at + 1000])
    return n / (time.perf_counter() - start)


def exchange(backend: SQLiteBackend, n: int, keep: float) -> float:
    for at in range(0, n, 1000):
        backend.push(jobs(min(1000, n - at), keep))
    consumer = backend.consume({"tasks": 1}, "bench")
    start = time.perf_counter()
    settled = 0
    reservations = consumer.take(BATCH).reservations
    while reservations:
        outcomes = [Outcome(reservation=r, verdict=Verdict.COMPLETE) for r in reservations]
        settlements, taken = consumer.exchange(outcomes, BATCH)
        settled += len(settlements)
        reservations = taken.reservations
    elapsed = time.perf_counter() - start
    assert settled == n
    consumer.close()
    return n / elapsed


def take_settle_one(backend: SQLiteBackend, n: int) -> float:
    backend.push(jobs(n, 0.0))
    consumer = backend.consume({"tasks": 1}, "bench")
    start = time.perf_counter()
    while reservations := consumer.take(1).reservations:
        consumer.settle([Outcome(reservation=reservations[0], verdict=Verdict.COMPLETE)])
    elapsed = time.perf_counter() - start
    consumer.close()
    return n / elapsed


def median(rounds: int, measure: Callable[[SQLiteBackend], float], options: str = "normal") -> float:
    figures = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TASKQ_BENCH_DIR", ".")) as folder:
            backend = SQLiteBackend(str(Path(folder).resolve() / "bench.db"), synchronous=options)
            try:
                figures.append(measure(backend))
            finally:
                backend.close()
    return statistics.median(figures)


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    for name, figure in (
        ("push, one at a time", median(rounds, lambda b: push_one_by_one(b, n // 4))),
        ("push, 1,000 at a time", median(rounds, lambda b: push_batches(b, n))),
        ("exchange(64), keep = 0", median(rounds, lambda b: exchange(b, n, 0.0))),
        ("exchange(64), keep = 3600", median(rounds, lambda b: exchange(b, n, 3600.0))),
        ("take(1) and settle", median(rounds, lambda b: take_settle_one(b, n // 10))),
        ("push, one at a time, full", median(rounds, lambda b: push_one_by_one(b, 500), "full")),
    ):
        print(f"{name:<28}{figure:>10,.0f} jobs/s")


if __name__ == "__main__":
    main()
