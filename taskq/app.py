"""The app: a registry of tasks, and the backend and store their jobs live in."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from taskq import backends
from taskq.backend import Backend, store_needed
from taskq.declaring import TaskDecorator, add_task, decorator
from taskq.errors import InvalidArgumentError, TaskNotFoundError
from taskq.events import Events, Subscriber
from taskq.inspector import Inspector
from taskq.job import DEFAULT_QUEUE, Job
from taskq.middleware import Middleware, around_push
from taskq.options import check_call, check_list, check_mapping, check_queue, nearest
from taskq.queue import Queue
from taskq.registry import default_app, register_app, set_default_factory, shared_tasks, using
from taskq.result import AsyncResult
from taskq.schedules import Schedules
from taskq.settings import Settings, load
from taskq.store import Store
from taskq.tasks import Signature, Task

if TYPE_CHECKING:
    from taskq.worker.embedded import EmbeddedWorker

__all__ = ["TaskQ", "default_app", "task"]

#: How many jobs ``enqueue_many`` stores by one write.
_BULK = 1000


class TaskQ:
    """An app. Nothing is opened before its first use.

    ``url`` names the backend (default: ``TASKQ_URL``, else ``sqlite:///taskq.db``), ``store`` what remembers
    results beside a broker; every other setting of ``docs/settings.md`` is a keyword. Raises
    ``ConfigurationError`` for what cannot work.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        store: str | None = None,
        name: str | None = None,
        middleware: Sequence[Middleware] = (),
        **settings: Any,
    ) -> None:
        arguments = {**settings, "url": url, "store_url": store}
        self._settings = load({k: v for k, v in arguments.items() if v is not None}, os.environ)
        check_queue(self._settings.queue)
        self._name = name or self._settings.url
        self.middleware = tuple(middleware)
        self._tasks: dict[str, Task[Any, Any]] = {}
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        self._declared: tuple[Backend | None, set[str]] = (None, set())  # where, and limits of which tasks
        self._entered: list[contextlib.ExitStack] = []
        self.events = Events()
        self.task: TaskDecorator = decorator(lambda made: add_task(self._tasks, made), self)
        register_app(self)

    def __repr__(self) -> str:
        return f"<TaskQ {self.name}>"

    @property
    def name(self) -> str:
        """For messages: the given name, else the URL without its password."""
        from taskq.settings import mask

        return mask(self._name)

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def tasks(self) -> Mapping[str, Task[Any, Any]]:
        """The tasks this app can run: its own, and those declared by ``@task`` without an app."""
        return {**shared_tasks, **self._tasks}

    @property
    def backend(self) -> Backend:
        """Where jobs are held; made on first use."""
        if self._backend is None:
            with self._lock:
                if self._backend is None:
                    self._backend = backends.from_url(
                        self._settings.url,
                        store_url=self._settings.store_url,
                        publish_timeout=self._settings.publish_timeout,
                    )
        return self._backend

    @property
    def store(self) -> Store | None:
        """What outlives a delivery; ``None`` on a broker without one."""
        backend = self.backend
        return backend if isinstance(backend, Store) else None

    def need_store(self, feature: str) -> Store:
        """The store, or a ``ConfigurationError`` that names what wants it."""
        store = self.store
        if store is None:
            raise store_needed(feature, self.name)
        return store

    def enqueue(self, jobs: Sequence[Job]) -> list[str]:
        """Store jobs as the middleware leaves them; returns the id that stands for each."""
        if self.middleware:
            jobs = [around_push(self.middleware, job) for job in jobs]
        if any(job.lane is not None for job in jobs):
            self._declare_limits(jobs)
        ids = self.backend.push(jobs)
        wanted = self.events.wanted("job.pushed")
        for job, stored in zip(jobs, ids, strict=True):
            if wanted or stored != job.id:
                name = "job.pushed" if stored == job.id else "job.deduplicated"
                self.events.emit(name, job_id=stored, task=job.task, queue=job.queue)
        return ids

    def enqueue_many(self, signatures: Iterable[Signature[Any]]) -> list[AsyncResult[Any]]:
        """Store many calls, a thousand by one write: ``app.enqueue_many(send.s(x) for x in rows)``.

        All of a thousand are stored or none. Where a later thousand fails, the earlier ones stay stored.
        """
        results: list[AsyncResult[Any]] = []
        batch: list[Job] = []
        for signature in signatures:
            if not isinstance(signature, Signature):
                raise InvalidArgumentError(f"enqueue_many takes calls such as send.s(x), not {signature!r}")
            batch.append(signature.job(self))
            if len(batch) == _BULK:
                results += self._enqueue_batch(batch)
                batch = []
        return results + self._enqueue_batch(batch)

    def send(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncResult[Any]:
        """Store a call of the task registered as ``name``; raises ``TaskNotFoundError`` for an unknown one."""
        tasks = self.tasks
        if name not in tasks:
            raise TaskNotFoundError(f"no task is named {name!r}{nearest(str(name), tasks)}")
        return tasks[name]._push_to(
            self, tuple(check_list("args", args)), check_mapping("kwargs", kwargs), check_call(options)
        )

    def queue(self, name: str = DEFAULT_QUEUE, **options: Any) -> Queue:
        """A plain queue of payloads on this app's backend; options as of :class:`taskq.Queue`."""
        return Queue(name, backend=self.backend, **options)

    def result(self, job_id: str) -> AsyncResult[Any]:
        """The handle of a job stored earlier."""
        return AsyncResult(job_id, self)

    @property
    def inspector(self) -> Inspector:
        """For whoever looks at this app from outside."""
        return Inspector(self)

    @property
    def schedules(self) -> Schedules:
        """The schedules, to look at and to change while workers run."""
        return Schedules(self)

    def subscribe(self, subscriber: Subscriber, prefix: str = "") -> Callable[[], None]:
        """Call ``subscriber`` for this process's events whose name starts with ``prefix``."""
        return self.events.subscribe(subscriber, prefix)

    def worker(self, **options: Any) -> EmbeddedWorker:
        """A worker inside this process, for tests, scripts and ``memory://``: threads run the jobs.

        ``with app.worker(concurrency=4): ...`` runs until the block ends; ``app.worker().run(burst=True)``
        runs what is due and returns. Options are those of ``taskq worker``.
        """
        from taskq.worker.embedded import EmbeddedWorker

        return EmbeddedWorker(self, options)

    @contextlib.contextmanager
    def instead(self, backend: Backend) -> Iterator[Self]:
        """Within the block, hold jobs in ``backend``, and be the current app; the caller closes it."""
        with self._lock:
            mine, self._backend = self._backend, backend
        try:
            with using(self):
                yield self
        finally:
            with self._lock:
                self._backend = mine

    def close(self) -> None:
        """Let go of connections and files; the next use opens them again. Idempotent."""
        with self._lock:
            backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def __enter__(self) -> Self:
        """Make this the current app; leaving closes it."""
        stack = contextlib.ExitStack()
        stack.enter_context(using(self))
        self._entered.append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().close()
        if not self._entered:
            self.close()

    def _declare_limits(self, jobs: Sequence[Job]) -> None:
        """Before the first job under limits is stored, its backend learns them: once per task and process."""
        backend = self.backend
        if self._declared[0] is not backend:
            self._declared = (backend, set())
            backend.declare_limits([])
        known, tasks = self._declared[1], self.tasks
        new = {job.lane.task for job in jobs if job.lane is not None and job.lane.task not in known}
        declared = [tasks[name].limits for name in sorted(new) if name in tasks]
        wanted = [limits for limits in declared if limits is not None]
        for name in backend.declare_limits(wanted) if wanted else []:
            self.events.emit("limits.changed", task=name)
        known |= new

    def _enqueue_batch(self, batch: list[Job]) -> list[AsyncResult[Any]]:
        if not batch:
            return []
        stored = self.enqueue(batch)
        return [
            AsyncResult(job_id, self, deduplicated=job_id != job.id)
            for job_id, job in zip(stored, batch, strict=True)
        ]


def _make_default() -> TaskQ:
    return TaskQ(name="default")


set_default_factory(_make_default)

#: Declare a task without an app in hand; it joins the current app when it is used.
task: TaskDecorator = decorator(lambda made: add_task(shared_tasks, made), None)
