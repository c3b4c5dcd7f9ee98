"""One file of jobs as a process sees it: the database, the bells beside it, and who here sleeps on one."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from sqlite3 import Connection
from typing import Protocol, TypeVar

from taskq.backends.sqlite import keys
from taskq.backends.sqlite.bells import Bell, Bells
from taskq.backends.sqlite.change import Change
from taskq.backends.sqlite.connection import CONSUMER_WAL, Database, NotStoredError
from taskq.backends.sqlite.lanes import Lanes
from taskq.backends.sqlite.rows import Row
from taskq.backends.sqlite.settle import UNSTORABLE, Deleted
from taskq.clock import Clock
from taskq.errors import BackendUnavailableError, InvalidArgumentError
from taskq.job import Job

T = TypeVar("T")


class Session(Protocol):
    """What has the file open for one worker."""

    def close(self) -> None: ...

    def forget_parent(self) -> None: ...


class JobFile:
    """Thread-safe; opens on first use; never crosses a fork."""

    def __init__(self, path: str, clock: Clock, *, timeout: float, full: bool) -> None:
        self.path = path
        self.clock = clock
        self.database = Database(path, timeout=timeout, full=full)
        self.bells = Bells(path)
        self.deleted = Deleted()
        self.closed = False
        self.sessions: set[Session] = set()  #: closed with the file
        self._pushes = _PushLine(self)
        self._bells_lock = threading.Lock()
        self._spare_bells: list[Bell] = []
        self._open_bells: weakref.WeakSet[Bell] = weakref.WeakSet()
        _files.add(self)

    def change(self, work: Callable[[Change], T], *, durable: bool = False) -> T:
        """Run ``work`` in a write transaction, and wake those it concerns once it is committed."""
        self.check_open()
        change: Change | None = None

        def inside(db: Connection) -> T:
            nonlocal change
            change = Change(db, self.clock)
            result = work(change)
            change.flush()
            if change.lanes is not None and change.lanes.started:
                Lanes(change, None).record()
            return result

        result = self.database.write(inside, durable=durable)
        assert change is not None
        if change.ready:
            self.bells.ring_takers(change.ready)
        if change.ended:
            self.bells.ring_waiters(change.ended)
        return result

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` on a connection that does not write."""
        self.check_open()
        return self.database.read(work)

    def push(self, jobs: Sequence[Job], inserts: list[Row], *, announced: bool) -> list[str]:
        """Store jobs and their rows; pushes of several threads share one commit."""
        self.check_open()
        return self._pushes.push(_Push(jobs, inserts, announced))

    def consuming(self) -> None:
        """This process has a consumer: it is the one to keep the log short."""
        self.database.wal_limit = CONSUMER_WAL

    def check_open(self) -> None:
        if self.closed:
            raise BackendUnavailableError("this backend is closed")

    # -- sleeping ---------------------------------------------------------------------

    def new_bell(self, owner: str) -> Bell:
        """A bell that :meth:`close` wakes; its owner closes it."""
        bell = self.bells.bell(owner)
        self._open_bells.add(bell)
        return bell

    @contextlib.contextmanager
    def borrowed_bell(self) -> Iterator[Bell]:
        """A bell for one wait."""
        with self._bells_lock:
            bell = self._spare_bells.pop() if self._spare_bells else None
        bell = bell or self.new_bell("")
        try:
            yield bell
        finally:
            with self._bells_lock:
                if self.closed:
                    bell.close()
                else:
                    self._spare_bells.append(bell)

    def close(self) -> None:
        """Idempotent; whoever sleeps is woken and told."""
        with self._bells_lock:
            self.closed = True
            spare, self._spare_bells = self._spare_bells, []
        for bell in spare:
            bell.close()
        for bell in list(self._open_bells):
            bell.wake()
        for session in list(self.sessions):
            session.close()
        self.bells.close()
        self.database.close()

    def forget_parent(self) -> None:
        """In the child of a fork: begin anew; what was opened before belongs to the parent."""
        self.database.forget_parent()
        self.bells.forget_parent()
        self._pushes = _PushLine(self)
        self._bells_lock = threading.Lock()
        for session in self.sessions:
            session.forget_parent()
        for bell in self._open_bells:
            bell.close()
        self._spare_bells = []
        self._open_bells, self.sessions = weakref.WeakSet(), set()


class _Push:
    __slots__ = ("announced", "done", "error", "ids", "inserts", "jobs", "keyed")

    def __init__(self, jobs: Sequence[Job], inserts: list[Row], announced: bool) -> None:
        self.jobs = jobs
        self.announced = announced
        self.inserts = inserts
        self.keyed = False  #: whether one of them wants a unique key, or a place in a line that may be full
        for job in jobs:
            if job.unique is not None or (job.lane is not None and job.lane.most is not None):
                self.keyed = True
        self.ids = [job.id for job in jobs]  #: that stand for the jobs
        self.done = False
        self.error: Exception | None = None


class _PushLine:
    """Group commit: of the threads that push at once, one commits for all; each returns after its commit."""

    def __init__(self, file: JobFile) -> None:
        self._file = weakref.proxy(file)
        self._mutex = threading.Lock()
        self._leader = threading.Lock()
        self._line: list[_Push] = []

    def push(self, push: _Push) -> list[str]:
        with self._mutex:
            self._line.append(push)
        with self._leader:
            if not push.done:
                self._lead(push)
        if push.error is not None:
            raise push.error
        return push.ids

    def _lead(self, own: _Push) -> None:
        with self._mutex:
            pushes, self._line = self._line, []
        try:
            self._store(pushes)
        except BaseException:
            # Interrupted: the others find their place in the line again, and one of them leads.
            with self._mutex:
                self._line[:0] = [push for push in pushes if push is not own and not push.done]
            raise

    def _store(self, pushes: Sequence[_Push]) -> None:
        try:
            inserts: list[Row] = []
            keyed = False
            for push in pushes:
                inserts += push.inserts
                keyed = keyed or push.keyed
            if keyed:
                self._insert_by_keys(pushes)
            else:
                self._insert(inserts)
        except Exception as error:  # noqa: BLE001 - handed to the thread whose push it is
            if len(pushes) == 1:
                pushes[0].error, pushes[0].done = _not_stored(error), True
                return
            for push in pushes:  # one of them is to blame, and only that one shall fail
                self._store([push])
        for push in pushes:
            push.done = True

    def _insert(self, inserts: list[Row]) -> None:
        def all_new(change: Change) -> None:
            if not change.insert_new(inserts):
                raise _RepeatedError

        try:
            self._file.change(all_new, durable=True)
        except _RepeatedError:
            self._file.change(lambda change: change.insert(inserts), durable=True)

    def _insert_by_keys(self, pushes: Sequence[_Push]) -> None:
        def each(change: Change) -> list[list[str]]:
            return [
                keys.store(change, push.jobs, may_refuse=True, announced=push.announced) for push in pushes
            ]

        for push, ids in zip(pushes, self._file.change(each, durable=True), strict=True):
            push.ids = ids


class _RepeatedError(Exception):
    """Some of the rows are there already."""


def _not_stored(error: Exception) -> Exception:
    told = error
    if isinstance(error, BackendUnavailableError):
        told = NotStoredError(str(error))
    elif isinstance(error, UNSTORABLE):
        told = InvalidArgumentError(f"the job cannot be stored: {error}")
    if told is not error:
        told.__cause__ = error
    return told


_files: weakref.WeakSet[JobFile] = weakref.WeakSet()


def _forget_parent() -> None:
    for file in list(_files):
        file.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)
