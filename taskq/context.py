"""What a running task may know of its job and do about it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final, NoReturn, Protocol

from taskq.clock import SYSTEM_CLOCK, Duration
from taskq.errors import RetryRequested
from taskq.job import Job
from taskq.options import check_lease, check_priority, check_queue, check_seconds


class Link(Protocol):
    """The way from a run to the supervisor that holds its reservation."""

    def extend(self, seconds: float) -> None: ...

    def progress(self, value: Any) -> None: ...


class Context:
    """The running job, handed to a task that declares ``bind=True`` or a parameter ``ctx: Context = CONTEXT``.

    In a plain call, outside a worker, it describes a first attempt and its verbs do nothing.
    """

    __slots__ = ("_cancel_reason", "_link", "deadline", "fence", "job", "worker")

    def __init__(
        self,
        job: Job,
        *,
        worker: str = "",
        fence: int = 0,
        deadline: float | None = None,
        link: Link | None = None,
    ) -> None:
        self.job = job
        self.worker = worker
        #: Grows with every reservation of any job: hand it to a system that refuses older writers.
        self.fence = fence
        #: When the hard time limit ends this run, in Unix seconds.
        self.deadline = deadline
        self._link = link
        self._cancel_reason: str | None = None

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def task(self) -> str:
        return self.job.task

    @property
    def queue(self) -> str:
        return self.job.queue

    @property
    def headers(self) -> Mapping[str, Any]:
        """What the caller attached; taskq never reads it."""
        return self.job.headers

    @property
    def attempt(self) -> int:
        """1 in the first run; grows with every run that ended badly."""
        return self.job.attempts + 1

    @property
    def max_retries(self) -> int | None:
        return self.job.max_retries

    @property
    def last_attempt(self) -> bool:
        """Whether a failure of this run would bury the job."""
        return self.job.max_retries is not None and self.job.attempts >= self.job.max_retries

    @property
    def cancelled(self) -> bool:
        """Whether this run should stop; see :attr:`cancel_reason`."""
        return self._cancel_reason is not None

    @property
    def cancel_reason(self) -> str | None:
        """``"cancelled"``, ``"lease lost"``, ``"time limit"`` or ``"shutdown"`` once :attr:`cancelled`."""
        return self._cancel_reason

    def time_left(self) -> float | None:
        """Seconds until the hard time limit; ``None`` without one."""
        return None if self.deadline is None else self.deadline - SYSTEM_CLOCK.now()

    def extend(self, seconds: Duration) -> None:
        """Hold the lease for at least ``seconds`` from now; renewals go on as before after that."""
        if self._link is not None:
            self._link.extend(check_seconds("extend", seconds))
        else:
            check_lease(seconds)

    def progress(self, value: Any) -> None:
        """Show ``value`` (anything that can be an argument) to whoever asks ``AsyncResult.progress``."""
        if self._link is not None:
            self._link.progress(value)

    def retry(
        self,
        reason: str | BaseException = "",
        *,
        exc: BaseException | None = None,
        countdown: Duration | None = None,
        queue: str | None = None,
        priority: int | None = None,
    ) -> NoReturn:
        """Run again: ``ctx.retry("not ready", countdown=30)`` raises, and so does ``raise ctx.retry(...)``.

        It counts as a failed attempt. Without ``countdown`` the task's policy decides the delay. ``exc`` is
        another way to say the reason.
        """
        raise RetryRequested(
            str(reason or exc or ""),
            countdown=None if countdown is None else check_seconds("countdown", countdown),
            queue=None if queue is None else check_queue(queue),
            priority=None if priority is None else check_priority(priority),
        ) from exc

    def _cancel(self, reason: str) -> None:
        if self._cancel_reason is None:
            self._cancel_reason = reason


#: The default of a parameter that wants the running job: ``def f(x: int, ctx: Context = CONTEXT)``.
CONTEXT: Final = Context(Job(id=""))

running: ContextVar[Context | None] = ContextVar("taskq_running", default=None)


def current_context() -> Context | None:
    """The context of the run this code is part of; ``None`` outside a worker."""
    return running.get()
