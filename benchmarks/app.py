"""taskq as a contestant: its tasks, and how they are called."""

from __future__ import annotations

from benchmarks import tally
from taskq import TaskQ

app = TaskQ()


@app.task(name="noop", ignore_result=True)
def noop(number: int, text: str) -> None:
    """Nothing but to be counted, with the arguments of a small job."""
    tally.done()


@app.task(name="kept")
def kept(number: int, text: str) -> None:
    """The same, with its result kept."""
    tally.done()


@app.task(name="noop_async", ignore_result=True)
async def noop_async(number: int, text: str) -> None:
    """The same, as a coroutine."""
    tally.done()


@app.task(name="stamp", ignore_result=True)
def stamp(called: int) -> None:
    """Note how long it took from the call to the body."""
    tally.waited(called)


@app.task(name="echo")
def echo(value: int) -> int:
    return value


def one(number: int, text: str) -> None:
    noop.delay(number, text)


def many(count: int, text: str) -> None:
    app.enqueue_many(noop.s(number, text) for number in range(count))


def many_kept(count: int, text: str) -> None:
    app.enqueue_many(kept.s(number, text) for number in range(count))


def many_async(count: int, text: str) -> None:
    app.enqueue_many(noop_async.s(number, text) for number in range(count))


def late(called: int) -> None:
    stamp.delay(called)


def answer(value: int) -> int:
    return echo.delay(value).get(30)
