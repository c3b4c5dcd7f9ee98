"""The handle that ``delay`` returns: follow a job, wait for its value, cancel it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from datetime import datetime
from typing import Any, Generic, TypeVar, cast

from taskq import codec
from taskq.backend import Cancellation
from taskq.clock import Duration, monotonic, to_datetime
from taskq.errors import ResultNotFoundError, ResultTimeoutError, TaskCancelledError, TaskFailedError
from taskq.job import Attempt, Job, State
from taskq.options import check_seconds
from taskq.registry import App
from taskq.store import Store

R_co = TypeVar("R_co", covariant=True)

#: How long one wait may block before an asyncio waiter looks whether it was cancelled, in seconds.
_SLICE = 0.5


class AsyncResult(Generic[R_co]):
    """What is known of a job. Reading never consumes it; it is kept ``result_ttl`` seconds after the end."""

    __slots__ = ("_app", "deduplicated", "id")

    def __init__(self, job_id: str, app: App, *, deduplicated: bool = False) -> None:
        self.id = job_id
        #: Whether this is a job that was there already and holds the key of the call: see ``unique=``.
        self.deduplicated = deduplicated
        self._app = app

    def __repr__(self) -> str:
        return f"<AsyncResult {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncResult) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def job(self) -> Job | None:
        """The whole record as it stands now; ``None`` where nothing is known (any more)."""
        return self._store.find(self.id)

    @property
    def state(self) -> State | None:
        """Where the job stands; ``None``: never stored, or ended and kept no longer."""
        job = self.job()
        return None if job is None else job.state

    def ready(self) -> bool:
        """Whether the job has ended; also true where its record is gone."""
        job = self.job()
        return job is None or job.state.ended

    def successful(self) -> bool:
        """Whether the job has completed."""
        return self.state is State.COMPLETED

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The runs that ended badly, oldest first (the latest twenty)."""
        job = self.job()
        return () if job is None else job.history

    @property
    def ended(self) -> datetime | None:
        """When the job ended."""
        job = self.job()
        return None if job is None or job.ended is None else to_datetime(job.ended)

    @property
    def progress(self) -> Any:
        """What the run last gave to ``ctx.progress``; ``None`` before that."""
        noted = self._store.progress(self.id)
        return None if noted is None else codec.decode(noted)

    def get(self, timeout: Duration | None = None) -> R_co:
        """Wait for the end and return the value.

        Raises ``TaskFailedError`` (the job is dead), ``TaskCancelledError``, ``ResultNotFoundError``, or
        ``ResultTimeoutError`` after ``timeout`` seconds (``None``: wait for ever).
        """
        limit = None if timeout is None else check_seconds("timeout", timeout)
        if not self._store.wait([self.id], limit):
            raise self._timed_out(limit)
        return self._value()

    async def aget(self, timeout: Duration | None = None) -> R_co:  # noqa: ASYNC109 - get()'s twin
        """:meth:`get` without blocking the event loop."""
        limit = None if timeout is None else check_seconds("timeout", timeout)
        until = None if limit is None else monotonic() + limit
        while True:
            left = _SLICE if until is None else min(_SLICE, max(0.0, until - monotonic()))
            if await asyncio.to_thread(self._store.wait, [self.id], left):
                return await asyncio.to_thread(self._value)
            if until is not None and monotonic() >= until:
                raise self._timed_out(limit)

    def __await__(self) -> Generator[Any, None, R_co]:
        return self.aget().__await__()

    def cancel(self, reason: str = "") -> Cancellation:
        """Keep the job from starting, or ask its worker to stop it; says which."""
        return self._app.backend.cancel([self.id], reason=reason)[self.id]

    def revive(self) -> bool:
        """Give the job a new life if it is dead; whether it was."""
        job = self.job()
        return job is not None and bool(self._app.backend.revive(job.queue, [self.id]))

    def forget(self) -> bool:
        """Delete the record of the ended job; whether there was one."""
        return self._app.backend.forget([self.id]) == 1

    @property
    def _store(self) -> Store:
        return self._app.need_store("results")

    def _value(self) -> R_co:
        job = self.job()
        if job is None:
            raise ResultNotFoundError(
                f"nothing is known of job {self.id}: it was never stored, or it has ended and its result is "
                "kept no longer (ignore_result, result_ttl)"
            )
        if job.state is State.COMPLETED:
            return cast("R_co", None if job.result is None else codec.decode(job.result))
        if job.state is State.CANCELLED:
            raise TaskCancelledError(
                f"{job.task or 'job'} {job.id} was cancelled: {job.error or 'no reason given'}"
            )
        last = job.history[-1] if job.history else Attempt(number=0, error_type=job.error or "")
        raise TaskFailedError(
            f"{job.task or 'job'} {job.id} is dead: {job.error}",
            type_name=last.error_type,
            text=last.message,
            traceback=last.traceback,
        )

    def _timed_out(self, limit: float | None) -> ResultTimeoutError:
        return ResultTimeoutError(f"job {self.id} has not ended within {limit:g} seconds")


#: The same, for readers to whom ``AsyncResult`` sounds like asyncio.
Result = AsyncResult
