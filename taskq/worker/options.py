"""What a worker is told when it starts, checked before anything runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from taskq.errors import ConfigurationError
from taskq.options import check_queue
from taskq.settings import LOG_FORMATS, LOG_LEVELS, POOLS, Settings, suggestion

#: A weight above this gives no finer shares, only a longer turn.
MAX_WEIGHT: Final = 1000
#: Coroutines at once: of the async pool, and of a child of a process pool whose app has ``async def`` tasks.
COROUTINES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How one worker runs. Raises ``ConfigurationError`` for what cannot work.

    ``queues`` maps each name to its weight; empty means the queues of the app's tasks.
    """

    app: str = ""  #: what ``-A`` names
    queues: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    pool: str = "process"
    concurrency: int | None = None  #: ``None`` for one per CPU; 100 in the async pool
    burst: bool = False  #: exit 0 once nothing is left that is due
    watch: bool = False  #: restart the children when a source file changes
    max_jobs_per_child: int | None = None
    max_memory_per_child: int | None = None  #: MiB, by proportional set size
    shutdown_timeout: float = 30.0
    log_level: str = "info"
    log_format: str = "auto"
    name: str = ""  #: for people; empty: the host's name
    probe_file: str | None = None  #: touched while the worker lives
    probe_port: int | None = None  #: serves ``/live`` on loopback; 0 for any free one
    probe_patience: float = 30.0  #: how long the backend may be silent before the worker counts as dead

    def __post_init__(self) -> None:
        _check_choice("pool", self.pool, POOLS)
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        _check_choice("log_format", self.log_format, LOG_FORMATS)
        _check_range("concurrency", self.concurrency, 1, 10_000)
        _check_range("max_jobs_per_child", self.max_jobs_per_child, 1)
        _check_range("max_memory_per_child", self.max_memory_per_child, 16)
        _check_range("shutdown_timeout", self.shutdown_timeout, 0)
        _check_range("probe_port", self.probe_port, 0, 65_535)
        _check_range("probe_patience", self.probe_patience, 1)
        self._check_together()
        for queue, weight in self.queues.items():
            check_share(queue, weight)

    @property
    def slots(self) -> int:
        """How many jobs run at a time."""
        if self.pool == "solo":
            return 1
        return self.concurrency or (COROUTINES if self.pool == "async" else os.cpu_count() or 1)

    def _check_together(self) -> None:
        if self.burst and self.watch:
            raise ConfigurationError(
                "burst ends the worker when all is done and watch keeps it waiting: give one"
            )
        if self.pool == "solo" and (self.concurrency or 1) > 1:
            raise ConfigurationError(
                f"concurrency={self.concurrency} with pool='solo': solo runs one job at a time"
            )


def worker_options(settings: Settings, **given: Any) -> WorkerOptions:
    """What was ``given`` (``None`` was not), and the settings for the rest; ``queues`` may be ``a,b=3``."""
    known = {one.name for one in dataclasses.fields(WorkerOptions)}
    for name in given:
        if name not in known:
            raise ConfigurationError(f"unknown worker option {name!r}{suggestion(name, known)}")
    values = {
        one.name: getattr(settings, one.name) for one in dataclasses.fields(settings) if one.name in known
    }
    values |= {name: value for name, value in given.items() if value is not None}
    if not isinstance(values["queues"], Mapping):
        values["queues"] = parse_queues(values["queues"])
    return WorkerOptions(**values)


def parse_queues(text: str) -> Mapping[str, int]:
    """``mail,reports=3`` as names and weights; a queue without a weight has 1."""
    shares: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, weight = (piece.strip() for piece in part.partition("="))
        if separator and not weight.isdecimal():
            raise ConfigurationError(
                f"queues={text!r}: the weight of {name!r} is {weight!r}, not a whole number"
            )
        if name in shares:
            raise ConfigurationError(f"queues={text!r}: {name!r} stands there twice")
        shares[name] = int(weight) if separator else 1
        check_share(name, shares[name])
    return MappingProxyType(shares)


def check_share(queue: str, weight: int) -> None:
    """Refuse a queue name that a backend could not carry, and a weight out of range."""
    check_queue(queue)
    if isinstance(weight, bool) or not 1 <= weight <= MAX_WEIGHT:
        raise ConfigurationError(f"weight {weight} of queue {queue!r}: use 1 to {MAX_WEIGHT}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(
            f"{name}={value!r}: use {', '.join(choices)}{suggestion(str(value), choices)}"
        )


def _check_range(name: str, value: float | None, least: int, most: float = float("inf")) -> None:
    if value is not None and (isinstance(value, bool) or not least <= value <= most or value == float("inf")):
        limit = "" if most == float("inf") else f" to {most:,.0f}"
        raise ConfigurationError(f"{name}={value!r}: use a number from {least}{limit}")
