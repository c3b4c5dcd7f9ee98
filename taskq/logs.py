"""Log lines for taskq's own processes, made from events.

Nothing here touches the root logger, ``logging``'s configuration or structlog's: an application keeps the
logging that it set up.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TextIO, cast

from taskq.events import Event, Events
from taskq.job import Attempt, Job
from taskq.scribe import Scribe

_LEVELS: Final[Mapping[str, int]] = MappingProxyType(
    {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
)


#: How loud each fact is. A fact that is not named here is told at debug.
LOUDNESS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "job.completed": "info",
        "job.retried": "warning",
        "job.dead": "error",
        "job.lost": "error",
        "job.cancelled": "info",
        "job.deduplicated": "info",
        "job.revived": "info",
        "jobs.reclaimed": "warning",
        "worker.started": "info",
        "worker.reloading": "info",
        "worker.quiet": "info",
        "worker.stopping": "info",
        "worker.stopped": "info",
        "child.died": "error",
        "child.killed": "warning",
        "child.retired": "info",
        "child.stuck": "error",
        "child.unborn": "error",
        "thread.stuck": "error",
        "loop.blocked": "warning",
        "fork.refused": "warning",
        "hook.failed": "error",
        "policy.failed": "error",
        "note.failed": "error",
        "backend.unavailable": "warning",
        "backend.available": "info",
        "schedule.fired": "info",
        "schedule.skipped": "warning",
        "schedule.failed": "error",
        "service.failed": "error",
        "limits.changed": "info",
    }
)
#: What a job was called with and what it returned: theirs to log, not ours.
_PRIVATE: Final = frozenset({"args", "kwargs", "payload", "result"})


class Logger:
    """Writes one line per fact; lines below its level cost one comparison."""

    def __init__(self, level: str, write: Any) -> None:
        self.threshold = _LEVELS[level]
        self._write = write

    def log(self, level: str, fact: str, fields: Mapping[str, Any]) -> None:
        """Write ``fact`` with ``fields``, unless ``level`` is below this logger's."""
        if _LEVELS[level] >= self.threshold:
            getattr(self._write, level)(fact, **fields)


def configure(level: str = "info", fmt: str = "auto", stream: TextIO | Scribe | None = None) -> Logger:
    """A logger to ``stream`` (default: stderr): ``console``, ``json``, or by whether it is a terminal."""
    import structlog

    stream = Scribe(sys.stderr) if stream is None else stream
    terminal = stream.isatty()
    console = fmt == "console" or (fmt == "auto" and terminal)
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *(_console(terminal) if console else _json_lines()),
    ]
    write = structlog.wrap_logger(
        structlog.WriteLogger(cast("TextIO", stream)),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        context_class=dict,
        cache_logger_on_first_use=False,
    )
    return Logger(level, write)


def _console(colors: bool) -> list[Any]:
    import structlog

    return [_traceback_below, structlog.dev.ConsoleRenderer(colors=colors)]


def _json_lines() -> list[Any]:
    import structlog

    return [structlog.processors.JSONRenderer(default=str, ensure_ascii=False)]


def _traceback_below(_logger: Any, _method: str, line: dict[str, Any]) -> dict[str, Any]:
    """The console shows a text under this key below the line, as it is."""
    if "traceback" in line:
        line["exception"] = line.pop("traceback")
    return line


# -- from events ----------------------------------------------------------------------


def subscribe(events: Events, logger: Logger) -> Callable[[], None]:
    """Write a line for every fact that ``events`` announces; returns what undoes it.

    A quiet logger subscribes to the facts that it would write and to no others, so that what nobody reads is
    not even put together.
    """

    def write(event: Event) -> None:
        level = LOUDNESS.get(event.name, "debug")
        if _LEVELS[level] >= logger.threshold:
            logger.log(level, event.name, fields_of(event))

    if logger.threshold <= _LEVELS["info"]:
        return events.subscribe(write)
    undo = contextlib.ExitStack()
    for name, level in LOUDNESS.items():
        if _LEVELS[level] >= logger.threshold:
            undo.callback(events.subscribe(write, name))
    return undo.close


def fields_of(event: Event) -> dict[str, Any]:
    """What of an event belongs in its line: jobs by their id, task, queue and attempt; never arguments."""
    fields: dict[str, Any] = {}
    for name, value in event.fields.items():
        if isinstance(value, Job):
            fields |= context_of(value)
        elif isinstance(value, Attempt):
            fields |= {"error": value.error, "traceback": value.traceback}
        elif name not in _PRIVATE and value is not None and not isinstance(value, bytes):
            fields[name] = value if isinstance(value, str | int | float | bool) else str(value)
    if not fields.get("traceback"):
        fields.pop("traceback", None)
    return fields


def context_of(job: Job) -> dict[str, Any]:
    """What every line about ``job`` says."""
    return {"job_id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempts + 1}


def bound(job: Job) -> contextlib.AbstractContextManager[None]:
    """Bind ``job``'s context to structlog's context variables, for the lines of the code that runs it."""
    import structlog

    return structlog.contextvars.bound_contextvars(**context_of(job))
