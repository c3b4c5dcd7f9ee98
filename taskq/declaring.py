"""``@task`` itself: what it accepts, and the type of what it makes of a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

from taskq.context import Context
from taskq.errors import ConfigurationError
from taskq.functions import place
from taskq.options import TaskKeywords, check_task
from taskq.registry import App
from taskq.tasks import AsyncTask, SyncTask, Task

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """What ``@app.task(...)`` returns."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, fn: Callable[P, R], /) -> SyncTask[P, R]: ...


class BoundDecorator(Protocol):
    """What ``@app.task(bind=True, ...)`` returns: the first parameter receives the context."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, fn: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[Context, P], R], /) -> SyncTask[P, R]: ...


class TaskDecorator(Protocol):
    """``task`` itself: bare, with options, or with ``bind=True``."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, fn: Callable[P, R], /) -> SyncTask[P, R]: ...

    @overload
    def __call__(
        self, fn: None = None, /, *, bind: Literal[True], **options: Unpack[TaskKeywords]
    ) -> BoundDecorator: ...

    @overload
    def __call__(
        self, fn: None = None, /, *, bind: Literal[False] = False, **options: Unpack[TaskKeywords]
    ) -> Decorator: ...


def decorator(register: Callable[[Task[Any, Any]], None], app: App | None) -> TaskDecorator:
    """Make a ``task`` decorator whose tasks belong to ``app`` and are announced to ``register``."""

    def declare(fn: Any = None, /, *, bind: bool = False, **keywords: Any) -> Any:
        def wrap(fn: Callable[..., Any]) -> Task[Any, Any]:
            kind = AsyncTask if inspect.iscoroutinefunction(fn) else SyncTask
            made: Task[Any, Any] = kind(fn, app=app, bind=bind, keywords=keywords)
            register(made)
            return made

        if fn is None:
            check_task(keywords)
            return wrap
        return wrap(fn)

    return cast("TaskDecorator", declare)


def add_task(registry: dict[str, Any], task: Task[Any, Any]) -> None:
    """Register ``task``; another function under the same name is refused."""
    there = registry.get(task.name)
    if there is not None and place(there.fn) != place(task.fn):
        raise ConfigurationError(
            f"two tasks are named {task.name!r} ({place(there.fn)} and {place(task.fn)}): give one a name="
        )
    registry[task.name] = task
