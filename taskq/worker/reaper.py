"""Process 1 inherits every orphan of its container, and must wait for it when it ends."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Set as AbstractSet
from multiprocessing import forkserver, resource_tracker
from typing import Final

_INIT: Final = 1


def reap_orphans(own: AbstractSet[int]) -> None:
    """Wait for ended orphans, where this is process 1; ``own`` are children that somebody else here waits for."""
    if os.getpid() != _INIT or not _something_ended():
        return
    for pid in _children() - own - _helpers():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _something_ended() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _children() -> set[int]:
    found: set[int] = set()
    for thread in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (thread / "children").read_text(encoding="ascii").split()}
    return found


def _helpers() -> set[int]:
    """What multiprocessing started and waits for itself."""
    started = (
        getattr(forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
    )
    return {pid for pid in started if pid is not None}
