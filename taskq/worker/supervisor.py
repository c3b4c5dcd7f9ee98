"""The supervisor: owns the reservations, hands jobs to children, ends in good order.

It runs no user code. One loop waits on the children's pipes, their deaths, signals, and news from the session that
speaks with the backend. Stopping goes through stages::

    RUNNING ── first signal ──► DRAINING ── grace over, or second signal ──► INTERRUPTING ──► stopped

DRAINING takes nothing new, gives back what has not begun and lets running jobs finish. INTERRUPTING raises
``ShutdownRequested`` in what still runs, then kills the children that do not let go; those jobs are given back,
uncounted, once they are seen to have ended.
"""

from __future__ import annotations

import enum
import selectors
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from taskq.backend import Backend
from taskq.clock import monotonic
from taskq.errors import TaskQError
from taskq.events import Events
from taskq.store import Store
from taskq.worker import limits, pipes
from taskq.worker.dispatch import Dispatcher
from taskq.worker.facts import declare_limits, describe, queues_of, task_facts
from taskq.worker.flow import Flow
from taskq.worker.nursery import Nursery
from taskq.worker.options import WorkerOptions
from taskq.worker.pool import ChildHandle
from taskq.worker.services import Services, leave, services_for
from taskq.worker.session import Session
from taskq.worker.watch import LETTING_GO, Watch

#: How often running jobs are looked at, in seconds: at the most, and at the least.
_GLANCE: Final = 0.02
_LONG_GLANCE: Final = 0.25
#: How often the rest is looked after, in seconds.
_UPKEEP: Final = 1.0
#: A signal to a process and to its group arrives twice at once; that is one signal; in seconds.
_ECHO: Final = 0.02
#: How long the last outcomes may take to be written at the end, in seconds.
_LAST_WRITES: Final = 10.0


class Stage(enum.IntEnum):
    """How far stopping has come."""

    RUNNING, DRAINING, INTERRUPTING = range(3)


class Supervisor:
    """One worker.

    ``start_child`` makes a started child; ``open_backend`` turns a child's facts into the backend; ``fork_refused``
    is told why children must not be forked, and answers whether they are made otherwise from then on.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        worker: str,
        children: int,
        start_child: Callable[[], ChildHandle],
        open_backend: Callable[[Mapping[str, Any]], Backend],
        events: Events,
        burst: bool = False,
        on_first_ready: Callable[[Mapping[str, Any], Backend], object] = lambda _facts, _backend: None,
        fork_refused: Callable[[str], bool] = lambda _reason: False,
    ) -> None:
        self._options = options
        self._burst = burst
        self._worker = worker
        self._wanted = children
        self._open_backend = open_backend
        self._events = events
        self._on_first_ready = on_first_ready
        self._fork_refused = fork_refused
        self._selector = selectors.DefaultSelector()
        self._bell = pipes.Bell()
        self._selector.register(self._bell.sock, selectors.EVENT_READ, None)
        self._signals: deque[int] = deque()
        self._dispatcher = Dispatcher(options.max_jobs_per_child)
        self._nursery = Nursery(
            self._selector,
            start_child,
            events,
            most_jobs=options.max_jobs_per_child,
            most_memory=options.max_memory_per_child,
        )
        self._watch = Watch(self._dispatcher, events, worker, self._retire)
        self._backend: Backend | None = None
        self._session: Session | None = None
        self._flow: Flow | None = None
        self._services: Services | None = None
        self.failure: str | None = None  #: why the worker could not work
        self._stage = Stage.RUNNING
        self._stage_since = 0.0
        self._quiet = False
        self._last_turn = monotonic()
        self._next_glance = 0.0
        self._next_upkeep = 0.0

    # -- from other threads and signal handlers ---------------------------------------

    def signal(self, signum: int) -> None:
        """Act on a signal: TERM and INT stop (twice: at once), HUP renews the children, TSTP takes no more."""
        self._signals.append(signum)
        self._bell.ring()

    def ailment(self, patience: float) -> str | None:
        """What keeps the worker from working, ``None`` while it is well: asked by probes, in their thread."""
        if self._session is None:
            return "starting"
        for what, last in (("the supervisor", self._last_turn), ("the backend", self._session.last_contact)):
            if monotonic() - last > patience:
                return f"{what} has not answered for {monotonic() - last:.0f} s"
        return None

    # -- the loop ---------------------------------------------------------------------

    def run(self) -> int:
        """Work until stopped. Returns the exit status: 0 in good order, 1 where the worker could not work."""
        try:
            self._fill()
            while not self._finished():
                self._turn()
        finally:
            self._close()
        return 0 if self.failure is None else 1

    def _turn(self) -> None:
        for key, mask in self._selector.select(self._timeout()):
            if key.data is None:
                self._bell.hush()
            elif key.data[0] == "death":
                self._on_death(key.data[1])
            elif mask & selectors.EVENT_READ:
                self._on_messages(key.data[1])
        now = self._last_turn = monotonic()
        while self._signals:
            self._on_signal(self._signals.popleft(), now)
        if self._flow is not None:
            self._flow.hear()
        self._look_after(now)
        self._proceed(now)
        if self._flow is not None:
            self._flow.dispatch(now)
        self._nursery.flush()

    def _timeout(self) -> float:
        if self._signals or (self._session is not None and self._session.inbox):
            return 0.0
        if self._session is None or not self._nursery.complete or self._stage is not Stage.RUNNING:
            return _GLANCE * 2
        if not self._dispatcher.quiet:
            return max(0.0, self._next_glance - monotonic())
        return 5 * _UPKEEP

    def _finished(self) -> bool:
        stopped = self._stage is not Stage.RUNNING and not self._nursery.children
        return self.failure is not None or (stopped and (self._session is None or self._session.idle))

    def _close(self) -> None:
        if self._services is not None:
            self._services.stop()
        written = self._session is not None and self._session.close(_LAST_WRITES)
        self._nursery.close()
        if self._backend is not None:
            if isinstance(self._backend, Store) and written:
                leave(self._backend, self._worker, self._events)
            settled = 0 if self._flow is None else self._flow.settled
            self._events.emit("worker.stopped", worker=self._worker, settled=settled)
        self._selector.close()
        self._bell.close()

    # -- children ---------------------------------------------------------------------

    def _fill(self) -> None:
        if self._stage is Stage.RUNNING and self.failure is None:
            self.failure = self._nursery.fill()

    def _on_messages(self, child: ChildHandle) -> None:
        if child not in self._nursery.children:
            return
        try:
            messages = child.end.receive()
        except pipes.Closed:
            self._nursery.hung_up(child)
            if child.sentinel is None:
                self._on_death(child)
            else:
                child.kill()  # it ends anyway, or has lost the only way to say what it does
        else:
            self._handle(child, messages)

    def _handle(self, child: ChildHandle, messages: list[list[Any]]) -> None:
        for kind, *rest in messages:
            if kind == pipes.HELLO:
                self._on_hello(child, rest[0])
            elif kind == pipes.FAILED:
                self.failure = rest[0]
            elif kind == pipes.SAY:
                self._events.emit(rest[0], **rest[1])
            elif kind != pipes.DONE and self._flow is not None:
                self._flow.request(child, kind, *rest)
            elif self._flow is not None and self._nursery.ran(child, self._flow.done(child, *rest)):
                self._retire(child)

    def _on_hello(self, child: ChildHandle, facts: Mapping[str, Any]) -> None:
        if facts["obstacle"] and self._fork_refused(facts["obstacle"]):
            self._events.emit("fork.refused", reason=facts["obstacle"])
            self._nursery.retire(child)
        else:
            if self._session is None:
                self._begin(facts)
            if self._services is not None:
                self._services.declare(facts["schedules"])
            if self.failure is None and self._stage is Stage.RUNNING:
                self._dispatcher.tasks = task_facts(facts)
                self._nursery.is_ready(child)
                self._dispatcher.add_child(child)
        self._fill()

    def _begin(self, facts: Mapping[str, Any]) -> None:
        """The first child has told what the app is: open the backend, let the others start."""
        try:
            queues = dict(self._options.queues) or queues_of(facts)
            backend = self._backend = declare_limits(self._open_backend(facts), facts, self._events)
            session = self._session = Session(backend, queues, self._worker, self._events, burst=self._burst)
        except TaskQError as error:
            self.failure = str(error)
            return
        self._flow = Flow(self._dispatcher, self._watch, session, self._taking)
        session.on_news = self._bell.ring
        session.start()
        me = describe(self._options, self._worker, queues)
        self._services = services_for(
            backend,
            self._events,
            lambda: replace(me, running=self._dispatcher.outstanding),
            scheduling=not self._burst,
        )
        self._services.start()
        self._nursery.wanted = self._wanted
        self._on_first_ready(facts, backend)
        self._events.emit(
            "worker.started", worker=self._worker, queues=",".join(queues), pool=self._options.pool
        )

    def _on_death(self, child: ChildHandle) -> None:
        """A child has ended: settle what it had sent, blame what it ran, give the rest to others."""
        if child not in self._nursery.children:
            return
        self._handle(child, child.end.drain())
        how = child.death()
        expected = child in self._nursery.retiring or self._stage is not Stage.RUNNING
        death = self._dispatcher.bury_child(child, monotonic())
        self._nursery.forget(child)
        if self._flow is not None:
            self._flow.settle(self._watch.judge(child, death, how))
            self._flow.put_back(death.unbegun)
        if not expected:
            self._events.emit("child.died", pid=child.pid, how=how, running=len(death.running))
        child.close()
        self._fill()

    def _retire(self, child: ChildHandle) -> None:
        """Replace a child: it gets no more jobs, and ends when its last has ended."""
        self._dispatcher.retire(child)
        self._nursery.retire(child)
        self._fill()

    def _taking(self) -> bool:
        """Whether jobs may be begun."""
        return self._stage is Stage.RUNNING and not self._quiet

    # -- looking after ----------------------------------------------------------------

    def _look_after(self, now: float) -> None:
        if now >= self._next_glance and not self._dispatcher.quiet:
            self._dispatcher.take_back(now)
            to_mark = self._watch.glance(now)
            self._next_glance = now + min(max(_GLANCE, self._dispatcher.next_look - now), _LONG_GLANCE)
            if to_mark and self._session is not None:
                self._session.mark(to_mark)
        if now >= self._next_upkeep:
            self._next_upkeep = now + _UPKEEP
            for child in self._nursery.check(now):
                self._retire(child)
            self._fill()
            if self._session is not None and self._stage is Stage.RUNNING:
                self._session.release(self._dispatcher.drop_excess(now))

    def _on_signal(self, signum: int, now: float) -> None:
        if signum in {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}:
            if self._stage is Stage.RUNNING:
                self._stop(Stage.DRAINING, now)
            elif now - self._stage_since > _ECHO:
                self._stop(Stage.INTERRUPTING, now)
        elif signum == signal.SIGHUP and self._stage is Stage.RUNNING:
            self._events.emit("worker.reloading", worker=self._worker)
            self._fork_refused("the code may have changed")
            for child in list(self._nursery.ready - self._nursery.retiring):
                self._retire(child)
        elif signum == signal.SIGTSTP and self._session is not None:
            self._quiet = True
            self._events.emit("worker.quiet", worker=self._worker)
            self._session.release(self._dispatcher.drop_ready(now))

    def _stop(self, stage: Stage, now: float) -> None:
        """Go on to ``stage``."""
        if stage <= self._stage:
            return
        self._stage, self._stage_since = stage, now
        self._events.emit("worker.stopping", worker=self._worker, stage=stage.name.lower())
        if self._session is not None:
            self._session.want(0)
            self._session.release(self._dispatcher.drop_ready(now))
        if stage is Stage.INTERRUPTING:
            self._watch.interrupt_all(limits.SHUTDOWN)

    def _proceed(self, now: float) -> None:
        """Take stopping one step further."""
        if self._stage is Stage.RUNNING:
            if self._burst and self._session is not None and self._session.dry and self._dispatcher.quiet:
                self._stop(Stage.DRAINING, now)
            return
        since = now - self._stage_since
        if self._stage is Stage.DRAINING and since > self._options.shutdown_timeout:
            self._stop(Stage.INTERRUPTING, now)
        for child in list(self._nursery.children):
            if self._dispatcher.idle(child):
                self._nursery.retire(child)
        if self._stage is Stage.INTERRUPTING and since > 2 * LETTING_GO:
            self._finish_off()
            if since > 2 * LETTING_GO + _LAST_WRITES and not self._nursery.children:
                self.failure = "the backend does not answer: what is not settled comes back after its lease"

    def _finish_off(self) -> None:
        """End what did not end by itself."""
        for child in list(self._nursery.children):
            self._watch.killed(child)
            if not child.kill():
                self._abandon(child)

    def _abandon(self, child: ChildHandle) -> None:
        """Threads of this process that do not end: their jobs come back when their leases run out."""
        self._dispatcher.bury_child(child, monotonic())
        self._nursery.forget(child)
        child.end.close()
        self.failure = "a job did not end; it comes back when its lease runs out"
