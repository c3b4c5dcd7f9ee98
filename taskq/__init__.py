"""taskq: run Python functions later, elsewhere, and reliably."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from taskq._version import __version__

if TYPE_CHECKING:
    from taskq.app import TaskQ, default_app, task
    from taskq.context import CONTEXT, Context, current_context
    from taskq.errors import (
        Cancel,
        ConfigurationError,
        DuplicateJobError,
        EncodeError,
        LeaseLostError,
        LineFullError,
        Reject,
        ResultError,
        ResultNotFoundError,
        ResultTimeoutError,
        RetryRequested,
        Snooze,
        SoftTimeLimit,
        TaskCancelledError,
        TaskFailedError,
        TaskQError,
    )
    from taskq.job import Job, State
    from taskq.lent import QueueJob
    from taskq.middleware import Middleware
    from taskq.queue import Queue
    from taskq.registry import current_app
    from taskq.result import AsyncResult, Result
    from taskq.retry import CircuitBreaker, Retry, RetryBudget
    from taskq.schedule import cron, crontab, every
    from taskq.tasks import Signature, Task

__all__ = [
    "CONTEXT",
    "AsyncResult",
    "Cancel",
    "CircuitBreaker",
    "ConfigurationError",
    "Context",
    "DuplicateJobError",
    "EncodeError",
    "Job",
    "LeaseLostError",
    "LineFullError",
    "Middleware",
    "Queue",
    "QueueJob",
    "Rate",
    "Reject",
    "Result",
    "ResultError",
    "ResultNotFoundError",
    "ResultTimeoutError",
    "Retry",
    "RetryBudget",
    "RetryRequested",
    "Signature",
    "Snooze",
    "SoftTimeLimit",
    "State",
    "Task",
    "TaskCancelledError",
    "TaskFailedError",
    "TaskQ",
    "TaskQError",
    "__version__",
    "cron",
    "crontab",
    "current_app",
    "current_context",
    "default_app",
    "every",
    "task",
]

#: Where each name lives. It is imported when it is first asked for: the command line needs few of them.
_HOMES = {
    name: module
    for module, names in {
        "taskq.app": ("TaskQ", "default_app", "task"),
        "taskq.context": ("CONTEXT", "Context", "current_context"),
        "taskq.job": ("Job", "State"),
        "taskq.limits": ("Rate",),
        "taskq.middleware": ("Middleware",),
        "taskq.lent": ("QueueJob",),
        "taskq.queue": ("Queue",),
        "taskq.registry": ("current_app",),
        "taskq.result": ("AsyncResult", "Result"),
        "taskq.retry": ("CircuitBreaker", "Retry", "RetryBudget"),
        "taskq.schedule": ("cron", "crontab", "every"),
        "taskq.tasks": ("Signature", "Task"),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'taskq' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "taskq.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
