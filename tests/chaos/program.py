"""What runs under the soak: the app of the workers, and as a program a producer.

Each start of a body is a line of the file ``TASKQ_X_LEDGER``; each confirmed push is one of the producer's file.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from taskq import CONTEXT, Context, Retry, TaskQ

app = TaskQ()
QUEUES = ("red", "green", "blue", "grey")
#: Losses that the soak inflicts must not bury a job; each counted one waits a little.
PATIENT = Retry(wait=0, max_retries=30)


def note(ctx: Context) -> None:
    """Which attempt of which job starts now, in which process of which worker."""
    line = f"{ctx.id} {ctx.attempt} {os.getpid()} {os.getsid(0)} {time.monotonic():.4f}\n"
    append(os.environ["TASKQ_X_LEDGER"], line)


def append(path: str, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


@app.task(name="soak", retry=PATIENT, visibility_timeout=3, bind=True)
def soak(ctx: Context, seconds: float, *, fails: bool = False) -> None:
    """Write down the start; take a while; fail the first time, if told so."""
    note(ctx)
    if seconds:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sum(range(500))
    if fails and ctx.attempt == 1:
        raise ValueError("the first time, as told")


@app.task(name="soak_async", retry=PATIENT, visibility_timeout=3)
async def soak_async(ctx: Context = CONTEXT) -> None:
    note(ctx)


def signature(number: int) -> Any:
    """Mostly no-ops; some take milliseconds, some fail once, some are coroutines, some are due later."""
    queue = QUEUES[number % len(QUEUES)]
    if number % 50 == 7:
        return soak_async.s().set(queue=queue)
    seconds = random.uniform(0.0, 0.01) if number % 20 == 3 else 0.0
    later = {"countdown": random.uniform(0.0, 3.0)} if number % 30 == 11 else {}
    return soak.s(seconds, fails=number % 100 == 1).set(queue=queue, priority=number % 3, **later)


def produce(confirmed: str, count: int) -> None:
    """Push ``count`` jobs, ten a time, and write down those whose push has returned."""
    for start in range(0, count, 10):
        results = app.enqueue_many(signature(number) for number in range(start, min(start + 10, count)))
        append(confirmed, "".join(f"{result.id}\n" for result in results))


if __name__ == "__main__":
    produce(sys.argv[1], int(sys.argv[2]))
