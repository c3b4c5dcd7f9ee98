"""A worker inside this process: for ``memory://``, tests, scripts and debuggers. Threads run the jobs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from taskq.errors import ConfigurationError, TaskQError
from taskq.worker.facts import identity
from taskq.worker.options import WorkerOptions, worker_options
from taskq.worker.pool import LocalChild, layout
from taskq.worker.supervisor import Supervisor

if TYPE_CHECKING:
    from taskq.app import TaskQ


class EmbeddedWorker:
    """Runs an app's jobs in threads of this process.

    A hard time limit or a shutdown cannot end a body that blocks in a system call: its job is held until it ends.
    """

    def __init__(self, app: TaskQ, given: Mapping[str, Any]) -> None:
        self._options = _options(app, given)
        self._supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None
        self._app = app

    def run(self, *, burst: bool | None = None) -> int:
        """Work in the calling thread until :meth:`stop`, or with ``burst`` until nothing is left that is due.

        Returns 0 in good order. Raises ``TaskQError`` where the worker cannot work.
        """
        supervisor = self._supervisor = self._make(burst=self._options.burst if burst is None else burst)
        status = supervisor.run()
        if supervisor.failure is not None:
            raise TaskQError(supervisor.failure)
        return status

    def start(self) -> None:
        """Work in a thread until :meth:`stop`."""
        supervisor = self._supervisor = self._make(burst=self._options.burst)
        self._thread = threading.Thread(target=supervisor.run, name="taskq-supervisor", daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Finish what runs and end; whether that was done within ``timeout`` seconds. Idempotent."""
        if self._supervisor is not None:
            self._supervisor.signal(signal.SIGTERM)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None and self._supervisor is not None and self._supervisor.failure is not None:
            raise TaskQError(self._supervisor.failure)

    def _make(self, *, burst: bool) -> Supervisor:
        worker = identity()
        return Supervisor(
            self._options,
            worker=worker,
            children=1,
            start_child=lambda: LocalChild(layout(self._options, worker), self._app).start(),
            open_backend=lambda _: self._app.backend,
            events=self._app.events,
            burst=burst,
        )


def _options(app: TaskQ, given: Mapping[str, Any]) -> WorkerOptions:
    pool = given.get("pool", "thread")
    if pool not in {"thread", "async"}:
        raise ConfigurationError(
            f"pool={pool!r}: a worker inside a process has pool='thread' or 'async'; "
            "processes are started by `taskq worker -A app`"
        )
    return worker_options(app.settings, **{**given, "pool": pool})
