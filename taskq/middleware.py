"""Behaviour around pushes and runs. To observe without changing, subscribe to events instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from taskq.job import Job


class Middleware:
    """Subclass and override either side; pass instances to ``TaskQ(middleware=[...])``, outermost first."""

    def push(self, job: Job, forward: Callable[[Job], Job]) -> Job:
        """Around the making of a job, in the producer: change it (``dataclasses.replace``) and ``forward`` it."""
        return forward(job)

    def run(self, ctx: Any, forward: Callable[[], Any]) -> Any:
        """Around the body of a job, in the worker, where the body's value or exception passes through.

        For an ``async def`` task, ``forward()`` returns a coroutine; return one too.
        """
        return forward()


def around_push(middleware: Sequence[Middleware], job: Job) -> Job:
    """``job`` as the chain leaves it."""

    def step(position: int, job: Job) -> Job:
        if position == len(middleware):
            return job
        return middleware[position].push(job, lambda changed: step(position + 1, changed))

    return step(0, job)


def around_run(middleware: Sequence[Middleware], ctx: Any, body: Callable[[], Any]) -> Any:
    """Call ``body`` inside the chain."""

    def step(position: int) -> Any:
        if position == len(middleware):
            return body()
        return middleware[position].run(ctx, lambda: step(position + 1))

    return step(0)
