"""Tasks: decorated functions whose calls can be stored as jobs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, ParamSpec, TypeVar, Unpack, cast

from taskq import codec
from taskq.clock import SYSTEM_CLOCK
from taskq.context import CONTEXT, Context, running
from taskq.errors import ConfigurationError, PayloadTooLargeError
from taskq.functions import Arguments, injection, module_name, refuse_what_no_worker_can_find
from taskq.job import Job, Lane, Unique, new_id
from taskq.limits import Limits, lane
from taskq.options import (
    NO_OPTIONS,
    RETRY_KEYWORDS,
    CallKeywords,
    CallOptions,
    check_call,
    check_list,
    check_mapping,
    check_task,
)
from taskq.registry import App, current_app
from taskq.result import AsyncResult
from taskq.retry import policy_from_options
from taskq.unique import UniqueRule, check_unique

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Signature(Generic[R_co]):
    """One intended call: a task, its arguments and the call's options, not stored yet."""

    task: Task[Any, R_co]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    options: CallOptions = NO_OPTIONS

    def delay(self) -> AsyncResult[R_co]:
        """Store the call as a job."""
        return self.task._push(self.args, self.kwargs or {}, self.options)

    def set(self, **options: Unpack[CallKeywords]) -> Signature[R_co]:
        """The same call with these options."""
        return replace(self, options=check_call(options))

    def job(self, app: App) -> Job:
        """The job as ``app`` would store it."""
        return self.task._job(app, self.args, self.kwargs or {}, self.options)


class Bound(Generic[P, R_co]):
    """A task with options for its next calls; :meth:`Task.options` returns it."""

    __slots__ = ("_options", "_task")

    def __init__(self, task: Task[P, R_co], options: CallOptions) -> None:
        self._task = task
        self._options = options

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]:
        """Store a call as a job; returns when it is stored."""
        return self._task._push(args, kwargs, self._options)

    async def adelay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]:
        """:meth:`delay` without blocking the event loop."""
        return await _in_thread(self._task._push, args, kwargs, self._options)

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Signature[R_co]:
        """A call to store later, alone or in a batch."""
        return self._task._signature(args, kwargs, self._options)


class Task(Generic[P, R_co]):
    """A function that can run later, in a worker.

    ``P`` are the caller's parameters (without an injected context), ``R_co`` the value a run returns.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        app: App | None,
        bind: bool,
        keywords: Mapping[str, Any],
    ) -> None:
        refuse_what_no_worker_can_find(fn, keywords.get("name"))
        self.fn = fn
        self.name: str = keywords.get("name") or f"{module_name(fn)}.{fn.__qualname__}"
        self.config = check_task(keywords)
        self.policy = policy_from_options(**{k: v for k, v in keywords.items() if k in RETRY_KEYWORDS})
        self.is_async = inspect.iscoroutinefunction(fn)
        self.inject: Final = injection(fn, bind=bind)
        self._app = app
        self._arguments = Arguments(self.name, fn, self.inject)
        for option in ("key", "fairness_key"):
            source = getattr(self.config.limits, option, None)
            if isinstance(source, str):
                self._arguments.refuse_unknown(option, source)
        self._unique = self._unique_rule({})
        self._check_timetable()
        self._check_on_exhausted()
        self.__name__ = fn.__name__
        self.__qualname__ = fn.__qualname__
        self.__module__ = fn.__module__
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn
        codec.register_annotations(fn)

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    @property
    def queue(self) -> str:
        """Where its jobs go unless the call says otherwise."""
        return self.config.queue or (self._app or current_app()).settings.queue

    @property
    def limits(self) -> Limits | None:
        """The limits it declares, in numbers; ``None`` for a task that its jobs run without."""
        declared = self.config.limits
        return declared.limits(self.name) if declared is not None and declared.limited else None

    def __set_name__(self, owner: type, name: str) -> None:
        raise ConfigurationError(
            f"{owner.__name__}.{name}: a method cannot be a task, because its instance would not travel; "
            "move it to module level and pass what it needs"
        )

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]:
        """Store a call as a job; returns when it is stored.

        Raises ``TypeError`` for arguments the function does not take, ``EncodeError`` for values that cannot
        travel, and a ``BackendError`` where the job is not (known to be) stored.
        """
        return self._push(args, kwargs, NO_OPTIONS)

    async def adelay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]:
        """:meth:`delay` without blocking the event loop."""
        return await _in_thread(self._push, args, kwargs, NO_OPTIONS)

    def apply_async(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[CallKeywords],
    ) -> AsyncResult[R_co]:
        """:meth:`delay` with the options of the call, in Celery's form; ``options()`` keeps types checked."""
        return self._push(
            tuple(check_list("args", args)), check_mapping("kwargs", kwargs), check_call(options)
        )

    def options(self, **options: Unpack[CallKeywords]) -> Bound[P, R_co]:
        """The task with options for its next calls: ``send.options(priority=5).delay(...)``."""
        return Bound(self, check_call(options))

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Signature[R_co]:
        """A call to store later, alone or in a batch."""
        return self._signature(args, kwargs, NO_OPTIONS)

    def call(self, ctx: Context, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the function with ``ctx`` where it asked for one; a coroutine where it is async."""
        if self.inject is None:
            return self.fn(*args, **kwargs)
        if self.inject == "":
            return self.fn(ctx, *args, **kwargs)
        return self.fn(*args, **{**kwargs, self.inject: ctx})

    def check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` for arguments the function does not take."""
        self._arguments.check(args, kwargs)

    def _signature(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions
    ) -> Signature[R_co]:
        self._arguments.check(args, kwargs)
        return Signature(self, tuple(args), kwargs, options)

    def _push(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions
    ) -> AsyncResult[R_co]:
        return self._push_to(self._app or current_app(), args, kwargs, options)

    def _push_to(
        self, app: App, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions
    ) -> AsyncResult[R_co]:
        job = self._job(app, args, kwargs, options)
        (stored,) = app.enqueue([job])
        return AsyncResult(stored, app, deduplicated=stored != job.id)

    def _job(self, app: App, args: Sequence[Any], kwargs: Mapping[str, Any], call: CallOptions) -> Job:
        self._arguments.check(args, kwargs)
        config, settings, now = self.config, app.settings, SYSTEM_CLOCK.now()
        payload = codec.encode_call(tuple(args), dict(kwargs))
        if len(payload) > settings.max_payload:
            raise PayloadTooLargeError(
                f"the arguments of {self.name} take {len(payload):,} bytes, more than max_payload="
                f"{settings.max_payload:,}: store the data elsewhere and pass its address"
            )
        lease = call.lease if call.lease is not None else config.lease
        rule = self._unique_rule(call.unique) if call.unique else self._unique
        return Job(
            id=call.job_id or new_id(),
            queue=call.queue or config.queue or settings.queue,
            task=self.name,
            payload=payload,
            priority=config.priority if call.priority is None else call.priority,
            due=_due(call, now) if rule is None or rule.wait is None else _debounced(call, now + rule.wait),
            expires=_expires(call, config.expires, now),
            lease=settings.visibility_timeout if lease is None else lease,
            max_retries=call.max_retries
            if call.max_retries is not None or call.unlimited
            else self.policy.max_retries,
            loss_base=self.policy.loss_base,
            loss_cap=self.policy.loss_cap,
            keep=self._keep(call, settings.result_ttl),
            headers=call.headers,
            created=now,
            unique=None if rule is None else self._key(app, rule, args, kwargs, now),
            lane=self._lane(args, kwargs, call),
        )

    def _lane(self, args: Sequence[Any], kwargs: Mapping[str, Any], call: CallOptions) -> Lane | None:
        given = (call.key, call.fairness_key, call.weight)
        if self.config.limits is None and given == (None, None, None):
            return None
        return lane(
            self.name,
            self.config.limits,
            given,
            lambda source: self._arguments.work_out(source, args, kwargs),
        )

    def _check_timetable(self) -> None:
        """A task that is run by a schedule must be callable without arguments, and its app must remember."""
        if self.config.timetable is None:
            return
        try:
            self._arguments.check((), {})
        except TypeError as error:
            raise ConfigurationError(f"a schedule calls {self.name} without arguments: {error}") from None
        if self._app is not None and not self._app.settings.stores:
            self._app.need_store(f"schedules ({self.name})")

    def _check_on_exhausted(self) -> None:
        wanted = self.policy.on_exhausted
        if isinstance(wanted, Task):
            try:
                wanted.check_arguments(({},), {})
            except TypeError as error:
                raise ConfigurationError(
                    f"on_exhausted= of {self.name}: it is called with one dict: {error}"
                ) from None
        elif wanted is not None and not callable(wanted):
            raise ConfigurationError(f"on_exhausted={wanted!r} of {self.name}: use a task or a callable")

    def _unique_rule(self, call: Mapping[str, Any]) -> UniqueRule | None:
        rule = check_unique(self.config.unique, call)
        if rule is not None and isinstance(rule.by, tuple):
            for name in rule.by:
                if not self._arguments.knows(name):
                    raise ConfigurationError(f"unique= of {self.name}: it has no parameter {name!r}")
        return rule

    def _key(
        self, app: App, rule: UniqueRule, args: Sequence[Any], kwargs: Mapping[str, Any], now: float
    ) -> Unique:
        app.need_store("unique jobs")
        key = rule.key(self.name, args, kwargs, lambda: self._arguments.named(args, kwargs))
        return rule.unique(key, now)

    def _keep(self, call: CallOptions, default: float) -> float:
        ignored = self.config.ignore_result if call.ignore_result is None else call.ignore_result
        if ignored:
            return 0.0
        if call.keep is not None:
            return call.keep
        return default if self.config.keep is None else self.config.keep


class SyncTask(Task[P, R_co]):
    """A task whose function is an ordinary one."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function here and now."""
        return cast("R_co", self.call(running.get() or CONTEXT, args, kwargs))


class AsyncTask(Task[P, R_co]):
    """A task whose function is ``async def``."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]:
        """Call the function here; await what it returns."""
        return cast("Coroutine[Any, Any, R_co]", self.call(running.get() or CONTEXT, args, kwargs))


def _due(call: CallOptions, now: float) -> float:
    if call.countdown is not None:
        return now + call.countdown if call.countdown > 0 else 0.0
    return call.eta or 0.0


def _debounced(call: CallOptions, due: float) -> float:
    if call.countdown is not None or call.eta is not None:
        raise ConfigurationError("debounce= decides when the job is due: give no countdown or eta")
    return due


def _expires(call: CallOptions, declared: float | None, now: float) -> float | None:
    if call.expires_at is not None:
        return call.expires_at
    within = declared if call.expires_in is None else call.expires_in
    return None if within is None else now + within


async def _in_thread(fn: Callable[..., R], *args: Any) -> R:
    import asyncio

    return await asyncio.to_thread(fn, *args)
