"""``taskq workers``."""

from __future__ import annotations

import dataclasses

import click

from taskq.cli import show
from taskq.cli.apps import app_option, open_app


@click.command()
@app_option()
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def workers(as_json: bool) -> None:
    """List the workers heard of within the last two minutes."""
    found = sorted(open_app().inspector.workers(), key=lambda worker: worker.started)
    if as_json:
        show.as_json([dataclasses.asdict(worker) for worker in found])
        return
    rows = [
        (
            each.id,
            ",".join(each.queues),
            each.pool,
            each.concurrency,
            each.running,
            show.instant(each.started),
        )
        for each in found
    ]
    show.table(("WORKER", "QUEUES", "POOL", "AT A TIME", "RUNNING", "STARTED"), rows)
