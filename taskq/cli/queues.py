"""``taskq size``, ``pause``, ``resume`` and ``limits``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click

from taskq.backend import Scope
from taskq.cli import show
from taskq.cli.apps import app_option, open_app
from taskq.job import State


@click.command()
@app_option()
@click.argument("queue", required=False)
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def size(queue: str | None, as_json: bool) -> None:
    """Count jobs per queue and state."""
    queues = open_app().inspector.queues(queue)
    if as_json:
        show.as_json(
            {each.name: {state.value: each.counts.get(state, 0) for state in State} for each in queues}
        )
        return
    states = [state for state in State if state in _ALWAYS or any(each.counts.get(state) for each in queues)]
    rows = [
        (each.name + (" (paused)" if each.paused else ""), *(each.counts.get(state, 0) for state in states))
        for each in queues
    ]
    show.table(("QUEUE", *(state.value.upper() for state in states)), rows)


#: Columns that are shown even where every count is zero.
_ALWAYS = frozenset({State.PENDING, State.SCHEDULED, State.RESERVED, State.DEAD})


@click.command()
@app_option()
@click.argument("queue", required=False)
@click.option("--task", "tasks", multiple=True, metavar="NAME", help="A task, in every queue.")
@click.option("--key", "keys", multiple=True, metavar="KEY", help="A key, in every queue and of every task.")
def pause(queue: str | None, tasks: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """Lend no more jobs of QUEUE, of a task or of a key, on every worker, until resumed.

    With nothing named, list what is paused.
    """
    backend = open_app().inspector
    chosen = _chosen(queue, tasks, keys)
    for what, name in chosen:
        backend.pause(name, what)
        click.echo(f"{_said(what, name)} is paused")
    if not chosen:
        rows = [(what, name) for what in _SCOPES for name in sorted(backend.paused(what))]
        show.table(("WHAT", "PAUSED"), rows)


@click.command()
@app_option()
@click.argument("queue", required=False)
@click.option("--task", "tasks", multiple=True, metavar="NAME", help="A task.")
@click.option("--key", "keys", multiple=True, metavar="KEY", help="A key.")
def resume(queue: str | None, tasks: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """Undo pause."""
    chosen = _chosen(queue, tasks, keys)
    if not chosen:
        raise click.UsageError("name a QUEUE, --task NAME or --key KEY; `taskq pause` lists what is paused")
    backend = open_app().inspector
    for what, name in chosen:
        backend.resume(name, what)
        click.echo(f"{_said(what, name)} is open")


@click.command()
@app_option()
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def limits(as_json: bool) -> None:
    """List the limits that tasks declared last."""
    found = sorted(open_app().inspector.limits().values(), key=lambda each: each.task)
    columns = ("rate", "concurrency", "key_rate", "key_concurrency")
    if as_json:
        show.as_json({each.task: {name: getattr(each, name) for name in columns} for each in found})
        return
    rows = [
        (each.task, *("-" if getattr(each, name) is None else str(getattr(each, name)) for name in columns))
        for each in found
    ]
    show.table(("TASK", *(name.upper().replace("_", " ") for name in columns)), rows)


_SCOPES: Final[tuple[Scope, ...]] = ("queue", "task", "key")


def _chosen(queue: str | None, tasks: Sequence[str], keys: Sequence[str]) -> list[tuple[Scope, str]]:
    chosen: list[tuple[Scope, str]] = [] if queue is None else [("queue", queue)]
    chosen += [("task", name) for name in tasks]
    return chosen + [("key", name) for name in keys]


def _said(what: Scope, name: str) -> str:
    return name if what == "queue" else f"{what} {name}"
