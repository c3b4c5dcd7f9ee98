"""Watches running bodies from outside: time limits, cancellation, shutdown, marks, and blame when a child dies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from taskq.clock import SYSTEM_CLOCK, monotonic
from taskq.codec import encode_call
from taskq.events import Events
from taskq.job import Attempt, Job, Outcome, Reservation, Verdict, exhausted, loss_delay
from taskq.timetable import unpack_job
from taskq.worker import limits, pipes
from taskq.worker.dispatch import Dispatcher
from taskq.worker.pool import ChildHandle
from taskq.worker.portions import UNKNOWN, Death, Running

#: A job that runs longer than this is marked as started, so that its loss can be attributed; in seconds.
_MOMENT: Final = 1.0
#: After an interrupt that must end a body, how long until stronger means; in seconds.
LETTING_GO: Final = 2.0

_Key = tuple[ChildHandle, int, int, int]


class Watch:
    """Interrupts bodies, and uses force where that does not help."""

    def __init__(
        self, dispatcher: Dispatcher, events: Events, worker: str, retire: Callable[[ChildHandle], None]
    ) -> None:
        self._dispatcher = dispatcher
        self._events = events
        self._worker = worker
        self._retire = retire
        self._told: dict[_Key, tuple[str, float]] = {}
        self._killed: set[ChildHandle] = set()
        self._marked: set[str] = set()

    def glance(self, now: float) -> list[Reservation]:
        """Enforce what depends on how long bodies have been running; returns those to mark as started."""
        to_mark = []
        for running in self._dispatcher.running(now):
            age = now - running.since
            reservation = running.reservation
            if age > _MOMENT and reservation.job.id not in self._marked:
                self._marked.add(reservation.job.id)
                to_mark.append(reservation)
            self._enforce(running, age, now)
            running.lane.look_at = self._next_look(running, now)
        return to_mark

    def _next_look(self, running: Running, now: float) -> float:
        """When something about this body may be due next."""
        facts, since = self._dispatcher.facts(running.reservation), running.since
        told = self._told.get(_key(running))
        deadlines = [since + limit for limit in (facts.soft, facts.hard, _MOMENT) if limit is not None]
        if told is not None:
            deadlines.append(told[1] + LETTING_GO)
        return min((at for at in deadlines if at > now), default=math.inf)

    def interrupt(self, running: Running, kind: str) -> None:
        """Raise in the body, once. A hard limit in a process that does nothing else kills it at once."""
        told, _ = self._told.get(_key(running), (limits.SOFT, 0.0))
        if told != limits.SOFT or (kind == limits.SOFT and _key(running) in self._told):
            return  # somebody who asks again and again must not put off what comes next
        now = running.lane.look_at = monotonic()
        self._told[_key(running)] = (kind, now)
        if kind == limits.HARD and self._has_process_to_itself(running):
            self._force(running, kind, now)
        else:
            running.lane.child.end.send([pipes.INTERRUPT, *running.key, kind])

    def interrupt_all(self, kind: str) -> None:
        """Raise in every body that runs."""
        for running in list(self._dispatcher.running()):
            self.interrupt(running, kind)

    def marked(self, job_id: str) -> None:
        """The job has been marked as started elsewhere."""
        self._marked.add(job_id)

    def ended(self, child: ChildHandle, lane: int, chunk: int, indexes: list[int]) -> None:
        """These runs have ended."""
        for index in indexes if self._told else ():
            self._told.pop((child, lane, chunk, index), None)

    def settled(self, outcomes: list[Outcome]) -> None:
        """These jobs are on their way to be settled."""
        if self._marked:
            self._marked.difference_update(outcome.reservation.job.id for outcome in outcomes)

    def judge(self, child: ChildHandle, death: Death, how: str) -> list[Outcome]:
        """What becomes of the jobs that a dead child had begun; ``how`` is how it died.

        Who was told to end has ended. Of the others one is to blame, unless the child was killed for somebody
        else's sake: the only one that ran, or one that is under suspicion already. Where that does not say which,
        all become suspects, and each shows by itself what it does to its process.
        """
        ended = [running for running in death.running if self._must_end(running)]
        rest = [running for running in death.running if running not in ended]
        # Where no body ran, one that had just ended may have left behind what killed the process.
        candidates = rest if death.running else death.last
        if child in self._killed:
            self._killed.discard(child)
            candidates = []
        outcomes = [Outcome(reservation=each, verdict=Verdict.RELEASE) for each in death.ran]
        for each in (*rest, *death.last):
            self._told.pop(_key(each), None)
            known = each.reservation.job.losses > 0 or (len(candidates) == 1 and candidates is rest)
            if each in candidates and known:
                outcomes.append(self._loss(each, "WorkerLost", f"worker lost: its process ended ({how})"))
            else:
                released = Outcome(reservation=each.reservation, verdict=Verdict.RELEASE)
                outcomes.append(replace(released, suspect=each in candidates))
        return outcomes + [self._end(running) for running in ended]

    def killed(self, child: ChildHandle) -> None:
        """The child was killed, and no body that it ran is to blame for that."""
        self._killed.add(child)

    def _must_end(self, running: Running) -> bool:
        return self._told.get(_key(running), (limits.SOFT, 0.0))[0] != limits.SOFT

    def _end(self, running: Running) -> Outcome:
        """What becomes of a job that was told to end and whose process has ended."""
        kind, _ = self._told.pop(_key(running))
        reservation = running.reservation
        if kind == limits.SHUTDOWN:
            return Outcome(reservation=reservation, verdict=Verdict.RELEASE)
        if kind in {limits.CANCELLED, limits.LEASE_LOST}:
            return Outcome(reservation=reservation, verdict=Verdict.CANCEL, error=kind)
        limit = self._dispatcher.facts(reservation).hard
        return self._loss(running, "TimeLimitExceeded", f"time_limit={limit:g} s has passed")

    def _enforce(self, running: Running, age: float, now: float) -> None:
        facts = self._dispatcher.facts(running.reservation)
        told, since = self._told.get(_key(running), ("", 0.0))
        if told and told != limits.SOFT:
            if now - since > LETTING_GO:
                self._force(running, told, now)
        elif facts.hard is not None and age >= facts.hard:
            self.interrupt(running, limits.HARD)
        elif facts.soft is not None and age >= facts.soft and not told:
            self.interrupt(running, limits.SOFT)

    def _force(self, running: Running, kind: str, now: float) -> None:
        """End a body that did not let go: kill its process, or set its thread aside."""
        child = running.lane.child
        self._told[_key(running)] = (kind, now)
        if not running.lane.coroutine and child.spec.threads > 1:
            self._set_aside(running)
        elif child.kill():
            self.killed(child)
            self._events.emit("child.killed", pid=child.pid, reason=kind, job_id=running.reservation.job.id)

    def _set_aside(self, running: Running) -> None:
        """A stuck thread cannot be ended: another takes its place, and its job is held until it ends."""
        lane = running.lane
        if not lane.usable:
            return
        self._dispatcher.disuse(lane)
        self._events.emit("thread.stuck", pid=lane.child.pid, job_id=running.reservation.job.id)
        number = self._dispatcher.spare(lane.child)
        if number is None:
            self._retire(lane.child)
        else:
            lane.child.end.send([pipes.LANE, lane.number, number])
            self._dispatcher.add_lane(lane.child, number, coroutine=False)

    def _has_process_to_itself(self, running: Running) -> bool:
        """Whether killing the child would end this body alone."""
        child = running.lane.child
        serial = not running.lane.coroutine and child.spec.threads == 1
        return serial and child.sentinel is not None and self._dispatcher.only_user(running)

    def _loss(self, running: Running, kind: str, message: str) -> Outcome:
        job, now = running.reservation.job, SYSTEM_CLOCK.now()
        over = exhausted(job, job.attempts + 1)
        delay = 0.0 if over else loss_delay(job)
        attempt = Attempt(
            number=job.attempts + 1,
            generation=job.generation,
            worker=self._worker,
            started=now - (monotonic() - running.since),
            ended=now,
            error_type=kind,
            message=message,
            delay=None if over else delay,
        )
        return Outcome(
            reservation=running.reservation,
            verdict=Verdict.RETRY,
            due=now + delay if delay > 0 else 0.0,
            attempt=attempt,
            error=attempt.error,
            pushes=self._told_of(job, attempt, now) if over else (),
        )

    def _told_of(self, job: Job, attempt: Attempt, now: float) -> tuple[Job, ...]:
        """``on_exhausted``, if that is a task: its child cannot call it any more."""
        wanted = self._dispatcher.tasks.get(job.task, UNKNOWN).exhausted
        if wanted is None:
            return ()
        told = {"job_id": job.id, "task": job.task, "error": attempt.error}
        return (unpack_job({**wanted, "payload": encode_call((told,), {})}, now, now),)


def _key(running: Running) -> _Key:
    return (running.lane.child, *running.key)
