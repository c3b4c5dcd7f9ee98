"""The children of one worker: started, replaced, retired; their pipes flushed and their growth watched."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import Final

from taskq.clock import monotonic
from taskq.events import Events
from taskq.worker import reaper
from taskq.worker.pool import ChildHandle, proportional_memory, stop

#: A child must report ready within this, or is replaced; in seconds.
_READY: Final = 60.0
#: So many children may die before they are ready, one after the other, before the worker gives up.
_STILLBORN: Final = 5
#: How often memory is looked at, in seconds.
_WEIGHING: Final = 2.0

#: What a registered descriptor stands for: ``message`` or ``death``, and whose.
Registration = tuple[str, ChildHandle]


class Nursery:
    """Keeps ``wanted`` children alive."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        start_child: Callable[[], ChildHandle],
        events: Events,
        *,
        most_jobs: int | None,
        most_memory: int | None,
    ) -> None:
        self._selector = selector
        self._start_child = start_child
        self._events = events
        self._most_jobs = most_jobs
        self._most_memory = most_memory
        self.wanted = 1
        self.children: dict[ChildHandle, float] = {}  #: when each was started (monotonic)
        self.ready: set[ChildHandle] = set()
        self.retiring: set[ChildHandle] = set()
        self._jobs: dict[ChildHandle, int] = {}
        self._choked: set[ChildHandle] = set()
        self._stillborn = 0
        self._next_weighing = 0.0

    @property
    def complete(self) -> bool:
        """Whether every child is there and has reported ready."""
        return len(self.ready) >= max(len(self.children), self.wanted)

    def fill(self) -> str | None:
        """Start the children that are missing; returns why there is no point in it, if so."""
        if self._stillborn >= _STILLBORN:
            return f"{_STILLBORN} children died before they were ready: the log says how"
        while len(self.children) - len(self.retiring) < self.wanted:
            try:
                self._add()
            except (OSError, EOFError) as error:  # no process to be had, or the fork server died meanwhile
                self._stillborn += 1
                self._events.emit("child.unborn", error=f"{type(error).__name__}: {error}")
                break
        return None

    def is_ready(self, child: ChildHandle) -> None:
        """``child`` has reported."""
        self._stillborn = 0
        self.ready.add(child)

    def retire(self, child: ChildHandle) -> None:
        """Let ``child`` end once its lanes are idle; :meth:`fill` starts another."""
        if child in self.children and child not in self.retiring:
            self.retiring.add(child)
            stop(child)

    def ran(self, child: ChildHandle, jobs: int) -> bool:
        """Count jobs of ``child``; whether it has run as many as it may."""
        self._jobs[child] += jobs
        return self._most_jobs is not None and self._jobs[child] >= self._most_jobs

    def forget(self, child: ChildHandle) -> None:
        """``child`` has ended."""
        for descriptor in (child.sentinel, child.end.sock):
            if descriptor is not None and self._registered(descriptor):
                self._selector.unregister(descriptor)
        if child not in self.ready and child not in self.retiring:
            self._stillborn += 1
        del self.children[child], self._jobs[child]
        for group in (self.ready, self.retiring, self._choked):
            group.discard(child)

    def hung_up(self, child: ChildHandle) -> None:
        """``child`` has closed its pipe: there is nothing more to read, its death is what counts."""
        if self._registered(child.end.sock):
            self._selector.unregister(child.end.sock)

    def flush(self) -> None:
        """Write what is queued for the children; watch for room where a buffer is full."""
        for child in list(self.children):
            written = child.end.flush()
            if written == (child in self._choked) and self._registered(child.end.sock):
                (self._choked.discard if written else self._choked.add)(child)
                events = selectors.EVENT_READ | (0 if written else selectors.EVENT_WRITE)
                self._selector.modify(child.end.sock, events, ("message", child))

    def check(self, now: float) -> list[ChildHandle]:
        """Kill children that never became ready; returns those that have grown too large."""
        for child, started in self.children.items():
            if child not in self.ready and child not in self.retiring and now - started > _READY:
                self._events.emit("child.stuck", pid=child.pid, seconds=_READY)
                child.kill()
        if all(
            child.sentinel is not None for child in self.children
        ):  # else user code has processes of its own
            reaper.reap_orphans({child.pid for child in self.children})
        if self._most_memory is None or now < self._next_weighing:
            return []
        self._next_weighing = now + _WEIGHING
        return [child for child in self.ready - self.retiring if self._too_large(child, self._most_memory)]

    def close(self) -> None:
        """End every child now."""
        for child in list(self.children):
            child.kill()
            child.close()

    def _add(self) -> None:
        child = self._start_child()
        self.children[child] = monotonic()
        self._jobs[child] = 0
        self._selector.register(child.end.sock, selectors.EVENT_READ, ("message", child))
        if child.sentinel is not None:
            self._selector.register(child.sentinel, selectors.EVENT_READ, ("death", child))

    def _registered(self, descriptor: object) -> bool:
        return descriptor in self._selector.get_map()

    def _too_large(self, child: ChildHandle, most: int) -> bool:
        used = proportional_memory(child.pid)
        if used is None or used <= most * 1024 * 1024:
            return False
        self._events.emit("child.retired", pid=child.pid, reason="memory", mib=used // (1024 * 1024))
        return True
