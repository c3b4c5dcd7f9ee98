"""The seam to what outlives a delivery: results, workers; on the embedded and database backends the same object."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

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


class Store(abc.ABC):
    """Remembers jobs and workers. All methods are thread-safe."""

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
    def tick(self, schedule: str, instant: float) -> bool:
        """Claim one instant of a schedule: true for exactly one caller, and never for an instant at or before
        one that was claimed."""

    @abc.abstractmethod
    def last_tick(self, schedule: str) -> float | None:
        """The latest claimed instant of a schedule."""
