"""The tasks that are measured."""

from __future__ import annotations

import os
import time

from taskq import TaskQ

app = TaskQ()


@app.task(name="noop", ignore_result=True)
def noop(number: int, text: str) -> None:
    """Nothing, with the arguments of a small job."""


@app.task(name="kept")
def kept(number: int, text: str) -> None:
    """The same, with its result kept."""


@app.task(name="stamp", ignore_result=True)
def stamp(sent: int, path: str) -> None:
    """Write down how long it took from the call to the body, in nanoseconds."""
    line = f"{time.time_ns() - sent}\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


@app.task(name="echo")
def echo(value: int) -> int:
    return value


@app.task(name="noop_async", ignore_result=True)
async def noop_async(number: int, text: str) -> None:
    """A coroutine that does nothing."""
