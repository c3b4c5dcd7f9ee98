"""The file: one writer and a few readers per process, patient with locks, clear about failures."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from taskq.backends.sqlite import schema
from taskq.backends.sqlite.wal import WalGauge
from taskq.clock import monotonic
from taskq.errors import BackendError, BackendUnavailableError, NotPublishedError, SchemaError

T = TypeVar("T")

#: Bytes of log at which a consuming process checkpoints, and at which a producing one does.
CONSUMER_WAL: Final = 16 << 20
PRODUCER_WAL: Final = 256 << 20
#: With synchronous=full every push waits for the disk, and that is half as long in a log which has its length.
_SYNCED_WAL: Final = 4 << 20
#: A checkpoint waits this long for others, in milliseconds.
_CHECKPOINT_PATIENCE: Final = 100
#: Pause after one that found somebody in the way, in seconds: a writer is gone in a moment, a reader may stay.
_FIRST_CHECKPOINT_PAUSE: Final = 0.05
_LAST_CHECKPOINT_PAUSE: Final = 2.0
_KEPT_READERS: Final = 4
_FIRST_DELAY: Final = 0.0002
_LAST_DELAY: Final = 0.002

#: What a value raises that SQLite cannot store.
UNSTORABLE: Final = (
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.IntegrityError,
    sqlite3.DataError,
)

# A connection must not be used, nor even closed, on the other side of a fork: closing would drop the locks that
# the parent's connection relies on. What a child inherits is kept here, untouched.
_inherited: list[sqlite3.Connection] = []


class NotStoredError(NotPublishedError, BackendUnavailableError):
    """The push was rolled back: nothing of it is stored."""


class Database:
    """One SQLite file. Thread-safe; opens on first use."""

    def __init__(
        self, path: str, *, timeout: float, full: bool, scripts: Sequence[str] | None = None
    ) -> None:
        self.path = path
        self._timeout = timeout
        self._full = full
        self._scripts = schema.steps() if scripts is None else scripts
        self._lock = threading.Lock()
        self._readers_lock = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._readers: list[sqlite3.Connection] = []
        self._closed = False
        self._file: tuple[int, int] | None = None  #: which file the connections are to
        self._durable = False  # whether the writer syncs at commit at present
        self._wal = WalGauge(path)
        self._next_checkpoint = 0.0
        self._checkpoint_pause = _FIRST_CHECKPOINT_PAUSE
        self.wal_limit = _SYNCED_WAL if full else PRODUCER_WAL

    def write(self, work: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        """Run ``work`` in a write transaction of its own: committed when this returns, undone when it raises."""
        with self._lock, self.translated():
            self._notice_another_file()
            db = self._ready_writer()
            if self._full:
                self._sync(db, durable)
            self._patiently(lambda: db.execute("BEGIN IMMEDIATE"))
            try:
                result = work(db)
                db.execute("COMMIT")
            except BaseException:
                self._roll_back(db)
                raise
            if self._wal.passed(self.wal_limit) and monotonic() >= self._next_checkpoint:
                self._checkpoint(db)
            return result

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work``, which reads little and leaves no cursor open."""
        with self.translated(), self._reader() as db:
            return self._patiently(lambda: work(db))

    def close(self) -> None:
        """Close every connection. Idempotent."""
        with self._lock, self._readers_lock:
            self._closed = True
            for db in [*self._readers, *([self._writer] if self._writer else [])]:
                db.close()
            self._readers, self._writer = [], None
            self._wal.close()

    def forget_parent(self) -> None:
        """In the child of a fork: begin anew."""
        _inherited.extend(self._readers)
        if self._writer is not None:
            _inherited.append(self._writer)
        self._readers, self._writer = [], None
        self._lock, self._readers_lock = threading.Lock(), threading.Lock()
        self._wal.close()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turn SQLite's errors into taskq's, except ``UNSTORABLE``, which concern a value and not the file."""
        try:
            yield
        except UNSTORABLE as error:
            if self._closed:
                raise BackendUnavailableError("this backend is closed") from error
            raise
        except sqlite3.Error as error:
            raise _translate(error, self.path) from error

    # -- connections ------------------------------------------------------------------

    def _ready_writer(self) -> sqlite3.Connection:
        if self._writer is None:
            self._writer = self._open_writer()
            self._durable = False
            self._file = _identity(self.path)
        return self._writer

    def _notice_another_file(self) -> None:
        """Leave a file that was deleted or replaced: what is written there, nobody will find."""
        if self._writer is not None and _identity(self.path) != self._file:
            with self._readers_lock:
                for db in (*self._readers, self._writer):
                    db.close()
                self._readers, self._writer = [], None
            self._wal.close()

    def _open_writer(self) -> sqlite3.Connection:
        db = self._connect()
        try:
            if not self._patiently(lambda: schema.is_current(db, len(self._scripts))):
                self._patiently(lambda: _use_wal(db))
                self._patiently(lambda: db.execute("BEGIN IMMEDIATE"))
                try:
                    schema.migrate(db, self._scripts)
                    db.execute("COMMIT")
                except BaseException:
                    self._roll_back(db)
                    raise
        except BaseException as error:
            db.close()
            if isinstance(error, SchemaError):
                raise SchemaError(f"{self.path}: {error}") from error
            raise
        return db

    def _connect(self) -> sqlite3.Connection:
        if self._closed:
            raise BackendUnavailableError("this backend is closed")
        folder = Path(self.path).parent
        if not folder.is_dir():
            raise BackendUnavailableError(
                f"the directory {folder} does not exist; create it: mkdir -p {folder}"
            )
        db = sqlite3.connect(
            self.path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            self._patiently(lambda: _configure(db))
        except BaseException:
            db.close()
            raise
        return db

    @contextlib.contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        if self._writer is None or _identity(self.path) != self._file:
            with self._lock:
                self._notice_another_file()
                self._ready_writer()
        with self._readers_lock:
            db = self._readers.pop() if self._readers else None
            file = self._file
        try:
            db = db or self._connect()
            yield db
        finally:
            with self._readers_lock:
                if db is not None:
                    self._put_away(db, file)

    def _put_away(self, reader: sqlite3.Connection, file: tuple[int, int] | None) -> None:
        if self._closed or file != self._file or len(self._readers) >= _KEPT_READERS:
            reader.close()
        else:
            self._readers.append(reader)

    # -- locks and durability ---------------------------------------------------------

    def _patiently(self, action: Callable[[], T]) -> T:
        """Repeat ``action`` while another process holds the lock it needs."""
        delay = _FIRST_DELAY
        end = 0.0
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if not _is_busy(error):
                    raise
                end = end or monotonic() + self._timeout
                if monotonic() >= end:
                    raise
            # Short and random: SQLite's own waiting grows to 100 ms and starves whoever comes late.
            time.sleep(random.uniform(delay / 2, delay))  # noqa: S311, TID251 - a lock has no event to wait for
            delay = min(delay * 1.5, _LAST_DELAY)

    def _sync(self, db: sqlite3.Connection, durable: bool) -> None:
        if durable is not self._durable:
            db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable

    def _roll_back(self, db: sqlite3.Connection) -> None:
        if db.in_transaction:
            # A full disk may have rolled back already; nothing else can be done about it here.
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")

    def _checkpoint(self, db: sqlite3.Connection) -> None:
        """Move the log into the file and begin it again; between transactions, by the writer itself.

        RESTART holds the writers' lock throughout, so that nobody commits meanwhile. Without a busy timeout it
        would quietly become a passive one when another process holds that lock.
        """
        try:
            db.execute(f"PRAGMA busy_timeout = {_CHECKPOINT_PATIENCE}")
            (busy, *_) = db.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        except sqlite3.Error:
            # The transaction before it is committed, and the next one tries again.
            busy = 1
        finally:
            db.execute("PRAGMA busy_timeout = 0")
        if busy:
            self._next_checkpoint = monotonic() + self._checkpoint_pause
            self._checkpoint_pause = min(self._checkpoint_pause * 2, _LAST_CHECKPOINT_PAUSE)
        else:
            self._checkpoint_pause = _FIRST_CHECKPOINT_PAUSE


def _configure(db: sqlite3.Connection) -> None:
    for setting in _SETTINGS:
        db.execute(f"PRAGMA {setting}")


def _use_wal(db: sqlite3.Connection) -> None:
    (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise BackendUnavailableError(
            f"SQLite cannot keep a write-ahead log there (it offers {mode!r}); the file must be on a local disk"
        )


_SETTINGS: Final = (
    "busy_timeout = 0",  # waiting for locks is done here, not by SQLite
    # A push dirties four pages; small ones make it half as dear again, and batches no dearer.
    "page_size = 2048",
    "synchronous = NORMAL",
    # Automatic checkpoints are passive ones, and those may damage the file (SQLite before 3.51.3).
    "wal_autocheckpoint = 0",
    f"journal_size_limit = {CONSUMER_WAL}",
    "cache_size = -16000",
    "temp_store = MEMORY",
)


# PROTOCOL: many came at the same moment and it gave up trying to find a place among the readers.
_BUSY: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def _identity(path: str) -> tuple[int, int] | None:
    """Which file is at ``path``; ``None`` where none is."""
    try:
        found = os.stat(path)  # noqa: PTH116 - asked before every write
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _BUSY


def _translate(error: sqlite3.Error, path: str) -> BackendError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_NOTADB:
        return SchemaError(f"{path} is not a SQLite database; give taskq a file of its own")
    if code == sqlite3.SQLITE_CORRUPT:
        return BackendUnavailableError(
            f"{path} is damaged ({error}); stop its workers and restore it, or save what is readable with"
            f" the sqlite3 shell's .recover"
        )
    said = _UNAVAILABLE.get(code)
    if said is not None:
        return BackendUnavailableError(f"{path}: {said} ({error})")
    return BackendError(f"{path}: {error}")


_UNAVAILABLE: Final = {
    sqlite3.SQLITE_BUSY: "other processes kept it locked for too long",
    sqlite3.SQLITE_LOCKED: "it was kept locked for too long",
    sqlite3.SQLITE_PROTOCOL: "other processes kept it busy for too long",
    sqlite3.SQLITE_FULL: "the disk is full; nothing was written",
    sqlite3.SQLITE_READONLY: "the file or its directory is read-only; SQLite writes into both",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; are the file and its directory writable for this user?",
    sqlite3.SQLITE_IOERR: "the disk failed; nothing was written",
    sqlite3.SQLITE_PERM: "access is denied",
    sqlite3.SQLITE_AUTH: "access is denied",
    sqlite3.SQLITE_NOMEM: "memory is used up",
}
