"""The session against memory, whose consumer fails on cue: nothing is forgotten, nothing piles up."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from taskq.backend import Taken
from taskq.backends.memory import MemoryBackend
from taskq.backends.memory import backend as backend_module
from taskq.errors import BackendUnavailableError
from taskq.events import Event, Events
from taskq.job import Job, Outcome, Reservation, State, Verdict, new_id
from taskq.worker import session as session_module
from taskq.worker.session import Session
from tests.conftest import eventually


class Flaky:
    """Passes calls on, unless it is to fail: before the call, or after it as if the answer were lost."""

    def __init__(self, consumer: Any, faults: Faults) -> None:
        self._consumer = consumer
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._consumer, name)
        if name in {"wake", "close"}:
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            self._faults.calls.append(name)
            self._faults.strike("before", name)
            answer = method(*arguments, **options)
            self._faults.strike("after", name)
            return answer

        return call


@dataclass
class Faults:
    """When to fail."""

    where: str = ""
    share: float = 1.0
    only: str = ""  #: the one call that fails
    error: type[Exception] = BackendUnavailableError
    calls: list[str] = field(default_factory=list)

    def strike(self, where: str, name: str) -> None:
        if where == self.where and self.only in {"", name} and random.random() < self.share:
            raise self.error("on cue")


@dataclass
class Setting:
    backend: MemoryBackend
    session: Session
    faults: Faults
    events: list[Event]

    def push(self, n: int = 1, **fields: Any) -> list[str]:
        return self.backend.push([Job(id=new_id(), **fields) for _ in range(n)])

    def taken(self, n: int = 1) -> list[Reservation]:
        """Wait until so many jobs have been taken."""
        found: list[Reservation] = []

        def enough() -> bool:
            while self.session.inbox:
                what, about = self.session.inbox.popleft()
                if what == "taken":
                    found.extend(about)
            return len(found) >= n

        eventually(enough)
        return found

    def told(self) -> list[tuple[str, Any]]:
        return [(what, about) for what, about in self.session.inbox]

    def names(self) -> list[str]:
        return [event.name for event in self.events]


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setattr(session_module, "_BACKOFF", 0.02)
    monkeypatch.setattr(session_module, "_DUTY", 0.02)
    backend, faults, events = MemoryBackend(), Faults(), Events()
    heard: list[Event] = []
    events.subscribe(heard.append)
    consume = backend.consume
    monkeypatch.setattr(backend, "consume", lambda *arguments: Flaky(consume(*arguments), faults))
    session = Session(backend, {"tasks": 1}, "me", events, burst=False)
    session.start()
    yield Setting(backend, session, faults, heard)
    faults.where = ""
    assert session.close(10)
    backend.close()


def test_a_burst_ends_only_after_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MemoryBackend()
    consume = backend.consume

    def lending_only_by_take(*arguments: Any) -> Any:
        consumer = consume(*arguments)
        settle = consumer.settle
        monkeypatch.setattr(consumer, "exchange", lambda outcomes, limit: (settle(outcomes), Taken([], None)))
        return consumer

    monkeypatch.setattr(backend, "consume", lending_only_by_take)
    session = Session(backend, {"tasks": 1}, "me", Events(), burst=True)
    backend.push([Job(id=new_id()) for _ in range(3)])
    setting = Setting(backend, session, Faults(), [])
    dry_at: list[int] = []
    session.on_news = lambda: dry_at.append(backend.size("tasks")) if session.dry else None
    session.start()
    session.want(1)
    for _ in range(3):
        session.settle([complete(each) for each in setting.taken(1)])
    eventually(lambda: dry_at)
    assert session.close(10)

    assert dry_at[0] == 0
    backend.close()


def complete(reservation: Reservation) -> Outcome:
    return Outcome(reservation=reservation, verdict=Verdict.COMPLETE)


def test_it_takes_what_is_wanted_and_no_more(setting: Setting) -> None:
    setting.push(5)
    setting.session.want(2)

    assert len(setting.taken(2)) == 2
    assert setting.backend.size("tasks") == 3


@pytest.mark.parametrize("where", ["before", "after"])
def test_outcomes_outlive_any_refusal(setting: Setting, where: str) -> None:
    setting.push(10)
    setting.session.want(10)
    reservations = setting.taken(10)
    setting.session.want(0)
    setting.faults.where, setting.faults.only = where, "exchange"
    setting.session.settle([complete(each) for each in reservations])
    eventually(lambda: setting.faults.calls.count("exchange") > 3)
    assert not setting.session.idle
    setting.faults.where = ""
    eventually(lambda: setting.session.idle)

    assert setting.backend.size("tasks", State.COMPLETED) == 10
    assert "backend.available" in setting.names()
    assert setting.names().count("backend.unavailable") == 1
    assert "job.lost" not in setting.names()


def test_an_unexpected_error_of_a_driver_is_survived_too(setting: Setting) -> None:
    setting.push()
    setting.session.want(1)
    (reservation,) = setting.taken()
    setting.faults.where, setting.faults.error = "before", ZeroDivisionError
    setting.session.settle([complete(reservation)])
    eventually(lambda: "backend.unavailable" in setting.names())
    setting.faults.where = ""

    eventually(lambda: setting.backend.size("tasks", State.COMPLETED) == 1)


def test_through_a_flickering_backend_every_job_ends_once(setting: Setting) -> None:
    setting.push(300, lease=0.0)  # so that no job is taken twice
    setting.session.want(8)
    setting.faults.where, setting.faults.share = "before", 0.3
    ended: list[str] = []
    while len(ended) < 300:
        for reservation in setting.taken():
            ended.append(reservation.job.id)
            setting.session.settle([complete(reservation)])
    setting.faults.where = ""
    eventually(lambda: setting.backend.size("tasks", State.COMPLETED) == 300)

    assert len(set(ended)) == 300


def test_it_resumes_by_itself(setting: Setting) -> None:
    setting.faults.where = "before"
    setting.session.want(1)
    eventually(lambda: "backend.unavailable" in setting.names())
    setting.push()
    setting.faults.where = ""

    assert setting.taken()


def test_wishes_do_not_pile_up_while_the_backend_is_away(setting: Setting) -> None:
    setting.push()
    setting.session.want(1)
    (reservation,) = setting.taken()
    setting.faults.where = "before"
    for n in range(1_000):
        setting.session.progress(reservation, b"%d" % n)
        setting.session.extend(reservation, 60 + n)
    assert len(setting.session._wishes) == 2
    assert not setting.session._requests
    setting.faults.where = ""

    eventually(lambda: setting.backend.progress(reservation.job.id) == b"999")
    eventually(lambda: not setting.session._wishes)


def test_a_wish_that_cannot_be_granted_holds_up_nothing(setting: Setting) -> None:
    setting.push()
    setting.session.want(1)
    (reservation,) = setting.taken()
    setting.faults.where, setting.faults.only, setting.faults.error = "before", "note", OverflowError
    setting.session.progress(reservation, b"too large")
    setting.session.settle([complete(reservation)])

    eventually(lambda: setting.backend.size("tasks", State.COMPLETED) == 1)
    assert "note.failed" in setting.names()


def test_leases_are_renewed_while_held(setting: Setting) -> None:
    setting.push(lease=0.15)
    setting.session.want(1)
    setting.taken()
    eventually(lambda: setting.faults.calls.count("extend") > 10)

    assert not any(setting.backend.reclaim())


def test_a_lost_lease_is_told_and_its_outcome_is_not_written(setting: Setting) -> None:
    setting.push(lease=0.15)
    setting.session.want(1)
    (reservation,) = setting.taken()
    setting.session.want(0)
    setting.faults.where = "before"
    eventually(lambda: setting.backend.reclaim().suspects)
    setting.faults.where = ""
    eventually(lambda: ("lost", reservation.job.id) in setting.told())
    setting.session.settle([complete(reservation)])
    eventually(lambda: setting.session.idle)

    assert setting.names().count("job.lost") == 2
    assert setting.backend.size("tasks", State.PENDING) == 1


def test_a_mark_is_told_once_it_is_durable_unless_the_job_was_lost(setting: Setting) -> None:
    setting.push(2, lease=0.15)
    setting.session.want(2)
    kept, lost = setting.taken(2)
    setting.session.want(0)
    setting.session.mark([kept], tell=True)
    eventually(lambda: ("marked", kept) in setting.told())
    setting.faults.where = "before"
    eventually(lambda: len(setting.backend.reclaim().suspects) == 1 or setting.backend.size("tasks"))
    setting.session.mark([lost], tell=True)
    setting.faults.where = ""
    eventually(lambda: ("lost", lost.job.id) in setting.told())

    assert ("marked", lost) not in setting.told()


def test_a_cancel_reaches_the_main_thread(setting: Setting) -> None:
    (job_id,) = setting.push()
    setting.session.want(1)
    setting.taken()
    setting.backend.cancel([job_id])

    eventually(lambda: ("cancel", job_id) in setting.told())


def test_what_is_taken_while_the_worker_leaves_is_given_back(setting: Setting) -> None:
    """Pushed, taken and closed at random moments: nothing stays reserved."""
    for _ in range(30):
        session = Session(setting.backend, {"tasks": 1}, "leaving", Events(), burst=False)
        session.start()
        session.want(5)
        pusher = threading.Thread(target=setting.push, args=(3,))
        pusher.start()
        session.want(0)
        assert session.close(10)
        pusher.join()

    assert setting.backend.size("tasks", State.RESERVED) == 0
    assert setting.backend.size("tasks") == 90
    assert all(job.deliveries == 0 for job in setting.backend.list_jobs("tasks", State.PENDING).jobs)


def test_a_job_that_comes_again_while_it_is_held_was_lost_before(setting: Setting) -> None:
    (job_id,) = setting.push(lease=3600.0)
    setting.session.want(2)
    (first,) = setting.taken()
    setting.backend._shelf.rows[job_id].deadline = 0.0
    setting.backend.reclaim()
    eventually(lambda: len(setting.told()) == 2)

    (lost, about), (taken, again) = setting.told()
    assert (lost, about, taken) == ("lost", job_id, "taken")
    assert again[0].token > first.token
    assert setting.names().count("job.lost") == 1
    setting.session.settle([Outcome(reservation=again[0], verdict=Verdict.COMPLETE)])
    eventually(lambda: setting.session.idle)


def test_a_lease_that_is_a_connection_is_looked_at_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_DUTY", 0.02)
    monkeypatch.setattr(
        backend_module, "_CAPABILITIES", replace(backend_module._CAPABILITIES, leases="connection")
    )
    backend = MemoryBackend()
    backend.push([Job(id=new_id(), lease=3600.0)])
    session = Session(backend, {"tasks": 1}, "me", Events(), burst=False)
    session.want(1)
    session.start()
    eventually(lambda: backend.size("tasks", State.RESERVED) == 1)
    backend._shelf.rows.clear()

    eventually(lambda: ("lost", None) in [(learned.what, None) for learned in session.inbox])
    session.inbox.clear()
    assert session.close(10)
    backend.close()
