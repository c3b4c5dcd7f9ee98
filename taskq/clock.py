"""Time, as an argument: the only module that reads a clock."""

from __future__ import annotations

import pathlib
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

#: Seconds, as a number or a ``timedelta``; everywhere a duration is accepted.
Duration = float | timedelta


class Clock(Protocol):
    """What the rest of taskq may ask about time."""

    def now(self) -> float:
        """Seconds since the Unix epoch, for due times, expiry and schedules."""
        ...

    def lease_time(self) -> float:
        """Seconds that never step back and go on through suspend; comparable between processes of one boot."""
        ...

    def boot_id(self) -> str:
        """Names the boot that ``lease_time`` counts from; leases of another boot are over."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def __init__(self) -> None:
        self._boot_id = _read_boot_id()

    def now(self) -> float:
        return time.time()

    def lease_time(self) -> float:
        return time.clock_gettime(_LEASE_CLOCK)

    def boot_id(self) -> str:
        return self._boot_id


class FrozenClock:
    """A clock that moves only when told to; for tests."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._lease = 1_000.0
        self._boot_id = "frozen"

    def now(self) -> float:
        return self._now

    def lease_time(self) -> float:
        return self._lease

    def boot_id(self) -> str:
        return self._boot_id

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, on both clocks."""
        self._now += seconds
        self._lease += seconds

    def step(self, seconds: float) -> None:
        """Set the wall clock, as an operator or NTP does: no time passes."""
        self._now += seconds

    def reboot(self) -> None:
        """Start another boot: lease time begins again near zero."""
        self._lease = 0.0
        self._boot_id += "+"


# CLOCK_BOOTTIME counts through suspend; where it is missing (macOS), the monotonic clock is the nearest.
_LEASE_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


def _read_boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def monotonic() -> float:
    """Seconds for measuring how long something takes within this boot."""
    return time.monotonic()


def seconds(duration: Duration) -> float:
    """``duration`` as a float of seconds."""
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)


def to_datetime(timestamp: float) -> datetime:
    """Unix seconds as an aware UTC datetime."""
    return datetime.fromtimestamp(timestamp, UTC)


#: The machine's clocks; stateless, so one serves the whole process.
SYSTEM_CLOCK = SystemClock()
