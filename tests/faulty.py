"""``python -m tests.faulty worker …``: the command line with faults on cue, told by the environment.

``TASKQ_X_CRASH_AT`` names a point of a job's life, ``TASKQ_X_VICTIM`` who is killed there (``child``, ``supervisor``
or ``group``), once for each file ``TASKQ_X_CRASHED``. While the file ``TASKQ_X_REFUSE`` exists, the backend refuses.

Children import this module too: it is the main module of their supervisor.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import taskq.backends
from taskq.backend import Backend, Consumer
from taskq.errors import BackendUnavailableError
from taskq.store import Store
from taskq.worker.slots import Slots

POINT = os.environ.get("TASKQ_X_CRASH_AT", "")
VICTIM = os.environ.get("TASKQ_X_VICTIM", "")
SUPERVISOR = "TASKQ_X_SUPERVISOR"


# -- crashes --------------------------------------------------------------------------


def crash() -> None:
    """Kill the victim, the first time."""
    try:
        os.close(os.open(os.environ["TASKQ_X_CRASHED"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    supervisor = int(os.environ[SUPERVISOR])
    if VICTIM == "group":
        os.killpg(0, signal.SIGKILL)
    elif VICTIM == "supervisor":
        os.kill(supervisor, signal.SIGKILL)
        threading.Event().wait()  # in a child: until it is noticed
    elif os.getpid() == supervisor:
        for child in multiprocessing.active_children():
            child.kill()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


class CrashingConsumer:
    """Dies at a point on the way between the session and its backend."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._has_settled = False

    def take(self, *arguments: Any, **options: Any) -> Any:
        self._acked()
        taken = self._consumer.take(*arguments, **options)
        if taken.reservations and POINT == "reserved":
            crash()
        return taken

    def exchange(self, outcomes: Any, limit: int) -> Any:
        answer = self._consumer.exchange(outcomes, limit)
        self._has_settled = True
        if POINT == "settled":
            crash()
        return answer

    def _acked(self) -> None:
        if self._has_settled and POINT == "acked":
            crash()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


def crashing_slots() -> None:
    """Die in the child, when a body is about to begin or has just ended."""
    begin, ran = Slots.begin, Slots.ran

    def begin_and_crash(slots: Slots, *arguments: Any) -> bool:
        begun = begin(slots, *arguments)
        if begun:
            crash()
        return begun

    def ran_and_crash(slots: Slots, lane: int) -> None:
        ran(slots, lane)
        crash()

    if POINT == "running":
        Slots.begin = begin_and_crash  # type: ignore[method-assign]
    elif POINT == "ran":
        Slots.ran = ran_and_crash  # type: ignore[method-assign]


# -- a backend that is away -----------------------------------------------------------


def refuse() -> None:
    """Raise while the backend is to be away."""
    flag = os.environ.get("TASKQ_X_REFUSE")
    if flag and pathlib.Path(flag).exists():
        raise BackendUnavailableError("away, as the test wants it")


def refusing(thing: Any, kinds: tuple[type, ...], spared: set[str]) -> Any:
    """Let every promised method of ``thing`` refuse first."""
    for kind in (kind for kind in kinds if isinstance(thing, kind)):
        for name, member in vars(kind).items():
            if callable(member) and not name.startswith("_") and name not in spared:
                setattr(thing, name, _refusing_first(getattr(thing, name)))
    return thing


def _refusing_first(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        refuse()
        return method(*arguments, **options)

    return call


# -- both -----------------------------------------------------------------------------


def faulty(backend: Backend) -> Backend:
    consume = backend.consume

    def consume_faultily(queues: Any, worker: str) -> Any:
        consumer: Any = consume(queues, worker)
        if POINT:
            return CrashingConsumer(consumer)
        return refusing(consumer, (Consumer,), {"wake", "close", "credit"})

    refusing(backend, (Backend, Store), {"consume", "close", "size", "capabilities", "location"})
    backend.consume = consume_faultily  # type: ignore[method-assign]
    return backend


_from_url = taskq.backends.from_url
taskq.backends.from_url = lambda url, **options: faulty(_from_url(url, **options))
crashing_slots()

if __name__ == "__main__":
    from taskq.cli import main

    os.environ[SUPERVISOR] = str(os.getpid())
    with contextlib.suppress(KeyboardInterrupt):
        main()
