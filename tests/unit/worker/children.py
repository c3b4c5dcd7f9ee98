"""Children that are books only: what they were sent can be read, and a test says what they did."""

from __future__ import annotations

import threading
from typing import Any

from taskq.job import Job, Reservation, new_id
from taskq.worker.child import ChildSpec
from taskq.worker.pipes import RUN
from taskq.worker.slots import Slots, local_memory


class End:
    """What was sent to the child."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []

    def send(self, message: list[Any]) -> None:
        self.sent.append(message)


class FakeChild:
    """A child handle with slots in this process."""

    pid = 4711
    sentinel = 7

    def __init__(self, *, threads: int = 1, coroutines: int = 0) -> None:
        self.spec = ChildSpec(app="", worker="w", threads=threads, coroutines=coroutines)
        self.end = End()
        self.lock = threading.Lock()
        self.slots = Slots(local_memory(self.spec.lanes), self.lock)
        self.killed = False

    def kill(self) -> bool:
        self.killed = True
        return True

    def chunks(self) -> list[tuple[int, int, int]]:
        """Lane, chunk and number of jobs of each chunk it was sent."""
        return [(lane, chunk, len(jobs)) for kind, lane, chunk, jobs in self.runs() if kind == RUN]

    def runs(self) -> list[list[Any]]:
        return [message for message in self.end.sent if message[0] == RUN]

    def jobs(self) -> list[str]:
        """Ids of the jobs it was sent, in order."""
        return [packed[1] for message in self.runs() for packed in message[3]]

    def begin(self, lane: int, chunk: int, index: int, now: float = 0.0) -> bool:
        return self.slots.begin(lane, chunk, index, now)


def reservation(task: str = "short", **fields: Any) -> Reservation:
    return Reservation(Job(id=new_id(), task=task, **fields), token=1)


def reservations(n: int, task: str = "short", **fields: Any) -> list[Reservation]:
    return [reservation(task, **fields) for _ in range(n)]


def done(*indexes: int, seconds: float = 0.00001) -> list[list[Any]]:
    """Results of completed jobs, as a child packs them."""
    return [[index, seconds, None] for index in indexes]
