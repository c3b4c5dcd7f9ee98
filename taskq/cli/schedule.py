"""``taskq schedule``: look at schedules, pause, resume, trigger and remove them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from taskq.cli import show
from taskq.cli.apps import app_option, open_app
from taskq.schedules import ScheduleView


@click.group()
@app_option()
def schedule() -> None:
    """Look at schedules, pause, resume, trigger and remove them."""


@schedule.command("list")
@app_option()
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def list_(as_json: bool) -> None:
    """List the schedules, those made at run time and those that code declares."""
    views = open_app().schedules.list()
    if as_json:
        show.as_json([_fields(view) for view in views])
        return
    rows = [
        (
            view.name + (" (paused)" if view.paused else ""),
            view.task,
            view.description,
            _moment(view.next, view),
            _moment(view.last, view),
        )
        for view in views
    ]
    show.table(("SCHEDULE", "TASK", "WHEN", "NEXT", "LAST"), rows)


@schedule.command("show")
@app_option()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def show_(name: str, as_json: bool) -> None:
    """Show one schedule."""
    view = open_app().schedules.get(name)
    if as_json:
        show.as_json(_fields(view))
        return
    for field, value in _details(view):
        click.echo(f"{field:<12}{value}")


@schedule.command()
@app_option()
@click.argument("name")
def pause(name: str) -> None:
    """Let nothing of NAME come due until resumed."""
    open_app().schedules.pause(name)
    click.echo(f"{name} is paused")


@schedule.command()
@app_option()
@click.argument("name")
def resume(name: str) -> None:
    """Undo pause; what passed meanwhile is not made up for."""
    view = open_app().schedules.resume(name)
    click.echo(f"{name} goes on; next {_moment(view.next, view)}")


@schedule.command()
@app_option()
@click.argument("name")
def trigger(name: str) -> None:
    """Store the job of NAME now, and print its id."""
    click.echo(open_app().schedules.trigger(name).id)


@schedule.command()
@app_option()
@click.argument("name")
def remove(name: str) -> None:
    """Forget NAME. One that running code declares can only be paused."""
    open_app().schedules.remove(name)
    click.echo(f"{name} is removed")


def _details(view: ScheduleView) -> list[tuple[str, object]]:
    misfire = view.timetable.misfire
    made_up = "at most 1 instant" if misfire.most == 1 else f"at most {misfire.most} instants"
    age = "of any age" if misfire.max_age is None else f"up to {misfire.max_age} late"
    origin = f"code, said at {_moment(view.declared, view)}" if view.declared else "run time"
    return [
        ("name", view.name),
        ("task", view.task),
        ("queue", view.queue),
        ("when", view.description),
        ("jitter", view.timetable.schedule.jitter or "-"),
        ("overlap", view.timetable.overlap.value),
        ("missed", f"{made_up} {age}"),
        ("declared", origin),
        ("state", "paused" if view.paused else "active"),
        ("next", _moment(view.next, view)),
        ("last", _moment(view.last, view)),
        ("last job", view.last_job or "-"),
        ("revision", view.revision),
    ]


def _fields(view: ScheduleView) -> dict[str, Any]:
    misfire = view.timetable.misfire
    return {
        "name": view.name,
        "task": view.task,
        "queue": view.queue,
        "when": view.description,
        "overlap": view.timetable.overlap.value,
        "misfire": {
            "most": misfire.most,
            "max_age": None if misfire.max_age is None else misfire.max_age.total_seconds(),
        },
        "paused": view.paused,
        "declared": view.declared and view.declared.isoformat(),
        "next": view.next and view.next.isoformat(),
        "last": view.last and view.last.isoformat(),
        "last_job": view.last_job,
        "revision": view.revision,
    }


def _moment(moment: datetime | None, view: ScheduleView) -> str:
    """For people: in the schedule's own zone, and which that is."""
    if moment is None:
        return "-"
    zone = getattr(view.timetable.schedule, "zone", None)
    local = moment if zone is None else moment.astimezone(zone)
    return f"{local:%Y-%m-%d %H:%M:%S} {local.tzname()}"
