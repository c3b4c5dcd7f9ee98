# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnusedFunction=false, reportUnusedVariable=false
"""Code that only has to type-check: the function's own signature reaches every way of calling it."""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from taskq import CONTEXT, AsyncResult, Context, Retry, TaskQ, task
from taskq.tasks import Signature

app = TaskQ("memory://")


@app.task
def bare(to: str, size: int = 1) -> float:
    return size / len(to)


@app.task()
def called(to: str) -> bytes:
    return to.encode()


@app.task(cron="*/5 * * * *", timezone="UTC", overlap="skip", catch_up=timedelta(hours=1))
def periodic(days: int = 7) -> None: ...


@app.task(unique=["to"], unique_for=60, on_conflict="raise")
def unique(to: str, text: str) -> None: ...


@app.task(queue="mail", max_retries=3, visibility_timeout=timedelta(minutes=5), retry=Retry(max_retries=2))
def with_options(to: str, *, subject: str) -> int:
    return len(to + subject)


@task
def shared(numbers: list[int]) -> int:
    return sum(numbers)


@app.task
async def asynchronous(url: str) -> bytes:
    return url.encode()


@app.task(bind=True, priority=5)
def bound(ctx: Context, order: int) -> str:
    return ctx.id * order


@app.task(bind=True)
async def bound_async(ctx: Context, order: int) -> str:
    return ctx.id * order


@app.task
def injected(order: int, ctx: Context = CONTEXT) -> str:
    return ctx.id * order


@app.task
def anything(value: Any, *rest: object) -> None:
    print(value, rest)


@app.task
def nothing() -> list[str]:
    return []


def plain_calls() -> None:
    assert_type(bare("a"), float)
    assert_type(called("a"), bytes)
    assert_type(with_options("a", subject="b"), int)
    assert_type(shared([1]), int)
    coroutine = assert_type(asynchronous("a"), Coroutine[Any, Any, bytes])
    assert_type(bound(1), str)
    another = assert_type(bound_async(1), Coroutine[Any, Any, str])
    assert_type(injected(1), str)
    assert_type(nothing(), list[str])


def stored_calls() -> None:
    assert_type(bare.delay("a", size=2), AsyncResult[float])
    assert_type(called.delay("a"), AsyncResult[bytes])
    assert_type(with_options.delay("a", subject="b").get(timeout=1), int)
    assert_type(shared.delay([1]), AsyncResult[int])
    assert_type(asynchronous.delay("a"), AsyncResult[bytes])
    assert_type(bound.delay(1), AsyncResult[str])
    assert_type(bound_async.delay(1), AsyncResult[str])
    assert_type(injected.delay(1), AsyncResult[str])
    assert_type(anything.delay({}, 1, "x"), AsyncResult[None])
    assert_type(nothing.delay(), AsyncResult[list[str]])
    assert_type(bare.options(priority=5, countdown=60).delay("a"), AsyncResult[float])
    assert_type(bare.apply_async(("a",), {"size": 2}, eta=datetime.now(UTC), expires=60), AsyncResult[float])
    assert_type(bare.s("a", 2), Signature[float])
    assert_type(bare.s("a").delay(), AsyncResult[float])
    assert_type(bare.options(queue="x").s("a"), Signature[float])
    assert_type(bare.options(unique=True, debounce=5).delay("a"), AsyncResult[float])
    app.schedules.create("named", bare.s("a"), every=timedelta(minutes=5), misfire="run_once")
    app.enqueue_many(bare.s(name) for name in ("a", "b"))


async def awaited_calls() -> None:
    assert_type(await bare.adelay("a"), AsyncResult[float])
    assert_type(await bare.delay("a"), float)
    assert_type(await (await asynchronous.adelay("a")).aget(timeout=3), bytes)
    assert_type(await bound_async.options(priority=1).adelay(1), AsyncResult[str])


def wrong_calls() -> None:
    bare.delay(1)  # type: ignore[arg-type]
    bare.delay("a", "b")  # type: ignore[arg-type]
    bare.delay("a", colour=1)  # type: ignore[call-arg]
    bare.delay()  # type: ignore[call-arg]
    with_options.delay("a")  # type: ignore[call-arg]
    with_options.delay("a", "b")  # type: ignore[call-arg]
    bound.delay("x")  # type: ignore[arg-type]
    bound.delay(1, 2)  # type: ignore[call-arg]
    nothing.delay(1)  # type: ignore[call-arg]
    asynchronous.delay(b"x")  # type: ignore[arg-type]
    bare.options(priority="high")  # type: ignore[arg-type]
    bare.options(prio=1)  # type: ignore[call-arg]
    bare.options(priority=1).delay(1)  # type: ignore[arg-type]
    bare.options(on_conflict="explode")  # type: ignore[arg-type]
    bare.s(3)  # type: ignore[arg-type]
    number: int = bare.delay("a").get()  # type: ignore[assignment]
