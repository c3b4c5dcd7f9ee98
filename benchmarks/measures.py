"""What is measured of a contestant: each in a place of its own, by processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from benchmarks import tally
from benchmarks.contestants import Place
from tests import servers

Figures = dict[str, float]

#: A drain in which nothing happens for this long is given up, in seconds.
_STUCK: Final = 30.0
#: No drain is measured for longer, in seconds: slow contestants are judged by what they did until then.
_LONGEST: Final = 20.0


# -- measures -------------------------------------------------------------------------


def pushes(act: str, share: float) -> Callable[[Place, int], Figures]:
    """Jobs pushed per second, where ``share`` of the jobs is pushed."""

    def measure(place: Place, jobs: int) -> Figures:
        count = int(jobs * share)
        seconds = push(place, act, count)
        return {" /s": count / seconds[0]} if seconds else {}

    return measure


def drain(processes: int, act: str = "many", *arguments: str) -> Callable[[Place, int], Figures]:
    """Jobs run per second of those that wait already, start-up left out, and what each costs in processor time."""

    def measure(place: Place, jobs: int) -> Figures:
        if not push(place, act, jobs) and (act != "many" or not push(place, "one", jobs)):
            return {}
        with worker(place, processes, *arguments, wait=False) as process:
            first = _until(place, lambda done: done > 0)
            began, before = time.perf_counter(), _spent(place, process.pid)
            end = began + _LONGEST
            last = _until(place, lambda done: done >= jobs or time.perf_counter() > end)
            took, after = time.perf_counter() - began, _spent(place, process.pid)
        figures = {" /s": (last - first) / took}
        for name in before.keys() & after.keys() if last - first > 5000 else ():
            figures[f" µs of processor per job, {name}"] = (after[name] - before[name]) / (last - first) * 1e6
        return figures

    return measure


def times(act: str, count: int) -> Callable[[Place, int], Figures]:
    """A worker with nothing else to do, and one call after the other."""

    def measure(place: Place, jobs: int) -> Figures:
        with worker(place, 1):
            found = sorted(push(place, act, count))
        if not found:
            return {}
        return {" p50 ms": statistics.median(found), " p99 ms": found[int(len(found) * 0.99)]}

    return measure


def idle(place: Place, jobs: int) -> Figures:
    """A worker with nothing to do, for ten seconds: processor time and memory of its processes."""
    began = time.perf_counter()
    with worker(place, 1) as process:
        ready = time.perf_counter() - began
        threading.Event().wait(2)
        before = sum(map(_cpu, family(process.pid)))
        threading.Event().wait(10)
        spent = sum(map(_cpu, family(process.pid))) - before
        sizes = [pss(pid) for pid in family(process.pid)]
    figures = {
        " % of a core": spent * 10,
        " MiB, all processes (PSS)": sum(sizes),
        " MiB, the largest": max(sizes),
    }
    return figures | ({" ms to ready": ready * 1e3} if place.contestant.package == "taskq" else {})


MEASURES: Mapping[str, Callable[[Place, int], Figures]] = {
    "push, one at a time": pushes("one", 0.25),
    "push, from 8 threads": pushes("threads", 0.25),
    "push, in bulk": pushes("many", 2.0),
    "run, 1 process": drain(1),
    "run, 2 processes": drain(2),
    "run, 2 processes, results kept": drain(2, "many_kept"),
    "run, coroutines": drain(1, "many_async", "--pool", "async"),
    "idle pick-up": times("late", 220),
    "call to result": times("answer", 220),
    "idle": idle,
}


# -- processes ------------------------------------------------------------------------


def _environ(place: Place) -> dict[str, str]:
    place.tally.touch()
    return {
        **os.environ,
        **place.environ,
        tally.FILE: str(place.tally),
        "PYTHONPATH": str(pathlib.Path.cwd()),
    }


def push(place: Place, act: str, count: int) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.pusher", place.contestant.module, act, str(count)]
    done = subprocess.run(
        command, check=False, env=_environ(place), capture_output=True, text=True, timeout=300
    )
    for line in done.stdout.splitlines():
        if line.startswith("FIGURES "):
            return list(json.loads(line.removeprefix("FIGURES ")))
    raise RuntimeError(f"{place.contestant.name}, {act}: {done.stderr[-2000:]}")


@contextlib.contextmanager
def worker(
    place: Place, processes: int, *arguments: str, wait: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker; with ``wait`` once it is ready, where it says so, else after three seconds."""
    log = place.folder / "worker.log"
    command = [*place.contestant.worker(processes), *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=_environ(place), stdout=out, stderr=out)
        try:
            if wait:
                _ready(place, process, log)
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def _ready(place: Place, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    pause, end = threading.Event(), time.perf_counter() + 30
    if place.contestant.package != "taskq":
        pause.wait(3.0)
        return
    while b"\n  tasks" not in log.read_bytes():
        if process.poll() is not None or time.perf_counter() > end:
            raise RuntimeError(
                f"{place.contestant.name}: the worker did not start: {log.read_text()[-2000:]}"
            )
        pause.wait(0.005)


def _until(place: Place, reached: Callable[[int], bool]) -> int:
    last, since, pause = -1, time.perf_counter(), threading.Event()
    while not reached(done := tally.read(place.tally)[0]):
        if done != last:
            last, since = done, time.perf_counter()
        elif time.perf_counter() - since > _STUCK:
            log = (place.folder / "worker.log").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{place.contestant.name}: stuck after {done} jobs: {log[-2000:]}")
        pause.wait(0.002)
    return done


# -- what /proc says ------------------------------------------------------------------


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    found = [pid]
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text(encoding="ascii").split():
                found += family(int(child))
    return found


def _spent(place: Place, pid: int) -> dict[str, float]:
    """Processor seconds of the process that was started, of its descendants, and of the server."""
    first, *others = family(pid)
    spent = {"first process": _cpu(first), "others": sum(map(_cpu, others))}
    if place.contestant.server is not None:
        found = [each for pid in servers.pids(place.contestant.server) for each in family(pid)]
        spent["server"] = sum(map(_cpu, found))
    return spent


def _cpu(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss(pid: int) -> float:
    """Memory in MiB, shared pages counted by share."""
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0
