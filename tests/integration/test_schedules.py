"""Schedules with real workers: killed at random, each second's tick is stored exactly once.

``python -m tests.integration.test_schedules 120`` does it for two minutes and prints what happened.
"""

from __future__ import annotations

import os
import pathlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter

import pytest

from taskq.backends import from_url
from taskq.clock import SYSTEM_CLOCK
from taskq.codec import encode_call
from taskq.job import Job, State, new_id
from taskq.timetable import INSTANT_HEADER
from tests.workers import Worker, eventually

TICKING = str(pathlib.Path(__file__).parents[1] / "ticking.py")
WORKERS = 5
#: How long the suite lets workers die; more by hand.
SECONDS = float(os.environ.get("TASKQ_TEST_KILL_SECONDS", "15"))


@pytest.mark.slow
def test_every_second_is_stored_once_while_workers_are_killed(tmp_path):
    figures = let_die(tmp_path, SECONDS)

    assert figures["kills"] >= SECONDS / 4
    assert figures["twice"] == []
    assert figures["missing"] == []
    assert figures["ticks"] >= SECONDS


def test_a_schedule_is_fired_by_a_worker_inside_a_process(tmp_path):
    from taskq import TaskQ

    app = TaskQ(f"sqlite:///{tmp_path}/jobs.db")
    ran = threading.Event()

    @app.task(name="often", every=0.05)
    def often() -> None:
        ran.set()

    with app, app.worker(concurrency=1):
        assert ran.wait(20)
        view = app.schedules.get("often")
    assert view.declared is not None


def test_the_workers_own_time_zone_moves_nothing(tmp_path, monkeypatch):
    """A job due soon, in a worker that believes to be on the Chatham Islands, neither runs at once nor hours late."""
    monkeypatch.setenv("TZ", "Pacific/Chatham")
    url = f"sqlite:///{tmp_path}/jobs.db"
    backend = from_url(url)
    due = SYSTEM_CLOCK.now() + 3
    (job_id,) = backend.push([Job(id=new_id(), task="tick", due=due, payload=encode_call((), {}))])
    worker = start(url, tmp_path)
    try:
        worker.wait_ready()
        job = eventually(lambda: ended(backend, job_id), about=worker)
        eventually(lambda: instants(backend), about=worker)
    finally:
        end(worker)

    assert job.state is State.COMPLETED
    assert job.ended >= due
    assert all(abs(instant - due) < 60 for instant in instants(backend))


def ended(backend, job_id):
    job = backend.find(job_id)
    return job if job.state.ended else None


def let_die(folder, seconds):
    """Run workers for a while, killing one after the other; returns what came of it."""
    url = f"sqlite:///{folder}/jobs.db"
    backend = from_url(url)
    workers = [start(url, folder) for _ in range(WORKERS)]
    kills = 0
    try:
        eventually(lambda: instants(backend), within=60, about=workers[0])
        until = time.monotonic() + seconds
        pause = threading.Event()
        while time.monotonic() < until:
            pause.wait(random.uniform(0.2, 2.0))
            victim = random.choice(workers)
            end(victim)
            kills += 1
            workers[workers.index(victim)] = start(url, folder)
        last = max(instants(backend))
        eventually(lambda: max(instants(backend)) > last + 2, within=60, about=workers[0])
        eventually(lambda: drained(backend), within=60, about=workers[0])
    finally:
        for worker in workers:
            end(worker)
    return {"kills": kills, **judged(instants(backend)), "delivered again": again(backend)}


def start(url, folder):
    return Worker(url, folder / "ledger", "--pool", "thread", "-c", "1", app=TICKING)


def end(worker):
    worker.kill_all()
    worker.process.wait(10)
    worker.close()


def jobs(backend):
    found = []
    for state in (
        State.PENDING,
        State.RESERVED,
        State.SCHEDULED,
        State.DEAD,
        State.COMPLETED,
        State.CANCELLED,
    ):
        cursor = None
        while True:
            page = backend.list_jobs("tasks", state, limit=500, cursor=cursor)
            found += page.jobs
            cursor = page.cursor
            if cursor is None:
                break
    return {job.id: job for job in found}


def instants(backend):
    found = (job.headers.get(INSTANT_HEADER) for job in jobs(backend).values())
    return [instant for instant in found if instant is not None]


def drained(backend):
    """Whether every tick but those of the last seconds has completed."""
    now = time.time()
    left = [job for job in jobs(backend).values() if job.state is not State.COMPLETED and job.due < now - 3]
    return not left


def again(backend):
    return sum(job.deliveries > 1 for job in jobs(backend).values())


def judged(found):
    counts = Counter(found)
    first, last = min(counts), max(counts)
    wanted = [first + n for n in range(int(last - first) + 1)]
    return {
        "ticks": len(found),
        "twice": [instant for instant, n in counts.items() if n > 1],
        "missing": [instant for instant in wanted if instant not in counts],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="taskq-ticks-") as place:
        print(let_die(pathlib.Path(place), float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS))
