"""A soak: producers and workers run while their processes are killed, stopped and asked to end at random."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from taskq.backends import from_url
from taskq.job import State
from tests.chaos.program import QUEUES, append
from tests.workers import Worker

#: In the database itself: every end of a job, whoever wrote it.
_WITNESS = """
    CREATE TABLE soak_end (id TEXT, state INTEGER);
    CREATE TRIGGER soak_witness AFTER UPDATE OF state ON job WHEN new.state >= 5 AND old.state < 5
    BEGIN INSERT INTO soak_end VALUES (new.id, new.state); END;
"""
#: How often each is chosen. The first ones kill.
ACTIONS = {
    "kill child": 6,
    "kill group": 3,
    "kill supervisor": 3,
    "kill helper": 1,
    "kill producer": 2,
    "stop child": 2,
    "stop supervisor": 1,
    "term": 2,
    "term group": 1,
    "hup": 1,
}
#: Jobs that one producer process pushes.
_PRODUCED = 2_000
#: Longest time in which nothing ends before the soak gives up, in seconds.
_STALLED = 60.0


@dataclass
class Events:
    """What the soak did to whom."""

    actions: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)  #: of workers that were asked to end
    #: Pids of children, and of supervisors for all of theirs, whose runs may be repeated.
    victims: set[int] = field(default_factory=set)
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        return sum(n for action, n in self.actions.items() if action.startswith("kill"))


class Soak:
    """One soak in one folder."""

    def __init__(
        self, folder: pathlib.Path, *, jobs: int, kills: int, seconds: float, seed: int, workers: int
    ) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/jobs.db"
        self.ledger = folder / "ledger"
        self.confirmed = folder / "confirmed"
        self.events = Events()
        self._jobs, self._kills, self._seconds = jobs, kills, seconds
        self._pause = seconds / kills
        self._began = 0.0
        self._random = random.Random(seed)
        self._workers: list[Worker] = []
        self._wanted = workers
        self._ending: list[Worker] = []
        self._producer: subprocess.Popen[bytes] | None = None
        self._stopped: list[tuple[float, int]] = []
        self._backend = from_url(self.url)

    def run(self) -> None:
        """Until every confirmed job has ended and all the kills are done."""
        self._began = time.monotonic()
        self._backend.counts()  # makes the file
        with sqlite3.connect(self.folder / "jobs.db") as db:
            db.executescript(_WITNESS)
        db.close()
        try:
            self._mistreat()
            self._settle_down()
        finally:
            self.events.seconds = time.monotonic() - self._began
            self._end()

    # -- while it runs ----------------------------------------------------------------

    def _mistreat(self) -> None:
        next_action = time.monotonic() + 1.0
        while self.events.kills < self._kills or self.count_confirmed() < self._jobs:
            self._keep_running()
            now = time.monotonic()
            if now >= next_action and self.events.kills < self._kills:
                self._act(self._random.choices([*ACTIONS], [*ACTIONS.values()])[0])
                next_action = now + self._random.uniform(0.5, 1.5) * self._pause
            self._wait(0.02)

    def _settle_down(self) -> None:
        """Wait until nothing is left to do."""
        waits = (State.PENDING, State.SCHEDULED, State.RESERVED)
        last, since = None, time.monotonic()
        while True:
            self._keep_running()
            counts = self._backend.counts()
            left = sum(counts.get(queue, {}).get(state, 0) for queue in QUEUES for state in waits)
            if not left:
                return
            if counts != last:
                last, since = counts, time.monotonic()
            assert time.monotonic() - since < _STALLED, f"nothing moves: {counts}\n{self._output()}"
            self._wait(0.1)

    def _keep_running(self) -> None:
        """Replace who has gone, let those go on that were stopped for long enough."""
        now = time.monotonic()
        for until, pid in [entry for entry in self._stopped if entry[0] <= now]:
            self._stopped.remove((until, pid))
            _signal(pid, signal.SIGCONT)
        for worker in [worker for worker in self._ending if worker.process.poll() is not None]:
            self._ending.remove(worker)
            self.events.statuses[worker.wait()] += 1
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._workers.remove(worker)
            worker.close()
        while len(self._workers) < self._wanted:
            arguments = ("--concurrency", "2", "--log-level", "warning", "--queues", ",".join(QUEUES))
            self._workers.append(Worker(self.url, self.ledger, *arguments, app="tests.chaos.program"))
        idle = self._producer is None or self._producer.poll() is not None
        so_far = min(1.0, (now - self._began) / self._seconds + 0.05)
        missing = self._jobs - self.count_confirmed()
        if idle and missing > self._jobs * (1 - so_far):
            count = str(min(missing, _PRODUCED))
            self._producer = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.program", str(self.confirmed), count],
                env={**os.environ, "TASKQ_URL": self.url},
            )

    def _act(self, action: str) -> None:
        worker = self._random.choice(self._workers)
        helpers, children = _processes_of(worker)
        verb, _, whom = action.partition(" ")
        if whom == "producer":
            if self._producer is None or self._producer.poll() is not None:
                return
            self._producer.kill()
        elif whom == "child" or whom == "helper":
            chosen = children if whom == "child" else helpers
            if not chosen:
                return
            pid = self._random.choice(chosen)
            self.events.victims.add(pid if whom == "child" else worker.pid)
            self._strike(verb, pid)
        elif verb in {"kill", "stop"}:
            self.events.victims.add(worker.pid)
            self._strike(verb, worker.pid, group=whom == "group")
            if verb == "kill":
                worker.process.wait()  # gone before anybody asks it to end
        elif verb == "term":
            self._workers.remove(worker)
            self._ending.append(worker)
            self._wait_for_handlers(worker)
            _signal(-worker.pid if whom else worker.pid, signal.SIGTERM)
        else:
            self._wait_for_handlers(worker)
            _signal(worker.pid, signal.SIGHUP)
        self.events.actions[action] += 1
        append(str(self.folder / "actions"), f"{time.monotonic():.4f} {action} {worker.pid} {children}\n")

    def _strike(self, verb: str, pid: int, *, group: bool = False) -> None:
        if verb == "kill":
            _signal(-pid if group else pid, signal.SIGKILL)
        else:
            _signal(pid, signal.SIGSTOP)
            self._stopped.append((time.monotonic() + self._random.uniform(0.5, 6.0), pid))

    def _wait_for_handlers(self, worker: Worker) -> None:
        while not handles_term(worker.pid) and worker.process.poll() is None:
            self._wait(0.01)

    def _wait(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    # -- afterwards -------------------------------------------------------------------

    def count_confirmed(self) -> int:
        return self.confirmed.stat().st_size // 33 if self.confirmed.exists() else 0

    def _end(self) -> None:
        for _, pid in self._stopped:
            _signal(pid, signal.SIGCONT)
        for worker in self._workers:
            self._wait_for_handlers(worker)
            _signal(worker.pid, signal.SIGTERM)
        for worker in self._workers + self._ending:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.events.statuses[worker.wait(60)] += 1
            worker.kill_all()
        if self._producer is not None:
            self._producer.kill()
            self._producer.wait()
        self._backend.close()

    def _output(self) -> str:
        return "\n".join(line for worker in self._workers for line in worker.output[-20:])


def handles_term(pid: int) -> bool:
    """Whether the process has installed its signal handlers."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) & 1 << (signal.SIGTERM - 1))
    return False


def _processes_of(worker: Worker) -> tuple[list[int], list[int]]:
    """The helpers of a worker (its fork server, its resource tracker), and its children."""
    helpers, children = [], []
    for pid in worker.children():
        with contextlib.suppress(OSError):
            parent = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            (helpers if parent == worker.pid else children).append(pid)
    return helpers, children


def _signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(-pid, signum) if pid < 0 else os.kill(pid, signum)
