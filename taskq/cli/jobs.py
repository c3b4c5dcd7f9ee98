"""``taskq call``, ``cancel`` and ``tasks``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from taskq.backend import Cancellation
from taskq.cli import show
from taskq.cli.apps import app_option, open_app
from taskq.job import MAX_PRIORITY

if TYPE_CHECKING:
    from taskq.tasks import Task


@click.command()
@app_option()
@click.argument("task")
@click.argument("arguments", nargs=-1, metavar="[ARGS]")
@click.option("--countdown", type=float, metavar="SECONDS", help="Not before this time has passed.")
@click.option("--queue", metavar="NAME", help="Another queue than the task's own.")
@click.option("--priority", type=click.IntRange(0, MAX_PRIORITY), help="Higher runs first.")
def call(task: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Store a call of TASK and print the job's id.

    ARGS is JSON: an array of positional arguments, an object of keyword arguments, or one of each.

    \b
    taskq call -A app app.add '[1, 2]'
    taskq call -A app app.send_email '["a@b.c"]' '{"subject": "hi"}'
    """  # noqa: D301 - click wants the character, not its name
    args, kwargs = _arguments(arguments)
    app = open_app(required=True)
    given = {name: value for name, value in options.items() if value is not None}
    if task in app.tasks:
        _check_arguments(app.tasks[task], args, kwargs)
    click.echo(app.send(task, args, kwargs, **given).id)


def _check_arguments(task: Task[Any, Any], args: list[Any], kwargs: dict[str, Any]) -> None:
    try:
        task.check_arguments(args, kwargs)
    except TypeError as error:
        raise click.UsageError(str(error)) from error


def _arguments(documents: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
    found: dict[type, Any] = {}
    for document in documents:
        try:
            value = json.loads(document)
        except ValueError as error:
            raise click.UsageError(f"ARGS {document!r} is not JSON: {error}") from error
        if not isinstance(value, list | dict):
            raise click.UsageError(f"ARGS {document!r}: give an array, [{document}], or an object")
        if type(value) in found:
            raise click.UsageError("ARGS: give one array and one object at most")
        found[type(value)] = value
    return found.get(list, []), found.get(dict, {})


_SAID = {
    Cancellation.CANCELLED: "cancelled",
    Cancellation.REQUESTED: "is running; its worker is told",
    Cancellation.ENDED: "had ended already",
    Cancellation.UNKNOWN: "is not known",
}


@click.command()
@app_option()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--reason", default="", help="Kept with the job.")
def cancel(ids: tuple[str, ...], reason: str) -> None:
    """Cancel jobs: waiting ones end now, running ones are asked to."""
    answers = open_app().inspector.cancel(ids, reason=reason)
    for job_id, answer in answers.items():
        click.echo(f"{job_id} {_SAID[answer]}")
    if Cancellation.UNKNOWN in answers.values():
        raise SystemExit(1)


@click.command()
@app_option()
def tasks() -> None:
    """List the tasks that the app can run, and their queues."""
    found = open_app(required=True).tasks
    show.table(("TASK", "QUEUE"), [(name, found[name].queue) for name in sorted(found)])
