"""Celery on RabbitMQ, with confirms, as taskq publishes."""

from __future__ import annotations

import os

from celery import Celery, group

from benchmarks import tally

app = Celery("bench", broker=os.environ["BENCH_URL"], backend="rpc://")
app.conf.update(
    task_ignore_result=True,
    worker_hijack_root_logger=False,
    task_default_queue=os.environ["BENCH_QUEUE"],
    broker_connection_retry_on_startup=True,
    broker_transport_options={"confirm_publish": True},
    worker_prefetch_multiplier=128,
)


@app.task(name="noop")
def noop(number: int, text: str) -> None:
    tally.done()


@app.task(name="stamp")
def stamp(called: int) -> None:
    tally.waited(called)


@app.task(name="echo", ignore_result=False)
def echo(value: int) -> int:
    return value


def one(number: int, text: str) -> None:
    noop.delay(number, text)


def many(count: int, text: str) -> None:
    for start in range(0, count, 1000):
        group(noop.s(number, text) for number in range(start, min(count, start + 1000))).apply_async()


def late(called: int) -> None:
    stamp.delay(called)


def answer(value: int) -> int:
    return echo.delay(value).get(timeout=30)
