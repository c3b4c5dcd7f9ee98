"""What one member was assigned: its jobs, who has which, and what has ended; all under one lock."""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from taskq.backends import moves
from taskq.backends.kafka.marks import Mark
from taskq.backends.kafka.parts import Held, Part
from taskq.backends.kafka.topics import Slot
from taskq.backends.kafka.wire import Parcel
from taskq.backends.turns import Turns
from taskq.clock import Clock
from taskq.job import KEPT_ATTEMPTS, Job, Reservation, State

#: Settled reservations that are remembered, so that a repeat is known.
_REMEMBERED: Final = 50_000


class Shelf:
    """Driven by the thread of the member and those of its sessions; callers hold :attr:`changed`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self.parts: dict[Slot, Part] = {}
        self.by_queue: dict[str, list[Part]] = defaultdict(list)
        self.orphans: list[Held] = []  #: were lent by an owner that is gone
        self.broken: list[tuple[Held, str]] = []  #: messages that are no jobs, and why
        self.early: list[tuple[float, int, Held]] = []  #: due within a moment
        self.settled: OrderedDict[tuple[str, int], tuple[Part, int]] = OrderedDict()
        self._token = 0

    # -- partitions -------------------------------------------------------------------

    def assign(self, part: Part) -> None:
        self.parts[part.slot] = part
        self.by_queue[part.queue].append(part)
        self.changed.notify_all()

    def drop(self, slot: Slot) -> Part | None:
        """The partition is another's from now on."""
        part = self.parts.pop(slot, None)
        if part is not None:
            part.live = False
            self.by_queue[part.queue].remove(part)
            self.orphans = [held for held in self.orphans if held.part is not part]
            self.broken = [entry for entry in self.broken if entry[0].part is not part]
            self.changed.notify_all()
        return part

    def running(self, slots: Iterable[Slot]) -> list[Held]:
        """What is lent of these partitions."""
        parts = [part for slot in slots if (part := self.parts.get(slot)) is not None]
        return [held for part in parts for held in part.lent_jobs()]

    def refuge(self, part: Part) -> Part | None:
        """A partition of the queue of ``part`` that stays here, of its band if one does."""
        stay = [one for one in self.by_queue[part.queue] if one.hop is None and not one.leaving]
        return min(stay, key=lambda one: (one.band != part.band, len(one.open)), default=None)

    # -- messages ---------------------------------------------------------------------

    def arrive(self, part: Part, offset: int, stamp: int, key: bytes | None, parcel: Parcel) -> None:
        """A message was read."""
        if offset in part.open:
            return
        prior = part.prior.pop(offset, None) if part.prior else None
        moved = part.ahead.pop(offset, None) if part.ahead else None
        if moved is not None:
            part.add(moved)
            part.reached = offset + 1
            return
        if prior is Mark.DONE or offset < part.purged:
            part.read_to(offset + 1)
            return
        if key is not None and prior is None:
            prior = Mark.LENT  # it was moved by a worker that had it, and has died since
        held = Held(part, offset, parcel.job, stamp)
        part.add(held)
        part.reached = offset + 1
        if prior is not None:
            held.mark = prior
            held.started = stamp / 1000 if prior is Mark.STARTED else None
            self.orphans.append(held)
        else:
            self._shelve(held, waits=parcel.waits)

    def move(self, held: Held, slot: Slot, offset: int) -> None:
        """``held`` stands at ``offset`` of another partition now; whoever has it has it still."""
        held.part.lent -= 1
        held.part.end(held)
        held.settling = False
        self.parts[slot].expect(held, offset)

    def in_motion(self, reservations: Iterable[Reservation]) -> bool:
        """Whether some of these are being moved, or ended by an earlier call."""
        return any(isinstance(one.handle, Held) and one.handle.settling for one in reservations)

    def _shelve(self, held: Held, *, waits: bool) -> None:
        """``held`` waits: for its time, or to be lent."""
        if held.part.hop is not None:
            held.rank = (0, held.rank[1] + int(held.part.hop * 1000), held.offset)
            heapq.heappush(held.part.heap, held)
        elif waits and held.job.due > self.clock.now():
            heapq.heappush(self.early, (held.job.due, id(held), held))
        else:
            held.part.wait(held)

    def stage(self) -> float | None:
        """Let those that are due by now be lent; returns when the next is."""
        now = self.clock.now()
        while self.early and self.early[0][0] <= now:
            held = heapq.heappop(self.early)[2]
            if self.stands(held):
                held.part.wait(held)
                self.changed.notify_all()
        return self.early[0][0] if self.early else None

    def leaving(self, limit: int) -> list[tuple[Held, Job]]:
        """What must stand elsewhere, and as what: delayed jobs whose hop is over, and what an earlier owner left."""
        now = self.clock.now()
        found = [(held, held.job) for held in self._over(limit, int(now * 1000))]
        found += [(held, remembering(moves.lost(held.job, held.started, now))) for held in self.orphans]
        found += [(held, moves.end(held.job, State.DEAD, now, error=why)) for held, why in self.broken]
        self.orphans, self.broken = [], []
        for held, _ in found:
            held.settling = True
        return found

    def _over(self, limit: int, now: int) -> Iterator[Held]:
        for part in self.parts.values():
            if part.hop is not None:
                while part.heap and part.heap[0].rank[1] <= now and limit > 0:
                    limit -= 1
                    yield heapq.heappop(part.heap)

    def stands(self, held: Held) -> bool:
        """Whether ``held`` is this member's still, and has not ended."""
        return held.part.has(held)

    def stay(self, helds: Iterable[Held]) -> None:
        """What was to be written with these was not."""
        for held in helds:
            held.settling = False
            if not self.stands(held) or (held.session is not None and not held.session.closed):
                continue
            if held.session is not None:
                held.session = None
                held.part.lent -= 1
            if held.part.hop is not None:
                heapq.heappush(held.part.heap, held)
            elif held.mark is Mark.OPEN:
                self.broken.append((held, held.job.error or "no job"))
            else:
                self.orphans.append(held)

    def purge(self, part: Part, end: int) -> int:
        """End what waits in ``part`` before the offset ``end``, read or not; returns how many those are at most."""
        waiting = [held for held in part.open.values() if held.session is None and held.mark is Mark.OPEN]
        for held in waiting:
            part.end(held)
        part.heap.clear()
        unread = max(0, end - max(0, part.reached))
        part.purged = end
        return len(waiting) + unread

    # -- lending ----------------------------------------------------------------------

    def lend(self, turns: Turns, limit: int, session: Any, worker: str) -> list[Reservation]:
        """At most ``limit`` jobs of the queues of ``turns``, in the order they should run."""
        if limit <= 0:
            return []
        self.stage()
        found = {queue: self._first(queue, limit) for queue in turns.weights}
        order = turns.share(limit, {queue: len(helds) for queue, helds in found.items()})
        next_of = {queue: iter(helds) for queue, helds in found.items()}
        self._token = max(self._token + 1, time.time_ns())
        lent = [self._lend(next(next_of[queue]), session, worker) for queue in order]
        for rest in next_of.values():
            for held in rest:
                held.part.lent -= 1
                held.part.wait(held)
        return lent

    def _first(self, queue: str, limit: int) -> list[Held]:
        """The first ``limit`` jobs of ``queue``, counted as lent; those too late to start end here."""
        now = self.clock.now()
        heads = [(part.heap[0], part) for part in self.by_queue[queue] if part.hop is None and part.ready > 0]
        heapq.heapify(heads)
        found: list[Held] = []
        while heads and len(found) < limit:
            _, part = heads[0]
            held = heapq.heappop(part.heap)
            if moves.expired(held.job, now):
                part.end(held)
            else:
                part.lent += 1
                found.append(held)
            if part.ready > 0:
                heapq.heapreplace(heads, (part.heap[0], part))
            else:
                heapq.heappop(heads)
        return found

    def _lend(self, held: Held, session: Any, worker: str) -> Reservation:
        held.session, held.token = session, self._token
        held.part.mark(held, Mark.LENT)
        job = held.job
        held.job = replace(job, state=State.RESERVED, worker=worker, deliveries=job.deliveries + 1)
        job = replace(held.job, history=()) if job.history else held.job
        return Reservation(job, self._token, held)

    # -- what is lent -----------------------------------------------------------------

    def held(self, reservation: Reservation) -> Held | None:
        """The message of ``reservation``, if it is its still."""
        held = reservation.handle
        if not isinstance(held, Held) or held.token != reservation.token:
            return None
        return held if held.session is not None and held.part.has(held) else None

    def give_back(self, held: Held, job: Job) -> None:
        """Let it wait again, as ``job``."""
        held.part.lent -= 1
        held.job = job
        held.session = None
        held.token = 0
        held.part.wait(held)
        self.changed.notify_all()

    def remember(self, job_id: str, token: int, part: Part) -> None:
        """The end of what was lent under ``token`` is written with the next commit of ``part``."""
        self.settled[job_id, token] = (part, part.version)
        if len(self.settled) > _REMEMBERED:
            self.settled.popitem(last=False)

    def end(self, held: Held) -> None:
        """It has ended, or stands elsewhere now."""
        if held.session is not None:
            held.part.lent -= 1
            held.session = None
        held.settling = False
        held.part.end(held)

    def close_session(self, session: Any) -> None:
        """Nobody has what ``session`` had: what it did not begin waits again, the rest is lost with it."""
        for part in self.parts.values():
            for held in part.lent_jobs():
                if held.session is not session or held.settling:
                    continue
                if held.mark is Mark.STARTED:
                    held.session = None
                    part.lent -= 1
                    self.orphans.append(held)
                else:
                    self.give_back(held, moves.released(held.job, self.clock.now()))

    # -- counting ---------------------------------------------------------------------

    def waiting(self, parts: Iterable[Part]) -> int:
        """Jobs of ``parts`` that were read and are not lent."""
        return sum(len(part.open) - part.lent for part in parts)

    def dirty(self) -> Iterator[Part]:
        """Partitions of which something is not committed."""
        return (part for part in self.parts.values() if part.version > part.saved and part.reached >= 0)


def sure(needs: Sequence[tuple[Part, int]]) -> bool:
    """Whether nothing can change any more about these: written, or the partition is another's."""
    return all(part.saved >= version or not part.live for part, version in needs)


def remembering(move: moves.Move) -> Job:
    """The job of ``move``, with the bad end in its history."""
    if move.attempt is None:
        return move.job
    return replace(move.job, history=(*move.job.history, move.attempt)[-KEPT_ATTEMPTS:])
