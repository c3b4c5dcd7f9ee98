"""Real workers on RabbitMQ, alone and with a store beside it, killed at each point of a job's life."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import uuid
from collections import Counter

import pytest

from taskq import State, TaskQ
from tests import acting, servers
from tests.contract.acts import listed
from tests.integration.test_rabbitmq_faults import proxy  # noqa: F401 - a fixture
from tests.servers import rabbitmq
from tests.workers import Bench, Ledger, Worker, eventually

pytestmark = [pytest.mark.server("rabbitmq"), pytest.mark.slow]


@contextlib.contextmanager
def set_up(folder, url, store=None):
    """A bench on RabbitMQ."""
    app = TaskQ(url, store=store)
    app._tasks.update(acting.app.tasks)
    os.environ["TASKQ_X_LEDGER"] = str(folder / "ledger")
    if store:
        os.environ["TASKQ_STORE_URL"] = store
    try:
        yield Bench(app, url, Ledger(folder / "ledger"))
    finally:
        del os.environ["TASKQ_X_LEDGER"]
        os.environ.pop("TASKQ_STORE_URL", None)
        app.close()
        rabbitmq.sweep(url, ())


@pytest.fixture
def url():
    return f"{servers.url('rabbitmq')}?prefix=w{uuid.uuid4().hex[:12]}."


@pytest.fixture
def alone(tmp_path, url):
    with set_up(tmp_path, url) as bench:
        yield bench


@pytest.fixture
def beside(tmp_path, url):
    with set_up(tmp_path, url, f"sqlite:///{tmp_path}/jobs.db") as bench:
        yield bench


POINTS = ["reserved", "running", "ran", "settled", "acked"]


def crash_at(bench, point, victim):
    return {"CRASH_AT": point, "VICTIM": victim, "CRASHED": str(bench.ledger.path.parent / "crashed")}


def ended(bench, *results):
    """Whether each body has come to its end."""
    return lambda: {result.id for result in results} <= bench.ledger.ends().keys()


def test_jobs_run_retry_and_die(alone):
    with alone.working("--concurrency", "2") as worker:
        fine = [alone.send("act", ["return", n]) for n in range(50)]
        again = alone.send("act", ["raise", "once"], ["return", 1])
        later = alone.send("act", ["return", 2], countdown=0.3)
        bad = alone.send("act", ["reject", "no"])
        eventually(ended(alone, *fine, again, later), about=worker)
        (dead,) = eventually(lambda: listed(alone.app.backend, "tasks", State.DEAD))
        assert worker.stop() == 0

    assert (dead.id, dead.error) == (bad.id, "Reject: no")
    assert alone.ledger.starts()[again.id] == 2
    assert set(alone.ledger.starts().values()) == {1, 2}


@pytest.mark.parametrize("point", ["running", "ran"])
def test_a_killed_child_is_counted_by_its_supervisor(alone, point):
    result = alone.send("act", ["return", 7])
    with alone.working("--concurrency", "1", faults=crash_at(alone, point, "child")) as worker:
        eventually((alone.ledger.path.parent / "crashed").exists, about=worker)
        eventually(lambda: alone.ledger.ends()[result.id] == (2 if point == "ran" else 1), about=worker)
        last = alone.send("act", ["return", 9])
        eventually(ended(alone, last), about=worker)
        assert worker.stop() == 0

    attempts = [line.attempt for line in alone.ledger.lines() if line.job_id == result.id]
    assert attempts[-1] == (2 if point == "running" else 1)
    assert alone.app.backend.size("tasks") == 0


@pytest.mark.parametrize("victim", ["supervisor", "group"])
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_worker_loses_nothing(alone, point, victim):
    result = alone.send("act", ["return", 7])
    worker: Worker
    with alone.working("--concurrency", "1", faults=crash_at(alone, point, victim)) as worker:
        assert worker.process.wait(20) == -signal.SIGKILL
        eventually(lambda: not worker.children())
    with alone.working("--concurrency", "1") as worker:
        last = alone.send("act", ["return", 9])
        eventually(ended(alone, result, last), about=worker)
        eventually(lambda: alone.ledger.ends()[result.id] == 1 + (point == "ran"), about=worker)
        assert worker.stop() == 0

    assert alone.app.backend.counts("tasks") == {}
    assert {line.attempt for line in alone.ledger.lines()} == {1}, "nobody is to blame"


@pytest.mark.parametrize("victim", ["supervisor", "group"])
@pytest.mark.parametrize("point", POINTS)
def test_with_a_store_beside_it_each_job_ends_once(beside, point, victim):
    result = beside.send("act_briefly", ["return", 7])
    worker: Worker
    with beside.working("--concurrency", "1", faults=crash_at(beside, point, victim)) as worker:
        assert worker.process.wait(20) == -signal.SIGKILL
        eventually(lambda: not worker.children())
    with beside.working("--concurrency", "1") as worker:
        assert result.get(30) == 7
        assert beside.send("act", ["return", 9]).get(20) == 9
        assert worker.stop() == 0

    repeated = point == "ran"
    assert beside.ledger.starts()[result.id] == 1 + repeated
    assert (beside.job(result).attempts, beside.job(result).state) == (0, State.COMPLETED)


def test_a_job_that_kills_every_worker_ends_dead_and_its_neighbours_do_not(alone):
    killer = alone.send("act", ["kill group"], ["kill group"], ["kill group"], max_retries=1)
    others = [alone.send("act", ["sleep", 0.05]) for _ in range(8)]
    workers = []

    def step():
        for worker in workers:
            if worker.process.poll() is not None and worker.output is not None:
                worker.process.wait()
        if not workers or workers[-1].process.poll() is not None:
            workers.append(alone.worker("--concurrency", "2"))
        return listed(alone.app.backend, "tasks", State.DEAD)

    try:
        (dead,) = eventually(step, within=60)
        eventually(lambda: [step(), ended(alone, *others)()][1], within=60)
    finally:
        for worker in workers:
            worker.kill_all()
            worker.wait()

    assert dead.id == killer.id
    assert dead.attempts == 2
    assert alone.app.backend.size("tasks", State.DEAD) == 1


def test_a_cut_stops_what_runs_and_it_runs_again(tmp_path, url, proxy):  # noqa: F811
    with set_up(tmp_path, proxy.url(url)) as bench, bench.working("--concurrency", "1") as worker:
        result = bench.send("act", ["until cancelled", 30])
        eventually(lambda: bench.ledger.starts()[result.id], about=worker)
        proxy.cut()
        eventually(lambda: worker.events("job.lost"), within=15, about=worker)
        eventually(lambda: bench.ledger.starts()[result.id] == 2, about=worker)


@pytest.mark.parametrize("store", [False, True])
def test_a_soak_of_kills_and_cuts_loses_nothing_confirmed(tmp_path, url, proxy, store):  # noqa: F811
    chance = random.Random(5)
    store_url = f"sqlite:///{tmp_path}/jobs.db" if store else None
    with set_up(tmp_path, proxy.url(url), store_url) as bench:
        workers = [bench.worker("--concurrency", "2", "--log-level", "warning") for _ in range(2)]
        confirmed = []
        try:
            for n in range(24):
                batch = [bench.app.tasks["act_briefly"].s(["sleep", 0.001 * (k % 9)]) for k in range(40)]
                with contextlib.suppress(Exception):
                    confirmed += [result.id for result in bench.app.enqueue_many(batch)]
                if n % 3 == 1:
                    number = chance.randrange(2)
                    workers[number].kill_all()
                    workers[number].wait()
                    workers[number] = bench.worker("--concurrency", "2", "--log-level", "warning")
                if n % 5 == 2:
                    proxy.cut()
                done = len(bench.ledger.ends())
                eventually(lambda done=done: len(bench.ledger.ends()) > done + 5, within=40, about=workers[0])
            eventually(lambda: set(confirmed) <= bench.ledger.ends().keys(), within=90, about=workers[0])
        finally:
            for worker in workers:
                worker.kill_all()
                worker.wait()
        starts = bench.ledger.starts()
        if store:
            states = Counter(bench.app.backend.find(job_id).state for job_id in confirmed)
            assert set(states) <= {State.COMPLETED, State.RESERVED}

    assert len(confirmed) >= 15 * 40
    assert sum(starts.values()) < len(starts) * 1.5, "repeated only what a crash left undecided"
