"""``python -m tests.chaos.storm --signals N``: workers of every pool, each asked to end at a random moment."""

from __future__ import annotations

import argparse
import pathlib
import random
import signal
import sys
import tempfile
import threading
from collections import Counter

from taskq.job import State
from tests.chaos.soak import handles_term
from tests.workers import Bench, Worker, set_up

POOLS = ("process", "thread", "async", "solo")
_JOBS = 60
#: Latest moment of a signal after a worker listens to signals, in seconds.
_LATEST = 1.0


class Storm:
    """Waves of one worker per pool on one file that always has something to do."""

    def __init__(self, folder: pathlib.Path, *, signals: int, seed: int | None = None) -> None:
        self.folder = folder
        self.statuses: Counter[int] = Counter()
        self.sent = 0
        self._signals = signals
        self._random = random.Random(seed)
        self._ids: list[str] = []
        self._found: dict[str, object] = {}

    def run(self) -> None:
        with set_up(self.folder) as bench:
            while self.sent < self._signals:
                self._feed(bench)
                self._wave(bench)
            with bench.app.worker(concurrency=4):
                self._finish(bench)
            self._check(bench)

    def faults(self) -> dict[str, object]:
        """What must be empty."""
        return {name: value for name, value in self._found.items() if value}

    def _feed(self, bench: Bench) -> None:
        for number in range(_JOBS):
            if number % 3:
                step = ["sleep", 0.05] if number % 2 else ["return", number]
                self._ids.append(bench.send("act", step, max_retries=0).id)
            else:
                self._ids.append(bench.send("act_async", 0.02, max_retries=0).id)

    def _wave(self, bench: Bench) -> None:
        workers = []
        for pool in POOLS[: self._signals - self.sent]:
            arguments = ("--pool", pool, "--concurrency", "1" if pool == "solo" else "2")
            workers.append(bench.worker(*arguments, "--log-level", "warning"))
        threads = [threading.Thread(target=self._interrupt, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _interrupt(self, worker: Worker) -> None:
        while not handles_term(worker.pid) and worker.process.poll() is None:
            threading.Event().wait(0.005)
        threading.Event().wait(self._random.uniform(0, _LATEST))
        signum = self._random.choice([signal.SIGTERM, signal.SIGINT])
        self._random.choice([worker.signal, worker.signal_all])(signum)
        self.sent += 1
        status = worker.wait(60)
        self.statuses[status] += 1
        if status or any("Traceback" in line for line in worker.output):
            self._found[f"output of {worker.pid}"] = worker.output

    def _finish(self, bench: Bench) -> None:
        waits = (State.PENDING, State.SCHEDULED, State.RESERVED)
        while any(bench.app.backend.size("tasks", state) for state in waits):
            threading.Event().wait(0.02)

    def _check(self, bench: Bench) -> None:
        jobs = [bench.app.backend.find(job_id) for job_id in self._ids]  # type: ignore[attr-defined]
        starts = bench.ledger.starts()
        self._found["lost"] = [job_id for job_id, job in zip(self._ids, jobs, strict=True) if job is None]
        self._found["not completed"] = [job for job in jobs if job and job.state is not State.COMPLETED]
        self._found["counted"] = [job for job in jobs if job and (job.attempts or job.losses)]
        self._found["started again"] = [job_id for job_id in self._ids if starts[job_id] != 1]
        self._found["deliveries"] = [job for job in jobs if job and job.deliveries != 1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.storm", description=__doc__)
    parser.add_argument("--signals", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="taskq-storm-") as folder:
        storm = Storm(pathlib.Path(folder), signals=given.signals, seed=given.seed)
        storm.run()
    statuses = ", ".join(f"{n} x {status}" for status, n in storm.statuses.items())
    print(f"{storm.sent:,} signals, {len(storm._ids):,} jobs; exit statuses: {statuses}")
    print(f"faults: {storm.faults() or 'none'}")
    return 1 if storm.faults() or set(storm.statuses) != {0} else 0


if __name__ == "__main__":
    sys.exit(main())
