"""The app that a command works for: ``-A``, before or after the command."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from taskq.app import TaskQ

F = TypeVar("F", bound=Callable[..., Any])
_KEY = "taskq.app"


def app_option(*, envvar: str | None = None) -> Callable[[F], F]:
    """``-A/--app``. The one after the command wins over the one before it, and both over the environment."""
    return click.option(
        "-A",
        "--app",
        metavar="APP",
        envvar=envvar,
        show_envvar=envvar is not None,
        expose_value=False,
        callback=_remember,
        help="The app: a module (app, pkg.mod), module:name, or a file (app.py).",
    )


def _remember(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    if value:
        ctx.meta[_KEY] = value


def app_spec() -> str | None:
    """What ``-A`` or ``TASKQ_APP`` named, if anything."""
    return cast("str | None", click.get_current_context().meta.get(_KEY))


def need_app_spec() -> str:
    """What ``-A`` named; a usage error where it is missing."""
    spec = app_spec()
    if spec is None:
        raise click.UsageError("which app? Give -A APP (a module, module:name, or a file), or set TASKQ_APP")
    return spec


def open_app(*, required: bool = False) -> TaskQ:
    """The named app, closed when the command ends.

    Without a name it is the one that the settings make, unless the command needs an app's tasks.
    """
    spec = need_app_spec() if required else app_spec()
    app = _found(spec) if spec else _default()
    click.get_current_context().call_on_close(app.close)
    return app


def _found(spec: str) -> TaskQ:
    from taskq.discovery import find_app

    return find_app(spec)


def _default() -> TaskQ:
    from taskq.app import default_app

    return cast("TaskQ", default_app())
