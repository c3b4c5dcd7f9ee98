"""Slots: one shared-memory page per child that says what each of its lanes is doing now.

A *lane* runs jobs one after the other: the main thread, a pool thread, or a line of coroutines. The supervisor
reads a lane's slot for blame, time limits and renewal, and withdraws jobs that were handed over but not begun.
Both sides write under one lock, held for a microsecond: that a lane begins a job and that the supervisor takes it
back can never both happen, even while the child's interpreter is stuck in C code.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
from typing import Any, Final, NamedTuple, Protocol

#: chunk, index, activity, since (monotonic seconds) · written by the child
_DOING: Final = struct.Struct("<Iii4xd")
#: first chunk, first index in it, last chunk · written by the supervisor
_WITHDRAWN: Final = struct.Struct("<IiI")
_SIZE: Final = 64
_WITHDRAWN_AT: Final = 32
_ACTIVITY_AT: Final = 8

#: How long the supervisor waits for a child that holds the lock; a live one needs a microsecond.
_PATIENCE: Final = 0.05


class Activity(enum.IntEnum):
    """What a lane does with the job its slot names."""

    IDLE = 0
    RUNNING = 1
    RAN = 2  #: the body has ended, the outcome may not have been sent


class Doing(NamedTuple):
    """A slot as read."""

    chunk: int
    position: int
    activity: int
    since: float


class Lock(Protocol):
    """What both ``threading`` and ``multiprocessing`` locks offer."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool: ...

    def release(self) -> None: ...


class Slots:
    """A child's page. ``memory`` is shared with the child (see :func:`shared_memory`)."""

    def __init__(self, memory: Any, lock: Any) -> None:
        self._memory = memory
        self._lock = lock

    # -- the child's side -------------------------------------------------------------

    def begin(self, lane: int, chunk: int, index: int, now: float) -> bool:
        """Say that ``lane`` begins this job; false if it has been withdrawn."""
        at = lane * _SIZE
        with self._lock:
            first, position, last = _WITHDRAWN.unpack_from(self._memory, at + _WITHDRAWN_AT)
            if (first, position) <= (chunk, index) and chunk <= last:
                return False
            _DOING.pack_into(self._memory, at, chunk, index, Activity.RUNNING, now)
        return True

    def ran(self, lane: int) -> None:
        """Say that the body of the job just begun has ended."""
        self._memory[lane * _SIZE + _ACTIVITY_AT] = Activity.RAN

    def rest(self, lane: int) -> None:
        """Say that ``lane`` has nothing to do; call it after the outcomes were sent."""
        self._memory[lane * _SIZE + _ACTIVITY_AT] = Activity.IDLE

    # -- the supervisor's side --------------------------------------------------------

    def withdraw(self, lane: int, last: int) -> tuple[int, int] | None:
        """Take back what ``lane`` has not begun of the chunks up to ``last``; chunk numbers grow.

        Returns the chunk and index from which on nothing will run. ``None``: the child holds the lock and does
        not let go (it was stopped); nothing was withdrawn.
        """
        at = lane * _SIZE
        if not self._lock.acquire(True, _PATIENCE):
            return None
        try:
            doing = Doing(*_DOING.unpack_from(self._memory, at))
            start = (doing.chunk, doing.position + 1)
            # All that the lane has not begun, so that what an earlier call withdrew, and the lane may not even
            # have read, stays withdrawn.
            _WITHDRAWN.pack_into(self._memory, at + _WITHDRAWN_AT, *start, last)
        finally:
            self._lock.release()
        return start

    def look(self, lane: int) -> Doing | None:
        """What ``lane`` is doing; ``None`` while the child holds the lock and does not let go."""
        if not self._lock.acquire(True, _PATIENCE):
            return None
        try:
            return self.last(lane)
        finally:
            self._lock.release()

    def last(self, lane: int) -> Doing:
        """The slot without the lock: for a child that is known to be dead."""
        return Doing(*_DOING.unpack_from(self._memory, lane * _SIZE))


def shared_memory(lanes: int) -> tuple[int, mmap.mmap]:
    """Anonymous memory for ``lanes`` slots, and the descriptor by which a child maps it too."""
    descriptor = os.memfd_create("taskq-slots", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, lanes * _SIZE)
    return descriptor, mmap.mmap(descriptor, lanes * _SIZE)


def local_memory(lanes: int) -> bytearray:
    """Memory for ``lanes`` slots of a child that lives in this process."""
    return bytearray(lanes * _SIZE)


def map_memory(descriptor: int, lanes: int) -> mmap.mmap:
    """The child's view of :func:`shared_memory`; closes the descriptor."""
    try:
        return mmap.mmap(descriptor, lanes * _SIZE)
    finally:
        os.close(descriptor)
