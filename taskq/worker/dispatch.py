"""Which job goes to which lane: buffers, chunks, take-back and blame. Bookkeeping only: no I/O but queued messages.

Jobs go out in *chunks*: many at once where they are known to be short, one at a time where they are long or unknown.
Whatever a busy lane has not begun is withdrawn and given to another, without the backend noticing.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from taskq.job import Outcome, Reservation
from taskq.worker.durations import Durations
from taskq.worker.pipes import FLUSH, RUN
from taskq.worker.pool import ChildHandle
from taskq.worker.portions import UNKNOWN, Chunk, Death, Lane, Running, TaskFacts
from taskq.worker.slots import Activity, Doing
from taskq.worker.suspects import Suspects, Turn, in_the_way
from taskq.worker.wire import pack_job, unpack_result

#: Work handed to a lane at a time, in seconds of its running estimate.
_CHUNK: Final = 0.004
_CHUNK_JOBS: Final = 64
#: Work wanted at hand per lane, in seconds; more would only wait here instead of in the queue.
_AT_HAND: Final = 0.012
_AT_HAND_JOBS: Final = 192
#: A job that runs longer than this gives up the unstarted ones behind it.
_PATIENCE: Final = 0.02
#: Jobs for which no lane has had room for so long are another worker's to run.
_STALE: Final = 1.0


class Dispatcher:
    """Hands reservations to lanes and turns what comes back into outcomes."""

    def __init__(self, most_jobs: int | None = None) -> None:
        self._most_jobs = most_jobs  #: that one child may be handed
        self._allowance: dict[ChildHandle, int] = {}
        self.tasks: Mapping[str, TaskFacts] = {}
        self.lanes: dict[ChildHandle, dict[int, Lane]] = {}
        self._ready = (deque[Reservation](), deque[Reservation]())  # for threads, for coroutines
        # Dicts as ordered sets: lanes with nothing to do, and lanes that may be handed a second chunk.
        self._idle: tuple[dict[Lane, None], dict[Lane, None]] = ({}, {})
        self._roomy: tuple[dict[Lane, None], dict[Lane, None]] = ({}, {})
        self._usable = [0, 0]
        self._only_coroutines = False
        self._suspects = Suspects()
        self._moved = [0.0, 0.0]  #: when each line was last empty or gave something to a lane
        self._full = False  #: lately jobs had to be given back because no lane took them
        self._durations = Durations()
        self._numbers = itertools.count(1)
        self._busy: set[Lane] = set()

    # -- lanes ------------------------------------------------------------------------

    def add_child(self, child: ChildHandle) -> None:
        """Use a child that has reported ready."""
        spec = child.spec
        self.lanes[child] = {}
        if self._most_jobs is not None:
            self._allowance[child] = self._most_jobs
        self._only_coroutines = not spec.threads
        for number in range(spec.threads):
            self.add_lane(child, number, coroutine=False)
        if not spec.threads or any(facts.is_async for facts in self.tasks.values()):
            for number in range(spec.first_coroutine, spec.lanes):
                self.add_lane(child, number, coroutine=True)

    def add_lane(self, child: ChildHandle, number: int, *, coroutine: bool) -> None:
        lane = Lane(child, number, coroutine)
        self.lanes[child][number] = lane
        self._usable[coroutine] += 1
        self._idle[coroutine][lane] = None

    def disuse(self, lane: Lane) -> None:
        """Hand nothing more to ``lane``."""
        if lane.usable:
            lane.usable = False
            self._usable[lane.coroutine] -= 1
            self._idle[lane.coroutine].pop(lane, None)
            self._roomy[lane.coroutine].pop(lane, None)

    def retire(self, child: ChildHandle) -> list[Reservation]:
        """Hand nothing more to ``child``; returns to the buffer what it has not begun."""
        if child not in self.lanes:
            return []
        self._disuse_child(child)
        return self._keep([each for lane in self.lanes[child].values() for each in self._withdraw(lane)])

    def idle(self, child: ChildHandle) -> bool:
        """Whether no lane of ``child`` has a job."""
        return not any(lane.chunks for lane in self.lanes.get(child, {}).values())

    def bury_child(self, child: ChildHandle, now: float) -> Death:
        """Forget a dead child, and say what became of each job it had been handed."""
        death = Death([], [], [], [])
        self._allowance.pop(child, None)
        for lane in self.lanes.pop(child, {}).values():
            self.disuse(lane)
            self._busy.discard(lane)
            doing = child.slots.last(lane.number)
            reached = (doing.chunk, doing.position)
            for chunk in lane.chunks:
                for index in sorted(chunk.open):
                    reservation = chunk.reservations[index]
                    self._suspects.gone(reservation.job.id, now)
                    if (chunk.number, index) == reached and doing.activity == Activity.RUNNING:
                        death.running.append(Running(lane, chunk, index, doing.since))
                    elif (chunk.number, index) == reached:
                        death.last.append(Running(lane, chunk, index, doing.since))
                    else:
                        (death.ran if (chunk.number, index) < reached else death.unbegun).append(reservation)
            lane.chunks.clear()
        return death

    # -- jobs -------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Jobs in the buffer."""
        return len(self._ready[0]) + len(self._ready[1]) + len(self._suspects)

    @property
    def quiet(self) -> bool:
        """Whether nothing is buffered and no lane has a job."""
        return not self._busy and not self.waiting

    @property
    def target(self) -> int:
        """How many jobs are worth holding: enough to keep every lane busy, and no more."""
        if self._full:
            return self.waiting + self.outstanding
        threads, coroutines = self._usable
        if coroutines and threads:
            # Beside threads, coroutine lanes ask for more only as far as they turn out to be used.
            coroutines = min(coroutines, 2 * (coroutines - len(self._idle[True])) + 2)
        mean = self._durations.mean
        ahead = 0 if mean is None else min(_AT_HAND_JOBS, int(_AT_HAND / max(mean, 1e-6)))
        return threads + coroutines + (threads or min(coroutines, 4)) * ahead

    @property
    def outstanding(self) -> int:
        """Jobs in lanes."""
        return sum(lane.outstanding for lane in self._busy)

    def offer(self, reservations: Iterable[Reservation]) -> None:
        """Buffer reservations in the order they should run."""
        for each in reservations:
            line = self._suspects.line if each.job.losses > 0 else self._ready[self._on_loop(each)]
            line.append(each)

    def put_back(self, reservations: Iterable[Reservation]) -> None:
        """Buffer reservations ahead of the others: it is their turn already."""
        self._keep(list(reservations))

    def drop_ready(self, now: float) -> list[Reservation]:
        """Empty the buffer and withdraw what no lane has begun: for a worker that stops."""
        for lane in list(self._busy):
            self._keep(self._withdraw(lane))
        dropped = [*self._ready[False], *self._ready[True], *self._suspects.drop(now)]
        for line in self._ready:
            line.clear()
        return dropped

    def drop_excess(self, now: float) -> list[Reservation]:
        """What is not worth holding any longer: no lane comes free, or jobs have become longer."""
        dropped: list[Reservation] = []
        for line, moved in zip(self._ready, self._moved, strict=True):
            if line and now - moved >= _STALE:
                dropped += line
                line.clear()
        self._full = bool(dropped)
        excess = self.waiting + self.outstanding - self.target
        for line in (*self._ready, self._suspects.line):
            for _ in range(min(len(line), excess)):
                dropped.append(line.pop())
                excess -= 1
        return dropped

    def withdraw(self, job_id: str, now: float) -> Reservation | Running | None:
        """Take a job out of the buffer or of a lane that has not begun it; where it runs, say so."""
        for lane in list(self._busy):
            if lane.holds(job_id):
                self._keep(self._withdraw(lane))
                running = self._running(lane)
                if running is not None and running.reservation.job.id == job_id:
                    return running
        for line in self._ready:
            for each in line:
                if each.job.id == job_id:
                    line.remove(each)
                    return each
        return self._suspects.take_out(job_id, now)

    def dispatch(self, now: float) -> Reservation | None:
        """Hand out what can be; returns a suspect that is to be marked before it can run alone."""
        if self._suspects.begin(now, others=bool(self._ready[0] or self._ready[1])):
            return self._dispatch_suspect(now)
        for coroutine in (False, True):
            self._dispatch_line(coroutine, now)
        return None

    def run_alone(self, suspect: Reservation, now: float) -> bool:
        """Run a suspect that has been marked; whether that is still wanted."""
        wanted = self._suspects.marked(suspect)
        if wanted:
            self._dispatch_suspect(now)
        return wanted

    def results(
        self, child: ChildHandle, number: int, chunk_number: int, packed: list[list[Any]], now: float
    ) -> list[Outcome]:
        """The outcomes of results that a child sent."""
        lane = self.lanes.get(child, {}).get(number)
        chunk = next((chunk for chunk in lane.chunks if chunk.number == chunk_number), None) if lane else None
        if lane is None or chunk is None:
            return []
        outcomes = []
        self._full = False
        lane.heard = lane.look_at = now
        for result in packed:
            index = result[0]
            if index in chunk.open:
                chunk.open.discard(index)
                reservation = chunk.reservations[index]
                self._durations.note(reservation.job.task, result[1])
                outcomes.append(unpack_result(result, reservation))
                self._suspects.gone(reservation.job.id, now)
        self._settle_lane(lane)
        return outcomes

    def running(self, until: float = math.inf) -> Iterator[Running]:
        """The bodies that run now, in lanes that are worth a look by ``until``."""
        for lane in [lane for lane in self._busy if lane.look_at <= until]:
            running = self._running(lane)
            if running is not None:
                yield running

    @property
    def next_look(self) -> float:
        """When the first lane is worth a look."""
        looks = (lane.heard + _PATIENCE if lane.crowded else lane.look_at for lane in self._busy)
        return min(looks, default=math.inf)

    def facts(self, reservation: Reservation) -> TaskFacts:
        """What is known of the job's task."""
        return self.tasks.get(reservation.job.task, UNKNOWN)

    def spare(self, child: ChildHandle) -> int | None:
        """The number of a thread lane that ``child`` can still add."""
        number = sum(not lane.coroutine for lane in self.lanes[child].values())
        return number if number < child.spec.first_coroutine else None

    def only_user(self, running: Running) -> bool:
        """Whether nothing else has been handed to the child of ``running``, but what waits behind it."""
        return not any(
            lane.chunks for lane in self.lanes[running.lane.child].values() if lane is not running.lane
        )

    def find(self, child: ChildHandle, number: int, chunk_number: int, index: int) -> Reservation | None:
        """The reservation of a job that a child speaks about."""
        lane = self.lanes.get(child, {}).get(number)
        for chunk in lane.chunks if lane else ():
            if chunk.number == chunk_number and index in chunk.open:
                return chunk.reservations[index]
        return None

    def take_back(self, now: float) -> None:
        """Withdraw what waits behind jobs that turn out long."""
        for lane in list(self._busy):
            if lane.crowded and now - lane.heard >= _PATIENCE:
                self._keep(self._withdraw(lane))
                lane.child.end.send([FLUSH, lane.number])
                lane.heard = now

    # -- inside -----------------------------------------------------------------------

    def _on_loop(self, reservation: Reservation) -> bool:
        """Whether the job belongs on a coroutine lane; where there are no others, all do."""
        return self._only_coroutines or self.facts(reservation).is_async

    def _dispatch_line(self, coroutine: bool, now: float) -> None:
        line, idle, roomy = self._ready[coroutine], self._idle[coroutine], self._roomy[coroutine]
        if not line:
            self._moved[coroutine] = now
        while line:
            # A long or unknown job never goes behind another, where it might wait for long.
            free = idle or (roomy if self._expected(line[0]) <= _CHUNK else None)
            if not free:
                return
            lane = next(iter(free))
            share = math.ceil(len(line) / (len(idle) + len(roomy)))
            allowed = self._allowance.get(lane.child, _CHUNK_JOBS)
            self._send(lane, self._cut(line, min(_CHUNK_JOBS, max(1, share), allowed)), now)
            self._moved[coroutine] = now

    def _expected(self, reservation: Reservation) -> float:
        return self._durations.expected(reservation.job.task)

    def _cut(self, line: deque[Reservation], most: int) -> list[Reservation]:
        """Take from ``line`` what one chunk should hold."""
        chunk = [line.popleft()]
        work = self._expected(chunk[0])
        while line and len(chunk) < most and work + self._expected(line[0]) <= _CHUNK:
            work += self._expected(line[0])
            chunk.append(line.popleft())
        return chunk

    def _send(self, lane: Lane, reservations: list[Reservation], now: float) -> None:
        chunk = Chunk(next(self._numbers) & 0x7FFFFFFF, reservations, set(range(len(reservations))), now)
        if not lane.chunks:
            lane.heard = lane.look_at = now
        lane.chunks.append(chunk)
        self._busy.add(lane)
        lane.child.end.send([RUN, lane.number, chunk.number, [pack_job(each) for each in reservations]])
        self._place(lane)
        if lane.child in self._allowance:
            self._allowance[lane.child] -= len(reservations)
            if self._allowance[lane.child] <= 0:
                self._disuse_child(lane.child)

    def _disuse_child(self, child: ChildHandle) -> None:
        for lane in self.lanes[child].values():
            self.disuse(lane)

    def _settle_lane(self, lane: Lane) -> None:
        """Drop finished chunks; a lane with room can be used again."""
        while lane.chunks and not lane.chunks[0].open:
            lane.chunks.popleft()
        if not lane.chunks:
            self._busy.discard(lane)
        self._place(lane)

    def _place(self, lane: Lane) -> None:
        """Keep ``lane`` in the set it belongs to."""
        idle, roomy = self._idle[lane.coroutine], self._roomy[lane.coroutine]
        idle.pop(lane, None)
        roomy.pop(lane, None)
        if not lane.usable:
            return
        if not lane.chunks:
            idle[lane] = None
        elif (
            len(lane.chunks) == 1
            and not lane.coroutine
            and self._expected(lane.chunks[0].reservations[-1]) <= _CHUNK
        ):
            roomy[lane] = None

    def _withdraw(self, lane: Lane) -> list[Reservation]:
        """Take back what ``lane`` has not begun, in order."""
        if not lane.chunks:
            return []
        start = lane.child.slots.withdraw(lane.number, lane.chunks[-1].number)
        if start is None:
            return []
        taken: list[Reservation] = []
        for chunk in lane.chunks:
            for index in sorted(index for index in chunk.open if (chunk.number, index) >= start):
                chunk.open.discard(index)
                taken.append(chunk.reservations[index])
        self._settle_lane(lane)
        return taken

    def _keep(self, reservations: list[Reservation]) -> list[Reservation]:
        for each in reversed(reservations):
            if each.job.losses > 0:
                self._suspects.put_back(each)
            else:
                self._ready[self._on_loop(each)].appendleft(each)
        return reservations

    def _running(self, lane: Lane) -> Running | None:
        doing: Doing | None = lane.child.slots.look(lane.number)
        if doing is None or doing.activity != Activity.RUNNING:
            return None
        for chunk in lane.chunks:
            if chunk.number == doing.chunk and doing.position in chunk.open:
                return Running(lane, chunk, doing.position, doing.since)
        return None

    def _dispatch_suspect(self, now: float) -> Reservation | None:
        """Let running jobs end, then give one suspect the worker to itself."""
        suspects = self._suspects
        if suspects.turn is Turn.CLEARING:
            for lane in list(self._busy):
                self._keep(self._withdraw(lane))
            if not any(in_the_way(self._running(lane), now) for lane in self._busy):
                return suspects.mark()
        elif suspects.turn is Turn.MARKED and suspects.current is not None:
            for lane in self._idle[self._on_loop(suspects.current)]:
                self._send(lane, [suspects.current], now)
                suspects.sent(now)
                break
        return None
