"""The command line. Each command lives in a module of its own, loaded when it is asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import click

from taskq import __version__
from taskq.cli.apps import app_option
from taskq.errors import ConfigurationError, ScheduleNotFoundError, TaskNotFoundError, TaskQError

#: Every command and the module that holds it under the same name.
COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "worker": "taskq.cli.worker",
        "call": "taskq.cli.jobs",
        "cancel": "taskq.cli.jobs",
        "tasks": "taskq.cli.jobs",
        "size": "taskq.cli.queues",
        "pause": "taskq.cli.queues",
        "resume": "taskq.cli.queues",
        "limits": "taskq.cli.queues",
        "dead": "taskq.cli.dead",
        "schedule": "taskq.cli.schedule",
        "workers": "taskq.cli.workers",
        "doctor": "taskq.cli.doctor",
        "bench": "taskq.cli.bench",
    }
)


class Failure(click.ClickException):
    """A taskq error as the command line shows it: its message."""

    def __init__(self, error: TaskQError) -> None:
        super().__init__(str(error) or type(error).__name__)


class Misuse(Failure):
    """An error about what the caller gave."""

    exit_code = 2


class Commands(click.Group):
    """Finds commands by name, without importing the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command = getattr(importlib.import_module(module), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
            ctx.fail(f"no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigurationError, ScheduleNotFoundError, TaskNotFoundError) as error:
            raise Misuse(error) from error
        except TaskQError as error:
            raise Failure(error) from error


@click.command(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@app_option(envvar="TASKQ_APP")
@click.version_option(__version__, prog_name="taskq")
def main() -> None:
    """Run Python functions later, elsewhere, and reliably."""
