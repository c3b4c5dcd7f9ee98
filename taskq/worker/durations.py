"""Running estimates of how long tasks take."""

from __future__ import annotations

import math
from typing import Final

#: How much the latest run counts in the estimate of its task, and in that of all.
_WEIGHT: Final = 0.2
_WEIGHT_OF_ALL: Final = 0.05


class Durations:
    """What runs of each task took lately, in seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.mean: float | None = None  #: over all tasks

    def note(self, task: str, seconds: float) -> None:
        """A run of ``task`` has taken so long."""
        known = self._seconds.get(task)
        self._seconds[task] = seconds if known is None else known + _WEIGHT * (seconds - known)
        self.mean = seconds if self.mean is None else self.mean + _WEIGHT_OF_ALL * (seconds - self.mean)

    def expected(self, task: str) -> float:
        """How long the next run may take; infinity for a task that was never seen."""
        return self._seconds.get(task, math.inf)
