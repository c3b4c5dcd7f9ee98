"""``taskq dead``: look at dead jobs, give them a new life, or delete them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from taskq.cli import show
from taskq.cli.apps import app_option, open_app
from taskq.job import Attempt, Job, State

if TYPE_CHECKING:
    from taskq.app import TaskQ


@click.group()
@app_option()
def dead() -> None:
    """Look at dead jobs, revive them, or delete them."""


@dead.command("list")
@app_option()
@click.argument("queue")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most so many."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def list_(queue: str, limit: int, as_json: bool) -> None:
    """List the dead jobs of QUEUE, oldest first."""
    page = open_app().inspector.jobs(queue, State.DEAD, limit=limit)
    if as_json:
        show.as_json([_summary(job) for job in page.jobs])
        return
    rows = [
        (job.id, job.task or "-", show.instant(job.ended), job.attempts, show.one_line(job.error))
        for job in page.jobs
    ]
    show.table(("ID", "TASK", "DIED", "ATTEMPTS", "ERROR"), rows)
    if page.cursor is not None:
        click.echo(f"… and more; --limit shows more than {limit}", err=True)


def _summary(job: Job) -> dict[str, object]:
    return {
        "id": job.id,
        "queue": job.queue,
        "task": job.task,
        "attempts": job.attempts,
        "created": show.instant(job.created),
        "ended": show.instant(job.ended),
        "error": job.error,
    }


@dead.command("show")
@app_option()
@click.argument("job_id", metavar="ID")
def show_(job_id: str) -> None:
    """Show a job and how its attempts ended."""
    job = open_app().inspector.job(job_id)
    for name, value in _details(job):
        click.echo(f"{name:<12}{value}")
    for attempt in job.history:
        _print_attempt(attempt)


def _details(job: Job) -> list[tuple[str, object]]:
    limit = "for ever" if job.max_retries is None else str(job.max_retries)
    return [
        ("id", job.id),
        ("task", job.task or "-"),
        ("queue", job.queue),
        ("state", job.state.value),
        ("priority", job.priority),
        ("attempts", f"{job.attempts} (max_retries {limit}), generation {job.generation}"),
        ("deliveries", job.deliveries),
        ("losses", job.losses),
        ("created", show.instant(job.created)),
        ("started", show.instant(job.first_started)),
        ("ended", show.instant(job.ended)),
        ("unique", job.unique.key if job.unique else "-"),
        ("payload", f"{len(job.payload)} bytes"),
        ("error", job.error or "-"),
    ]


def _print_attempt(attempt: Attempt) -> None:
    click.echo(
        f"\nattempt {attempt.number} ended {show.instant(attempt.ended)} on {attempt.worker or 'no worker'}"
    )
    click.echo((attempt.traceback or attempt.error).rstrip())


@dead.command()
@app_option()
@click.argument("queue")
@click.argument("ids", metavar="[ID...]", nargs=-1)
def revive(queue: str, ids: tuple[str, ...]) -> None:
    """Give the dead jobs of QUEUE, or those named, a new life with all their retries."""
    app = open_app()
    revived = app.inspector.revive(queue, ids or None)
    for job_id in revived:
        click.echo(job_id)
    missed = {job_id: _why_not(app, job_id, queue) for job_id in ids if job_id not in revived}
    for why in dict.fromkeys(missed.values()):
        click.echo(f"{why}: {', '.join(each for each in missed if missed[each] == why)}", err=True)
    if missed:
        raise SystemExit(1)


def _why_not(app: TaskQ, job_id: str, queue: str) -> str:
    job = None if app.store is None else app.store.find(job_id)
    if job is not None and job.state is State.DEAD and job.queue == queue:
        return "still dead, because another job holds its unique key"
    return f"not dead in {queue}"


@dead.command()
@app_option()
@click.argument("queue")
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge(queue: str, yes: bool) -> None:
    """Delete the dead jobs of QUEUE."""
    app = open_app()
    if not yes:
        dead_jobs = app.backend.size(queue, State.DEAD)
        click.confirm(f"Delete {dead_jobs} dead jobs of {queue} for good?", abort=True)
    click.echo(f"{app.inspector.purge(queue, State.DEAD)} deleted")
