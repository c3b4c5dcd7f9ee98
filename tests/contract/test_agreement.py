"""Backends that are their own store agree on unique keys, whatever happens in whatever order."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskq.clock import FrozenClock
from taskq.errors import DuplicateJobError
from taskq.job import Job, State, Unique, Verdict
from tests.contract.acts import failure, outcome
from tests.contract.backends import CASES

KEYS = st.sampled_from(["k", "l"])
UNIQUES = st.builds(
    Unique,
    key=KEYS,
    until=st.sampled_from(["ended", "started", "period"]),
    period=st.sampled_from([0.0, 20.0]),
    conflict=st.sampled_from(["return", "raise", "replace", "reschedule"]),
)
PUSH = st.tuples(
    st.just("push"),
    st.none() | UNIQUES,
    st.sampled_from([0, 0, 15]),  # countdown
    st.sampled_from([0.0, 30.0, 10**6]),  # keep
    st.sampled_from([None, None, 10]),  # expires
)
ACTS = st.one_of(
    PUSH,
    PUSH,
    PUSH,
    st.tuples(st.sampled_from(["take", "reclaim", "housekeep", "revive", "purge"])),
    st.tuples(st.just("settle"), st.sampled_from([*Verdict, "fail"])),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("later"), st.sampled_from([5, 12, 40])),
)


class Player:
    """Does the same to one backend as others do to theirs."""

    def __init__(self, case, place):
        self.clock = FrozenClock()
        self.backend = case.open(Path(place), self.clock)
        self.consumer = self.backend.consume({"tasks": 1}, "worker-1")
        self.pushed, self.held = [], []

    def close(self):
        self.consumer.close()
        self.backend.close()

    def play(self, act):
        return getattr(self, act[0])(*act[1:]), self.look()

    def look(self):
        found = [self.backend.find(job_id) for job_id in self.pushed]
        return [job and (job.id, job.state, job.due, job.payload, job.attempts, job.error) for job in found]

    def push(self, unique, countdown, keep, expires):
        now, number = self.clock.now(), len(self.pushed)
        job = Job(
            id=f"{number:032x}",
            payload=str(number).encode(),
            due=now + countdown if countdown else 0.0,
            expires=None if expires is None else now + expires,
            keep=keep,
            lease=30.0,
            max_retries=1,
            loss_base=0.0,
            unique=unique,
        )
        self.pushed.append(job.id)
        try:
            return self.backend.push([job])
        except DuplicateJobError as error:
            return "refused", error.job_id

    def take(self):
        taken = self.consumer.take(1).reservations
        self.held += taken
        return [one.job.id for one in taken]

    def settle(self, how):
        if not self.held:
            return None
        reservation = self.held.pop(0)
        if how == "fail":
            return self.consumer.settle([failure(reservation)])
        return self.consumer.settle([outcome(reservation, how, due=self.clock.now() + 7)])

    def cancel(self, number):
        return self.backend.cancel(self.pushed[number : number + 1])

    def later(self, seconds):
        self.clock.advance(seconds)

    def reclaim(self):
        return self.backend.reclaim()

    def housekeep(self):
        while self.backend.housekeep() == 0.0:
            pass

    def revive(self):
        return self.backend.revive("tasks")

    def purge(self):
        return self.backend.purge("tasks", State.PENDING)


def _exact(case):
    """Whether what it does is wholly decided by what was done to it."""
    return case.capabilities.stores and case.capabilities.order == "fifo"


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ACTS, max_size=40))
def test_they_agree(acts):
    with tempfile.TemporaryDirectory() as place:
        players = [Player(case, place) for case in CASES if _exact(case) and not case.absent()]
        try:
            for act in acts:
                first, *others = [player.play(act) for player in players]
                assert all(other == first for other in others), act
        finally:
            for player in players:
                player.close()
