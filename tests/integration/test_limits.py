"""Limits as users meet them: several workers in processes of their own, one file, a ledger of what really started."""

from __future__ import annotations

import bisect
import contextlib
import os
import pathlib
import signal
import statistics
from collections.abc import Iterator

import pytest

from taskq import State, TaskQ
from tests import limited
from tests.workers import Ledger, Worker, eventually, working

APP = str(pathlib.Path(limited.__file__))


@pytest.fixture
def app(tmp_path: pathlib.Path) -> Iterator[TaskQ]:
    app = TaskQ(f"sqlite:///{tmp_path}/jobs.db")
    for task in limited.app.tasks.values():
        app._tasks[task.name] = task
    yield app
    app.close()


@pytest.fixture
def ledger(tmp_path: pathlib.Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def starts(ledger: Ledger) -> list[float]:
    return sorted(line.at for line in ledger.lines() if line.event == "start")


def test_three_workers_never_exceed_the_rate(
    app: TaskQ, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    app.enqueue_many(app.tasks["ten_a_second"].s() for _ in range(60))
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(working(app.settings.url, ledger.path, "--concurrency", "2", app=APP))
        eventually(lambda: len(starts(ledger)) == 60, within=60)
    times = starts(ledger)
    # How many starts lie in the second that begins with each.
    held = [bisect.bisect_left(times, at + 1.0) - place for place, at in enumerate(times)]
    took = times[-1] - times[0]
    with capsys.disabled():
        print(f"\n60 starts under 10/s by 3 workers in {took:.1f} s; most in any second: {max(held)}")

    assert max(held) <= 10


@pytest.mark.parametrize("graceful", [False, True])
def test_a_key_goes_on_after_its_holder_was_killed(app: TaskQ, ledger: Ledger, graceful: bool) -> None:
    held = app.send("one_by_one", ("a", 600.0))
    with working(app.settings.url, ledger.path, app=APP) as first:
        eventually(lambda: starts(ledger), about=first)
        following = app.send("one_by_one", ("a",))
        if graceful:
            app.result(held.id).cancel()
        else:
            os.killpg(first.pid, signal.SIGKILL)
    app.result(held.id).cancel()
    with working(app.settings.url, ledger.path, app=APP) as second:
        following.get(30)
        assert second.stop() == 0

    assert following.state is State.COMPLETED


def test_sequences_keep_their_order_over_workers_and_retries(app: TaskQ, ledger: Ledger) -> None:
    names = {}
    for number in range(12):
        for who in "abc":
            names[app.send("in_turn", (who, number)).id] = (who, number)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(working(app.settings.url, ledger.path, app=APP))
        eventually(lambda: sum(line.event == "end" for line in ledger.lines()) == 36, within=60)
    ends = [
        names[line.job_id] for line in sorted(ledger.lines(), key=lambda line: line.at) if line.event == "end"
    ]

    for who in "abc":
        assert [number for name, number in ends if name == who] == list(range(12))


def test_a_flood_delays_no_other_tenant(
    app: TaskQ, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    """The p95 of the other tenants' waits, counted in starts: how many jobs started before theirs."""
    tenants, each = 100, 5
    task = app.tasks["fair"]

    def waits(flood: int) -> float:
        app.enqueue_many(task.s("flood") for _ in range(flood))
        mine = {r.id for r in app.enqueue_many(task.s(f"t{n}") for _ in range(each) for n in range(tenants))}
        before = len(starts(ledger))
        worker = Worker(app.settings.url, ledger.path, "--burst", app=APP)
        assert worker.wait(90) == 0
        order = sorted((line for line in ledger.lines() if line.event == "start"), key=lambda line: line.at)
        places = [place for place, line in enumerate(order[before:]) if line.job_id in mine]
        assert len(places) == tenants * each
        return statistics.quantiles(places, n=20)[-1]

    alone, flooded = waits(0), waits(5_000)
    with capsys.disabled():
        print(
            f"\np95 wait of {tenants} tenants in starts: {alone:.0f} alone, {flooded:.0f} with 5,000 of another's"
        )

    assert flooded <= 2 * alone


def test_a_pause_reaches_a_working_worker(app: TaskQ, ledger: Ledger) -> None:
    with working(app.settings.url, ledger.path, app=APP) as worker:
        app.send("one_by_one", ("a",)).get(20)
        app.backend.pause("one_by_one", "task")
        app.backend.pause("k", "key")
        paused = [app.send("one_by_one", ("b",)), app.send("fair", ("k",), job_id="by-key")]
        app.send("fair", ("open",), job_id="open")
        eventually(lambda: ledger.starts()["open"], about=worker)
        assert [result.state for result in paused] == [State.PENDING, State.PENDING]

        app.backend.resume("one_by_one", "task")
        app.backend.resume("k", "key")
        paused[0].get(20)
        eventually(lambda: ledger.starts()["by-key"], about=worker)
