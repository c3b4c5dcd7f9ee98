"""Children as the supervisor sees them: started, spoken to, watched, ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
import socket
import threading
from collections.abc import Iterator
from multiprocessing import reduction, resource_tracker
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Protocol, Self

from taskq.worker import child as child_module
from taskq.worker import preload
from taskq.worker.child import GROUP_SIGNALS, Child, ChildSpec
from taskq.worker.latch import Latch
from taskq.worker.options import COROUTINES, WorkerOptions
from taskq.worker.pipes import STOP, ChildEnd, ParentEnd
from taskq.worker.slots import Slots, local_memory, shared_memory

if TYPE_CHECKING:
    from taskq.app import TaskQ


class ChildHandle(Protocol):
    """A child, in a process of its own or in threads of this one."""

    pid: int
    spec: ChildSpec
    end: ParentEnd
    slots: Slots

    def start(self) -> Self: ...

    @property
    def sentinel(self) -> int | None:
        """A descriptor that becomes readable when the child has died; ``None`` where it cannot die alone."""
        ...

    def alive(self) -> bool: ...

    def kill(self) -> bool:
        """End it whatever it does; whether that is possible."""
        ...

    def death(self) -> str:
        """How it died, for people."""
        ...

    def close(self) -> None: ...


class Descriptor:
    """A file descriptor that travels to a child with the arguments of its start."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def detach(self) -> int:
        return self._descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._descriptor),)


def _received(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


class ProcessChild:
    """A child in a process of its own."""

    def __init__(self, spec: ChildSpec, context: BaseContext) -> None:
        self.spec = spec
        self._context = context
        ours, self._theirs = socket.socketpair()
        self.end = ParentEnd(ours)
        self._their_life, self._life = os.pipe()
        self._descriptor, self._memory = shared_memory(spec.lanes)
        self._lock = Latch()
        self.slots = Slots(self._memory, self._lock)
        self._process: Any = None
        self.pid = 0

    def start(self) -> Self:
        theirs = (Descriptor(self._descriptor), Descriptor(self._their_life))
        process = self._context.Process(  # type: ignore[attr-defined]
            target=child_module.main, args=(self.spec, self._theirs, *theirs, self._lock), name="taskq-child"
        )
        try:
            process.start()
        except BaseException:
            self._let_go()
            raise
        finally:
            self._theirs.close()
            os.close(self._descriptor)
            os.close(self._their_life)
        self._process = process
        self.pid = process.pid
        return self

    @property
    def sentinel(self) -> int | None:
        return int(self._process.sentinel)

    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def kill(self) -> bool:
        self._process.kill()
        return True

    def death(self) -> str:
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "unknown"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def close(self) -> None:
        self._process.join()
        self._process.close()
        self._let_go()

    def _let_go(self) -> None:
        self.end.close()
        self._memory.close()
        self._lock.forget_name()
        os.close(self._life)


class LocalChild:
    """A child in threads of this process: for ``memory://``, tests and debuggers."""

    def __init__(self, spec: ChildSpec, app: TaskQ, *, here: bool = False) -> None:
        self.spec = spec
        self.pid = os.getpid()
        ours, theirs = socket.socketpair()
        self.end = ParentEnd(ours)
        self._their_end = ChildEnd(theirs)
        self.slots = Slots(local_memory(spec.lanes), threading.Lock())
        self._child = Child(app, spec, self._their_end, self.slots, tell=here)
        self._app = app
        self._here = here
        self.ended = threading.Event()  #: whether it has served
        self._thread = threading.Thread(target=self.serve, name="taskq-child", daemon=True)

    def start(self) -> Self:
        self._their_end.send(child_module.greeting(self._app))
        if not self._here:
            self._thread.start()
        return self

    def serve(self) -> None:
        """Run jobs until told to stop; :meth:`start` does it in a thread of its own unless told ``here``."""
        try:
            self._child.serve(self._child.stop)
        finally:
            self.ended.set()
            self._their_end.close()

    @property
    def sentinel(self) -> int | None:
        return None

    def alive(self) -> bool:
        return not self.end.closed

    def kill(self) -> bool:
        return False

    def death(self) -> str:
        return "stopped"

    def close(self) -> None:
        self.end.close()
        if self._thread.is_alive():
            self._thread.join(1.0)


class ProcessPool:
    """Starts the child processes of one worker."""

    def __init__(self, options: WorkerOptions, worker: str) -> None:
        self._options = options
        self._worker = worker
        self._method = "forkserver"
        os.environ[preload.VARIABLE] = options.app
        multiprocessing.get_context("forkserver").set_forkserver_preload(["taskq.worker.preload"])

    @property
    def size(self) -> int:
        """How many children the pool keeps."""
        return self._options.slots if self._options.pool == "process" else 1

    def start(self) -> ProcessChild:
        """Start a child."""
        with _group_signals_held_back():
            return ProcessChild(self.spec(), multiprocessing.get_context(self._method)).start()

    def spec(self) -> ChildSpec:
        return layout(self._options, self._worker)

    def spawn_from_now_on(self) -> bool:
        """Start children from scratch: forking is not safe, or the code has changed. Whether that is news."""
        was, self._method = self._method, "spawn"
        return was != "spawn"

    def close(self) -> None:
        os.environ.pop(preload.VARIABLE, None)


@contextlib.contextmanager
def _group_signals_held_back() -> Iterator[None]:
    """Let what is started here inherit a mask: a signal to the whole group would end it before it is ready for one.

    The fork server keeps the mask for good; children take it off once they are ready.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # for its own start this unblocks some
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def layout(options: WorkerOptions, worker: str) -> ChildSpec:
    """The lanes of one child of the pool that ``options`` ask for."""
    slots = options.slots
    app = options.app
    if options.pool == "async":
        return ChildSpec(app=app, worker=worker, threads=0, coroutines=slots, main=False)
    if options.pool == "thread":
        return ChildSpec(app=app, worker=worker, threads=slots, spares=slots, coroutines=slots, main=False)
    return ChildSpec(app=app, worker=worker, threads=1, coroutines=COROUTINES)


def proportional_memory(pid: int) -> int | None:
    """Proportional set size of a process in bytes: its own memory, and its share of what is shared."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None


def stop(child: ChildHandle) -> None:
    """Ask a child to end once its lanes are idle."""
    child.end.send([STOP])
    child.end.flush()
