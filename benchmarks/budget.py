"""``python -m benchmarks.budget``: where the time of one job goes, step by step, in processor time of one core.

Each step is run by itself over the same no-op jobs (one small int and a text of 100 bytes), with batches and chunks as a
busy worker has them. Prints the median of ``--rounds``, in microseconds per job. What a worker needs beyond these steps
(its loop, its books, the system calls of its pipes) is the difference to what ``python -m benchmarks`` prints.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from taskq import TaskQ, codec
from taskq.backend import Backend
from taskq.backends import from_url
from taskq.job import Outcome, Reservation
from taskq.options import NO_OPTIONS
from taskq.worker import pipes, wire
from taskq.worker.executor import Executor, Result

BATCH = 512
CHUNK = 64
ARGUMENTS = (7, "x" * 100)

app = TaskQ("memory://")


@app.task(name="noop", ignore_result=True)
def noop(number: int, text: str) -> None:
    """Nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="taskq-bench-", dir=os.environ.get("TASKQ_BENCH_DIR")) as name:
        backend = from_url(f"sqlite:///{name}/jobs.db")
        for _ in range(given.rounds):
            for step, seconds in life(backend):
                found.setdefault(step, []).append(seconds / BATCH * 1e6)
        backend.close()
    for step, figures in found.items():
        print(f"{statistics.median(figures):8.2f} µs  {step}")


def life(backend: Backend) -> Iterator[tuple[str, float]]:
    """The seconds of each step of a batch's life."""
    executor = Executor(app, "bench")
    calls = range(BATCH)
    yield spent("producer: encode the arguments", lambda: [codec.encode_call(ARGUMENTS, {}) for _ in calls])[
        1
    ]
    jobs, step = spent(
        "producer: make the job, its arguments included",
        lambda: [noop._job(app, ARGUMENTS, {}, NO_OPTIONS) for _ in calls],
    )
    yield step
    yield spent("producer: store it, in one batch", lambda: backend.push(jobs))[1]
    consumer = backend.consume({"tasks": 1}, "bench")
    taken, step = spent("supervisor: take it", lambda: consumer.take(BATCH).reservations)
    yield step
    chunk, step = spent("supervisor: pack it for a child", lambda: pack(taken))
    yield step
    runs, step = spent(
        "child: unpack it, find its task, decode its arguments", lambda: opened(executor, chunk)
    )
    yield step
    results, step = spent("child: run it", lambda: [executor.run(run, _call) for run in runs])
    yield step
    answers, step = spent("child: pack its result", lambda: packed(results))
    yield step
    outcomes, step = spent("supervisor: unpack its result", lambda: unpacked(answers, taken))
    yield step
    yield spent("supervisor: settle it", lambda: consumer.settle(outcomes))[1]
    consumer.close()


def spent(step: str, act: Callable[[], Any]) -> tuple[Any, tuple[str, float]]:
    """What ``act`` returns, and what the step took of this thread and of those that work for it."""
    began = time.process_time()
    value = act()
    return value, (step, time.process_time() - began)


def pack(taken: Sequence[Reservation]) -> list[bytes]:
    return [
        pipes.pack([wire.pack_job(each) for each in taken[at : at + CHUNK]])
        for at in range(0, len(taken), CHUNK)
    ]


def opened(executor: Executor, chunks: Sequence[bytes]) -> list[Any]:
    runs = []
    for chunk in chunks:
        for packed_job in next(iter(pipes.Frames().feed(chunk))):
            fence, job = wire.unpack_job(packed_job)
            runs.append(executor.open(job, fence, NO_LINK))
    return runs


def packed(results: Sequence[Result]) -> list[bytes]:
    return [
        pipes.pack(
            [wire.pack_result(index, 0.0, each) for index, each in enumerate(results[at : at + CHUNK])]
        )
        for at in range(0, len(results), CHUNK)
    ]


def unpacked(answers: Sequence[bytes], taken: Sequence[Reservation]) -> list[Outcome]:
    flat = [each for answer in answers for each in next(iter(pipes.Frames().feed(answer)))]
    return [wire.unpack_result(each, reservation) for each, reservation in zip(flat, taken, strict=True)]


def _call(body: Callable[[], Any]) -> Any:
    return body()


class _NoLink:
    """A run whose worker nobody tells anything."""

    def extend(self, seconds: float) -> None: ...

    def progress(self, value: Any) -> None: ...


NO_LINK = _NoLink()


if __name__ == "__main__":
    main()
