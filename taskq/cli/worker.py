"""``taskq worker``."""

from __future__ import annotations

import os
from typing import Any

import click

from taskq.cli.apps import app_option, need_app_spec
from taskq.settings import LOG_FORMATS, LOG_LEVELS, POOLS, load
from taskq.worker.options import worker_options


@click.command()
@app_option()
@click.option(
    "-Q",
    "--queues",
    metavar="A,B=3",
    help="Queues to serve, with weights. Default: those of the app's tasks.",
)
@click.option("--pool", type=click.Choice(POOLS), help="What runs the jobs. Default: process.")
@click.option("-c", "--concurrency", type=int, metavar="N", help="Jobs at a time. Default: one per CPU.")
@click.option("--burst", is_flag=True, help="Exit once nothing is left that is due.")
@click.option("--watch", is_flag=True, help="Restart the children when a source file changes.")
@click.option("--max-jobs-per-child", type=int, metavar="N", help="Replace a child after N jobs.")
@click.option(
    "--max-memory-per-child", type=int, metavar="MIB", help="Replace a child that has grown past this."
)
@click.option(
    "--shutdown-timeout", type=float, metavar="SECONDS", help="Grace for running jobs. Default: 30."
)
@click.option("--log-level", type=click.Choice(LOG_LEVELS), help="Default: info.")
@click.option(
    "--log-format", type=click.Choice(LOG_FORMATS), help="Default: console on a terminal, else json."
)
@click.option("--probe-file", metavar="PATH", help="Touch this file every second while the worker lives.")
@click.option("--probe-port", type=int, metavar="PORT", help="Serve /live on 127.0.0.1 at this port.")
@click.option(
    "--probe-patience",
    type=float,
    metavar="SECONDS",
    help="Silence of the backend that is death. Default: 30.",
)
@click.option("--name", metavar="NAME", help="This worker's name, for people. Default: the host's.")
def worker(**given: Any) -> None:
    """Run jobs until told to stop.

    TERM or INT: finish what runs and exit 0; a second one: give running jobs back at once. HUP: restart the
    children. TSTP: take no more jobs.
    """
    options = worker_options(load({}, os.environ), app=need_app_spec(), **given)
    from taskq.worker import command

    raise SystemExit(command.run(options))
