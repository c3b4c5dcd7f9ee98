"""Sessions of consumers: proof that a worker is gone, for jobs whose lease no time ends."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
from collections.abc import Iterable, Sequence
from typing import Final

from taskq.backends.mongodb.connection import Connection, Rooms
from taskq.backends.mongodb.documents import RESERVED
from taskq.backends.mongodb.moments import NEVER
from taskq.clock import SYSTEM_CLOCK, monotonic
from taskq.errors import BackendError
from taskq.job import Reservation

#: Seconds between two signs of life.
_BEAT: Final = 20.0
#: A session of another machine that has given no sign of life for this long is gone, in seconds.
SILENCE: Final = 600.0


class Session:
    """Says that its worker lives, from the first job on that only its death gives back."""

    def __init__(self, connection: Connection, worker: str) -> None:
        self._connection = connection
        self._worker = worker
        self._id = f"session:{worker}:{secrets.token_hex(6)}"
        self._beaten: float | None = None
        self._known: set[str] = set()

    def holds(self, reservations: Sequence[Reservation]) -> None:
        """Something was lent."""
        if self._beaten is None and any(reservation.job.lease <= 0 for reservation in reservations):
            self._beat()

    def renew(self) -> None:
        """A sign of life, if one is due."""
        if self._beaten is not None and monotonic() - self._beaten > _BEAT:
            self._beat()

    def called(self, asked: Iterable[str]) -> bool:
        """Whether there is a cancel request among ``asked`` that was not among those asked before."""
        known, self._known = self._known, set(asked)
        return not self._known <= known

    def _beat(self) -> None:
        facts = {
            "session": self._worker,
            "seen": self._connection.moments.tick(),
            "boot": SYSTEM_CLOCK.boot_id(),
            "space": _space(),
            "pid": os.getpid(),
            "born": _born(os.getpid()),
        }
        self._connection.run(
            lambda rooms: rooms.workers.update_one({"_id": self._id}, {"$set": facts}, upsert=True)
        )
        self._beaten = monotonic()

    def end(self) -> None:
        """The session is over."""
        if self._beaten is not None:
            with contextlib.suppress(BackendError):  # then its silence says so
                self._connection.run_within(2.0, lambda rooms: rooms.workers.delete_one({"_id": self._id}))


def holders_gone(connection: Connection, rooms: Rooms) -> list[str]:
    """Workers that hold jobs without a time limit, and are gone."""
    holders = set(rooms.jobs.distinct("w", {"s": RESERVED, "e": NEVER}))
    if not holders:
        return []
    oldest = connection.moments.tick() - SILENCE
    found = list(rooms.workers.find({"session": {"$in": list(holders)}}))
    alive = {each["session"] for each in found if each["seen"] >= oldest and not _dead(each)}
    return sorted(holders - alive)


def _dead(session: dict[str, object]) -> bool:
    """Whether a process of this machine has ended."""
    if (session["boot"], session["space"]) != (SYSTEM_CLOCK.boot_id(), _space()) or not session["space"]:
        return False
    return _born(int(str(session["pid"]))) != session["born"]


def _born(pid: int) -> str:
    """When a process of this machine was started, in ticks of its boot; empty where there is none."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def _space() -> str:
    """Whose process numbers are seen here: containers of one machine share its boot, but not these."""
    try:
        return str(pathlib.Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
