"""The tasks of ``python -m benchmarks.mixed``: short jobs and a few long ones, and when each ran."""

from __future__ import annotations

import os
import struct
import threading
import time

from taskq import TaskQ

#: Names the file that every run is noted in.
FILE = "BENCH_RUNS"
#: One run: the job's number, who ran it, and from when to when on the monotonic clock, in nanoseconds.
RUN = struct.Struct("<QQQQ")

app = TaskQ()


@app.task(name="run", ignore_result=True)
def run(number: int, seconds: float) -> None:
    """Wait for ``seconds``, or for nothing."""
    began = time.monotonic_ns()
    if seconds:
        threading.Event().wait(seconds)
    _note(RUN.pack(number, threading.get_native_id(), began, time.monotonic_ns()))


_file: int | None = None


def _note(entry: bytes) -> None:
    """Appends of so few bytes are whole, whoever else appends."""
    global _file
    if _file is None:
        _file = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND)
    os.write(_file, entry)
