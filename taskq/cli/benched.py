"""The tasks that ``taskq bench`` runs, and how it learns what they did: a file that its processes share."""

from __future__ import annotations

import os
import struct
import time
from mmap import mmap
from pathlib import Path

from taskq.app import TaskQ

#: Names the file; set by ``taskq bench`` for its worker.
FILE = "TASKQ_X_BENCH"

#: Jobs run, and the latest job's nanoseconds from the call to the body.
_RECORD = struct.Struct("=qq")

app = TaskQ(name="bench")


class Tally:
    """One process's record in the file."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        try:
            os.write(descriptor, bytes(_RECORD.size))
            # Nobody else's appending moves where ours ended.
            self._at = os.lseek(descriptor, 0, os.SEEK_CUR) - _RECORD.size
            self._map = mmap(descriptor, self._at + _RECORD.size)
        finally:
            os.close(descriptor)
        self._done = 0

    def count(self, waited: int = 0) -> None:
        """One more job is done."""
        self._done += 1
        _RECORD.pack_into(self._map, self._at, self._done, waited)


def read(path: Path) -> tuple[int, int]:
    """How many jobs are done, and the latest wait in nanoseconds, of all processes."""
    records = list(_RECORD.iter_unpack(path.read_bytes()))
    return sum(done for done, _ in records), max((waited for _, waited in records), default=0)


_tally: Tally | None = None


def _mine() -> Tally:
    global _tally
    if _tally is None:
        _tally = Tally(os.environ[FILE])
    return _tally


@app.task(name="taskq.bench.noop", ignore_result=True, max_retries=0)
def noop(number: int, text: str) -> None:
    """Nothing but to be counted."""
    _mine().count()


@app.task(name="taskq.bench.stamp", ignore_result=True, max_retries=0)
def stamp(called: int) -> None:
    """Note how long it took from the call to here."""
    _mine().count(time.time_ns() - called)
