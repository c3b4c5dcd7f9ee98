"""The backend: what is asked of all jobs at once."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from pika.channel import Channel

from taskq.backend import (
    Backend,
    Cancellation,
    Capabilities,
    Consumer,
    Page,
    Reclaimed,
    Scope,
    store_needed,
)
from taskq.backends.rabbitmq.address import Address
from taskq.backends.rabbitmq.consumer import Desk, RabbitConsumer
from taskq.backends.rabbitmq.dead import DeadLetters
from taskq.backends.rabbitmq.lane import Lane
from taskq.backends.rabbitmq.lanes import Lanes, finish
from taskq.backends.rabbitmq.layout import Layout
from taskq.backends.rabbitmq.link import Link, Script
from taskq.backends.rabbitmq.post import Post
from taskq.backends.rabbitmq.refusals import MissingError
from taskq.backends.rabbitmq.topology import Topology, reply_of
from taskq.clock import SYSTEM_CLOCK, Clock
from taskq.errors import BackendError, BackendUnavailableError, InvalidArgumentError
from taskq.job import Job, State

CAPABILITIES: Final = Capabilities(
    name="rabbitmq",
    leases="connection",
    fencing=False,
    attempts="after-crash approximate",
    priority="within prefetch",
    size="ready only",
    scheduled="opaque",
    dead_listing="intrusive",
    revive="at least once",
    pause="needs a store",
    order="fifo except give-backs",
    persistent=True,
    shared=True,
    stores=False,
    lease_clock="server",
)
#: Messages on their way between broker and buffer make a count wrong; this often it is taken again.
_RECOUNTS: Final = 5


class RabbitBackend(Backend):
    """Jobs in a broker: two connections, opened at first use, one to publish and one to consume."""

    def __init__(self, address: Address, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.address = address
        self._clock = clock
        self._layout = Layout(address.prefix, address.type)
        self._lock = threading.Lock()
        self._token = 0
        self._closed = False
        self._fresh()
        _opened.add(self)

    def _fresh(self) -> None:
        """Links that nobody has used; the child of a fork needs its own."""
        self._pid = os.getpid()
        self._post = Post(self.address, self._layout, self._clock)
        self._link = Link(self.address, "consume", on_lost=self._lost)
        self._topology = Topology(self._layout, self._link)
        self._sessions: list[RabbitConsumer] = []
        self._dead = DeadLetters(self._link, self._post, self._layout, self._clock)
        self._desk = Desk(
            self.address, self._link, self._post, self._topology, self._clock, self._lanes, self._next_token
        )

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def location(self) -> str:
        return self.address.location

    # -- jobs in ----------------------------------------------------------------------

    def push(self, jobs: Sequence[Job]) -> list[str]:
        self._check_open()
        if jobs:
            self._post.send([self._post.new(job) for job in jobs])
        return [job.id for job in jobs]

    def consume(self, queues: Mapping[str, int], worker: str) -> Consumer:
        self._check_open()
        for queue in queues:
            self._layout.check(queue)
        session = RabbitConsumer(self._desk, queues, worker, self._ended)
        self._sessions = [*self._sessions, session]
        return session

    def _lanes(self, queues: Mapping[str, int], ring: Callable[[], None]) -> Lanes:
        timeout = self.address.consumer_timeout
        arguments = {"x-consumer-timeout": round(timeout * 1000)} if timeout else {}
        return Lanes(self._link, self._post, self._layout, self._clock, queues, arguments, ring)

    def _ended(self, session: RabbitConsumer) -> None:
        with self._lock:
            self._sessions = [each for each in self._sessions if each is not session]

    def _next_token(self) -> int:
        """Grows with every take, of all workers as far as their clocks agree."""
        with self._lock:
            self._token = max(self._token + 1, time.time_ns() // 1000)
            return self._token

    # -- looking ----------------------------------------------------------------------

    def counts(self, queue: str | None = None) -> dict[str, dict[State, int]]:
        """What is ready in the broker, or at hand and unstarted here. All queues are those used from here."""
        self._check_open()
        names = self.known() if queue is None else [queue]
        found = {name: self._counted(name) for name in names}
        return {name: states for name, states in found.items() if states}

    def known(self) -> list[str]:
        """The queues that have been used from here."""
        return sorted(self._post.topology.seen | self._topology.seen)

    def _counted(self, queue: str) -> dict[State, int]:
        lanes = self._lanes_of(queue)
        ready, dead = 0, 0
        for _ in range(_RECOUNTS):
            before = self._flush(lanes)
            *waiting, dead = self._ready([*self._layout.ready(queue), self._layout.dead(queue)])
            ready = sum(waiting)
            if self._flush(lanes) == before:
                break
        ready += sum(len(lane.buffer) for lane in lanes)
        return {state: n for state, n in ((State.PENDING, ready), (State.DEAD, dead)) if n}

    def _lanes_of(self, queue: str) -> list[Lane]:
        return [lane for session in self._sessions for lane in session.lanes.lanes.get(queue, ())]

    def _flush(self, lanes: list[Lane]) -> int:
        sessions = self._sessions
        if not lanes or not sessions:
            return 0
        return sessions[0].lanes.flush(lanes, self.address.connect_timeout)

    def _ready(self, names: Sequence[str]) -> list[int]:
        try:
            return self._link.ask(lambda channel: _message_counts(channel, names), self._patience)
        except MissingError:
            return [0] * len(names)

    @property
    def _patience(self) -> float:
        return self.address.publish_timeout

    def list_jobs(self, queue: str, state: State, *, limit: int = 100, cursor: str | None = None) -> Page:
        self._check_open()
        if state is not State.DEAD:
            raise store_needed(f"lists of {state} jobs", self.location)
        return self._dead.page(queue, limit, cursor, self._patience)

    # -- changing what waits or has ended ---------------------------------------------

    def revive(self, queue: str, ids: Sequence[str] | None = None, *, due: float = 0.0) -> list[str]:
        self._check_open()
        return self._dead.revive(queue, ids, due, self._patience)

    def purge(self, queue: str, state: State) -> int:
        self._check_open()
        if state is State.RESERVED:
            raise InvalidArgumentError("reserved jobs cannot be purged")
        if state is State.DEAD:
            return self._purged([self._layout.dead(queue)])
        if state is not State.PENDING:
            raise store_needed(f"purges of {state} jobs", self.location)
        purged = self._purged(self._layout.ready(queue))
        lanes = self._lanes_of(queue)
        self._flush(lanes)
        return purged + self._emptied(lanes)

    def _purged(self, names: Sequence[str]) -> int:
        try:
            return sum(self._link.ask(lambda channel: _purges(channel, names), self._patience))
        except MissingError:
            return 0

    def _emptied(self, lanes: Iterable[Lane]) -> int:
        dropped = []
        for lane in lanes:
            while lane.buffer:
                dropped.append(lane.buffer.popleft())
        self._link.call(lambda: finish(dropped, at_once=True))
        return len(dropped)

    def hasten(self, queue: str, ids: Sequence[str]) -> list[str]:
        raise store_needed("changes to scheduled jobs", self.location)

    def forget(self, ids: Sequence[str]) -> int:
        raise store_needed("deletions of ended jobs by their ids", self.location)

    def pause(self, name: str, what: Scope = "queue") -> None:
        raise store_needed("pauses", self.location)

    def resume(self, name: str, what: Scope = "queue") -> None:
        raise store_needed("pauses", self.location)

    def paused(self, what: Scope = "queue") -> set[str]:
        """Nothing: see :meth:`pause`."""
        return set()

    def cancel(self, ids: Sequence[str], *, reason: str = "") -> dict[str, Cancellation]:
        raise store_needed("cancels", self.location)

    # -- upkeep -----------------------------------------------------------------------

    def reclaim(self, *, limit: int = 500) -> Reclaimed:
        """Nothing: the broker itself gives on what a lost connection held."""
        self._check_open()
        return Reclaimed([], [], [])

    def housekeep(self) -> float | None:
        self._check_open()
        return None

    def close(self) -> None:
        if self._pid != os.getpid():
            self._closed = True
            return
        self._closed = self._desk.closed = True
        for session in self._sessions:
            session.close()
        self._link.close()
        self._post.publisher.close()

    def _lost(self, error: BackendError) -> None:
        """The connection that consumes is gone."""
        self._topology.forget()
        for session in self._sessions:
            session.lose(error)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendUnavailableError("this backend is closed")
        if self._pid != os.getpid():
            self._fresh()

    def after_fork(self) -> None:
        """In the child of a fork: the sockets are the parent's."""
        self._link.abandon()
        self._post.publisher.link.abandon()


def _message_counts(channel: Channel, names: Sequence[str]) -> Script[list[int]]:
    counts = []
    for name in names:
        reply = yield reply_of(channel.queue_declare, name, passive=True)
        counts.append(int(reply.method.message_count))
    return counts


def _purges(channel: Channel, names: Sequence[str]) -> Script[list[int]]:
    counts = []
    for name in names:
        reply = yield reply_of(channel.queue_purge, name)
        counts.append(int(reply.method.message_count))
    return counts


_opened: weakref.WeakSet[RabbitBackend] = weakref.WeakSet()


def _forked() -> None:
    for backend in list(_opened):
        backend.after_fork()


os.register_at_fork(after_in_child=_forked)
