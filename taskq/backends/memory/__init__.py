"""Jobs in this process's memory: for tests and single-process use, and the shortest statement of the rules."""

from __future__ import annotations

from typing import Any

from taskq.backends import suggestion
from taskq.backends.memory.backend import MemoryBackend
from taskq.clock import SYSTEM_CLOCK, Clock
from taskq.errors import ConfigurationError

__all__ = ["MemoryBackend", "open_url"]


def open_url(
    url: str, *, clock: Clock = SYSTEM_CLOCK, publish_timeout: float | None = None, **options: Any
) -> MemoryBackend:
    """``memory://``: a new, empty backend with every call. ``ageing`` as in SQLite's."""
    if url.partition("://")[2]:
        raise ConfigurationError(f"{url!r}: memory:// takes no path and no parameters")
    for name in options.keys() - {"ageing", "max_finished"}:
        raise ConfigurationError(
            f"memory:// has no option {name!r}{suggestion(name, ['ageing', 'max_finished'])}"
        )
    return MemoryBackend(clock=clock, **options)
