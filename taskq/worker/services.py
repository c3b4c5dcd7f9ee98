"""Housekeeping beside the work: small services whose work is one ``run_once()``.

Each is safe to run in every worker at once, because each step is a conditional update in the backend.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from taskq.backend import Backend
from taskq.clock import SYSTEM_CLOCK
from taskq.errors import TaskQError
from taskq.events import Events
from taskq.store import Store, WorkerInfo
from taskq.worker.scheduler import Definitions, Scheduler

#: How often each service runs where it has no other wish, in seconds.
PERIOD: Final = 1.0
_RECLAIM_AT_ONCE: Final = 500
#: While a service fails it is tried again after this, doubling up to a minute.
_BACKOFF: Final = 1.0


class Service(Protocol):
    """Something to do again and again."""

    name: str

    def run_once(self) -> float | None:
        """Do one bounded step; returns the seconds until the next, ``None`` for the usual period."""
        ...


class Reclaim:
    """Takes back what dead workers held."""

    name = "reclaim"

    def __init__(self, backend: Backend, events: Events) -> None:
        self._backend = backend
        self._events = events

    def run_once(self) -> float | None:
        reclaimed = self._backend.reclaim(limit=_RECLAIM_AT_ONCE)
        found = len(reclaimed.retried) + len(reclaimed.buried) + len(reclaimed.suspects)
        if found:
            self._events.emit(
                "jobs.reclaimed",
                retried=len(reclaimed.retried),
                buried=len(reclaimed.buried),
                suspects=len(reclaimed.suspects),
            )
        for job_id in reclaimed.buried:
            self._events.emit("job.dead", job_id=job_id, error="WorkerLost: reservation timed out")
        # A full step means there is more; new work gets its turn between the steps.
        return 0.01 if found >= _RECLAIM_AT_ONCE else None


class Housekeep:
    """Stages due jobs, ends expired ones, forgets old ones."""

    name = "housekeep"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def run_once(self) -> float | None:
        return self._backend.housekeep()


class Heartbeat:
    """Says that this worker lives."""

    name = "heartbeat"
    _EVERY: Final = 10.0

    def __init__(self, store: Store, describe: Callable[[], WorkerInfo]) -> None:
        self._store = store
        self._describe = describe

    def run_once(self) -> float | None:
        self._store.heartbeat(replace(self._describe(), seen=SYSTEM_CLOCK.now()))
        return self._EVERY


def services_for(
    backend: Backend, events: Events, describe: Callable[[], WorkerInfo], *, scheduling: bool
) -> Services:
    """What every worker does beside its jobs."""
    services: list[Service] = [Reclaim(backend, events), Housekeep(backend)]
    scheduler = Scheduler(backend, events) if isinstance(backend, Store) and scheduling else None
    if isinstance(backend, Store):
        services.append(Heartbeat(backend, describe))
    return Services([*services, *filter(None, [scheduler])], events, scheduler)


def leave(store: Store, worker: str, events: Events) -> None:
    """Let ``store`` forget a worker that ends in good order."""
    try:
        store.forget_worker(worker)
    except TaskQError as error:
        events.emit("service.failed", service="leave", error=str(error))


class Services:
    """Runs services in one thread, each at its own pace."""

    def __init__(
        self, services: Sequence[Service], events: Events, scheduler: Scheduler | None = None
    ) -> None:
        self._scheduler = scheduler
        self._due = dict.fromkeys(services, 0.0)
        self._failures = dict.fromkeys(services, 0)
        self._events = events
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="taskq-services", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def declare(self, schedules: Definitions) -> None:
        """Fire the schedules that the worker's code declares."""
        if self._scheduler is not None:
            self._scheduler.declare(schedules)

    def stop(self, timeout: float = 5.0) -> None:
        """End after the step that is under way. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _serve(self) -> None:
        now = SYSTEM_CLOCK.lease_time()
        while not self._stopping.wait(max(0.0, min(self._due.values()) - now)):
            now = SYSTEM_CLOCK.lease_time()
            for service, due in self._due.items():
                if due <= now and not self._stopping.is_set():
                    self._due[service] = now + self._run(service)
            now = SYSTEM_CLOCK.lease_time()

    def _run(self, service: Service) -> float:
        """Do one step; returns the seconds until the next, spread so that workers do not march in step."""
        try:
            wish = service.run_once()
        except Exception as error:  # noqa: BLE001 - the next step may find the backend well again
            self._failures[service] += 1
            if self._failures[service] == 1:
                self._events.emit(
                    "service.failed", service=service.name, error=f"{type(error).__name__}: {error}"
                )
            return min(60.0, _BACKOFF * 2.0 ** self._failures[service])
        self._failures[service] = 0
        period = PERIOD if wish is None else wish
        return period * random.uniform(0.9, 1.1)  # noqa: S311
