"""Workers that are asked to end: in every pool, by whatever way the signal comes."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess

import pytest

from taskq import State
from tests.chaos.storm import Storm
from tests.workers import Bench, eventually, zombies_of

pytestmark = pytest.mark.slow
UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc")


def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


needs_unshare = pytest.mark.skipif(not can_unshare(), reason="needs the right to make a pid namespace")


def test_signals_at_random_moments_cost_nothing(tmp_path: pathlib.Path) -> None:
    storm = Storm(tmp_path, signals=16)
    storm.run()

    assert storm.faults() == {}
    assert set(storm.statuses) == {0}
    assert sum(storm.statuses.values()) == 16


@pytest.mark.parametrize("pool", ["process", "thread", "async"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_lets_jobs_finish(bench: Bench, pool: str, signum: int) -> None:
    with bench.working("--pool", pool, "--concurrency", "2") as worker:
        result = bench.send("act", ["sleep", 1.0], max_retries=0)
        coroutine = bench.send("act_async", 1.0, max_retries=0)
        eventually(lambda: len(bench.ledger.starts()) == 2)
        worker.signal_all(signum)
        assert worker.wait() == 0

    assert (result.state, coroutine.state) == (State.COMPLETED, State.COMPLETED)
    assert set(bench.ledger.starts().values()) == {1}
    assert not worker.events("child.died")


def test_hup_to_the_whole_group_renews_the_children(bench: Bench) -> None:
    with bench.working("--concurrency", "2") as worker:
        first = bench.send("act", ["sleep", 0.7])
        eventually(lambda: bench.ledger.starts()[first.id])
        worker.signal_all(signal.SIGHUP)
        assert bench.send("act", ["return", 1]).get(20) == 1
        assert first.get(20) == 0.7
        assert worker.stop() == 0

    assert set(bench.ledger.starts().values()) == {1}
    assert not worker.events("child.died")


def test_under_a_shell_the_group_gets_the_signal(bench: Bench) -> None:
    with bench.working("--concurrency", "1", before=("sh", "-c", '"$@"; exit $?', "sh")) as worker:
        result = bench.send("act", ["sleep", 0.7], max_retries=0)
        eventually(lambda: bench.ledger.starts()[result.id])
        worker.signal_all(signal.SIGTERM)
        eventually(lambda: not worker.children())
        worker.close()
        assert worker.events("worker.stopped")

    assert result.state is State.COMPLETED
    assert bench.job(result).attempts == 0


@needs_unshare
def test_as_process_1_it_stops_in_good_order_and_leaves_no_zombies(bench: Bench) -> None:
    with bench.working("--concurrency", "1", before=UNSHARE) as worker:
        inner = worker.inner()
        for result in [bench.send("act", ["orphan", 0.01]) for _ in range(5)]:
            result.get(20)
        eventually(lambda: len(worker.children()) <= 4)  # itself, tracker, fork server, one child
        eventually(lambda: bench.send("act", ["return", 1]).get(20) and not zombies_of(inner))
        last = bench.send("act", ["sleep", 0.7], max_retries=0)
        eventually(lambda: bench.ledger.starts()[last.id])
        os.kill(inner, signal.SIGTERM)
        assert worker.wait() == 0

    assert last.state is State.COMPLETED
    assert worker.events("worker.stopped")


@needs_unshare
def test_as_process_1_children_that_die_are_still_accounted_for(bench: Bench) -> None:
    with bench.working("--concurrency", "2", before=UNSHARE) as worker:
        for result in [bench.send("act", ["kill"], ["return", n]) for n in range(3)]:
            result.get(20)
        assert {line["how"] for line in worker.events("child.died")} == {"signal 9"}
        os.kill(worker.inner(), signal.SIGTERM)
        assert worker.wait() == 0


def test_leases_cancels_and_outcomes_go_on_until_the_last_job_has_ended(bench: Bench) -> None:
    refuse = bench.ledger.path.parent / "refuse"
    with bench.working("--concurrency", "2", faults={"REFUSE": str(refuse)}) as worker, bench.app.worker():
        # The worker in this process takes what the other loses.
        bench.app.backend.pause("tasks")
        long = bench.send("act_briefly", ["sleep", 3.5])
        cancelled = bench.send("act", ["until cancelled", 60])
        bench.app.backend.resume("tasks")
        eventually(lambda: len(bench.ledger.starts()) == 2)
        worker.signal(signal.SIGTERM)
        cancelled.cancel()
        eventually(cancelled.ready)
        assert cancelled.state is State.CANCELLED
        assert long.get(20) == 3.5
        worker.wait()

    assert bench.ledger.starts() == {long.id: 1, cancelled.id: 1}


def test_an_outcome_that_cannot_be_written_at_the_end_is_kept_until_it_can(bench: Bench) -> None:
    refuse = bench.ledger.path.parent / "refuse"
    with bench.working("--concurrency", "1", faults={"REFUSE": str(refuse)}) as worker:
        result = bench.send("act", ["sleep", 0.5], max_retries=0)
        eventually(lambda: bench.ledger.starts()[result.id])
        refuse.touch()
        worker.signal(signal.SIGTERM)
        worker.wait_for("backend.unavailable")
        eventually(lambda: bench.ledger.ends()[result.id])
        refuse.unlink()
        assert worker.wait() == 0

    assert result.get(1) == 0.5


def test_a_body_that_holds_the_only_process_cannot_keep_it(bench: Bench) -> None:
    with bench.working("--pool", "solo", "--shutdown-timeout", "0.2") as worker:
        result = bench.send("act_briefly", ["stubborn", 60], ["return", "again"])
        eventually(lambda: bench.ledger.starts()[result.id])
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 1

    with bench.app.worker():
        assert result.get(20) == "again"
