"""The one door for whoever looks at an app from outside: the command line, a dashboard, a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from taskq.backend import Cancellation, Page, Scope
from taskq.clock import SYSTEM_CLOCK, Duration, seconds
from taskq.errors import ResultNotFoundError
from taskq.job import Attempt, Job, State
from taskq.limits import Limits
from taskq.registry import App
from taskq.store import WorkerInfo


class QueueView(NamedTuple):
    """A queue as it stands."""

    name: str
    counts: Mapping[State, int]
    paused: bool


class Inspector:
    """Looks at jobs, queues and workers, and does what an operator may do to them."""

    def __init__(self, app: App) -> None:
        self._app = app

    def queues(self, name: str | None = None) -> list[QueueView]:
        """Every queue that was ever used (or the one named), by name."""
        counts = self._app.backend.counts(name)
        if name is not None:
            counts.setdefault(name, {})
        paused = self._app.backend.paused()
        return [QueueView(each, counts[each], each in paused) for each in sorted(counts)]

    def jobs(self, queue: str, state: State, *, limit: int = 100, cursor: str | None = None) -> Page:
        """A bounded slice of the jobs of ``queue`` in ``state``."""
        return self._app.backend.list_jobs(queue, state, limit=limit, cursor=cursor)

    def job(self, job_id: str) -> Job:
        """Everything known of a job; raises ``ResultNotFoundError`` where nothing is."""
        job = self._app.need_store("details of a job").find(job_id)
        if job is None:
            raise ResultNotFoundError(f"nothing is known of job {job_id}")
        return job

    def attempts(self, job_id: str) -> tuple[Attempt, ...]:
        """The runs of a job that ended badly, oldest first: worker, times, error, traceback, chosen delay."""
        return self.job(job_id).history

    def workers(self) -> list[WorkerInfo]:
        """The workers heard of lately."""
        return self._app.need_store("workers").workers()

    def cancel(self, ids: Sequence[str], *, reason: str = "") -> dict[str, Cancellation]:
        """Keep waiting jobs from starting, ask running ones to stop."""
        return self._app.backend.cancel(ids, reason=reason)

    def revive(self, queue: str, ids: Sequence[str] | None = None, *, delay: Duration = 0) -> list[str]:
        """Give dead jobs a new life, with all their retries; returns their ids."""
        due = SYSTEM_CLOCK.now() + seconds(delay) if delay else 0.0
        return self._app.backend.revive(queue, ids, due=due)

    def purge(self, queue: str, state: State) -> int:
        """Delete the jobs of ``queue`` in ``state``; returns how many."""
        return self._app.backend.purge(queue, state)

    def pause(self, name: str, what: Scope = "queue") -> None:
        """Lend no more jobs of a queue, a task or a key, on every worker, until :meth:`resume`."""
        self._app.backend.pause(name, what)

    def resume(self, name: str, what: Scope = "queue") -> None:
        """Undo :meth:`pause`."""
        self._app.backend.resume(name, what)

    def paused(self, what: Scope = "queue") -> set[str]:
        """The queues, tasks or keys that are paused."""
        return self._app.backend.paused(what)

    def limits(self) -> dict[str, Limits]:
        """The limits that tasks declared last."""
        return self._app.backend.limits()
