"""What a child tells of its app, which the supervisor never imports; and who a worker is."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from taskq.backend import Backend
from taskq.clock import SYSTEM_CLOCK
from taskq.errors import ConfigurationError
from taskq.events import Events
from taskq.limits import from_facts
from taskq.store import WorkerInfo
from taskq.worker.options import WorkerOptions
from taskq.worker.portions import TaskFacts


def queues_of(facts: Mapping[str, Any]) -> dict[str, int]:
    """The queues of the app's tasks, all of one weight; what a worker serves where none is named."""
    queues = dict.fromkeys(sorted({task["queue"] for task in facts["tasks"].values()}), 1)
    if not queues:
        raise ConfigurationError(
            "the app has no tasks and no queue was named: declare one with @app.task, or give --queues"
        )
    return queues


def task_facts(facts: Mapping[str, Any]) -> dict[str, TaskFacts]:
    """What the dispatcher must know of each task."""
    return {
        name: TaskFacts(task["async"], task["soft"], task["hard"], task["exhausted"])
        for name, task in facts["tasks"].items()
    }


def declare_limits(backend: Backend, facts: Mapping[str, Any], events: Events) -> Backend:
    """Make the app's limits those of ``backend``, before the first job is taken."""
    limits = [from_facts(each) for each in facts["limits"]]
    for task in backend.declare_limits(limits) if limits else []:
        events.emit("limits.changed", task=task)
    return backend


def describe(options: WorkerOptions, worker: str, queues: Mapping[str, int]) -> WorkerInfo:
    """A worker that has just started, for those who list workers."""
    now = SYSTEM_CLOCK.now()
    return WorkerInfo(
        id=worker,
        host=socket.gethostname(),
        pid=os.getpid(),
        queues=tuple(queues),
        pool=options.pool,
        concurrency=options.slots,
        started=now,
        seen=now,
    )


def identity(name: str = "") -> str:
    """A worker's id: its name or host, pid and a random part, so that it is never the same twice."""
    return f"{name or socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
