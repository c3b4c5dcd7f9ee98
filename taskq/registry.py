"""Which app a task belongs to when nobody says so."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from taskq.backend import Backend
from taskq.errors import ConfigurationError
from taskq.job import Job
from taskq.settings import Settings
from taskq.store import Store


class App(Protocol):
    """What tasks, queues and results need of the app they work for."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def backend(self) -> Backend: ...

    @property
    def tasks(self) -> Any: ...

    def need_store(self, feature: str) -> Store: ...

    def enqueue(self, jobs: Sequence[Job]) -> list[str]: ...


_current: ContextVar[App | None] = ContextVar("taskq_app", default=None)
_apps: weakref.WeakSet[App] = weakref.WeakSet()
_default: App | None = None
_make_default: Callable[[], App] | None = None

#: Tasks declared by ``@task`` without an app: every app can see and run them.
shared_tasks: dict[str, Any] = {}


def register_app(app: App) -> None:
    """Remember that ``app`` exists."""
    _apps.add(app)


def set_default_factory(make: Callable[[], App]) -> None:
    """Say how to make the app for processes that declare none."""
    global _make_default
    _make_default = make


@contextlib.contextmanager
def using(app: App) -> Iterator[None]:
    """Make ``app`` the current one for this thread or coroutine."""
    token = _current.set(app)
    try:
        yield
    finally:
        _current.reset(token)


def default_app() -> App:
    """The app made from settings alone, for processes that declare none."""
    global _default
    if _default is None:
        assert _make_default is not None
        _default = _make_default()
    return _default


def current_app() -> App:
    """The app of the enclosing ``with app:`` or running job; else the only app; else the default one.

    Raises ``ConfigurationError`` naming the candidates where several apps exist and none is current.
    """
    app = _current.get()
    if app is not None:
        return app
    apps = [app for app in list(_apps) if app is not _default]
    if len(apps) == 1:
        return apps[0]
    if not apps:
        return default_app()
    names = ", ".join(sorted(app.name for app in apps))
    raise ConfigurationError(
        f"several apps exist ({names}): declare the task with @app.task, or push inside `with app:`"
    )
