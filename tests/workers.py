"""Real workers in real processes, and ledgers of what they ran."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from taskq import AsyncResult, TaskQ
from taskq.job import Job
from tests import acting

ACTING = pathlib.Path(__file__).with_name("acting.py")


class Line(NamedTuple):
    """One line of a ledger."""

    event: str
    job_id: str
    attempt: int
    pid: int
    at: float


class Ledger:
    """What bodies wrote down."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def lines(self) -> list[Line]:
        if not self.path.exists():
            return []
        lines = [line.split() for line in self.path.read_text(encoding="utf-8").splitlines()]
        return [
            Line(event, job_id, int(attempt), int(pid), float(at))
            for event, job_id, attempt, pid, at in lines
        ]

    def starts(self) -> Counter[str]:
        """How often each job was started."""
        return Counter(line.job_id for line in self.lines() if line.event == "start")

    def ends(self) -> Counter[str]:
        """How often each job's body came to its end."""
        return Counter(line.job_id for line in self.lines() if line.event == "end")


class Worker:
    """A ``taskq worker`` in a process group of its own; ``faults`` are those of :mod:`tests.faulty`."""

    def __init__(
        self,
        url: str,
        ledger: pathlib.Path,
        *arguments: str,
        app: str = str(ACTING),
        faults: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        environ = {**os.environ, "TASKQ_URL": url, "TASKQ_X_LEDGER": str(ledger), "PYTHONUNBUFFERED": "1"}
        environ |= {f"TASKQ_X_{name}": value for name, value in (faults or {}).items()}
        program = "taskq" if faults is None else "tests.faulty"
        self.output: list[str] = []
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", program, "worker", "-A", app, "--log-format", "json", *arguments],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def events(self, name: str) -> list[dict[str, Any]]:
        """The facts of that name it has logged."""
        parsed = [json.loads(line) for line in self.output if line.startswith("{")]
        return [line for line in parsed if line["event"] == name]

    def wait_for(self, name: str, within: float = 20.0) -> dict[str, Any]:
        """The first fact of that name."""
        eventually(lambda: self.events(name) or self.process.poll() is not None, within=within, about=self)
        found = self.events(name)
        assert found, f"no {name}; exit {self.process.poll()}; output:\n" + "\n".join(self.output)
        return found[0]

    def wait_ready(self, within: float = 30.0) -> None:
        """Until the banner says that it works."""
        eventually(lambda: any(line.startswith("  tasks") for line in self.output), within=within, about=self)

    def children(self) -> list[int]:
        """Pids of the processes that run jobs."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    session, state = int(stat[3]), stat[0]
                    if session == self.pid and int(entry.name) != self.pid and state != "Z":
                        found.append(int(entry.name))
        return found

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def signal_all(self, signum: int) -> None:
        """The whole group, as a terminal or an init system does."""
        os.killpg(self.pid, signum)

    def inner(self) -> int:
        """The pid of the worker itself, where another program started it."""
        (pid,) = (pid for pid in self.children() if parent_of(pid) == self.pid)
        return pid

    def hurried(self) -> bool:
        """Send another TERM, as somebody impatient does; whether it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGTERM)
        return self.process.poll() is not None

    def kill_all(self) -> None:
        """The whole group at once, as when a machine goes away."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, within: float = 30.0) -> int:
        status = self.process.wait(within)
        self.close()
        return status

    def close(self) -> None:
        """Read what is left, once the process has ended."""
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def stop(self) -> int:
        """Finish in good order."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output.append(line.rstrip("\n"))


def parent_of(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def zombies_of(parent: int) -> list[int]:
    """Ended children that nobody has waited for."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            if stat[0] == "Z" and int(stat[1]) == parent:
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def working(url: str, ledger: pathlib.Path, *arguments: str, **options: Any) -> Iterator[Worker]:
    """A worker that is ready, and is gone afterwards."""
    worker = Worker(url, ledger, *arguments, **options)
    try:
        worker.wait_ready()
        yield worker
    finally:
        worker.kill_all()
        worker.process.wait(10)
        worker.close()


@dataclass
class Bench:
    """A fresh file, a producer on it, and a ledger."""

    app: TaskQ
    url: str
    ledger: Ledger

    def send(self, task: str, *args: object, **options: Any) -> AsyncResult[Any]:
        return self.app.send(task, args, **options)

    def job(self, result: AsyncResult[Any]) -> Job:
        job = result.job()
        assert job is not None
        return job

    def working(self, *arguments: str, **options: Any) -> contextlib.AbstractContextManager[Worker]:
        return working(self.url, self.ledger.path, *arguments, **options)

    def worker(self, *arguments: str, **options: Any) -> Worker:
        return Worker(self.url, self.ledger.path, *arguments, **options)


@contextlib.contextmanager
def set_up(folder: pathlib.Path) -> Iterator[Bench]:
    """A bench in ``folder``; workers inside this process write in its ledger too."""
    app = TaskQ(f"sqlite:///{folder}/jobs.db")
    app._tasks.update(acting.app.tasks)
    os.environ["TASKQ_X_LEDGER"] = str(folder / "ledger")
    try:
        yield Bench(app, f"sqlite:///{folder}/jobs.db", Ledger(folder / "ledger"))
    finally:
        del os.environ["TASKQ_X_LEDGER"]
        app.close()


def eventually(fact: Callable[[], Any], *, within: float = 20.0, about: object = None) -> Any:
    """Wait until ``fact()`` is true; returns it."""
    until = time.monotonic() + within
    while not (value := fact()):
        if time.monotonic() > until:
            output = "\n".join(about.output[-40:]) if isinstance(about, Worker) else ""
            raise AssertionError(f"not within {within} s: {fact}\n{output}")
        threading.Event().wait(0.01)
    return value
