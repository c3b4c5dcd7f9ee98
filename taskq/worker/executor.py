"""Runs one job: decode, find the task, run the body, decide. Everything the body may do ends as a verdict.

Used inside a child. A step that fails gives a verdict too: a job is never lost here, and nothing of the user's
reaches the caller as an exception.
"""

from __future__ import annotations

import contextvars
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tenacity import TryAgain

from taskq import codec
from taskq.app import TaskQ
from taskq.clock import SYSTEM_CLOCK
from taskq.context import Context, Link, running
from taskq.errors import (
    Cancel,
    DecodeError,
    EncodeError,
    Interrupted,
    JobCancelled,
    Reject,
    RetryRequested,
    ShutdownRequested,
    Snooze,
    Steering,
    TaskNotFoundError,
    TimeLimitExceeded,
)
from taskq.job import Attempt, Job, Verdict, new_id
from taskq.middleware import around_run
from taskq.options import nearest
from taskq.registry import using
from taskq.retry import Decision, Situation
from taskq.tasks import Task
from taskq.worker.limits import CANCELLED, HARD, LEASE_LOST, SHUTDOWN

#: Longest message and traceback that an attempt keeps, in characters.
_MESSAGE: Final = 2_000
_TRACEBACK: Final = 16_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A verdict on one run, before it is tied to a reservation; the fields are those of ``job.Outcome``."""

    verdict: Verdict
    result: bytes | None = None
    due: float = 0.0
    attempt: Attempt | None = None
    error: str | None = None
    queue: str | None = None
    priority: int | None = None
    pushes: tuple[Job, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A job whose body can be called."""

    task: Task[Any, Any]
    context: Context
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    started: float


class Executor:
    """Runs jobs of one app."""

    def __init__(self, app: TaskQ, worker: str) -> None:
        self._app = app
        self._worker = worker
        self.tasks = app.tasks

    def open(self, job: Job, fence: int, link: Link) -> Run | Result:
        """Make the job runnable; a result where it cannot be."""
        now = SYSTEM_CLOCK.now()
        if job.expires is not None and job.expires <= now:
            return Result(verdict=Verdict.CANCEL, error="expired")
        task = self.tasks.get(job.task)
        try:
            if task is None:
                raise TaskNotFoundError(f"no task is named {job.task!r}{nearest(job.task, self.tasks)}")
            args, kwargs = codec.decode_call(job.payload)
            task.check_arguments(args, kwargs)
        except (DecodeError, TaskNotFoundError, TypeError) as error:
            return self._bury(job, error, now)
        held = task.policy.hold(now)
        if held > 0:
            return Result(verdict=Verdict.SNOOZE, due=now + held, error="circuit breaker open")
        limit = task.config.time_limit
        deadline = None if limit is None else now + limit
        context = Context(job, worker=self._worker, fence=fence, deadline=deadline, link=link)
        return Run(task, context, args, kwargs, now)

    def run(self, run: Run, guard: Callable[[Callable[[], Any]], Any]) -> Result:
        """Call the body of an ordinary function; ``guard`` calls it so that it can be interrupted."""
        try:
            value = contextvars.copy_context().run(guard, lambda: self._body(run))
        except BaseException as error:  # noqa: BLE001 - whatever the body raises is its verdict
            return self._after_error(run, error)
        return self._after_value(run, value)

    async def run_async(self, run: Run, guard: Callable[[Any], Awaitable[Any]]) -> Result:
        """Await the body of a coroutine function; ``guard`` drives it so that it can be interrupted."""
        token = running.set(run.context)
        try:
            with using(self._app):
                value = await guard(around_run(self._app.middleware, run.context, lambda: _coroutine(run)))
        except BaseException as error:  # noqa: BLE001 - as above; nobody else cancels the task this runs in
            return self._after_error(run, error)
        finally:
            running.reset(token)
        return self._after_value(run, value)

    def broken(self, job: Job, error: BaseException) -> Result:
        """For what went wrong around a body, not in it: no other run would fare better."""
        return self._bury(job, error, SYSTEM_CLOCK.now())

    def _body(self, run: Run) -> Any:
        running.set(run.context)
        with using(self._app):
            if not self._app.middleware:
                return run.task.call(run.context, run.args, run.kwargs)
            call = lambda: run.task.call(run.context, run.args, run.kwargs)  # noqa: E731
            return around_run(self._app.middleware, run.context, call)

    # -- verdicts ---------------------------------------------------------------------

    def _after_value(self, run: Run, value: Any) -> Result:
        job = run.context.job
        if run.task.policy.watches_successes:
            decision = self._decide(run, None, value)
            if decision.action != "accept":
                return self._failed(run, None, decision, rejected=value)
        try:
            result = codec.encode(value) if job.keep > 0 and value is not None else None
        except EncodeError as error:
            # Running it again would repeat its effects and end the same way.
            return self._bury(job, error, run.started)
        self._hook(run.task.config.on_success, run, value)
        return Result(verdict=Verdict.COMPLETE, result=result)

    def _after_error(self, run: Run, error: BaseException) -> Result:
        job = run.context.job
        error = _decisive(error)
        if isinstance(error, Snooze):
            return Result(verdict=Verdict.SNOOZE, due=SYSTEM_CLOCK.now() + error.seconds)
        if isinstance(error, Cancel):
            return Result(verdict=Verdict.CANCEL, error=_said(error.reason) or "cancelled by the task")
        if isinstance(error, Reject):
            self._hook(run.task.config.on_failure, run, error)
            return self._bury(job, error, run.started, kind="Reject", message=_said(error.reason))
        # A body that was interrupted may end with an error of its own: from a clean-up, or wrapped around ours.
        reason = run.context.cancel_reason
        if isinstance(error, ShutdownRequested) or reason == SHUTDOWN:
            return Result(verdict=Verdict.RELEASE)
        if isinstance(error, JobCancelled) or reason in {CANCELLED, LEASE_LOST}:
            return Result(verdict=Verdict.CANCEL, error=reason or CANCELLED)
        if reason == HARD and not isinstance(error, TimeLimitExceeded):
            limit = TimeLimitExceeded(HARD)
            limit.__cause__ = error
            error = limit
        return self._failed(run, error, self._decide(run, error, None))

    def _failed(
        self, run: Run, error: BaseException | None, decision: Decision, *, rejected: Any = None
    ) -> Result:
        job, config = run.context.job, run.task.config
        retried = decision.action == "retry"
        attempt = self._attempt(job, error, run.started)
        if error is None:
            attempt = replace(attempt, error_type="ResultRejected", message=_text(rejected))
        if error is not None and run.task.policy.expected(error):
            attempt = replace(attempt, traceback="")
        self._hook(config.on_failure, run, error)
        if retried:
            self._hook(config.on_retry, run, error)
            return Result(
                verdict=Verdict.RETRY,
                due=SYSTEM_CLOCK.now() + decision.delay if decision.delay > 0 else 0.0,
                attempt=replace(attempt, delay=decision.delay),
                error=attempt.error,
                queue=decision.queue,
                priority=decision.priority,
            )
        return Result(
            verdict=Verdict.BURY,
            attempt=attempt,
            error=attempt.error,
            pushes=self._exhausted(run, error),
        )

    def _decide(self, run: Run, error: BaseException | None, result: Any) -> Decision:
        job = run.context.job
        decision = run.task.policy.decide(
            Situation(
                attempts=job.attempts + 1,
                error=error,
                result=result,
                first_started=job.first_started or run.started,
                now=SYSTEM_CLOCK.now(),
                max_retries=job.max_retries,
            )
        )
        if decision.flaw:
            self._app.events.emit("policy.failed", job=job, error=decision.flaw)
        return decision

    def _bury(
        self, job: Job, error: BaseException, started: float, *, kind: str = "", message: str = ""
    ) -> Result:
        attempt = self._attempt(job, error, started)
        if kind:
            attempt = replace(attempt, error_type=kind, message=message, traceback="")
        return Result(verdict=Verdict.BURY, attempt=attempt, error=attempt.error)

    def _attempt(self, job: Job, error: BaseException | None, started: float) -> Attempt:
        return Attempt(
            number=job.attempts + 1,
            generation=job.generation,
            worker=self._worker,
            started=started,
            ended=SYSTEM_CLOCK.now(),
            error_type=_type_name(error),
            message=_message(error),
            traceback=_traceback(error),
        )

    # -- the user's hooks -------------------------------------------------------------

    def _hook(self, hook: Callable[..., object] | None, run: Run, about: Any) -> None:
        """Call ``hook(ctx, value or exception)``; its failure is told, and changes nothing."""
        if hook is None:
            return
        try:
            hook(run.context, about)
        except BaseException as error:  # noqa: BLE001 - the run's verdict stands
            self._app.events.emit(
                "hook.failed",
                job=run.context.job,
                hook=_text(hook),
                error=f"{_type_name(error)}: {_message(error)}",
            )

    def _exhausted(self, run: Run, error: BaseException | None) -> tuple[Job, ...]:
        """``on_exhausted``: a callable is called, a task is pushed by the write that buries the job."""
        wanted = run.task.policy.on_exhausted
        if not isinstance(wanted, Task):
            self._hook(wanted, run, error)
            return ()
        job = run.context.job
        told = {"job_id": job.id, "task": job.task, "error": f"{_type_name(error)}: {_message(error)}"}
        with using(self._app):
            return (replace(wanted.s(told).job(self._app), id=new_id()),)


def _decisive(error: BaseException) -> BaseException:
    """What steers or interrupts a run, also from inside a task group; else ``error`` itself."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found: BaseException = error.split((Steering, Interrupted))[0] or error
    while found is not error and isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


async def _coroutine(run: Run) -> Any:
    return await run.task.call(run.context, run.args, run.kwargs)


def _type_name(error: BaseException | None) -> str:
    if error is None:
        return ""
    kind = type(error)
    if isinstance(error, RetryRequested | TryAgain):
        return "RetryRequested"
    name = kind.__qualname__.rpartition("<locals>.")[2]
    return name if kind.__module__ in {"builtins", "taskq.errors"} else f"{kind.__module__}.{name}"


def _said(reason: object) -> str:
    """The reason of a decision as a text that can travel."""
    if isinstance(reason, str):
        return _cut(reason, _MESSAGE)
    if isinstance(reason, BaseException):
        return f"{_type_name(reason)}: {_message(reason)}"
    return _text(reason)


def _message(error: BaseException | None) -> str:
    if error is None:
        return ""
    try:
        text = str(error)
    except BaseException as failure:  # noqa: BLE001 - the user's __str__ may do anything
        text = f"(its __str__ raised {type(failure).__name__})"
    return _cut(text, _MESSAGE)


def _text(value: Any) -> str:
    try:
        text = repr(value)
    except BaseException as failure:  # noqa: BLE001 - the user's __repr__ may do anything
        text = f"(its __repr__ raised {type(failure).__name__})"
    return _cut(text, 200)


def _traceback(error: BaseException | None) -> str:
    if error is None:
        return ""
    try:
        text = "".join(traceback.format_exception(type(error), error, _user_frames(error)))
    except BaseException as failure:  # noqa: BLE001 - formatting calls the user's code
        text = f"(the traceback could not be formatted: {type(failure).__name__})"
    return _cut(text, _TRACEBACK)


def _user_frames(error: BaseException) -> Any:
    """The traceback from the first frame outside taskq on."""
    first = frames = error.__traceback__
    while first is not None and _is_ours(first.tb_frame.f_globals.get("__name__", "")):
        first = first.tb_next
    return first or frames


def _is_ours(module: str) -> bool:
    return module.startswith("taskq.")


def _cut(text: str, most: int) -> str:
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n… {len(text) - most:,} characters left out …\n{text[-most // 2 :]}"
