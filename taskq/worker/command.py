"""``taskq worker``: the supervisor as a process of its own, with signals, a banner and logs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from taskq import backends, logs
from taskq._version import __version__
from taskq.backend import Backend
from taskq.errors import ConfigurationError
from taskq.events import Events
from taskq.scribe import Scribe
from taskq.settings import mask
from taskq.worker.facts import identity
from taskq.worker.options import WorkerOptions
from taskq.worker.pool import LocalChild, ProcessPool, layout
from taskq.worker.probe import Probe
from taskq.worker.reload import SourceWatch
from taskq.worker.supervisor import Supervisor
from taskq.worker.watch import LETTING_GO

#: Signals the supervisor acts on; see ``docs/workers.md``.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTSTP)


def run(options: WorkerOptions) -> int:
    """Run a worker until it is stopped. Returns its exit status: 0 in good order, 1 where it could not work."""
    events = Events()
    scribe = Scribe(sys.stderr)
    try:
        return _run(options, events, scribe)
    finally:
        scribe.close()


def _run(options: WorkerOptions, events: Events, scribe: Scribe) -> int:
    logs.subscribe(events, logs.configure(options.log_level, options.log_format, scribe))
    worker = identity(options.name)
    make = _solo if options.pool == "solo" else _pooled
    supervisor, end = make(options, worker, events, scribe)
    for signum in _SIGNALS:
        signal.signal(signum, lambda signum, _: supervisor.signal(signum))
    probe = Probe(
        lambda: supervisor.ailment(options.probe_patience), file=options.probe_file, port=options.probe_port
    )
    probe.start()
    sources = SourceWatch(lambda: supervisor.signal(signal.SIGHUP))
    if options.watch:
        sources.start()
    try:
        status = end()
    finally:
        sources.stop()
        probe.stop()
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
    _tell(supervisor, scribe)
    return status


def _tell(supervisor: Supervisor, scribe: Scribe) -> None:
    if supervisor.failure is not None:
        scribe.write(f"taskq worker: {supervisor.failure}\n")


def _pooled(
    options: WorkerOptions, worker: str, events: Events, scribe: Scribe
) -> tuple[Supervisor, Callable[[], int]]:
    pool = ProcessPool(options, worker)

    def fork_refused(reason: str) -> bool:
        return pool.spawn_from_now_on()

    supervisor = Supervisor(
        options,
        worker=worker,
        children=pool.size,
        start_child=pool.start,
        open_backend=_open_backend,
        events=events,
        burst=options.burst,
        on_first_ready=lambda facts, backend: scribe.write(_banner(options, facts, backend)),
        fork_refused=fork_refused,
    )

    def until_stopped() -> int:
        try:
            return supervisor.run()
        finally:
            pool.close()

    return supervisor, until_stopped


def _solo(
    options: WorkerOptions, worker: str, events: Events, scribe: Scribe
) -> tuple[Supervisor, Callable[[], int]]:
    """Everything in this process: jobs in the main thread, where debuggers like them; the supervisor beside it."""
    from taskq.discovery import find_app

    app = find_app(options.app)
    child = LocalChild(layout(options, worker), app, here=True)
    supervisor = Supervisor(
        options,
        worker=worker,
        children=1,
        start_child=child.start,
        open_backend=lambda _: app.backend,
        events=events,
        burst=options.burst,
        on_first_ready=lambda facts, backend: scribe.write(_banner(options, facts, backend)),
    )

    def until_stopped() -> int:
        status: list[int] = []

        def supervise() -> None:
            status.append(supervisor.run())
            if supervisor.failure is not None and not child.ended.wait(LETTING_GO):
                # A body that does not let go keeps the main thread: nothing else can end this process.
                _tell(supervisor, scribe)
                scribe.close()
                os._exit(status[0])

        thread = threading.Thread(target=supervise, name="taskq-supervisor")
        thread.start()
        child.serve()
        thread.join()
        app.close()
        return status[0]

    return supervisor, until_stopped


def _open_backend(facts: Mapping[str, Any]) -> Backend:
    url = facts["url"]
    backend = backends.from_url(url, store_url=facts["store"])
    if not backend.capabilities.shared:
        raise ConfigurationError(
            f"{mask(url)} lives in one process, which `taskq worker` is not: use sqlite:///taskq.db, "
            "or app.worker() inside that process"
        )
    return backend


def _banner(options: WorkerOptions, facts: Mapping[str, Any], backend: Backend) -> str:
    tasks = facts["tasks"]
    queues = dict(options.queues) or dict.fromkeys(sorted({task["queue"] for task in tasks.values()}), 1)
    lines = {
        "app": f"{options.app} ({mask(facts['app'])})",
        "backend": f"{backend.capabilities.name} {backend.location}",
        "queues": ", ".join(f"{name}={weight}" if weight != 1 else name for name, weight in queues.items()),
        "pool": f"{options.pool}, {options.slots} at a time",
        "tasks": ", ".join(sorted(tasks)) or "none",
    }
    return f"taskq {__version__}\n" + "".join(f"  {name:8} {value}\n" for name, value in lines.items())
