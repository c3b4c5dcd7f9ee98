"""Any interleaving of the verbs, held against a model of a page."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from taskq.backend import Cancellation, Note
from taskq.clock import FrozenClock
from taskq.job import MOVES, Job, Settlement, State, Verdict, new_id
from tests.contract.acts import failure, ids, job, outcome

QUEUES = ("a", "b")
LEASE = 30.0
SOME = st.integers(0, 10)


@dataclass
class Modelled:
    """What must be true of one job."""

    pushed: Job
    seq: int
    due: float
    state: State
    attempts: int = 0
    losses: int = 0
    generation: int = 0
    deliveries: int = 0
    started: bool = False
    cancel: bool = False
    ended: float | None = None
    deadline: float = 0.0
    seen: State = field(default=State.PENDING)  # when last looked at

    def wait(self, due, now):
        self.due = due or now
        self.state = State.SCHEDULED if self.due > now else State.PENDING
        self.started = False

    def back(self):
        """To the place it had, even if the wall clock has been set back since."""
        self.state, self.started = State.PENDING, False

    def end(self, state, now):
        self.state, self.ended, self.cancel, self.started = state, now, False, False

    def fail(self, due, now):
        self.attempts += 1
        if self.attempts > self.pushed.max_retries:
            self.end(State.DEAD, now)
        elif self.cancel:
            self.end(State.CANCELLED, now)
        else:
            self.wait(due, now)

    def order(self):
        return (-self.pushed.priority, self.due, self.seq)


class Verbs(RuleBasedStateMachine):
    """One backend, two queues with a consumer each."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.clock = FrozenClock()
        self.place = tempfile.TemporaryDirectory()
        self.backend = case.open(Path(self.place.name), self.clock)
        self.consumers = {queue: self.backend.consume({queue: 1}, f"worker-{queue}") for queue in QUEUES}
        self.jobs = {}
        self.held = []  # reservations that hold
        self.over = []  # reservations that were settled or lost: (reservation, settled)
        self.paused = set()

    def teardown(self):
        for consumer in self.consumers.values():
            consumer.close()
        self.backend.close()
        if self.case.capabilities.persistent:
            self.case.verify(Path(self.place.name))
        self.place.cleanup()

    # -- the verbs --------------------------------------------------------------------

    @rule(
        queue=st.sampled_from(QUEUES),
        priority=st.integers(0, 2),
        delay=st.sampled_from([0, 0, 20, -20]),
        retries=st.integers(0, 2),
        keep=st.sampled_from([0.0, 10**6]),
        expires=st.sampled_from([None, None, 15]),
    )
    def push(self, queue, priority, delay, retries, keep, expires):
        now = self.clock.now()
        pushed = job(
            id=new_id(),
            queue=queue,
            priority=priority,
            due=now + delay if delay else 0.0,
            expires=now + expires if expires else None,
            max_retries=retries,
            lease=LEASE,
            loss_base=5.0,
            keep=keep,
        )
        self.backend.push([pushed])
        due = pushed.due or now
        state = State.SCHEDULED if due > now else State.PENDING
        self.jobs[pushed.id] = Modelled(pushed, len(self.jobs), due, state, seen=state)

    @rule(queue=st.sampled_from(QUEUES), limit=st.integers(1, 4))
    def take(self, queue, limit):
        now = self.clock.now()
        taken = self.consumers[queue].take(limit).reservations
        wanted = []
        if queue not in self.paused:
            self._stage(queue)
            for entry in self._in_line(queue):
                if len(wanted) == limit:
                    break
                if entry.pushed.expires is not None and entry.pushed.expires <= now:
                    entry.end(State.CANCELLED, now)
                else:
                    wanted.append(entry)
        assert ids(taken) == [entry.pushed.id for entry in wanted]
        for entry in wanted:
            entry.state, entry.deadline = State.RESERVED, self.clock.lease_time() + LEASE
            entry.deliveries += 1
        self.held += taken

    def _stage(self, queue):
        for entry in self.jobs.values():
            if (
                entry.pushed.queue == queue
                and entry.state is State.SCHEDULED
                and entry.due <= self.clock.now()
            ):
                entry.state = State.PENDING

    def _in_line(self, queue):
        waiting = [e for e in self.jobs.values() if e.pushed.queue == queue and e.state is State.PENDING]
        return sorted(waiting, key=Modelled.order)

    @precondition(lambda self: self.held)
    @rule(which=SOME, verdict=st.sampled_from(Verdict), delay=st.sampled_from([0, 10]), repeat=st.booleans())
    def settle(self, which, verdict, delay, repeat):
        now = self.clock.now()
        reservation = self.held.pop(which % len(self.held))
        entry = self.jobs[reservation.job.id]
        consumer = self.consumers[entry.pushed.queue]
        due = now + delay if delay else 0.0
        decided = (
            failure(reservation, due=due)
            if verdict is Verdict.RETRY
            else outcome(reservation, verdict, due=due)
        )
        assert consumer.settle([decided]) == [Settlement.SETTLED]
        if repeat:
            assert consumer.settle([decided]) == [Settlement.ALREADY_YOURS]
        self._settled(entry, verdict, due, now)
        self.over.append((reservation, True))

    def _settled(self, entry, verdict, due, now):
        if verdict is Verdict.COMPLETE:
            entry.end(State.COMPLETED, now)
            if entry.pushed.keep == 0:
                del self.jobs[entry.pushed.id]
        elif verdict is Verdict.BURY:
            entry.end(State.DEAD, now)
        elif verdict is Verdict.RETRY:
            entry.fail(due, now)
        elif verdict is Verdict.CANCEL or entry.cancel:
            entry.end(State.CANCELLED, now)
        elif verdict is Verdict.RELEASE:
            entry.back()
        else:
            entry.wait(due, now)

    @precondition(lambda self: self.over)
    @rule(which=SOME)
    def settle_again(self, which):
        reservation, settled = self.over[which % len(self.over)]
        counts = self.backend.counts()
        (answer,) = self.consumers[reservation.job.queue].settle([outcome(reservation)])
        assert answer is not Settlement.SETTLED
        assert settled or answer is Settlement.LOST
        assert counts == self.backend.counts()

    @precondition(lambda self: self.held)
    @rule(which=SOME)
    def release(self, which):
        reservation = self.held.pop(which % len(self.held))
        entry = self.jobs[reservation.job.id]
        self.consumers[entry.pushed.queue].release([reservation])
        entry.deliveries -= 1
        if entry.cancel:
            entry.end(State.CANCELLED, self.clock.now())
        else:
            entry.back()
        self.over.append((reservation, True))

    @precondition(lambda self: self.held)
    @rule(which=SOME)
    def extend(self, which):
        reservation = self.held[which % len(self.held)]
        entry = self.jobs[reservation.job.id]
        lost, cancelled = self.consumers[entry.pushed.queue].extend([reservation])
        assert (lost, cancelled) == ([], [entry.pushed.id] if entry.cancel else [])
        entry.deadline = self.clock.lease_time() + LEASE

    @precondition(lambda self: self.held)
    @rule(which=SOME)
    def start(self, which):
        reservation = self.held[which % len(self.held)]
        entry = self.jobs[reservation.job.id]
        note = Note(reservation=reservation, started=self.clock.now())
        assert self.consumers[entry.pushed.queue].note([note]) == []
        entry.started = True

    @precondition(lambda self: self.jobs)
    @rule(which=SOME)
    def cancel(self, which):
        entry = list(self.jobs.values())[which % len(self.jobs)]
        (answer,) = self.backend.cancel([entry.pushed.id]).values()
        if entry.state.ended:
            assert answer is Cancellation.ENDED
        elif entry.state is State.RESERVED:
            assert answer is Cancellation.REQUESTED
            entry.cancel = True
        else:
            assert answer is Cancellation.CANCELLED
            entry.end(State.CANCELLED, self.clock.now())

    @rule()
    def reclaim(self):
        now = self.clock.now()
        over = [
            e
            for e in self.jobs.values()
            if e.state is State.RESERVED and e.deadline <= self.clock.lease_time()
        ]
        found = self.backend.reclaim()
        wanted = {"retried": set(), "buried": set(), "suspects": set()}
        for entry in over:
            if entry.cancel:
                entry.end(State.CANCELLED, now)
            elif entry.started:
                entry.fail(now + 5.0 * 2**entry.attempts, now)
                wanted["buried" if entry.state is State.DEAD else "retried"].add(entry.pushed.id)
            else:
                entry.losses += 1
                entry.back()
                wanted["suspects"].add(entry.pushed.id)
        assert {name: set(job_ids) for name, job_ids in found._asdict().items()} == wanted
        gone = {entry.pushed.id for entry in over}
        self.over += [(r, False) for r in self.held if r.job.id in gone]
        self.held = [r for r in self.held if r.job.id not in gone]

    @rule(queue=st.sampled_from(QUEUES))
    def revive(self, queue):
        dead = [e for e in self.jobs.values() if e.state is State.DEAD and e.pushed.queue == queue]
        assert set(self.backend.revive(queue)) == {e.pushed.id for e in dead}
        for entry in dead:
            entry.generation += 1
            entry.attempts = entry.losses = 0
            entry.ended = None
            entry.wait(0.0, self.clock.now())

    @rule(queue=st.sampled_from(QUEUES))
    def pause_or_resume(self, queue):
        (self.backend.resume if queue in self.paused else self.backend.pause)(queue)
        self.paused ^= {queue}
        assert self.backend.paused() == self.paused

    @rule(seconds=st.sampled_from([1.0, 12.0, 40.0]))
    def let_time_pass(self, seconds):
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([3600.0, -3600.0]))
    def set_the_wall_clock(self, seconds):
        self.clock.step(seconds)

    @rule()
    def keep_house(self):
        now = self.clock.now()
        while self.backend.housekeep() == 0.0:
            pass
        for queue in QUEUES:
            self._stage(queue)
        for entry in list(self.jobs.values()):
            late = entry.pushed.expires is not None and entry.pushed.expires <= now
            if late and entry.state in (State.PENDING, State.SCHEDULED):
                entry.end(State.CANCELLED, now)
            forgettable = entry.state in (State.COMPLETED, State.CANCELLED)
            if forgettable and entry.ended + entry.pushed.keep <= now:
                del self.jobs[entry.pushed.id]

    # -- what always holds ------------------------------------------------------------

    @invariant()
    def counts_are_right(self):
        wanted = Counter((entry.pushed.queue, entry.state) for entry in self.jobs.values())
        counts = self.backend.counts()
        assert {(queue, s): n for queue, found in counts.items() for s, n in found.items() if n} == wanted
        for queue, state in wanted:
            listed = self.backend.list_jobs(queue, state).jobs
            there = [e for e in self.jobs.values() if e.pushed.queue == queue and e.state is state]
            assert set(ids(listed)) == {entry.pushed.id for entry in there}

    @invariant()
    def jobs_are_as_modelled_and_moved_legally(self):
        for job_id, entry in self.jobs.items():
            found = self.backend.find(job_id)
            assert (
                found.state,
                found.attempts,
                found.losses,
                found.generation,
                found.deliveries,
                found.due,
            ) == (
                entry.state,
                entry.attempts,
                entry.losses,
                entry.generation,
                entry.deliveries,
                entry.due,
            )
            assert found.ended == entry.ended
            assert _reachable(entry.seen, entry.state)
            entry.seen = entry.state


def _reachable(before, after):
    """Whether a verb may lead there: one move, or two (staged and claimed, claimed and expired)."""
    one = MOVES[before] | {before}
    return after in one or any(after in MOVES[between] for between in one)


@pytest.mark.needs(stores=True)
def test_any_interleaving_of_the_verbs_keeps_the_rules(case):
    run_state_machine_as_test(
        lambda: Verbs(case),
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
