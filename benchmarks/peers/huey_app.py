"""Huey on SQLite."""

from __future__ import annotations

import os

from huey import SqliteHuey

from benchmarks import tally

huey = SqliteHuey("bench", filename=os.environ["BENCH_URL"])


@huey.task(name="noop")
def noop(number: int, text: str) -> None:
    tally.done()


@huey.task(name="stamp")
def stamp(called: int) -> None:
    tally.waited(called)


@huey.task(name="echo")
def echo(value: int) -> int:
    return value


def one(number: int, text: str) -> None:
    noop(number, text)


def late(called: int) -> None:
    stamp(called)


def answer(value: int) -> int:
    return echo(value).get(blocking=True, timeout=30)
