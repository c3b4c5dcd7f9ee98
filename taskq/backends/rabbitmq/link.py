"""One connection, and the one thread that speaks on it.

Everything that pika does happens on that thread: others hand it callables, and one wake-up carries any number of them.
A conversation that takes several steps is a *script*: a generator that yields what to start and is sent the reply.
A connection that is lost is opened again, for as long as the link is not closed.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final, Generic, TypeVar

import pika
from pika.adapters.select_connection import IOLoop
from pika.channel import Channel
from pika.exceptions import AMQPError

from taskq.backends.rabbitmq.address import Address
from taskq.backends.rabbitmq.refusals import explain, is_refusal
from taskq.errors import BackendError, BackendUnavailableError

T = TypeVar("T")

_logger: Final = logging.getLogger("taskq.rabbitmq")

#: A step starts something and passes on the function that is to be called with the reply.
Step = Callable[[Callable[[Any], None]], None]
Script = Generator[Step, Any, T]

#: Between attempts to connect, in seconds; doubles from the first to the last.
_FIRST_PAUSE: Final = 0.05
_LAST_PAUSE: Final = 2.0
#: How long closing waits for the broker's farewell, in seconds.
_FAREWELL: Final = 5.0


class Link:
    """A connection to ``address``. ``on_open`` and ``on_lost`` are called on its thread."""

    def __init__(
        self,
        address: Address,
        name: str,
        *,
        on_open: Callable[[], None] | None = None,
        on_lost: Callable[[BackendError], None] | None = None,
    ) -> None:
        self._address = address
        self._name = name
        self._on_open = on_open
        self._on_lost = on_lost
        self._calls: deque[Callable[[], None]] = deque()
        self._rung = False
        self._lock = threading.Lock()
        self._loop: IOLoop | None = None
        self._thread: threading.Thread | None = None
        self._pause = _FIRST_PAUSE
        self._talks: set[_Talk[Any]] = set()
        self._waiting: set[_Talk[Any]] = set()
        self._connecting = False
        self.connection: pika.SelectConnection | None = None  #: while it is open
        self.blocked = False  #: the broker reads nothing from it: an alarm
        self.failure: BackendError | None = None  #: why it is not open
        self.closed = False

    # -- any thread -------------------------------------------------------------------

    def call(self, do: Callable[[], None]) -> None:
        """Do this on the link's thread, soon and in order."""
        self._calls.append(do)
        if not self._rung:
            self._rung = True
            loop = self._loop or self._start()
            loop.add_callback_threadsafe(self._answer)

    def ask(self, script: Callable[[Channel], Script[T]], timeout: float) -> T:
        """Play ``script`` on a channel of its own and wait for what it returns.

        Raises ``BackendUnavailableError`` where that takes longer than ``timeout`` seconds, and whatever the broker's
        refusals are explained as.
        """
        talk = _Talk(self, script)
        self.call(talk.begin)
        try:
            return talk.future.result(timeout)
        except FutureTimeoutError:
            self.call(talk.abandon)
            raise self.unreachable(timeout) from None

    def unreachable(self, timeout: float) -> BackendError:
        """The error of something that did not happen in time."""
        why = f": {self.failure}" if self.failure else ""
        blocked = ", which is blocked by an alarm" if self.blocked else ""
        return BackendUnavailableError(
            f"no answer within {timeout:g} s from {self._address.location}{blocked}{why}"
        )

    def explained(self, error: BaseException) -> BackendError:
        """An error of the driver as one of ours."""
        return explain(error, self._address)

    def log(self, message: str, *about: object) -> None:
        """For whoever operates this."""
        _logger.warning(message, *about)

    def close(self) -> None:
        """Say good-bye and end the thread. Idempotent."""
        with self._lock:
            self.closed = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self.call(self._leave)
            thread.join(_FAREWELL)

    def abandon(self) -> None:
        """In the child of a fork: let go of the socket, which is the parent's, without a word."""
        self.closed = True
        transport = getattr(self.connection, "_transport", None)
        sock = getattr(transport, "_sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()

    def _start(self) -> IOLoop:
        with self._lock:
            if self._loop is None:
                _hush()
                self._loop = IOLoop()
                self._thread = threading.Thread(target=self._serve, name=f"taskq-{self._name}", daemon=True)
                self._thread.start()
            return self._loop

    # -- the link's thread ------------------------------------------------------------

    def later(self, seconds: float, do: Callable[[], None]) -> object:
        """Do this on the link's thread in ``seconds``; called on that thread."""
        assert self._loop is not None
        return self._loop.call_later(seconds, do)

    def play(self, script: Callable[[Channel], Script[T]]) -> Future[T]:
        """As :meth:`ask`, for callers on the link's thread, who cannot wait."""
        talk = _Talk(self, script)
        talk.begin()
        return talk.future

    def _serve(self) -> None:
        assert self._loop is not None
        self._connect()
        self._loop.start()
        self._loop.close()
        self._end_talks(BackendUnavailableError("this backend is closed"))

    def _answer(self) -> None:
        self._rung = False
        while self._calls:
            self._calls.popleft()()

    def _connect(self) -> None:
        if self.closed:
            self._stop()
            return
        parameters = self._address.parameters(self._name)
        try:
            self._connecting = True
            pika.SelectConnection(
                parameters,
                on_open_callback=self._opened,
                on_open_error_callback=self._failed,
                on_close_callback=self._lost,
                custom_ioloop=self._loop,
            )
        except (AMQPError, OSError) as error:
            self._failed(None, error)

    def _opened(self, connection: pika.SelectConnection) -> None:
        self.connection, self.failure, self.blocked = connection, None, False
        self._connecting = False
        if self.closed:
            connection.close()
            return
        self._pause = _FIRST_PAUSE
        connection.add_on_connection_blocked_callback(lambda *_: self._block(True))
        connection.add_on_connection_unblocked_callback(lambda *_: self._block(False))
        if self._on_open is not None:
            self._on_open()
        for talk in list(self._waiting):
            self._waiting.discard(talk)
            talk.begin()

    def _block(self, blocked: bool) -> None:
        self.blocked = blocked
        if not blocked and self._on_open is not None:
            self._on_open()

    def _failed(self, _: object, error: BaseException | str) -> None:
        """It did not come to a connection."""
        self._connecting = False
        self.failure = explain(error, self._address)
        if is_refusal(self.failure):
            self._end_talks(self.failure)
            if self._on_lost is not None:
                self._on_lost(self.failure)
        self._connect_later()

    def _lost(self, _: object, error: BaseException) -> None:
        """The connection that was there is no more."""
        self.connection, self.blocked = None, False
        self.failure = explain(error, self._address)
        self._end_talks(self.failure, waiting=False)
        if self._on_lost is not None:
            self._on_lost(self.failure)
        self._connect_later()

    def _connect_later(self) -> None:
        if self.closed:
            self._stop()
            return
        pause = random.uniform(self._pause / 2, self._pause)  # noqa: S311 - spreads attempts, guards nothing
        self._pause = min(_LAST_PAUSE, self._pause * 2)
        self.later(pause, self._connect)

    def _leave(self) -> None:
        if self.connection is not None:
            if self.connection.is_open:
                self.connection.close()  # _lost follows, and stops
        elif not self._connecting:
            self._stop()

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.stop()

    def _end_talks(self, error: BackendError, *, waiting: bool = True) -> None:
        for talk in [*self._talks, *(self._waiting if waiting else ())]:
            talk.fail(error)


def _hush() -> None:
    """The driver logs every attempt with its traceback; what it says comes as errors here, and is told once."""
    driver = logging.getLogger("pika")
    if driver.level == logging.NOTSET:
        driver.setLevel(logging.CRITICAL)


class _Talk(Generic[T]):
    """A script being played on a channel of its own."""

    def __init__(self, link: Link, script: Callable[[Channel], Script[T]]) -> None:
        self.future: Future[T] = Future()
        self._link = link
        self._play = script
        self._script: Script[T] | None = None
        self._channel: Channel | None = None

    def begin(self) -> None:
        """Start, or wait for the connection."""
        link = self._link
        if self.future.done():
            return
        if link.closed:
            self.fail(BackendUnavailableError("this backend is closed"))
        elif link.connection is None or not link.connection.is_open:
            link._waiting.add(self)
        else:
            link._talks.add(self)
            link.connection.channel(on_open_callback=self._opened)

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self.fail(BackendUnavailableError("given up"))

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
        self._end()

    def _opened(self, channel: Channel) -> None:
        self._channel = channel
        channel.add_on_close_callback(self._closed)
        if self.future.done():
            self._end()
            return
        self._script = self._play(channel)
        self._advance(None)

    def _advance(self, reply: Any) -> None:
        if self.future.done() or self._script is None:
            return
        try:
            step = self._script.send(reply)
            step(self._advance)
        except StopIteration as stop:
            self.future.set_result(stop.value)
            self._end()
        except Exception as error:  # noqa: BLE001 - whoever asked shall have it
            self.fail(explain(error, self._link._address) if isinstance(error, AMQPError) else error)

    def _closed(self, _: Channel, reason: Exception) -> None:
        if not self.future.done():
            self.fail(explain(reason, self._link._address))

    def _end(self) -> None:
        self._link._talks.discard(self)
        self._link._waiting.discard(self)
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            channel.close()
