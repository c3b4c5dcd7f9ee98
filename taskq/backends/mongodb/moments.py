"""What time it is: by the server's clock, so that the clocks of workers and producers need not agree.

Leases are written and compared by the server itself (``$$NOW``). For everything else, the server's time is the
machine's own, moved by how far the two were apart when they were last compared. A clock that is no machine's (that
of a test) keeps the time for both.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

from taskq.clock import SYSTEM_CLOCK, Clock, SystemClock, monotonic

#: The end of a lease that time does not end. A date, because ``$expr`` finds ``null`` to be before every date.
NEVER: Final = datetime(9999, 12, 31, tzinfo=UTC)
#: A difference between two clocks that is no greater than this is left alone, in seconds: it cannot be told from
#: the time that the question takes.
_UNSURE: Final = 0.05
#: Seconds between two comparisons of the clocks.
COMPARED: Final = 60.0

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Moments(Protocol):
    """The time that jobs in this database live by."""

    def now(self) -> float:
        """Seconds since the epoch, for due times, expiry and retention."""
        ...

    def lease_now(self) -> float:
        """Seconds of the clock that leases end by."""
        ...

    def lease(self) -> Any:
        """The same as an expression that the server evaluates."""
        ...

    def tick(self) -> float:
        """Seconds since the epoch, to number things by: goes on even where :meth:`now` stands still."""
        ...

    def learn(self, server: float, asked: float, answered: float) -> None:
        """The server's time was ``server`` somewhen between these two of :meth:`machine_now`."""
        ...


class ServerMoments:
    """The server's time."""

    def __init__(self) -> None:
        self._apart = 0.0
        self._compared = float("-inf")

    def now(self) -> float:
        return SYSTEM_CLOCK.now() + self._apart

    lease_now = tick = now

    def lease(self) -> Any:
        return "$$NOW"

    @property
    def stale(self) -> bool:
        """Whether the clocks should be compared again."""
        return monotonic() - self._compared > COMPARED

    def learn(self, server: float, asked: float, answered: float) -> None:
        apart = server - (asked + answered) / 2
        self._apart = apart if abs(apart) > _UNSURE + (answered - asked) else 0.0
        self._compared = monotonic()


class ClockMoments:
    """The time of a clock that was given."""

    stale = False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.now()

    def lease_now(self) -> float:
        return self._clock.lease_time()

    def tick(self) -> float:
        return SYSTEM_CLOCK.now()

    def lease(self) -> Any:
        return _EPOCH + timedelta(seconds=self._clock.lease_time())

    def learn(self, server: float, asked: float, answered: float) -> None:
        """Nothing: the clock is right."""


def moments(clock: Clock) -> ServerMoments | ClockMoments:
    """The server's time, unless ``clock`` is not a machine's."""
    return ServerMoments() if isinstance(clock, SystemClock) else ClockMoments(clock)


def lease_end(now: Any, seconds: Any) -> Any:
    """An expression for the end of a lease of ``seconds`` (a number or an expression) from ``now``."""
    return {
        "$cond": [{"$gt": [seconds, 0]}, {"$add": [now, {"$toLong": {"$multiply": [seconds, 1000]}}]}, NEVER]
    }


class Stamps:
    """Numbers that grow, and that no other process gives: of jobs, to keep their order, and of takes, to fence."""

    def __init__(self, tag: int) -> None:
        self._tag = tag & _TAGS
        self._last = 0
        self._lock = threading.Lock()

    def next(self, n: int, now: float) -> int:
        """The first of ``n``; each next one is :data:`STEP` greater."""
        with self._lock:
            first = max(self._last + 1, int(now * 1e6))
            self._last = first + n - 1
        return first * STEP + self._tag


#: Between two stamps of one process lie those of the others.
STEP: Final = 1 << 10
_TAGS: Final = STEP - 1
