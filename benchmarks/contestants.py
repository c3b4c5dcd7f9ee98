"""Who is measured: taskq on each backend whose server is there, and the peers that are installed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests import servers

TASKQ = "benchmarks.app"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A module with ``one``, ``many``, ``late`` and ``answer``, and a command that works on what they push."""

    name: str
    module: str
    package: str = "taskq"  #: what must be installed
    server: str | None = None  #: a kind of ``tests.servers``
    parameters: str = ""  #: of taskq's URL
    store: bool = False  #: taskq with a SQLite store beside its broker

    def missing(self) -> str | None:
        """Why it cannot be measured here, if so."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed: pip install '.[peers]'"
        if self.server is not None and servers.url(self.server) is None:
            return f"no server: python -m tests.servers up {self.server}"
        return None

    @contextlib.contextmanager
    def place(self) -> Iterator[Place]:
        """Somewhere new to keep jobs."""
        with tempfile.TemporaryDirectory(
            prefix="taskq-bench-", dir=os.environ.get("TASKQ_BENCH_DIR")
        ) as name:
            folder = pathlib.Path(name)
            yield Place(self, folder, self._environ(folder))

    def _environ(self, folder: pathlib.Path) -> dict[str, str]:
        tag = f"bench{os.urandom(4).hex()}"
        url = "" if self.server is None else servers.url(self.server) or ""
        if self.package != "taskq":
            return {"BENCH_URL": url or f"{folder}/jobs.db", "BENCH_QUEUE": tag}
        environ = {"TASKQ_QUEUE": tag}
        if self.store:
            environ["TASKQ_STORE_URL"] = f"sqlite:///{folder}/jobs.db"
        return {"TASKQ_URL": (url or f"sqlite:///{folder}/jobs.db") + self.parameters, **environ}

    def worker(self, processes: int) -> list[str]:
        """The command of a worker with so many processes, tuned for throughput of short jobs."""
        tools = pathlib.Path(sys.executable).parent
        if self.package == "celery":
            options = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "ERROR"]
            pool = ["-P", "solo"] if processes == 1 else ["-c", str(processes)]
            return [f"{tools}/celery", "-A", self.module, "worker", *options, *pool]
        if self.package == "dramatiq":
            return [f"{tools}/dramatiq", self.module, "-p", str(processes), "-t", "1"]
        if self.package == "huey":
            pace = ["-n", "-d", "0.005", "-m", "0.02", "-k", "process", "-w", str(processes)]
            return [f"{tools}/huey_consumer", f"{self.module}.huey", "-q", *pace]
        return [
            *(sys.executable, "-m", "taskq", "worker", "-A", f"{self.module}:app", "--log-level", "error"),
            *("--concurrency", str(processes)),
        ]


@dataclass(frozen=True)
class Place:
    """Where one contestant's jobs are for the time of one measure."""

    contestant: Contestant
    folder: pathlib.Path
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def tally(self) -> pathlib.Path:
        return self.folder / "tally"


ALL: Sequence[Contestant] = (
    Contestant(name="taskq, SQLite", module=TASKQ),
    Contestant(name="taskq, SQLite, synchronous=full", module=TASKQ, parameters="?synchronous=full"),
    Contestant(name="taskq, MongoDB", module=TASKQ, package="taskq", server="mongodb"),
    Contestant(name="taskq, RabbitMQ", module=TASKQ, package="taskq", server="rabbitmq"),
    Contestant(name="taskq, RabbitMQ with SQLite", module=TASKQ, server="rabbitmq", store=True),
    Contestant(name="taskq, Kafka", module=TASKQ, package="taskq", server="kafka"),
    Contestant(
        name="Celery, RabbitMQ", module="benchmarks.peers.celery_app", package="celery", server="rabbitmq"
    ),
    Contestant(
        name="Dramatiq, RabbitMQ",
        module="benchmarks.peers.dramatiq_app",
        package="dramatiq",
        server="rabbitmq",
    ),
    Contestant(name="Huey, SQLite", module="benchmarks.peers.huey_app", package="huey"),
)
