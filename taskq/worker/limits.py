"""Ending a body from outside: time limits, cancellation, shutdown; in the main thread, a pool thread, a coroutine.

An interrupt is addressed to one run by its key. It is raised only while that run's body executes: each mechanism
checks the key at the last moment, under the lock or in the thread where the body runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from types import FrameType
from typing import Any, Final, NoReturn, Protocol

from taskq.errors import JobCancelled, ShutdownRequested, SoftTimeLimit, TimeLimitExceeded

#: Why a run is interrupted, as the pipe carries it: what is raised, and what ``ctx.cancel_reason`` says.
SOFT: Final = "soft time limit"
HARD: Final = "time limit"
CANCELLED: Final = "cancelled"
LEASE_LOST: Final = "lease lost"
SHUTDOWN: Final = "shutdown"

_RAISES: Final[dict[str, type[BaseException]]] = {
    SOFT: SoftTimeLimit,
    HARD: TimeLimitExceeded,
    CANCELLED: JobCancelled,
    LEASE_LOST: JobCancelled,
    SHUTDOWN: ShutdownRequested,
}

#: Which run: lane, chunk, index.
Key = tuple[int, int, int]


def exception_for(kind: str) -> BaseException:
    """What to raise inside the body."""
    return _RAISES[kind](kind)


def end_process(status: int) -> NoReturn:
    """End this process now: what was printed is written, nobody else's threads are waited for."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def in_this_process(body: Callable[[], Any]) -> Any:
    """Call ``body``. A copy of the process that it forks ends where the body ends, and runs nobody else's jobs."""
    pid = os.getpid()
    status = 0
    try:
        return body()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except BaseException:
        status = 1
        raise
    finally:
        if os.getpid() != pid:
            end_process(status)


class Interrupter(Protocol):
    """Runs bodies so that :meth:`interrupt` can end them."""

    def run(self, key: Key, body: Callable[[], Any]) -> Any: ...

    def interrupt(self, key: Key, kind: str) -> None: ...


class MainThread:
    """Interrupts the main thread by a signal, which also ends a blocking system call."""

    def __init__(self, signum: int = signal.SIGUSR2) -> None:
        self._signum = signum
        self._armed: Key | None = None
        self._pending: tuple[Key, str] | None = None
        self._thread = threading.main_thread().ident
        signal.signal(signum, self._on_signal)

    def run(self, key: Key, body: Callable[[], Any]) -> Any:
        """Call ``body``; an interrupt for ``key`` is raised inside it."""
        try:
            self._armed = key
            return in_this_process(body)
        finally:
            self._armed = None

    def interrupt(self, key: Key, kind: str) -> None:
        """Raise inside the body of ``key``, if that is what runs. From any other thread."""
        self._pending = (key, kind)
        if self._armed == key and self._thread is not None:
            signal.pthread_kill(self._thread, self._signum)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and pending[0] == self._armed:
            raise exception_for(pending[1])


class PoolThread:
    """Interrupts one pool thread by an asynchronous exception; a blocking system call runs out first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: Key | None = None
        self._thread = 0

    def run(self, key: Key, body: Callable[[], Any]) -> Any:
        """Call ``body`` in the calling thread."""
        try:
            with self._lock:
                self._thread = threading.get_ident()
                self._armed = key
            return in_this_process(body)
        finally:
            self._disarm()

    def interrupt(self, key: Key, kind: str) -> None:
        """Raise inside the body of ``key`` at its next bytecode, if that is what runs."""
        with self._lock:
            if self._armed == key:
                # The exception is made by the interpreter in that thread, from its class alone.
                _set_async_exception(self._thread, ctypes.py_object(_RAISES[kind]))

    def _disarm(self) -> None:
        # An exception set just before the body ended is still pending: it may fire anywhere in here, so this
        # repeats until the lock was held once with nothing armed, and clears what has not fired.
        while True:
            try:
                with self._lock:
                    self._armed = None
                    _set_async_exception(self._thread, ctypes.py_object())
                return
            except BaseException as error:
                if type(error) not in _RAISES.values():
                    raise


def _set_async_exception(thread: int, exception: Any) -> None:
    """An empty ``py_object`` is NULL, which clears; ``None`` would set an error of its own."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


class Interruptible:
    """Drives a coroutine so that it can be interrupted where it waits.

    A soft limit is raised inside as ``SoftTimeLimit``. Whatever must end the body arrives as the ``CancelledError``
    that asyncio's own tools know how to pass on, and leaves here as the interrupt it was meant as.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._soft = 0  #: soft limits that are still to be raised
        self._ending: list[str] = []  #: why the body must end: one cancellation each
        self._task: asyncio.Task[Any] | None = None

    def interrupt(self, kind: str) -> None:
        """Raise inside the coroutine at its next wait. In the loop's thread."""
        if self._task is not None and not self._task.done():
            if kind == SOFT:
                self._soft += 1
            else:
                self._ending.append(kind)
            self._task.cancel()

    def __await__(self) -> Generator[Any, Any, Any]:
        self._task = asyncio.current_task()
        try:
            value = yield from self._drive()
        except asyncio.CancelledError as error:
            if self._ending:
                raise exception_for(self._ending[0]) from error
            raise
        finally:
            for _ in self._ending:
                self._uncancel()
        return value

    def _drive(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = lambda: self._coroutine.send(None)  # noqa: E731
        while True:
            try:
                waiting = step()
            except StopIteration as end:
                return end.value
            try:
                value = yield waiting
            except asyncio.CancelledError as error:
                step = self._throwing(self._translated(error))
            except BaseException as error:  # noqa: BLE001 - belongs to the coroutine, whatever it is
                step = self._throwing(error)
            else:
                step = self._sending(value)

    def _sending(self, value: Any) -> Callable[[], Any]:
        return lambda: self._coroutine.send(value)

    def _throwing(self, error: BaseException) -> Callable[[], Any]:
        return lambda: self._coroutine.throw(error)

    def _translated(self, error: BaseException) -> BaseException:
        if not self._soft or self._ending:
            return error
        self._soft -= 1
        self._uncancel()
        return exception_for(SOFT)

    def _uncancel(self) -> None:
        if self._task is not None:
            self._task.uncancel()
