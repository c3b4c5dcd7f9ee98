"""``python -m benchmarks.mixed``: short jobs among long ones, beside what the same machine could do at best.

A backlog of no-ops in which one job of a hundred waits for a second is run by a worker of ``--children``. Prints, for each
round, how long the short ones took beside the ideal: each child takes the next job the moment it is free, a short job costs
what it costs where all are short. And for how long a short job stood behind a long one: a child was free, and another had
the job in its hands, waiting for a long one to end.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.mixed_app import FILE, RUN

#: How long a long job takes, in seconds, and which share of the jobs they are.
LONG: Final = 1.0
SHARE: Final = 100
#: Nobody stands idle for less than this, in seconds: it is how long handing a job over takes.
_GRAIN: Final = 0.002


@dataclass(frozen=True)
class Run:
    """One job as it ran, in seconds."""

    number: int
    child: int
    began: float
    ended: float

    @property
    def long(self) -> bool:
        return self.ended - self.began > LONG / 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixed", description=__doc__)
    parser.add_argument("--children", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool", default="process")
    given = parser.parse_args()
    ratios, behind = [], []
    for number in range(1, given.rounds + 1):
        alone = runs([0.0] * given.jobs, given.children, given.pool)
        cost = elapsed(alone) / len(alone) * given.children
        seconds = [LONG if index % SHARE == SHARE // 2 else 0.0 for index in range(given.jobs)]
        mixed = runs(seconds, given.children, given.pool)
        ratios.append(elapsed([run for run in mixed if not run.long]) / ideal(seconds, given.children, cost))
        behind.append(longest_behind(mixed) * 1e3)
        print(
            f"  round {number}: all short {len(alone) / elapsed(alone):,.0f}/s; mixed: the short ones took "
            f"{ratios[-1]:.3f} of the ideal, the worst stood {behind[-1]:.1f} ms behind a long one"
        )
    print(
        f"{given.children} children, {given.jobs:,} jobs, 1 of {SHARE} lasts {LONG:g} s: the short ones take "
        f"{statistics.median(ratios):.3f} of the ideal ({min(ratios):.3f} to {max(ratios):.3f}); "
        f"longest behind a long one {statistics.median(behind):.1f} ms ({min(behind):.1f} to {max(behind):.1f})"
    )


def runs(seconds: Sequence[float], children: int, pool: str) -> list[Run]:
    """Push a job for each of ``seconds``, let a worker run them all, and return the runs in the order they began."""
    with tempfile.TemporaryDirectory(prefix="taskq-bench-", dir=os.environ.get("TASKQ_BENCH_DIR")) as name:
        file = pathlib.Path(name) / "runs"
        file.touch()
        os.environ.update({"TASKQ_URL": f"sqlite:///{name}/jobs.db", FILE: str(file)})
        _push(seconds)
        command = [sys.executable, "-m", "taskq", "worker", "-A", "benchmarks.mixed_app:app", "--burst"]
        command += ["--concurrency", str(children), "--pool", pool, "--log-level", "error"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = [
            Run(number, child, began / 1e9, ended / 1e9)
            for number, child, began, ended in RUN.iter_unpack(file.read_bytes())
        ]
    if len(found) != len(seconds):
        raise RuntimeError(f"{len(found)} runs of {len(seconds)} jobs")
    return sorted(found, key=lambda run: run.began)


def _push(seconds: Sequence[float]) -> None:
    """From a process whose app is new: each round has a file of its own."""
    script = (
        "import sys, json; from benchmarks.mixed_app import app, run;"
        "app.enqueue_many(run.s(number, each) for number, each in enumerate(json.load(sys.stdin)))"
    )
    subprocess.run([sys.executable, "-c", script], input=json.dumps(list(seconds)), text=True, check=True)


def elapsed(found: Sequence[Run]) -> float:
    """From the first beginning to the last end."""
    return max(run.ended for run in found) - min(run.began for run in found)


def ideal(seconds: Sequence[float], children: int, cost: float) -> float:
    """When the last short job ends, where whoever is free takes the next and a short one takes ``cost``."""
    free = [0.0] * children
    last = 0.0
    for each in seconds:
        end = heapq.heappop(free) + (each or cost)
        if not each:
            last = max(last, end)
        heapq.heappush(free, end)
    return last


def longest_behind(found: Sequence[Run]) -> float:
    """The longest time for which a child stood idle though a short job, which ran later, waited in the backlog."""
    worst = 0.0
    last_short = max(run.began for run in found if not run.long)
    ended: dict[int, float] = {}
    for run in found:
        since = ended.get(run.child)
        if since is not None:
            worst = max(worst, min(run.began, last_short) - since)
        ended[run.child] = run.ended
    for end in ended.values():
        if end < last_short:
            worst = max(worst, last_short - end)
    return max(worst - _GRAIN, 0.0)


if __name__ == "__main__":
    main()
