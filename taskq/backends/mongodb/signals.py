"""How those who wait learn that something has come.

Each thing that can be waited for (a queue, the end of jobs, a worker's cancellations) has one small document, in which
whoever waits signs in. Who brings something rings: at most every 20 ms over all processes, and only where somebody has
signed in, it adds an entry to a small capped collection. One thread of a process follows that collection while somebody
waits; another one rings.

(A change stream would tell the same, but each that is open reads everything that is written to the servers. Eight of
them halved what a server could do.)
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from taskq.backends.mongodb.connection import Connection, Rooms, passing
from taskq.clock import monotonic
from taskq.errors import BackendError

#: Longest sleep between two looks, in seconds: the net under everything that is waited for.
LOOK: Final = 1.0
#: The same where nothing can be followed.
LOOK_UNWATCHED: Final = 0.05
#: Shortest time between two rings of a name, in seconds.
_APART: Final = 0.02
#: A ring that lies this far in the future was made by a wrong clock, in seconds.
_WRONG: Final = 1.0
#: How long a sign-in lasts, and how much before its end it is renewed, in seconds.
_SIGNED: Final = 30.0
_RENEWED: Final = 15.0
#: How long rings are followed when nobody waits any more, in seconds.
_LINGER: Final = 2.0
#: Longest wait of one question for rings, in seconds.
_ASKED: Final = 0.25

#: The name under which ends of jobs are signalled; those of queues begin with ``q``.
ENDS: Final = "ends"


def queue_name(queue: str) -> str:
    return f"q{queue}"


def worker_name(worker: str) -> str:
    return f"w{worker}"


class Waiter:
    """Somebody who waits for some names; sleeps on an event of its own."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self._event = threading.Event()
        self._rung: set[str] = set()

    def ring(self, names: Iterable[str] = ()) -> None:
        self._rung = self._rung.union(names)
        self._event.set()

    def clear(self) -> None:
        """To be called before a look: what comes after that look rings."""
        self._event.clear()
        self._rung = set()

    def sleep(self, seconds: float) -> set[str]:
        """Sleep until something rings, but no longer than this; returns for which names it rang."""
        self._event.wait(seconds)
        return self._rung


class Signals:
    """Those of one process on one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()
        self._signed: dict[str, float] = {}  # until when, on the monotonic clock
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._active: set[Waiter] = set()
        self._idle_since = monotonic()
        self._ringer = _Ringer(self._connection)
        self._watcher: threading.Thread | None = None
        self._watching = threading.Event()  # rings are followed
        self._settled = threading.Event()  # it is known whether one can be

    # -- bringing ---------------------------------------------------------------------

    def ring(self, names: Iterable[str]) -> None:
        """Something has come for ``names``; costs the caller no trip."""
        self._own()
        wanted = set(names)
        if not wanted:
            return
        with self._lock:
            mine = [waiter for waiter in self._waiters if waiter.names & wanted]
        for waiter in mine:
            waiter.ring(wanted)
        self._ringer.ring(wanted)

    # -- waiting ----------------------------------------------------------------------

    def waiter(self, names: Iterable[str]) -> Waiter:
        self._own()
        waiter = Waiter(names)
        with self._lock:
            self._waiters.add(waiter)
        return waiter

    @contextlib.contextmanager
    def waiting(self, waiter: Waiter) -> Iterator[float]:
        """Sign ``waiter`` in while the block lasts, in which it must look before it sleeps; how long it may sleep."""
        self._own()
        with self._lock:
            self._active.add(waiter)
        try:
            self._sign_in(waiter.names)
            self._watch()
            yield LOOK if self._watching.is_set() else LOOK_UNWATCHED
        finally:
            with self._lock:
                self._active.discard(waiter)
                self._idle_since = monotonic()

    def _sign_in(self, names: Iterable[str]) -> None:
        """Before the look: what comes later is signalled."""
        now = monotonic()
        with self._lock:
            due = [name for name in names if self._signed.get(name, 0.0) - now < _RENEWED]
        if not due:
            return
        from pymongo import UpdateOne

        until = self._connection.moments.tick() + _SIGNED
        writes = [UpdateOne({"_id": name}, {"$max": {"seen": until}}, upsert=True) for name in due]
        self._connection.run(lambda rooms: rooms.signals.bulk_write(writes, ordered=False))
        with self._lock:
            self._signed.update(dict.fromkeys(due, now + _SIGNED))

    def _watch(self) -> None:
        if self._watching.is_set():
            return
        with self._lock:
            if self._watcher is None or not self._watcher.is_alive():
                self._settled.clear()
                self._watcher = threading.Thread(target=self._run, name="taskq-mongodb-watch", daemon=True)
                self._watcher.start()
        self._settled.wait(LOOK)

    # -- watching ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001 - whatever it is, waiters look by themselves meanwhile
            if not passing(error):
                # Not allowed: not tried again before somebody has waited a good while.
                self._settled.set()
                self._connection.closed.wait(_SIGNED)
        finally:
            self._watching.clear()
            self._settled.set()
            self._ring_all()

    def _follow(self) -> None:
        import pymongo
        from pymongo.cursor import CursorType

        rooms = self._connection.rooms()
        rings = rooms.bells.find(cursor_type=CursorType.TAILABLE_AWAIT, batch_size=1000)
        with contextlib.closing(rings.max_await_time_ms(int(_ASKED * 1000))):
            while not self._connection.closed.is_set() and not self._abandoned():
                with pymongo.timeout(_ASKED + self._connection.timeout):
                    ring: Any = next(rings, None)
                if ring is None:
                    if not rings.alive:
                        return  # too far behind, or the collection was dropped: everybody looks
                    # What was there before is read; whoever comes now looks first.
                    self._watching.set()
                    self._settled.set()
                elif self._watching.is_set():
                    self._rung(ring["names"])

    def _abandoned(self) -> bool:
        """Whether nobody waits any more; the watch is then over in the eyes of whoever comes."""
        with self._lock:
            over = not self._active and monotonic() - self._idle_since > _LINGER
            if over:
                self._watching.clear()
                self._watcher = None
            return over

    def _rung(self, names: Sequence[str]) -> None:
        with self._lock:
            woken = [waiter for waiter in self._waiters if not waiter.names.isdisjoint(names)]
        for waiter in woken:
            waiter.ring(names)

    def _ring_all(self) -> None:
        with self._lock:
            everyone = list(self._waiters)
        for waiter in everyone:
            waiter.ring()

    def close(self) -> None:
        """Free everybody; the connection is closed already."""
        self._ringer.close()
        self._ring_all()

    def _own(self) -> None:
        if self._pid != os.getpid():  # forked: threads and locks stayed behind
            self._lock = threading.Lock()
            self._waiters = weakref.WeakSet()
            self._signed = {}
            self._begin()


class _Ringer:
    """A thread that rings for what has come, and ends when nothing has for a while."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._wanted: set[str] = set()
        self._changed = threading.Condition()
        self._running = False
        self._closed = False

    def ring(self, names: Iterable[str]) -> None:
        with self._changed:
            self._wanted.update(names)
            if self._closed:
                return
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="taskq-mongodb-ring", daemon=True).start()
            self._changed.notify_all()

    def _run(self) -> None:
        while names := self._next():
            late: set[str] = set()
            with contextlib.suppress(BackendError):  # those who wait look by themselves, once a second
                late = self._connection.run_within(LOOK, self._write, names)
            self._connection.closed.wait(_APART)
            with self._changed:
                self._wanted |= late

    def _next(self) -> list[str]:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted or self._closed, _LINGER)
            names, self._wanted = list(self._wanted), set()
            if not names or self._closed:
                self._running = False
                return []
            return names

    def _write(self, rooms: Rooms, names: list[str]) -> set[str]:
        """Ring those of ``names`` for which somebody waits; returns those that were rung too short a time ago."""
        from pymongo import WriteConcern

        now = self._connection.moments.tick()
        signed = list(rooms.signals.find({"_id": {"$in": names}, "seen": {"$gt": now}}, {"at": 1}))
        ready = [each["_id"] for each in signed if not now - _APART < each.get("at", 0.0) < now + _WRONG]
        if ready:
            quick = WriteConcern(1)
            rooms.signals.with_options(write_concern=quick).update_many(
                {"_id": {"$in": ready}}, {"$set": {"at": now}}
            )
            rooms.bells.with_options(write_concern=quick).insert_one({"names": ready})
        return {each["_id"] for each in signed} - set(ready)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
