"""``taskq bench``: what this machine does with this backend."""

from __future__ import annotations

import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import click

from taskq.cli import show
from taskq.cli.apps import app_option, open_app
from taskq.job import State, new_id
from taskq.settings import mask

_TEXT: Final = "x" * 100
#: Single jobs by which the idle pick-up is measured.
_STAMPS: Final = 200
#: Nothing happens for this long: something is wrong, in seconds.
_STUCK: Final = 60.0


@click.command()
@app_option()
@click.option("--jobs", default=20_000, show_default=True, help="How many jobs to push and to run.")
@click.option("--processes", default=2, show_default=True, help="Worker processes for the runs.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def bench(jobs: int, processes: int, as_json: bool) -> None:
    """Measure pushing, running and pick-up on the app's backend, in a queue of its own that is emptied after.

    Jobs do nothing, with one number and a text of 100 characters as arguments.
    """
    settings = open_app().settings
    os.environ["TASKQ_URL"] = settings.url
    if settings.store_url is not None:
        os.environ["TASKQ_STORE_URL"] = settings.store_url
    with tempfile.TemporaryDirectory(prefix="taskq-bench-") as folder:
        measured = _Bench(pathlib.Path(folder) / "tally", f"taskq-bench-{new_id()[-8:]}", processes)
        try:
            figures = measured.run(jobs)
        finally:
            measured.clean()
    if as_json:
        show.as_json({"url": mask(settings.url), **figures})
        return
    click.echo(mask(settings.url))
    show.table(("MEASURE", "FIGURE"), [(name, f"{figure:,.2f}") for name, figure in figures.items()])


class _Bench:
    def __init__(self, path: pathlib.Path, queue: str, processes: int) -> None:
        from taskq.cli import benched

        path.touch()
        os.environ[benched.FILE] = str(path)
        self._tasks = benched
        self._path = path
        self._queue = queue
        self._processes = processes

    def run(self, jobs: int) -> dict[str, float]:
        """All figures, by name."""
        noop = self._tasks.noop.options(queue=self._queue)
        single = max(1, jobs // 10)
        figures = {
            "push, one at a time (jobs/s)": _rate(
                single, lambda: [noop.delay(number, _TEXT) for number in range(single)]
            ),
            "push, in bulk (jobs/s)": _rate(
                jobs, lambda: self._tasks.app.enqueue_many(noop.s(number, _TEXT) for number in range(jobs))
            ),
        }
        with self._worker(self._processes):
            figures[f"run, {self._processes} processes (jobs/s)"] = self._drained(jobs + single)
        with self._worker(1):
            waits = sorted(self._waits())
        figures["idle pick-up, median (ms)"] = statistics.median(waits) / 1e6
        figures["idle pick-up, 99 of 100 (ms)"] = waits[int(len(waits) * 0.99)] / 1e6
        return figures

    def _drained(self, jobs: int) -> float:
        """Jobs a second, from the first seen to the last."""
        first = self._until(lambda done: done > 0)
        began = time.perf_counter()
        self._until(lambda done: done >= jobs)
        return (jobs - first) / (time.perf_counter() - began)

    def _waits(self) -> Iterator[int]:
        stamp = self._tasks.stamp.options(queue=self._queue)
        done, _ = self._tasks.read(self._path)
        for number in range(1, _STAMPS + 1):
            stamp.delay(time.time_ns())
            self._until(lambda now, goal=done + number: now >= goal)  # type: ignore[misc]
            yield self._tasks.read(self._path)[1]
            threading.Event().wait(0.01)

    def _until(self, reached: Callable[[int], bool]) -> int:
        """Wait until so many are done; returns how many."""
        last, since, pause = -1, time.perf_counter(), threading.Event()
        while not reached(done := self._tasks.read(self._path)[0]):
            if done != last:
                last, since = done, time.perf_counter()
            elif time.perf_counter() - since > _STUCK:
                raise click.ClickException(f"no job was run for {_STUCK:.0f} seconds: see `taskq doctor`")
            pause.wait(0.001)
        return done

    @contextlib.contextmanager
    def _worker(self, processes: int) -> Iterator[None]:
        command = [
            sys.executable,
            "-m",
            "taskq",
            "worker",
            "-A",
            "taskq.cli.benched",
            "--log-level",
            "warning",
        ]
        process = subprocess.Popen(  # noqa: S603 - our own command
            [*command, "--queues", self._queue, "--concurrency", str(processes)], stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        said = b""
        while not said.startswith(b"  tasks"):
            line = process.stderr.readline()
            if not line:
                raise click.ClickException(f"the worker did not start: {said.decode().strip()}")
            said = line
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def clean(self) -> None:
        """Leave nothing behind."""
        backend = self._tasks.app.backend
        for state in (State.PENDING, State.DEAD):
            backend.purge(self._queue, state)
        self._tasks.app.close()


def _rate(jobs: int, push: Callable[[], object]) -> float:
    began = time.perf_counter()
    push()
    return jobs / (time.perf_counter() - began)
