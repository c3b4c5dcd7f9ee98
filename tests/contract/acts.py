"""Short words for what the tests of the contract do all the time."""

from __future__ import annotations

import threading

from taskq.errors import BackendUnavailableError
from taskq.job import Attempt, Job, Outcome, State, Verdict, new_id


def job(**fields):
    return Job(**{"id": new_id(), "payload": b"payload", **fields})


def jobs(n, **fields):
    return [job(**fields) for _ in range(n)]


def ids(things):
    """The ids of jobs or of reservations, in order."""
    return [getattr(thing, "job", thing).id for thing in things]


def take(consumer, limit=100, **how):
    return consumer.take(limit, **how).reservations


def take_one(consumer):
    (reservation,) = take(consumer, 1)
    return reservation


def outcome(reservation, verdict=Verdict.COMPLETE, **fields):
    return Outcome(reservation=reservation, verdict=verdict, **fields)


def failure(reservation, *, due=0.0, **fields):
    """A counted attempt, as a worker reports it."""
    attempt = Attempt(
        number=reservation.job.attempts + 1,
        generation=reservation.job.generation,
        worker="worker-1",
        started=1.0,
        ended=2.0,
        error_type="ValueError",
        message="no",
        traceback="Traceback: no",
    )
    return outcome(reservation, Verdict.RETRY, attempt=attempt, due=due, **fields)


def settle(consumer, *outcomes):
    """Settle; a single outcome gives a single answer."""
    answers = consumer.settle(outcomes)
    return answers[0] if len(outcomes) == 1 else answers


def complete(consumer, *reservations):
    return settle(consumer, *map(outcome, reservations))


def bury(backend, consumer, **fields):
    """Push a job and bury it; returns its id."""
    (job_id,) = backend.push([job(max_retries=0, **fields)])
    settle(consumer, failure(take_one(consumer)))
    return job_id


class Counts(dict):
    """Counts that equal others as far as the backend counts at all: a broker alone sees what waits and what is dead."""

    def __init__(self, counts, visible):
        super().__init__(counts)
        self.visible = visible

    def __eq__(self, other):
        return dict(self) == {state: n for state, n in other.items() if state in self.visible}

    __hash__ = None


def states(backend, *queues):
    """Counts by name, without zeros: ``{"pending": 2}`` for one queue."""
    counts = backend.counts()
    visible = {str(state) for state in State} if backend.capabilities.stores else {"pending", "dead"}
    found = {
        queue: Counts({str(s): n for s, n in counts.get(queue, {}).items() if n}, visible)
        for queue in queues or ("tasks",)
    }
    return found if len(queues) > 1 else found[(queues or ("tasks",))[0]]


def listed(backend, queue, state, limit=100):
    """All jobs of a listing, slice by slice."""
    found, cursor = [], None
    while True:
        page = backend.list_jobs(queue, state, limit=limit, cursor=cursor)
        found += page.jobs
        cursor = page.cursor
        if cursor is None:
            return found


def blocked_take(consumer, limit=1, timeout=30.0, **how):
    """A take in a thread of its own, and what it brings."""
    found = []

    def run():
        try:
            found.append(consumer.take(limit, timeout, **how))
        except BackendUnavailableError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def joined(thread, within=10.0):
    thread.join(within)
    return not thread.is_alive()
