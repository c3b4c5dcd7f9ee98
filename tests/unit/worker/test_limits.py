"""Interrupts reach the body they are meant for, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from taskq.errors import JobCancelled, SoftTimeLimit, TimeLimitExceeded
from taskq.worker.limits import CANCELLED, HARD, SOFT, Interruptible, Key, MainThread, PoolThread

ROUNDS = 1_500


def spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(50))


def fire_at_random(guard: Any, runs: int) -> tuple[int, int]:
    """Bodies that end just as they are interrupted: how many were, and how often that hit outside a body."""
    fired = leaked = 0
    key: list[Key] = [(0, 0, 0)]
    ended = threading.Event()

    def interrupt() -> None:
        chance = random.Random(7)
        while not ended.is_set():
            guard.interrupt(key[0], SOFT)
            ended.wait(chance.uniform(0, 0.0008))

    thread = threading.Thread(target=interrupt)
    thread.start()
    for number in range(runs):
        key[0] = (0, 1, number)
        try:
            guard.run(key[0], lambda: spin(0.0004))
        except SoftTimeLimit:
            fired += 1
        try:
            spin(0.0001)
        except SoftTimeLimit:
            leaked += 1
    ended.set()
    thread.join()
    return fired, leaked


def in_a_thread(body: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(body()))
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """What other tests left behind is collected now, not within a body: an interrupt that meets a destructor ends there."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage")
def test_in_the_main_thread_no_interrupt_leaks() -> None:
    fired, leaked = fire_at_random(MainThread(), ROUNDS)

    assert fired > 0
    assert leaked == 0


@pytest.mark.usefixtures("no_garbage")
def test_in_a_pool_thread_no_interrupt_leaks() -> None:
    fired, leaked = in_a_thread(lambda: fire_at_random(PoolThread(), ROUNDS))

    assert fired > 0
    assert leaked == 0


def test_a_blocking_call_in_the_main_thread_is_ended() -> None:
    guard = MainThread()
    never = threading.Event()
    threading.Timer(0.05, lambda: guard.interrupt((1, 1, 1), HARD)).start()

    with pytest.raises(TimeLimitExceeded):
        guard.run((1, 1, 1), lambda: never.wait(30))


def test_an_interrupt_for_another_run_is_ignored() -> None:
    guard = MainThread()
    guard.interrupt((1, 1, 1), HARD)

    assert guard.run((1, 1, 2), lambda: "done") == "done"


async def interrupted(body: Callable[[], Any], kind: str) -> Any:
    driver = Interruptible(body())

    async def run() -> Any:
        return await driver

    task = asyncio.create_task(run())
    await asyncio.sleep(0.01)
    driver.interrupt(kind)
    try:
        return await task, task.cancelling()
    except BaseException as error:  # noqa: BLE001
        return error, task.cancelling()


async def waits() -> None:
    await asyncio.Event().wait()


async def gathers() -> None:
    await asyncio.gather(waits(), waits())


async def groups() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(waits())
        await waits()


async def times_out() -> None:
    async with asyncio.timeout(30):
        await waits()


@pytest.mark.parametrize("body", [waits, gathers, times_out])
@pytest.mark.parametrize(("kind", "error"), [(SOFT, SoftTimeLimit), (CANCELLED, JobCancelled)])
def test_a_coroutine_meets_the_interrupt_where_it_waits(
    body: Callable[[], Any], kind: str, error: type[BaseException]
) -> None:
    raised, cancelling = asyncio.run(interrupted(body, kind))

    assert isinstance(raised, error)
    assert cancelling == 0


def test_a_task_group_passes_the_interrupt_on() -> None:
    raised, _ = asyncio.run(interrupted(groups, SOFT))

    assert isinstance(raised, BaseExceptionGroup)
    assert raised.split(SoftTimeLimit)[0] is not None


def test_a_coroutine_may_catch_its_soft_limit_and_return() -> None:
    async def tidies_up() -> str:
        with contextlib.suppress(SoftTimeLimit):
            await waits()
        await asyncio.sleep(0)
        return "tidy"

    assert asyncio.run(interrupted(tidies_up, SOFT)) == ("tidy", 0)
