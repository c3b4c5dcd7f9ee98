"""A lock between a supervisor and one child, that leaves nothing behind when both are killed.

``multiprocessing``'s own locks are named semaphores that keep their names for life: killed processes leave them in
``/dev/shm``. Here the child takes the name away as soon as it has the semaphore open.
"""

from __future__ import annotations

import _multiprocessing  # type: ignore[import-not-found]
import contextlib
import os
from typing import Any, Final

_SEMAPHORE: Final = 1


class Latch:
    """Acquired and released like a ``threading.Lock``; travels to a child with the arguments of its start."""

    def __init__(self, semaphore: Any = None) -> None:
        if semaphore is None:
            name = f"/taskq-{os.getpid()}-{os.urandom(8).hex()}"
            semaphore = _multiprocessing.SemLock(_SEMAPHORE, 1, 1, name, False)
        self._semaphore = semaphore
        self.acquire = semaphore.acquire
        self.release = semaphore.release

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        semaphore = self._semaphore
        return _opened, (semaphore.handle, semaphore.kind, semaphore.maxvalue, semaphore.name)

    def forget_name(self) -> None:
        """Take the name away, if the child has not."""
        with contextlib.suppress(FileNotFoundError):
            _multiprocessing.sem_unlink(self._semaphore.name)


def _opened(handle: int, kind: int, maxvalue: int, name: str) -> Latch:
    latch = Latch(_multiprocessing.SemLock._rebuild(handle, kind, maxvalue, name))
    latch.forget_name()
    return latch
