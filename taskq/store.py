"""The seam to what outlives a delivery: results, workers, schedules; on the embedded and database backends the same object."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taskq.backend import Backend
from taskq.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker as it last described itself."""

    id: str  #: host, pid and a random part: never the same twice
    host: str
    pid: int
    queues: tuple[str, ...]
    pool: str
    concurrency: int
    started: float
    seen: float  #: its last heartbeat
    running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecord:
    """What is remembered of a schedule."""

    name: str
    revision: int = 0  #: grows with every write; 0: not stored yet
    definition: Mapping[str, Any]  #: what to run and when, in plain values; the store never reads it
    dealt: float  #: the latest instant that was decided about, or since when instants count
    paused: bool = False
    declared: float | None = (
        None  #: when a worker last said that its code declares it; ``None``: made at run time
    )
    fired: float | None = None  #: the latest instant that stored a job
    job_id: str | None = None  #: and that job


class Store(abc.ABC):
    """Remembers jobs, workers and schedules. All methods are thread-safe."""

    @abc.abstractmethod
    def find(self, job_id: str) -> Job | None:
        """Everything known of a job, its history and result included; ``None`` where nothing is."""

    @abc.abstractmethod
    def wait(self, ids: Sequence[str], timeout: float | None = None) -> list[str]:
        """Wait until at least one of ``ids`` has ended or is not known, and return those; empty at the timeout.

        No busy polling. Many threads may wait at once.
        """

    @abc.abstractmethod
    def progress(self, job_id: str) -> bytes | None:
        """The latest progress a running job noted."""

    @abc.abstractmethod
    def heartbeat(self, worker: WorkerInfo) -> None:
        """Remember that ``worker`` lives."""

    @abc.abstractmethod
    def workers(self) -> list[WorkerInfo]:
        """Workers heard of within the last two minutes."""

    @abc.abstractmethod
    def forget_worker(self, worker_id: str) -> None:
        """The worker has left in good order."""

    @abc.abstractmethod
    def schedules(self) -> list[ScheduleRecord]:
        """Every schedule, by name."""

    @abc.abstractmethod
    def write_schedule(self, record: ScheduleRecord, jobs: Sequence[Job] = ()) -> bool:
        """Store ``record`` as the next revision, and push ``jobs``, in one write.

        Only if the stored revision is that of ``record`` (0: nothing is stored); else nothing happens and the
        answer is false. So of all who saw an instant come due, one stores its job.
        """

    @abc.abstractmethod
    def remove_schedule(self, name: str) -> bool:
        """Forget a schedule; whether it was there. Jobs that it has stored stay."""


class Ledger(Backend, Store):
    """A store that can stand beside a broker: it keeps the jobs, and the broker says whose turn it is.

    A job is *announced* while a message about it is on its way. It is PENDING like any other, but ``take`` passes it
    over: who gets the message claims it (:meth:`taskq.backend.Consumer.claim`). However it waits again later, it is
    an ordinary job of this store.
    """

    @abc.abstractmethod
    def announce(self, jobs: Sequence[Job]) -> list[str]:
        """Store jobs as ``Backend.push`` does; those that are due and have no lane are announced."""

    @abc.abstractmethod
    def adopt(self, queue: str, before: float, *, limit: int = 500) -> int:
        """Let ``take`` lend the announced jobs of ``queue`` that were due before this time, at most ``limit``.

        For those whose message was lost; a message that comes after all finds nothing to claim. Returns how many.
        """
