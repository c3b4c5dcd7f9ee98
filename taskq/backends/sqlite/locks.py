"""Proof of death: a file lock that a worker holds for its life, and that the kernel takes away at its end.

Only workers that hold a job without a time limit on its lease need one; such a job is taken back from nobody else
than the dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from pathlib import Path
from urllib.parse import quote

_LONGEST_NAME = 200


class LifeLock:
    """Held by a living worker."""

    def __init__(self, folder: str, worker: str) -> None:
        self._pid = os.getpid()
        with contextlib.suppress(FileExistsError):
            Path(folder).mkdir(0o700)
        path = _path(folder, worker)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Two sessions of one worker share the lock's meaning: while either lives, so does the worker.
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def release(self) -> None:
        """The session has ended. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_dead(folder: str, worker: str) -> bool:
    """Whether the worker's lock is there and nobody holds it. A lock that is missing proves nothing."""
    try:
        fd = os.open(_path(folder, worker), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def clear(folder: str, worker: str) -> None:
    """Remove the lock of a worker that is dead and holds nothing any more."""
    with contextlib.suppress(OSError):
        _path(folder, worker).unlink()


def _path(folder: str, worker: str) -> Path:
    name = quote(worker, safe="")
    if len(name) > _LONGEST_NAME:
        name = hashlib.sha256(worker.encode("utf-8", "surrogatepass")).hexdigest()
    return Path(folder) / f"{name}.lock"
