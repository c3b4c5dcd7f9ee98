"""Where a job goes that is to be produced: to its work topic, or to a hop of the delay topic on the way there."""

from __future__ import annotations

import bisect
import itertools
import random
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from taskq.backends import moves
from taskq.backends.kafka import wire
from taskq.backends.kafka.place import Place, band
from taskq.job import Job, State

if TYPE_CHECKING:
    from taskq.backends.kafka.topics import Topics

#: How long a job stays in each partition of the delay topic, in seconds. What is due sooner than the first waits in
#: the worker that will lend it.
HOPS: Final = (1.0, 4.0, 15.0, 60.0, 240.0, 900.0, 3600.0, 14_400.0, 43_200.0, 86_400.0)


class Letter(NamedTuple):
    """A message to be produced."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    stamp: int  #: milliseconds


def hop(remaining: float) -> int:
    """The longest hop that is not too long; -1 for none."""
    return bisect.bisect_right(HOPS, remaining) - 1


class Post:
    """Addresses jobs. Declares the topics that it names. Thread-safe."""

    def __init__(self, place: Place, topics: Topics) -> None:
        self._place = place
        self._topics = topics
        self._turn = itertools.count(random.randrange(1 << 16))  # noqa: S311 - spreads, hides nothing
        self._lock = threading.Lock()

    def letter(self, job: Job, now: float) -> Letter:
        """The message of ``job``, by its state: dead, or due now or later."""
        stamp = int(now * 1000)
        self._topics.declare(job.queue)
        if job.state is State.DEAD:
            return Letter(self._place.dead(job.queue), 0, job.id.encode(), wire.pack(job), stamp)
        due, _ = moves.arrival(job, now)
        level = hop(due - now)
        value = wire.pack(job, due=due, waits=due > now)
        if level >= 0:
            self._topics.declare_delays()
            return Letter(self._place.delays, level, None, value, stamp)
        topic = self._place.work(job.queue, band(job.priority))
        return Letter(topic, self._next() % self._topics.width(topic), None, value, stamp)

    def tombstone(self, queue: str, job_id: str, now: float) -> Letter:
        """What takes a job off the dead letters."""
        return Letter(self._place.dead(queue), 0, job_id.encode(), None, int(now * 1000))

    def _next(self) -> int:
        with self._lock:
            return next(self._turn)
