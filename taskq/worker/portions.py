"""What the dispatcher keeps its books in: chunks of jobs, the lanes they went to, the bodies that run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from taskq.job import Reservation
from taskq.worker.pool import ChildHandle


class TaskFacts(NamedTuple):
    """What a child told of a task."""

    is_async: bool = False
    soft: float | None = None
    hard: float | None = None
    exhausted: Mapping[str, Any] | None = None  #: the job to store when a loss has used up its retries


@dataclass(slots=True, eq=False)
class Chunk:
    """Jobs handed to a lane together."""

    number: int
    reservations: list[Reservation]
    open: set[int]  #: indexes without an outcome
    sent: float


@dataclass(slots=True, eq=False)
class Lane:
    """A lane as the supervisor sees it."""

    child: ChildHandle
    number: int
    coroutine: bool
    chunks: deque[Chunk] = field(default_factory=deque)
    heard: float = 0.0  #: when it was last handed something while idle, or gave something back
    usable: bool = True
    look_at: float = 0.0  #: when what it runs is worth a look: a limit may have passed

    @property
    def crowded(self) -> bool:
        """Whether jobs wait in it behind the one that runs."""
        return len(self.chunks) > 1 or (len(self.chunks) == 1 and len(self.chunks[0].open) > 1)

    @property
    def outstanding(self) -> int:
        return sum(len(chunk.open) for chunk in self.chunks)

    def holds(self, job_id: str) -> bool:
        """Whether it has been handed the job and gave no outcome of it."""
        return any(
            chunk.reservations[index].job.id == job_id for chunk in self.chunks for index in chunk.open
        )


class Running(NamedTuple):
    """A job whose body runs now."""

    lane: Lane
    chunk: Chunk
    position: int
    since: float  #: monotonic seconds

    @property
    def reservation(self) -> Reservation:
        return self.chunk.reservations[self.position]

    @property
    def key(self) -> tuple[int, int, int]:
        return self.lane.number, self.chunk.number, self.position


class Death(NamedTuple):
    """What a dead child leaves behind: every job it had been handed and gave no outcome of."""

    running: list[Running]  #: bodies that were running
    last: list[Running]  #: per lane, the body that had ended last
    ran: list[Reservation]  #: bodies that had ended before
    unbegun: list[Reservation]


#: A task that no child knows.
UNKNOWN: Final = TaskFacts()
