"""For the tests of applications: an app without its server, and its jobs run on the spot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from taskq.app import TaskQ
from taskq.backend import Backend
from taskq.backends import from_url
from taskq.events import Event
from taskq.job import Job, State
from taskq.store import Store

__all__ = ["Isolated", "drain", "isolated"]

_PAGE = 500


class Isolated:
    """An app whose jobs stay in this process: what was pushed, and how it ended."""

    def __init__(self, app: TaskQ, backend: Backend) -> None:
        self.app = app
        self.backend = backend
        self._ids: list[str] = []

    @property
    def pushed(self) -> list[Job]:
        """Every job that was pushed, in order, as it stands now; those kept no longer are left out."""
        assert isinstance(self.backend, Store)
        found = [self.backend.find(job_id) for job_id in self._ids]
        return [job for job in found if job is not None]

    def drain(self, *, scheduled: bool = False) -> int:
        """Run what is due; see :func:`drain`."""
        return drain(self.app, scheduled=scheduled)

    def _note(self, event: Event) -> None:
        self._ids.append(event.fields["job_id"])


@contextlib.contextmanager
def isolated(app: TaskQ, url: str = "memory://") -> Iterator[Isolated]:
    """Within the block, ``app`` keeps its jobs at ``url``, by default in memory, and is the current app."""
    backend = from_url(url)
    bench = Isolated(app, backend)
    unsubscribe = app.subscribe(bench._note, "job.pushed")
    try:
        with app.instead(backend):
            yield bench
    finally:
        unsubscribe()
        backend.close()


def drain(app: TaskQ, *, scheduled: bool = False) -> int:
    """Run every job that is due, with those they push, in threads of this process; returns how many were ended.

    With ``scheduled``, jobs due later (countdowns, retries) run at once too. A job that fails does not raise here:
    ask its ``AsyncResult``.
    """
    before = _ended(app)
    while True:
        paused = app.backend.paused()
        pending = [name for name, counts in app.backend.counts().items() if counts.get(State.PENDING)]
        queues = [name for name in pending if name not in paused]
        if queues:
            app.worker(queues=dict.fromkeys(queues, 1), concurrency=1).run(burst=True)
        elif not (scheduled and _hasten(app)):
            return _ended(app) - before


def _ended(app: TaskQ) -> int:
    return sum(n for counts in app.backend.counts().values() for state, n in counts.items() if state.ended)


def _hasten(app: TaskQ) -> bool:
    hastened = False
    for queue in app.backend.counts():
        waiting = app.backend.list_jobs(queue, State.SCHEDULED, limit=_PAGE).jobs
        hastened = bool(app.backend.hasten(queue, [job.id for job in waiting])) or hastened
    return hastened
