"""Two brakes on retrying that several tasks may share: a circuit breaker and a retry budget.

Both live in one process: each child of a worker has its own, and sees only its own runs. With N children, a
broken service is tried about N times as often as the numbers say. They are given the time, and are thread-safe.
"""

from __future__ import annotations

import threading
from typing import Final

from taskq.errors import InvalidArgumentError

#: Seconds' worth of ``min_per_second`` that a budget can save up.
_SAVED: Final = 10.0


class CircuitBreaker:
    """Stops calling what keeps failing, and lets one run probe it from time to time.

    *Closed*: all run. After ``failure_threshold`` failures in a row it *opens*: for ``reset_after`` seconds no
    run should start (:meth:`admit` says how long to hold it) and retries are due no earlier than its end. Then
    one run is let through: its success closes the breaker, its failure opens it for as long again. A probe that
    never reports back is replaced after ``reset_after`` more.

    Source of the pattern: M. Nygard, *Release It!*, "Circuit Breaker".
    """

    def __init__(self, name: str, failure_threshold: int = 5, reset_after: float = 30.0) -> None:
        if isinstance(failure_threshold, bool) or not failure_threshold >= 1:
            raise InvalidArgumentError(f"failure_threshold={failure_threshold!r}: expected 1 or more")
        if not 0 < reset_after < float("inf"):
            raise InvalidArgumentError(f"reset_after={reset_after!r}: expected a positive number of seconds")
        self.name = name
        self.failure_threshold = failure_threshold
        self.reset_after = reset_after
        self._failures = 0
        self._open_until: float | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"CircuitBreaker({self.name!r}, {self.failure_threshold}, {self.reset_after})"

    def admit(self, now: float) -> float:
        """0 if a run may start at ``now`` (Unix seconds), else the seconds to hold it for."""
        with self._lock:
            left = self._left(now)
            if left == 0 and self._open_until is not None:
                self._open_until = now + self.reset_after  # this run is the probe; the others wait for it
            return left

    def succeeded(self) -> None:
        """A run succeeded: close."""
        with self._lock:
            self._failures = 0
            self._open_until = None

    def failed(self, now: float) -> float:
        """A run failed; returns the seconds until the next one should start."""
        with self._lock:
            self._failures += 1
            if self._failures >= self.failure_threshold:
                self._open_until = now + self.reset_after
            return self._left(now)

    def _left(self, now: float) -> float:
        if self._open_until is None:
            return 0.0
        # No longer than `reset_after`, also when the clock was set back.
        return min(max(0.0, self._open_until - now), self.reset_after)


class RetryBudget:
    """Keeps retries to a share of the runs, so that an outage does not multiply the load.

    Every run deposits ``ratio``, every retry takes 1, and ``min_per_second`` retries a second are always there.
    A retry beyond the budget is not lost: it waits for the policy's ``max_delay``.

    Source of the idea: the retry budgets of Twitter's Finagle.
    """

    def __init__(self, ratio: float = 0.2, min_per_second: float = 1.0, burst: float = 100.0) -> None:
        for name, value in (("ratio", ratio), ("min_per_second", min_per_second), ("burst", burst)):
            if not 0 <= value < float("inf"):
                raise InvalidArgumentError(f"{name}={value!r}: expected a finite number, 0 or more")
        self.ratio = ratio
        self.min_per_second = min_per_second
        self.burst = burst  #: the most that runs can save up
        self._saved = 0.0
        self._floor = min_per_second * _SAVED
        self._seen: float | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RetryBudget({self.ratio}, {self.min_per_second}, {self.burst})"

    def deposit(self) -> None:
        """A run has ended, in whatever way."""
        with self._lock:
            self._saved = min(self.burst, self._saved + self.ratio)

    def withdraw(self, now: float) -> bool:
        """Take one retry at ``now`` (Unix seconds); false if there is none."""
        with self._lock:
            self._refill(now)
            if self._saved >= 1:
                self._saved -= 1
                return True
            if self._floor >= 1:
                self._floor -= 1
                return True
            return False

    def _refill(self, now: float) -> None:
        passed = 0.0 if self._seen is None else max(0.0, now - self._seen)
        self._seen = now
        most = max(1.0, self.min_per_second * _SAVED) if self.min_per_second else 0.0
        self._floor = min(most, self._floor + passed * self.min_per_second)
