"""The connection to the servers: opened at first use, once per process, and its errors in taskq's words."""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from taskq.backends.mongodb.moments import Stamps, moments
from taskq.clock import SYSTEM_CLOCK, Clock, monotonic
from taskq.errors import BackendError, BackendUnavailableError, ConfigurationError, NotSupportedError

if TYPE_CHECKING:
    from pymongo import MongoClient
    from pymongo.client_session import ClientSession
    from pymongo.collection import Collection

T = TypeVar("T")
P = ParamSpec("P")

#: How long a server that does not answer is tried, in seconds.
TIMEOUT: Final = 30.0
#: First and longest pause between two tries, in seconds.
_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.5

#: Codes of errors that say that the server cannot answer now: it is starting, stopping, or no longer the primary.
_PASSING: Final = frozenset(
    {6, 7, 24, 64, 89, 91, 112, 134, 189, 251, 262, 9001, 10107, 11600, 11602, 13435, 13436}
)

_PASSWORD: Final = re.compile(r"(//[^/@:]*):[^/@]*@")

#: The session of the caller that the present push belongs to: see ``enlist``.
CALLERS: ContextVar[Any] = ContextVar("taskq_mongodb_session", default=None)


@dataclass(frozen=True, slots=True)
class Rooms:
    """The collections."""

    client: MongoClient[dict[str, Any]]
    jobs: Collection[dict[str, Any]]
    lanes: Collection[dict[str, Any]]  #: lines of jobs with a lane, and whose turn it is
    gates: Collection[dict[str, Any]]  #: when jobs started that are under a rate, and what pushes agree upon
    keys: Collection[dict[str, Any]]  #: who holds which unique key
    facts: Collection[dict[str, Any]]  #: pauses and limits
    schedules: Collection[dict[str, Any]]
    workers: Collection[dict[str, Any]]  #: what workers say of themselves, and sessions of consumers
    signals: Collection[dict[str, Any]]  #: who waits for what
    bells: Collection[dict[str, Any]]  #: what has come; small, and capped

    @property
    def fresh(self) -> Collection[dict[str, Any]]:
        """The jobs as the primary sees them, though a majority may not yet: for looks that writes will check."""
        from pymongo.read_concern import ReadConcern

        return self.jobs.with_options(read_concern=ReadConcern("local"))


class Connection:
    """All threads of a process share one, and a child that was forked opens its own."""

    def __init__(self, url: str, database: str, *, prefix: str, timeout: float, clock: Clock) -> None:
        self._url = url
        self._database = database
        self._prefix = prefix
        self.timeout = timeout
        self.moments = moments(clock)
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._rooms: Rooms | None = None
        self._pid = 0
        self.transactions = True  #: whether the servers are a replica set or shards; known once connected
        self._stamps = Stamps(0)

    @property
    def location(self) -> str:
        """Where the jobs are, without a password."""
        server, _, query = _PASSWORD.sub(r"\1:***@", self._url).partition("/?")
        return f"{server}/{self._database}" + (f"?{query}" if query else "")

    # -- opening ----------------------------------------------------------------------

    def rooms(self) -> Rooms:
        """The collections, with their indexes; connects at first use."""
        rooms = self._rooms
        if rooms is None or self._pid != os.getpid():
            rooms = self._open()
        if self.moments.stale:
            self._compare_clocks(rooms)
        return rooms

    def check_open(self) -> None:
        if self.closed.is_set():
            raise BackendUnavailableError("this backend is closed")

    def _open(self) -> Rooms:
        if self._pid and self._pid != os.getpid():
            self._lock = threading.Lock()  # its holder may have stayed behind in the parent
        with self._lock:
            if self._rooms is not None and self._pid == os.getpid():
                return self._rooms
            self.check_open()
            rooms = self._connect()
            self._stamps = Stamps(int.from_bytes(os.urandom(4)))
            # The client of the parent is let go unclosed: its sockets are the parent's.
            self._rooms, self._pid = rooms, os.getpid()
            return rooms

    def _connect(self) -> Rooms:
        from taskq.backends.mongodb.schema import prepare

        client = self._client()
        try:
            hello = client.admin.command("hello")
            self.transactions = "setName" in hello or hello.get("msg") == "isdbgrid"
            rooms = self._collections(client)
            prepare(rooms)
        except BaseException:
            client.close()
            raise
        return rooms

    def _client(self) -> MongoClient[dict[str, Any]]:
        try:
            from pymongo import MongoClient
            from pymongo.driver_info import DriverInfo
            from pymongo.errors import PyMongoError
        except ImportError as error:
            raise ConfigurationError("mongodb:// needs pymongo: pip install 'taskq[mongodb]'") from error
        options: dict[str, Any] = {"appname": "taskq", "driver": DriverInfo("taskq"), "tz_aware": True}
        options |= {"retryWrites": True, "retryReads": True, "connect": False}
        options["serverSelectionTimeoutMS"] = int(self.timeout * 1000)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # a parameter that the driver does not know
                return MongoClient(self._url, **options)
        except (PyMongoError, ValueError, UserWarning) as error:
            raise ConfigurationError(f"{self.location}: {error}") from error

    def of(self, client: MongoClient[dict[str, Any]]) -> Rooms:
        """The same collections through the client of a caller; they are there already."""
        self.rooms()
        return self._collections(client)

    def _collections(self, client: MongoClient[dict[str, Any]]) -> Rooms:
        from pymongo import ReadPreference, WriteConcern
        from pymongo.read_concern import ReadConcern

        database = client.get_database(
            self._database,
            read_preference=ReadPreference.PRIMARY,
            read_concern=ReadConcern("majority"),
            write_concern=WriteConcern("majority", j=True),
        )
        names = ("jobs", "lanes", "gates", "keys", "facts", "schedules", "workers", "signals", "bells")
        rooms = Rooms(client, *(database[f"{self._prefix}{name}"] for name in names))
        # Rings are not worth a majority, and must not wait for one.
        return replace(rooms, bells=rooms.bells.with_options(read_concern=ReadConcern("local")))

    def _compare_clocks(self, rooms: Rooms) -> None:
        asked = SYSTEM_CLOCK.now()
        hello = rooms.client.admin.command("hello")
        self.moments.learn(hello["localTime"].timestamp(), asked, SYSTEM_CLOCK.now())

    # -- asking -----------------------------------------------------------------------

    def run(self, act: Callable[Concatenate[Rooms, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``act`` returns, which is tried again while the servers have no primary or a connection is cut.

        ``act`` must be harmless to repeat, whatever became of it. Raises ``BackendUnavailableError`` after
        ``timeout`` seconds.
        """
        return self.run_within(self.timeout, act, *args, **kwargs)

    def run_within(
        self, seconds: float, act: Callable[Concatenate[Rooms, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The same in at most so many seconds."""
        self.check_open()
        pymongo = _driver()
        end = monotonic() + seconds
        pause = _FIRST_PAUSE
        while True:
            try:
                with pymongo.timeout(max(end - monotonic(), 0.001)):
                    return act(self.rooms(), *args, **kwargs)
            except pymongo.errors.PyMongoError as error:
                self.check_open()
                if not passing(error) or end - monotonic() <= pause:
                    raise self.translated(error) from error
            # Spread, so that those who met here do not meet again.
            self.closed.wait(pause * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            self.check_open()
            pause = min(_LONGEST_PAUSE, pause * 2)

    def transact(self, act: Callable[[Rooms, ClientSession], T], what: str) -> T:
        """The same with all that ``act`` reads and writes in one transaction; ``what`` is the plural noun of an error."""

        def once(rooms: Rooms) -> T:
            if not self.transactions:
                raise NotSupportedError(
                    f"{what} need a replica set (one node is enough): {self.location} is a standalone server"
                )
            # Made before anything happens, so that the commit can be repeated by itself.
            with rooms.client.start_session() as session:
                return _transaction(session, lambda: act(rooms, session))

        return self.run(once)

    def stamp(self, n: int = 1) -> int:
        """The first of ``n`` numbers, ``moments.STEP`` apart, greater than all before."""
        self.rooms()
        return self._stamps.next(n, self.moments.tick())

    def translated(self, error: Exception) -> BackendError:
        """The driver's error in taskq's words."""
        said = _PASSWORD.sub(r"\1:***@", str(error)).partition(", Timeout:")[0]
        message = f"{self.location}: {said}"
        return BackendUnavailableError(message) if passing(error) else BackendError(message)

    def close(self) -> None:
        """Let go of the sockets; whoever waits is freed."""
        self.closed.set()
        with self._lock:
            rooms, self._rooms = self._rooms, None
            if rooms is not None and self._pid == os.getpid():
                rooms.client.close()


def _transaction(session: ClientSession, act: Callable[[], T]) -> T:
    """One try of a transaction; what it raises says whether it may be tried again."""
    from pymongo.errors import PyMongoError
    from pymongo.read_concern import ReadConcern
    from pymongo.write_concern import WriteConcern

    with contextlib.ExitStack() as undo:
        session.start_transaction(ReadConcern("snapshot"), WriteConcern("majority", j=True))
        undo.callback(_abort, session)
        found = act()
        undo.pop_all()
        while True:
            try:
                session.commit_transaction()
                return found
            except PyMongoError as error:
                # The server knows whether it is committed, and a repeat learns it.
                if not error.has_error_label("UnknownTransactionCommitResult") or error.timeout:
                    raise


def _abort(session: ClientSession) -> None:
    from pymongo.errors import PyMongoError

    with contextlib.suppress(PyMongoError):  # the server gives it up by itself
        session.abort_transaction()


def passing(error: BaseException) -> bool:
    """Whether trying again may help."""
    from pymongo import errors

    if isinstance(error, errors.BulkWriteError):
        codes = {each.get("code") for each in (error.details or {}).get("writeErrors", [])}
        return bool(codes) and codes <= _PASSING
    if isinstance(error, errors.OperationFailure):
        transient = error.has_error_label("TransientTransactionError")
        return transient or error.code in _PASSING or error.timeout
    if isinstance(error, errors.InvalidOperation):
        return "closed" in str(error) or "close" in str(error)
    return isinstance(
        error, errors.ConnectionFailure | errors.ExecutionTimeout | errors.WaitQueueTimeoutError
    ) or (
        isinstance(error, errors.PyMongoError)
        and (error.timeout or error.has_error_label("TransientTransactionError"))
    )


def _driver() -> Any:
    try:
        import pymongo
        import pymongo.errors
    except ImportError as error:
        raise ConfigurationError("mongodb:// needs pymongo: pip install 'taskq[mongodb]'") from error
    return pymongo


@contextlib.contextmanager
def unstorable() -> Iterator[None]:
    """Turn what values raise that cannot be encoded into errors about what the caller gave."""
    from bson.errors import BSONError, InvalidDocument

    from taskq.errors import InvalidArgumentError

    try:
        yield
    except (BSONError, InvalidDocument, OverflowError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(f"the job cannot be stored: {error}") from error
