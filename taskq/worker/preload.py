"""Imported once by the fork server, so that children start with the app already loaded.

Forking is safe only while one thread runs and no connection is open; what the import left behind is looked at here
and told by :func:`obstacle`, and then children are spawned instead.
"""

from __future__ import annotations

import gc
import os
import pathlib
from typing import Final

#: Names the app to load, in the environment of the fork server.
VARIABLE: Final = "TASKQ_X_PRELOAD"

_obstacle: str | None = None


def obstacle() -> str | None:
    """Why this process must not be forked; ``None`` if it may."""
    return _obstacle


def _sockets() -> set[str]:
    names = set()
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the directory's own descriptor, closed by now
        if target.startswith("socket:"):
            names.add(target)
    return names


def _load(spec: str) -> str | None:
    from taskq.discovery import find_app
    from taskq.errors import TaskQError
    from taskq.worker import child, executor, lanes  # noqa: F401

    before = _sockets()
    try:
        find_app(spec)
    except TaskQError:
        return None  # each child will try again, and tell
    threads = len(list(pathlib.Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"importing the app started {threads - 1} thread(s)"
    opened = len(_sockets() - before)
    if opened:
        return f"importing the app opened {opened} socket(s)"
    gc.freeze()
    return None


if VARIABLE in os.environ:
    _obstacle = _load(os.environ[VARIABLE])
