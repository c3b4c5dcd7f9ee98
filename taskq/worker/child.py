"""A child: runs the jobs that its supervisor hands it, and gives back what became of them.

It never touches a reservation. One thread reads the pipe; jobs run in *lanes* (:mod:`taskq.worker.lanes`). When the
pipe ends, the supervisor is gone: nobody would settle what runs here, so the child ends at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from taskq.limits import as_facts
from taskq.worker.pipes import FAILED, FLUSH, HELLO, INTERRUPT, LANE, RUN, SAY, STOP, ChildEnd, Closed
from taskq.worker.preload import obstacle

if TYPE_CHECKING:
    from taskq.app import TaskQ
    from taskq.tasks import Task
    from taskq.worker.slots import Slots

#: Exit status of a child whose supervisor has gone.
ORPHANED: Final = 70
#: What a terminal or an init system may send to the whole group; the supervisor alone acts on it.
GROUP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
#: How long a coroutine may block its loop before that is told, in seconds.
_BLOCKED: Final = 1.0
#: What happens in a child and is told by its supervisor.
_TOLD: Final = ("hook.", "policy.", "job.deduplicated")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What a child is started with."""

    app: str  #: what ``-A`` names
    worker: str
    threads: int  #: lanes in threads; the first is the main thread in a process pool
    spares: int = 0  #: lanes that may be added for threads that never came back
    coroutines: int = 0  #: lanes on the event loop
    main: bool = True  #: whether lane 0 is the main thread

    @property
    def lanes(self) -> int:
        """How many slots the page has."""
        return self.threads + self.spares + self.coroutines

    @property
    def first_coroutine(self) -> int:
        return self.threads + self.spares


class Child:
    """The lanes of one child and the thread that reads its pipe.

    ``tell``: the app's events are not the supervisor's, and some are worth telling it.
    """

    def __init__(
        self, app: TaskQ, spec: ChildSpec, end: ChildEnd, slots: Slots, *, tell: bool = True
    ) -> None:
        from taskq.worker.durations import Durations
        from taskq.worker.executor import Executor
        from taskq.worker.lanes import LoopLanes, ThreadLane

        self._end = end
        self._spec = spec
        self._shared = (Executor(app, spec.worker), end, slots, Durations())
        self._lane_type = ThreadLane
        self._threads: dict[int, ThreadLane] = {}
        self._loop: LoopLanes | None = None
        if spec.coroutines and (not spec.threads or any(task.is_async for task in app.tasks.values())):
            self._loop = LoopLanes(spec.first_coroutine, spec.coroutines, *self._shared)
        self._running: list[threading.Thread] = []
        self._ended = threading.Event()
        self._unsubscribe = [app.subscribe(self._say, prefix) for prefix in (_TOLD if tell else ())]

    def serve(self, on_orphaned: Callable[[], None]) -> None:
        """Run jobs until told to stop, in the calling thread and others; ``on_orphaned`` when the pipe ends."""
        from taskq.worker.limits import MainThread

        main = self._add_lane(0, MainThread()) if self._spec.main and self._spec.threads else None
        for number in range(1 if main else 0, self._spec.threads):
            self._start_lane(number)
        loop_here = self._loop if main is None else None
        if self._loop is not None:
            self._start_thread(self._watch_loop)
            if loop_here is None:
                self._running.append(self._start_thread(self._loop.serve))
        self._start_thread(lambda: self._read(on_orphaned))
        if main is not None:
            main.serve()
        elif loop_here is not None:
            loop_here.serve()
        for thread in self._running:
            thread.join()
        self._ended.set()
        for unsubscribe in self._unsubscribe:
            unsubscribe()

    def _add_lane(self, number: int, guard: Any) -> Any:
        lane = self._threads[number] = self._lane_type(number, guard, *self._shared)
        return lane

    def _start_lane(self, number: int) -> None:
        from taskq.worker.limits import PoolThread

        lane = self._add_lane(number, PoolThread())
        self._running.append(self._start_thread(lane.serve))

    def _start_thread(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name="taskq", daemon=True)
        thread.start()
        return thread

    def _read(self, on_orphaned: Callable[[], None]) -> None:
        handlers: Mapping[int, Callable[..., None]] = {
            RUN: self._on_run,
            INTERRUPT: self._on_interrupt,
            FLUSH: self._on_flush,
            LANE: self._on_lane,
            STOP: self.stop,
        }
        for kind, *rest in self._end.messages():
            # Sending can find the supervisor gone; then so does reading.
            with contextlib.suppress(Closed):
                handlers[kind](*rest)
        if not self._ended.is_set():
            on_orphaned()

    def _on_run(self, lane: int, chunk: int, jobs: list[Any]) -> None:
        if lane in self._threads:
            self._threads[lane].inbox.put((chunk, jobs))
        elif self._loop is not None:
            self._loop.give(lane, chunk, jobs)

    def _on_interrupt(self, lane: int, chunk: int, index: int, kind: str) -> None:
        key = (lane, chunk, index)
        if lane in self._threads:
            self._threads[lane].interrupt(key, kind)
        elif self._loop is not None:
            self._loop.interrupt(key, kind)

    def _on_flush(self, lane: int) -> None:
        if lane in self._threads:
            self._threads[lane].flush()
        elif self._loop is not None:
            self._loop.flush(lane)

    def _on_lane(self, stuck: int, number: int) -> None:
        """Start another thread for one that does not come back; do not wait for that one at the end."""
        self._threads[stuck].abandon()
        self._running = [thread for thread in self._running if thread.is_alive()]
        self._start_lane(number)

    def stop(self) -> None:
        """End once the lanes are idle. From any thread."""
        for lane in self._threads.values():
            lane.inbox.put(None)
        if self._loop is not None:
            self._loop.stop()

    def _watch_loop(self) -> None:
        """Tell which task and line block the event loop; its leases are renewed elsewhere meanwhile."""
        told: tuple[str, str] | None = None
        while self._loop is not None and not self._ended.wait(_BLOCKED / 2):
            blocked = self._loop.blocked_by(_BLOCKED)
            if blocked is not None and blocked != told:
                with contextlib.suppress(Closed):
                    self._end.send([SAY, "loop.blocked", {"task": blocked[0], "line": blocked[1]}])
            told = blocked

    def _say(self, event: Any) -> None:
        """Let the supervisor tell what happened here."""
        fields = {
            name: value if isinstance(value, str) else str(value)
            for name, value in event.fields.items()
            if name != "job"
        }
        job = event.fields.get("job")
        if job is not None:
            fields |= {"job_id": job.id, "task": job.task}
        with contextlib.suppress(Closed):
            self._end.send([SAY, event.name, fields])


def main(spec: ChildSpec, sock: socket.socket, memory: Any, life: Any, lock: Any) -> None:
    """The life of a child process."""
    _end_with_the_supervisor(life.detach())
    _leave_signals_to_the_supervisor()
    end = ChildEnd(sock, lambda: os._exit(ORPHANED))
    try:
        app = load(spec, end)
        if app is None:
            return
        from taskq.worker.limits import end_process
        from taskq.worker.slots import Slots, map_memory

        slots = Slots(map_memory(memory.detach(), spec.lanes), lock)
        child = Child(app, spec, end, slots)
        end.send(greeting(app))
        gc.freeze()  # what the app loaded stays: collections need not look at it again
        child.serve(lambda: os._exit(ORPHANED))
        app.close()
        # Threads that tasks have left behind must not keep the process, and with it the worker, from ending.
        end_process(0)
    except Closed:
        os._exit(ORPHANED)


def load(spec: ChildSpec, end: ChildEnd) -> TaskQ | None:
    """Import the app; where that fails, tell the supervisor why."""
    from taskq.discovery import find_app
    from taskq.errors import TaskQError

    try:
        return find_app(spec.app)
    except TaskQError as error:
        end.send([FAILED, str(error)])
    return None


def greeting(app: TaskQ) -> list[Any]:
    """The first message to the supervisor: what the app is, or why it cannot be worked for."""
    from taskq.errors import TaskQError

    try:
        return [HELLO, facts(app)]
    except TaskQError as error:
        return [FAILED, str(error)]


def facts(app: TaskQ) -> dict[str, Any]:
    """What the supervisor must know of the app, which it never imports."""
    from taskq.schedules import declared

    tasks = {
        name: {
            "queue": task.config.queue or app.settings.queue,
            "async": task.is_async,
            "soft": task.config.soft_time_limit,
            "hard": task.config.time_limit,
            "exhausted": _told_of_losses(app, task),
        }
        for name, task in app.tasks.items()
    }
    return {
        "pid": os.getpid(),
        "app": app.name,
        "url": app.settings.url,
        "store": app.settings.store_url,
        "tasks": tasks,
        "limits": [as_facts(task.limits) for task in app.tasks.values() if task.limits is not None],
        "schedules": declared(app),
        "obstacle": obstacle(),
    }


def _end_with_the_supervisor(life: int) -> None:
    """Let the kernel kill this process when the supervisor's end of a pipe closes.

    The thread that reads the messages would notice too, but not while a body holds the interpreter in C code, and
    nobody may run a job that others believe to be free.
    """
    # Where a system has no such thing, the reading thread has to do.
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)


def _told_of_losses(app: TaskQ, task: Task[Any, Any]) -> dict[str, Any] | None:
    """The job of the task that ``on_exhausted`` names: the supervisor stores it where the child is gone."""
    from taskq.options import NO_OPTIONS
    from taskq.tasks import Task
    from taskq.timetable import pack_job

    wanted = task.policy.on_exhausted
    return pack_job(wanted._job(app, ({},), {}, NO_OPTIONS)) if isinstance(wanted, Task) else None


def _leave_signals_to_the_supervisor() -> None:
    """Take no notice of signals that a terminal or an init system sends to the whole group.

    By a handler that does nothing rather than ``SIG_IGN``, which programs started by tasks would inherit.
    """
    for signum in GROUP_SIGNALS:
        signal.signal(signum, _take_no_notice)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


def _take_no_notice(signum: int, frame: object) -> None:
    """See :func:`_leave_signals_to_the_supervisor`."""
