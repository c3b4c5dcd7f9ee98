"""The app that the tests of limits run: tasks under limits that write down when they started."""

from __future__ import annotations

import threading

from taskq import CONTEXT, Context, TaskQ
from tests.acting import note

app = TaskQ()


@app.task(name="ten_a_second", rate_limit="10/s", ignore_result=True)
def ten_a_second(ctx: Context = CONTEXT) -> None:
    note("start", ctx)


@app.task(name="one_by_one", key="who", key_concurrency=1, visibility_timeout=1.5)
def one_by_one(who: str, seconds: float = 0.0, ctx: Context = CONTEXT) -> None:
    note("start", ctx)
    threading.Event().wait(seconds)
    note("end", ctx)


@app.task(name="fair", fairness_key="tenant", ignore_result=True)
def fair(tenant: str, ctx: Context = CONTEXT) -> None:
    note("start", ctx)


@app.task(name="in_turn", key="who", ordered=True, max_retries=2, default_retry_delay=0)
def in_turn(who: str, number: int, ctx: Context = CONTEXT) -> int:
    note("start", ctx)
    if ctx.attempt == 1 and number % 3 == 0:
        raise ValueError(number)
    note("end", ctx)
    return number
