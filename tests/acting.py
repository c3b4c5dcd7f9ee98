"""The app that the worker tests run: tasks that do what their arguments say, and write down that they did.

Each start and end of a body is a line in the file ``TASKQ_X_LEDGER``, appended by one write, so that a test can
count what really ran, whatever the queue says.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from taskq import CONTEXT, Cancel, Context, Reject, Retry, Snooze, SoftTimeLimit, TaskQ
from taskq.errors import JobCancelled

app = TaskQ()

#: What ["grow", …] holds on to.
kept: list[bytearray] = []
#: Retries that do not make a test wait.
AT_ONCE = Retry(wait=0, max_retries=3)


def note(event: str, ctx: Context) -> None:
    """Append a line to the ledger."""
    path = os.environ.get("TASKQ_X_LEDGER")
    if path:
        line = f"{event} {ctx.id} {ctx.attempt} {os.getpid()} {time.time():.6f}\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def perform(step: list[Any], ctx: Context) -> Any:  # noqa: C901
    """One thing a body can do."""
    match step:
        case ["return", value]:
            return value
        case ["raise", text]:
            raise ValueError(text)
        case ["sleep", seconds]:
            threading.Event().wait(seconds)
            return seconds
        case ["stubborn", seconds]:
            return stubborn(seconds)
        case ["tidy", seconds]:
            try:
                threading.Event().wait(seconds)
            except SoftTimeLimit:
                return "tidied"
            return "in time"
        case ["tidy spinning"]:
            try:
                while True:
                    sum(range(100))
            except SoftTimeLimit:
                return "tidied"
        case ["hog", seconds]:
            return hog(seconds)
        case ["exit", status]:
            os._exit(status)
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["kill group"]:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        case ["snooze", seconds]:
            raise Snooze(seconds)
        case ["reject", reason]:
            raise Reject(reason)
        case ["cancel", reason]:
            raise Cancel(reason)
        case ["retry", seconds]:
            raise ctx.retry("not yet", countdown=seconds)
        case ["reject error"]:
            raise Reject(ValueError("not a text"))
        case ["reject surrogate"]:
            raise Reject("\ud800")
        case ["close everything"]:
            os.closerange(3, 256)
            return None
        case ["fork"]:
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
            return "parent" if pid else "child"
        case ["fork and exit"]:
            pid = os.fork()
            if pid == 0:
                sys.exit(0)
            os.waitpid(pid, 0)
            return "parent"
        case ["leave a thread"]:
            threading.Thread(target=threading.Event().wait, daemon=False).start()
            return "left"
        case ["unencodable"]:
            return threading.Lock()
        case ["orphan", seconds]:
            # The shell in between ends at once: whoever adopts orphans has to wait for the inner one.
            subprocess.run(["sh", "-c", f"sleep {seconds} & exit"], check=True)
        case ["extend", lease, seconds]:
            ctx.extend(lease)
            note("extended", ctx)
            threading.Event().wait(seconds)
            return "extended"
        case ["tell", seconds]:
            return tell(seconds, ctx)
        case ["chatter", seconds]:
            chatter(seconds, ctx)
        case ["fail when interrupted", seconds]:
            try:
                threading.Event().wait(seconds)
            except BaseException as error:
                raise RuntimeError("the clean-up failed") from error
        case ["poison", kind]:
            poison(kind)
        case ["grow", mebibytes]:
            kept.append(bytearray(b"x" * (mebibytes << 20)))
        case ["until cancelled", seconds]:
            return until_cancelled(seconds, ctx)
        case _:
            raise AssertionError(f"no such step: {step}")
    return None


def stubborn(seconds: float) -> str:
    """Catch whatever is raised, and go on."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            while time.monotonic() < until:
                sum(range(100))
        except BaseException:  # noqa: BLE001
            continue
    return "stubborn"


def hog(seconds: float) -> str:
    """Hold the interpreter in C code: no other thread of this process runs meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        re.match(r"(a+)+$", "a" * 24 + "b")
    return "hogged"


def until_cancelled(seconds: float, ctx: Context) -> str | None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if ctx.cancelled:
            return ctx.cancel_reason
        threading.Event().wait(0.01)
    return "never"


def tell(seconds: float, ctx: Context) -> None:
    """Write down why this run had to end."""
    try:
        threading.Event().wait(seconds)
    except JobCancelled:
        note(f"told-{ctx.cancel_reason}".replace(" ", "-"), ctx)
        raise


def chatter(seconds: float, ctx: Context) -> None:
    """Report progress without a pause."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ctx.progress("x" * 1000)
        threading.Event().wait(0.0005)


class TwoArgumentsError(Exception):
    """Cannot be rebuilt from ``args``."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class IrreducibleError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not to be shown")


class FatalError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def poison(kind: str) -> None:
    """Raise what other systems choked on."""

    class LocalError(Exception):
        pass

    errors: dict[str, BaseException] = {
        "two arguments": TwoArgumentsError("this", "that"),
        "a lock": ValueError("holds", threading.Lock()),
        "reduce": IrreducibleError("alone"),
        "local": LocalError("from inside a function"),
        "group": ExceptionGroup("several", [ValueError("one"), ExceptionGroup("more", [KeyError("two")])]),
        "exit": SystemExit(7),
        "interrupt": KeyboardInterrupt(),
        "long": ValueError("x" * 50_000_000),
        "surrogates": ValueError("\ud800 \x00 \U0001f600"),
        "str": UnspeakableError(),
        "fatal str": FatalError(),
    }
    raise errors[kind]


def act_out(steps: tuple[list[Any], ...], ctx: Context) -> Any:
    """The step of this attempt: the last one for all that follow."""
    note("start", ctx)
    value = perform(steps[min(ctx.job.deliveries, len(steps)) - 1], ctx)
    note("end", ctx)
    return value


@app.task(name="mourn")
def mourn(about: dict[str, str]) -> dict[str, str]:
    return about


@app.task(name="act_mourned", retry=Retry(wait=0, max_retries=1, on_exhausted=mourn), time_limit=1, bind=True)
def act_mourned(ctx: Context, *steps: list[Any]) -> Any:
    return act_out(steps, ctx)


@app.task(name="act", retry=AT_ONCE, bind=True)
def act(ctx: Context, *steps: list[Any]) -> Any:
    return act_out(steps, ctx)


@app.task(name="act_briefly", retry=AT_ONCE, visibility_timeout=1.5, bind=True)
def act_briefly(ctx: Context, *steps: list[Any]) -> Any:
    """With a short lease."""
    return act_out(steps, ctx)


@app.task(name="act_timeless", retry=AT_ONCE, visibility_timeout=0, bind=True)
def act_timeless(ctx: Context, *steps: list[Any]) -> Any:
    """With a lease that only the death of its worker ends."""
    return act_out(steps, ctx)


@app.task(name="act_soft", retry=Retry(max_retries=0), soft_time_limit=0.4, time_limit=30, bind=True)
def act_soft(ctx: Context, *steps: list[Any]) -> Any:
    return act_out(steps, ctx)


@app.task(name="act_hard", retry=Retry(max_retries=0), time_limit=0.5, bind=True)
def act_hard(ctx: Context, *steps: list[Any]) -> Any:
    return act_out(steps, ctx)


@app.task(name="act_async", retry=AT_ONCE, time_limit=30)
async def act_async(seconds: float, ctx: Context = CONTEXT) -> float:
    note("start", ctx)
    await asyncio.sleep(seconds)
    note("end", ctx)
    return seconds


@app.task(name="tell_async", retry=AT_ONCE, visibility_timeout=1.5)
async def tell_async(seconds: float, ctx: Context = CONTEXT) -> str:
    """The first time, wait to be interrupted and write down why."""
    note("start", ctx)
    if ctx.job.deliveries > 1:
        return "other"
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        note(f"told-{ctx.cancel_reason}".replace(" ", "-"), ctx)
        raise
    return "never told"


@app.task(name="fail_async_when_interrupted", retry=Retry(max_retries=0))
async def fail_async_when_interrupted(seconds: float, ctx: Context = CONTEXT) -> None:
    note("start", ctx)
    try:
        await asyncio.sleep(seconds)
    finally:
        raise RuntimeError("the clean-up failed")


@app.task(name="cancel_yourself", retry=Retry(max_retries=0))
async def cancel_yourself(wait: bool) -> None:
    """With ``wait`` the cancellation is raised here; without, it would be in whatever waits next."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    if wait:
        await asyncio.sleep(1)


@app.task(name="exit_behind", retry=Retry(max_retries=0))
async def exit_behind() -> str:
    """Leave a task behind that ends by SystemExit."""

    async def leave() -> None:
        raise SystemExit(9)

    asyncio.get_running_loop().call_later(0.05, asyncio.create_task, leave())
    await asyncio.sleep(0.2)
    return "still here"


@app.task(name="block_hard", retry=Retry(max_retries=0), time_limit=0.5)
async def block_hard(seconds: float) -> None:
    threading.Event().wait(seconds)


@app.task(name="act_async_soft", retry=Retry(max_retries=0), soft_time_limit=0.3)
async def act_async_soft(seconds: float, ctx: Context = CONTEXT) -> str:
    try:
        await asyncio.sleep(seconds)
    except SoftTimeLimit:
        return "tidied"
    return "in time"


@app.task(name="act_async_hard", retry=Retry(max_retries=0), time_limit=0.3)
async def act_async_hard(seconds: float) -> None:
    await asyncio.sleep(seconds)


@app.task(name="act_in_group", retry=AT_ONCE)
async def act_in_group(seconds: float, ctx: Context = CONTEXT) -> None:
    """Wait and, where ``seconds`` is negative, snooze, inside a task group."""
    note("start", ctx)

    async def wait() -> None:
        if seconds < 0:
            raise Snooze(3600)
        await asyncio.sleep(seconds)

    async with asyncio.TaskGroup() as group:
        group.create_task(wait())
        await asyncio.sleep(max(0, seconds))


@app.task(name="block_the_loop")
async def block_the_loop(seconds: float) -> None:
    threading.Event().wait(seconds)


@app.task(name="count", ignore_result=True)
def count(number: int, ctx: Context = CONTEXT) -> None:
    note("start", ctx)
