"""The backend: pushes, sizes, the dead, and the one member of the group that this process is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from taskq.backend import Backend, Cancellation, Capabilities, Consumer, Page, Reclaimed, Scope, store_needed
from taskq.backends.kafka import marks
from taskq.backends.kafka.delays import Letter, Post
from taskq.backends.kafka.failures import driver
from taskq.backends.kafka.graves import Graves, Reader
from taskq.backends.kafka.marks import Mark
from taskq.backends.kafka.member import Member
from taskq.backends.kafka.place import Place
from taskq.backends.kafka.publisher import Publisher, closed, refuse_large
from taskq.backends.kafka.session import KafkaConsumer
from taskq.backends.kafka.topics import Committed, Slot, Topics
from taskq.clock import SYSTEM_CLOCK, Clock, monotonic
from taskq.errors import InvalidArgumentError
from taskq.job import Job, State

_CAPABILITIES = Capabilities(
    name="kafka",
    leases="connection",
    fencing=True,
    attempts="after-crash approximate",
    priority="within prefetch",
    size="ready only",
    scheduled="opaque",
    dead_listing="safe",
    revive="once",
    pause="needs a store",
    order="fifo except give-backs",
    persistent=True,
    shared=True,
    stores=False,
    lease_clock="server",
)
#: Up to this many messages are looked at one by one to tell jobs from the marks of transactions.
_LOOKED_AT: Final = 2000
#: How long a count waits for transactions that are open, in seconds.
_MOMENT: Final = 1.0
#: How often what has ended is deleted, in seconds.
_CUT_EVERY: Final = 60.0


class KafkaBackend(Backend):
    def __init__(self, place: Place, *, clock: Clock = SYSTEM_CLOCK, timeout: float = 30.0) -> None:
        self._place = place
        self._timeout = timeout
        self.clock = clock
        self._lock = threading.RLock()
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self.topics = Topics(self._place, min(self._timeout, 15.0))
        self.post = Post(self._place, self.topics)
        self._reader = Reader(self._place, self.topics, self._timeout)
        self._graves = Graves(self._place, self.topics, self.post, self.clock, self._reader)
        self._publisher: Publisher | None = None
        self._member: Member | None = None
        self._cut_after = 0.0  #: on the monotonic clock

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def location(self) -> str:
        return self._place.location

    # -- jobs in and out --------------------------------------------------------------

    def push(self, jobs: Sequence[Job]) -> list[str]:
        self.check_open()
        for job in jobs:
            if job.unique is not None:
                raise store_needed("unique keys", self.location)
            if job.lane is not None:
                raise store_needed("limits, keys and fair shares", self.location)
        now = self.clock.now()
        letters = [self.post.letter(job, now) for job in jobs]
        for letter, job in zip(letters, jobs, strict=True):
            self.refuse_large(letter, job.id)
        ids = [job.id for job in jobs]
        if letters:
            self._publishing().publish(letters, ids)
        return ids

    def refuse_large(self, letter: Letter, job_id: str) -> None:
        """Raise for a message that its topic would not take."""
        refuse_large(letter, job_id, self.topics.limit(letter.topic), self.location)

    def _publishing(self) -> Publisher:
        with self._lock:
            self.check_open()
            if self._publisher is None:
                self._publisher = Publisher(self._place, self._timeout)
            return self._publisher

    def consume(self, queues: Mapping[str, int], worker: str) -> Consumer:
        self.check_open()
        return KafkaConsumer(self, queues, worker)

    # -- the member of this process ---------------------------------------------------

    def joined(self, queues: Iterable[str]) -> Member:
        """The member, which serves ``queues`` too from now on."""
        queues = list(queues)
        for queue in queues:
            self.topics.declare(queue)
        with self._lock:
            self.check_open()
            if self._member is None:
                self._member = Member(self._place, self.topics, self.post, self.clock, self._timeout)
            self._member.join(queues)
            return self._member

    def left(self, member: Member, queues: Iterable[str]) -> None:
        """A session on ``queues`` has ended; the last one takes the member with it."""
        with self._lock:
            last = member.leave(queues)
            if last and self._member is member:
                self._member = None
        if last:
            ended = {} if member.health.failure is not None else member.ended()
            member.close()
            self.topics.cut(ended)

    # -- looking ----------------------------------------------------------------------

    def counts(self, queue: str | None = None) -> dict[str, dict[State, int]]:
        self.check_open()
        there = self.topics.there()
        found: dict[str, dict[State, int]] = {}
        for name in self._place.queues(list(there)) if queue is None else [queue]:
            slots = [(topic, n) for topic in self._place.bands(name) for n in range(there.get(topic, 0))]
            counts = {State.PENDING: self._pending(name, slots)}
            counts[State.DEAD] = self._graves.count(name) if self._place.dead(name) in there else 0
            counts = {state: n for state, n in counts.items() if n > 0}
            if counts:
                found[name] = counts
        return found

    def _pending(self, queue: str, slots: Sequence[Slot]) -> int:
        """Jobs that wait in these partitions: known where they are ours, else what is beyond the commits."""
        own = self._own(queue, slots)
        others = [slot for slot in slots if slot not in own]
        return sum(own.values()) + self._beyond(others)

    def _own(self, queue: str, slots: Sequence[Slot]) -> dict[Slot, int]:
        """How many jobs wait in those of ``slots`` that this process has."""
        member = self._member
        if member is None or not slots or not member.serves(queue):
            return {}
        ends = member.catch_up([queue], _MOMENT)
        with member.shelf.changed:
            parts = [part for slot in ends if (part := member.shelf.parts.get(slot)) is not None]
            return {
                part.slot: max(0, member.shelf.waiting([part]))
                + max(0, ends[part.slot] - max(0, part.reached))
                for part in parts
            }

    def _beyond(self, slots: Sequence[Slot]) -> int:
        ends, starts = self.topics.ends(slots), self.topics.ends(slots, first=True)
        said = self.topics.committed(slots)
        spans = {
            slot: max(starts[slot], committed.offset) for slot, committed in said.items() if slot in ends
        }
        most = sum(ends[slot] - spans[slot] for slot in spans)
        if 0 < most <= _LOOKED_AT:
            return self._counted(spans, said)
        known = [marks.tally(said[slot].text) for slot in slots]
        return max(
            0, most - sum(tally[mark] for tally in known for mark in (Mark.DONE, Mark.LENT, Mark.STARTED))
        )

    def _counted(self, spans: dict[Slot, int], said: Mapping[Slot, Committed]) -> int:
        """The same by looking: the ends of transactions take up offsets too."""
        known = {slot: marks.read(committed.offset, committed.text) for slot, committed in said.items()}
        found: list[int] = []

        def take(message: object) -> None:
            slot, offset = (message.topic(), message.partition()), message.offset()  # type: ignore[attr-defined]
            if offset not in known[slot]:
                found.append(offset)

        self._reader.read(spans, take)
        return len(found)

    def list_jobs(self, queue: str, state: State, *, limit: int = 100, cursor: str | None = None) -> Page:
        self.check_open()
        after = _parsed(cursor)
        if state is not State.DEAD:
            raise store_needed(f"listings of {state} jobs", self.location)
        if self._place.dead(queue) not in self.topics.there():
            return Page([], None)
        found = self._graves.jobs(queue, after, limit + 1)
        more = str(found[limit - 1][0]) if len(found) > limit else None
        return Page([job for _, job in found[:limit]], more)

    # -- changing what waits or is dead -----------------------------------------------

    def revive(self, queue: str, ids: Sequence[str] | None = None, *, due: float = 0.0) -> list[str]:
        self.check_open()
        self.topics.declare(queue)
        return self._graves.revive(queue, ids, due)

    def purge(self, queue: str, state: State) -> int:
        self.check_open()
        if state is State.RESERVED:
            raise InvalidArgumentError("reserved jobs cannot be purged; cancel them instead")
        if state is State.DEAD:
            self.topics.declare(queue)
            return self._graves.purge(queue)
        if state is not State.PENDING:
            raise store_needed(f"purging {state} jobs", self.location)
        return self._purge_pending(queue)

    def _purge_pending(self, queue: str) -> int:
        there = self.topics.there()
        slots = [(topic, n) for topic in self._place.bands(queue) for n in range(there.get(topic, 0))]
        own = self._own(queue, slots)
        purged = 0
        if self._member is not None and own:
            purged += self._member.purge(self.topics.ends(own))
        others = [slot for slot in slots if slot not in own]
        ends, said = self.topics.ends(others), self.topics.committed(others)
        # What is lent in a partition stays, and with it what stands behind it there.
        free = {slot: ends[slot] for slot in others if not marks.tally(said[slot].text)[Mark.LENT]}
        purged += self._beyond(list(free))
        self.topics.cut(free)
        return purged

    def forget(self, ids: Sequence[str]) -> int:
        raise store_needed("jobs that are remembered after their end", self.location)

    def hasten(self, queue: str, ids: Sequence[str]) -> list[str]:
        raise store_needed("scheduled jobs that can be found", self.location)

    def cancel(self, ids: Sequence[str], *, reason: str = "") -> dict[str, Cancellation]:
        raise store_needed("cancels", self.location)

    def pause(self, name: str, what: Scope = "queue") -> None:
        raise store_needed("pauses", self.location)

    def resume(self, name: str, what: Scope = "queue") -> None:
        raise store_needed("pauses", self.location)

    def paused(self, what: Scope = "queue") -> set[str]:
        self.check_open()
        return set()

    # -- upkeep -----------------------------------------------------------------------

    def reclaim(self, *, limit: int = 500) -> Reclaimed:
        """Nothing: who is assigned a partition takes back what its last owner had."""
        self.check_open()
        return Reclaimed([], [], [])

    def housekeep(self) -> float | None:
        """Delete what has ended: a group whose offsets have expired begins where the topics do."""
        self.check_open()
        member = self._member
        if member is None:
            return None
        if monotonic() >= self._cut_after:
            self.topics.cut(member.ended())
            self._cut_after = monotonic() + _CUT_EVERY
        return _CUT_EVERY

    def close(self) -> None:
        with self._lock:
            self._closed = True
            member, publisher = self._member, self._publisher
            self._member = self._publisher = None
        if os.getpid() != self._pid:
            return
        if member is not None:
            member.close()
        if publisher is not None:
            publisher.close()
        self._reader.close()

    def check_open(self) -> None:
        """Raise where this was closed; begin anew in the child of a fork."""
        if self._closed:
            raise closed(self.location)
        driver()
        if os.getpid() != self._pid:
            self._fork()

    def _fork(self) -> None:
        # The threads of the clients did not come along, so they can be neither used nor closed here.
        _LEFT_BEHIND.append((self.topics, self._reader, self._publisher, self._member))
        self._lock = threading.RLock()
        self._reset()


#: Clients of the process that this one was forked from; never to be freed.
_LEFT_BEHIND: Final[list[object]] = []


def _parsed(cursor: str | None) -> int:
    if cursor is None:
        return -1
    if not cursor.isdecimal():
        raise InvalidArgumentError(f"{cursor!r} is not a cursor of this listing")
    return int(cursor)
