"""``python -m benchmarks``: what taskq does on this machine, on SQLite. Prints a table; asserts nothing.

Each figure is the median of ``--rounds`` rounds, with the lowest and the highest. Figures of one run on one machine
compare with each other; those of two machines, or of a busy one, do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from benchmarks import app as measured

TEXT = "x" * 100
HERE = pathlib.Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--only", default="", help="measures whose names contain this")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here too")
    given = parser.parse_args()
    figures: dict[str, list[float]] = {}
    for _ in range(given.rounds):
        for name, measure in MEASURES.items():
            if given.only in name:
                for suffix, figure in measure(given.jobs).items():
                    figures.setdefault(f"{name}{suffix}", []).append(figure)
    print(f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {os.cpu_count()} CPUs")
    print(f"{'':44}{'median':>12}{'lowest':>12}{'highest':>12}")
    for name, values in figures.items():
        print(
            f"{name:44}"
            + "".join(f"{x:>12,.2f}" for x in (statistics.median(values), min(values), max(values)))
        )
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


@contextlib.contextmanager
def fresh(parameters: str = "") -> Iterator[pathlib.Path]:
    """The app on a new file."""
    with tempfile.TemporaryDirectory(prefix="taskq-bench-") as folder:
        url = f"sqlite:///{folder}/jobs.db{parameters}"
        from taskq.backends import from_url

        backend = from_url(url)
        try:
            with measured.app.instead(backend):
                yield pathlib.Path(folder)
        finally:
            backend.close()


@contextlib.contextmanager
def worker(folder: pathlib.Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker on that file, once it is ready."""
    command = [sys.executable, "-m", "taskq", "worker", "-A", str(HERE / "app.py"), "--log-level", "warning"]
    environ = {**os.environ, "TASKQ_URL": f"sqlite:///{folder}/jobs.db"}
    process = subprocess.Popen([*command, *arguments], env=environ, stderr=subprocess.PIPE)
    assert process.stderr is not None
    while b"  tasks" not in process.stderr.readline():
        continue
    threading.Thread(target=process.stderr.read, daemon=True).start()
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def until(fact: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not fact():
        pause.wait(0.002)


def unended() -> int:
    counts = measured.app.backend.counts("tasks").get("tasks", {})
    return sum(n for state, n in counts.items() if not state.ended)


def enqueue(parameters: str) -> Callable[[int], dict[str, float]]:
    def measure(jobs: int) -> dict[str, float]:
        with fresh(parameters):
            began = time.perf_counter()
            for number in range(jobs // 2):
                measured.noop.delay(number, TEXT)
            return {" /s": jobs // 2 / (time.perf_counter() - began)}

    return measure


def enqueue_many(jobs: int) -> dict[str, float]:
    with fresh():
        began = time.perf_counter()
        measured.app.enqueue_many(measured.noop.s(number, TEXT) for number in range(2 * jobs))
        return {" /s": 2 * jobs / (time.perf_counter() - began)}


def drain(task: str, *arguments: str) -> Callable[[int], dict[str, float]]:
    """Jobs that wait already, from the first to the last, start-up left out."""

    def measure(jobs: int) -> dict[str, float]:
        with fresh() as folder:
            chosen = measured.app.tasks[task]
            measured.app.enqueue_many(chosen.s(number, TEXT) for number in range(3 * jobs))
            with worker(folder, *arguments):
                until(lambda: unended() < 3 * jobs - 500)
                began, left = time.perf_counter(), unended()
                until(lambda: not unended())
                return {" /s": left / (time.perf_counter() - began)}

    return measure


def pick_up(jobs: int) -> dict[str, float]:
    """An idle worker and one job each 20 ms: from before the call to inside the body."""
    with fresh() as folder, worker(folder, "--concurrency", "1"):
        path, pause = folder / "stamps", threading.Event()
        for _ in range(220):
            measured.stamp.delay(time.time_ns(), str(path))
            pause.wait(0.02)
        until(lambda: not unended())
        times = sorted(int(line) / 1e6 for line in path.read_text(encoding="ascii").splitlines()[20:])
        return {" p50 ms": times[len(times) // 2], " p99 ms": times[int(len(times) * 0.99)]}


def round_trip(jobs: int) -> dict[str, float]:
    """``delay().get()``, one after the other."""
    with fresh() as folder, worker(folder, "--concurrency", "1"):
        times = []
        for number in range(320):
            began = time.perf_counter()
            measured.echo.delay(number).get(10)
            times.append((time.perf_counter() - began) * 1e3)
        times = sorted(times[20:])
        return {" p50 ms": times[len(times) // 2], " p99 ms": times[int(len(times) * 0.99)]}


def idle(jobs: int) -> dict[str, float]:
    """A worker with nothing to do, for ten seconds: processor time and memory of its processes."""
    with fresh() as folder, worker(folder, "--concurrency", "1") as process:
        threading.Event().wait(1)
        before = cpu_seconds(process.pid)
        threading.Event().wait(10)
        spent = cpu_seconds(process.pid) - before
        sizes = [pss(pid) for pid in family(process.pid)]
        return {" % of a core": spent * 10, " MiB, all processes (PSS)": sum(sizes), " processes": len(sizes)}


def start_up(jobs: int) -> dict[str, float]:
    with fresh() as folder:
        began = time.perf_counter()
        with worker(folder, "--concurrency", "2"):
            return {" ms to ready": (time.perf_counter() - began) * 1e3}


def family(pid: int) -> list[int]:
    found = [pid]
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            found += family(int(child))
    return found


def cpu_seconds(pid: int) -> float:
    ticks = 0
    for member in family(pid):
        fields = pathlib.Path(f"/proc/{member}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def pss(pid: int) -> float:
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


MEASURES: dict[str, Callable[[int], dict[str, float]]] = {
    "enqueue one at a time": enqueue(""),
    "enqueue one at a time, synchronous=full": enqueue("?synchronous=full"),
    "enqueue_many": enqueue_many,
    "drain, 1 process": drain("noop", "--concurrency", "1"),
    "drain, 2 processes": drain("noop", "--concurrency", "2"),
    "drain, 2 processes, results kept": drain("kept", "--concurrency", "2"),
    "drain, coroutines": drain("noop_async", "--pool", "async"),
    "idle pick-up": pick_up,
    "delay().get()": round_trip,
    "idle": idle,
    "start-up": start_up,
}

if __name__ == "__main__":
    main()
