"""A worker as a user runs it: real processes, real signals, one SQLite file."""

from __future__ import annotations

import signal

import pytest

from taskq import Job, State
from taskq.errors import TaskFailedError
from tests.workers import Bench, eventually

POOLS = ["process", "thread", "async", "solo"]


@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_runs_every_kind_of_task(bench: Bench, pool: str) -> None:
    results = [bench.send("act", ["return", number]) for number in range(20)]
    results += [bench.send("act_async", 0.001) for _ in range(20)]
    failing = bench.send("act", ["raise", "always"])

    with bench.working("--pool", pool, "--concurrency", "1" if pool == "solo" else "2") as worker:
        assert [result.get(20) for result in results] == [*range(20), *[0.001] * 20]
        with pytest.raises(TaskFailedError, match="always") as failure:
            failing.get(20)
        assert worker.stop() == 0

    assert failure.value.type_name == "ValueError"
    assert "perform" in failure.value.traceback
    assert [attempt.number for attempt in failing.attempts] == [1, 2, 3, 4]


def test_burst_ends_when_nothing_is_due(bench: Bench) -> None:
    results = [bench.send("act", ["return", number]) for number in range(50)]
    later = bench.send("act", ["return", 0], countdown=3600)

    worker = bench.worker("--burst")

    assert worker.wait() == 0
    assert all(result.state is State.COMPLETED for result in results)
    assert later.state is State.SCHEDULED


@pytest.mark.parametrize("step", [["kill"], ["exit", 3]])
def test_a_job_that_kills_its_process_is_counted_and_ends_dead(bench: Bench, step: list[object]) -> None:
    with bench.working("--concurrency", "2"):
        crasher = bench.send("act", step)
        neighbours = [bench.send("act", ["return", number]) for number in range(100)]
        with pytest.raises(TaskFailedError, match="WorkerLost"):
            crasher.get(30)
        assert [result.get(20) for result in neighbours] == [*range(100)]

    assert len(crasher.attempts) == 4
    assert bench.ledger.starts()[crasher.id] == 4
    assert all(result.attempts == () for result in neighbours)


@pytest.mark.parametrize(
    ("step", "error"),
    [(["kill"], "WorkerLost"), (["stubborn", 60], "TimeLimitExceeded"), (["raise", "no"], "ValueError: no")],
)
def test_on_exhausted_is_told_once_also_where_the_process_is_gone(
    bench: Bench, step: list[object], error: str
) -> None:
    with bench.working("--concurrency", "2"):
        result = bench.send("act_mourned", step)
        (told,) = eventually(lambda: [job for job in _completed(bench) if job.task == "mourn"])
        about = bench.app.result(told.id).get(20)

    assert about["job_id"] == result.id
    assert about["error"].startswith(error)
    assert result.state is State.DEAD
    assert [attempt.delay for attempt in result.attempts] == [0, None]
    assert len([job for job in _completed(bench) if job.task == "mourn"]) == 1


def _completed(bench: Bench) -> list[Job]:
    return bench.app.backend.list_jobs("tasks", State.COMPLETED).jobs


def test_a_job_that_kills_its_process_once_completes_the_second_time(bench: Bench) -> None:
    with bench.working():
        result = bench.send("act", ["kill"], ["return", "well"])
        assert result.get(20) == "well"

    assert len(result.attempts) == 1


def test_term_lets_running_jobs_finish(bench: Bench) -> None:
    with bench.working("--concurrency", "2") as worker:
        running = bench.send("act", ["sleep", 1.0])
        waiting = [bench.send("act", ["sleep", 5]) for _ in range(4)]
        eventually(lambda: bench.ledger.starts()[running.id])
        blocker = [result for result in waiting if bench.ledger.starts()[result.id]]
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0

    assert running.state is State.COMPLETED
    rest = [result for result in waiting if result not in blocker and not bench.ledger.starts()[result.id]]
    assert len(rest) >= 3
    assert all(result.state is State.PENDING and result.attempts == () for result in rest)


@pytest.mark.parametrize("pool", POOLS)
def test_a_job_interrupted_by_shutdown_costs_no_attempt(bench: Bench, pool: str) -> None:
    task = "act_async" if pool == "async" else "act"
    argument = 60 if pool == "async" else ["sleep", 60]
    result = bench.send(task, argument, max_retries=0)
    # A blocked pool thread cannot be interrupted: its process is killed instead.
    with bench.working("--pool", pool, "--shutdown-timeout", "0.3") as worker:
        eventually(lambda: bench.ledger.starts()[result.id])
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0

    job = result.job()
    assert job is not None
    assert job.state is State.PENDING
    assert (job.attempts, job.history, job.deliveries) == (0, (), 1)


def test_decisions_and_interrupts_count_as_such_inside_a_task_group(bench: Bench) -> None:
    with bench.working("--pool", "async", "--shutdown-timeout", "0.2") as worker:
        snoozing = bench.send("act_in_group", -1)
        running = bench.send("act_in_group", 60)
        eventually(lambda: snoozing.state is State.SCHEDULED and bench.ledger.starts()[running.id])
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0

    assert snoozing.attempts == running.attempts == ()
    assert running.state is State.PENDING


def test_a_second_signal_hurries(bench: Bench) -> None:
    with bench.working("--shutdown-timeout", "60") as worker:
        result = bench.send("act", ["sleep", 60])
        eventually(lambda: bench.ledger.starts()[result.id])
        worker.signal(signal.SIGTERM)
        worker.wait_for("worker.stopping")
        eventually(worker.hurried, within=15)
        assert worker.wait() == 0

    assert result.state is State.PENDING


def test_when_the_supervisor_is_killed_its_children_stop(bench: Bench) -> None:
    with bench.working("--concurrency", "2") as worker:
        result = bench.send("act_briefly", ["sleep", 30], ["return", "again"])
        eventually(lambda: bench.ledger.starts()[result.id])
        worker.signal(signal.SIGKILL)
        worker.process.wait(5)
        eventually(lambda: not worker.children())

    with bench.working():
        assert result.get(20) == "again"


def test_a_marked_job_is_counted_when_its_whole_worker_goes(bench: Bench) -> None:
    with bench.working() as worker:
        result = bench.send("act_briefly", ["sleep", 30], ["return", "again"])
        eventually(lambda: bench.ledger.starts()[result.id])
        eventually(lambda: (job := result.job()) and job.first_started)
        worker.kill_all()

    with bench.working():
        assert result.get(20) == "again"
    assert [attempt.error for attempt in result.attempts] == ["WorkerLost: reservation timed out"]


def test_a_job_longer_than_its_lease_runs_once(bench: Bench) -> None:
    with bench.working("--concurrency", "1"), bench.working("--concurrency", "1"):
        result = bench.send("act_briefly", ["sleep", 9])
        hogging = bench.send("act_briefly", ["hog", 6])
        assert result.get(30) == 9
        assert hogging.get(30) == "hogged"

    assert bench.ledger.starts() == {result.id: 1, hogging.id: 1}


def test_short_jobs_do_not_wait_behind_a_long_one(bench: Bench) -> None:
    with bench.working("--concurrency", "2"):
        for result in [bench.send("act", ["return", number]) for number in range(300)]:
            result.get(20)
        long = bench.send("act", ["hog", 3])
        short = [bench.send("act", ["return", number]) for number in range(200)]
        assert [result.get(20) for result in short] == [*range(200)]
        assert long.state is State.RESERVED
        assert long.get(20) == "hogged"

    assert bench.ledger.starts().most_common(1)[0][1] == 1


def test_short_jobs_do_not_wait_behind_a_long_one_of_another_worker(bench: Bench) -> None:
    act = bench.app.tasks["act"]
    with bench.working("--concurrency", "1"):
        for result in [bench.send("act_briefly", ["return", number]) for number in range(300)]:
            result.get(20)
        # The worker takes them together, and holds what is behind the long one.
        batch = [act.s(["hog", 30]), *(bench.app.tasks["act_briefly"].s(["return", n]) for n in range(50))]
        long, *short = bench.app.enqueue_many(batch)
        eventually(lambda: bench.ledger.starts()[long.id])
        with bench.app.worker(concurrency=1):
            assert [result.get(20) for result in short] == [*range(50)]
        assert long.state is State.RESERVED

    assert all(bench.job(result).attempts == 0 for result in short)


@pytest.mark.parametrize("pool", ["process", "thread", "solo"])
def test_a_soft_limit_can_be_caught_and_ends_once(bench: Bench, pool: str) -> None:
    with bench.working("--pool", pool):
        # A pool thread notices at its next bytecode: not inside one long wait.
        result = bench.send("act_soft", ["tidy spinning"] if pool == "thread" else ["tidy", 20])
        assert result.get(20) == "tidied"

    assert result.attempts == ()


def test_a_hard_limit_ends_a_body_that_catches_everything(bench: Bench) -> None:
    with bench.working("--concurrency", "1"):
        result = bench.send("act_hard", ["stubborn", 30])
        after = bench.send("act", ["return", 1])
        with pytest.raises(TaskFailedError, match="TimeLimitExceeded"):
            result.get(20)
        assert after.get(20) == 1

    assert len(result.attempts) == 1


def test_coroutines_meet_their_limits(bench: Bench) -> None:
    with bench.working("--pool", "async", "--concurrency", "10"):
        soft = bench.send("act_async_soft", 20)
        hard = bench.send("act_async_hard", 20)
        assert soft.get(20) == "tidied"
        with pytest.raises(TaskFailedError, match="TimeLimitExceeded"):
            hard.get(20)


def test_threads_that_overrun_in_a_system_call_do_not_use_up_the_pool(bench: Bench) -> None:
    with bench.working("--pool", "thread", "--concurrency", "2") as worker:
        stuck = [bench.send("act_hard", ["sleep", 8]) for _ in range(2)]
        eventually(lambda: len(worker.events("thread.stuck")) == 2)
        assert bench.send("act", ["return", "capacity"]).get(10) == "capacity"
        assert all(result.state is State.RESERVED for result in stuck)


def test_a_blocked_event_loop_is_told(bench: Bench) -> None:
    with bench.working("--pool", "async") as worker:
        bench.send("block_the_loop", 2.5)
        told = worker.wait_for("loop.blocked")

    assert told["task"] == "block_the_loop"
    assert "acting.py" in told["line"] or "threading.py" in told["line"]


def test_a_waiting_job_is_cancelled_and_a_running_one_stopped(bench: Bench) -> None:
    waiting = bench.send("act", ["return", 1], countdown=3600)
    waiting.cancel()
    with bench.working("--concurrency", "2"):
        running = bench.send("act", ["sleep", 60])
        cooperative = bench.send("act", ["until cancelled", 60])
        eventually(lambda: len(bench.ledger.starts()) == 2)
        running.cancel()
        cooperative.cancel()
        eventually(lambda: running.state is State.CANCELLED and cooperative.ready())

    assert waiting.state is State.CANCELLED
    assert bench.ledger.starts()[waiting.id] == 0


def test_what_cannot_run_is_parked_with_its_reason_and_can_be_revived(bench: Bench) -> None:
    unknown = bench.app.enqueue([_renamed(bench, "act", "gone")])[0]
    wrong = bench.app.enqueue([_renamed(bench, "act_async", "act_async", payload=b"\xc1garbage")])[0]
    unencodable = bench.send("act", ["unencodable"])
    with bench.working():
        eventually(lambda: bench.app.backend.size("tasks", State.DEAD) == 3)

    jobs = {job.id: job for job in bench.app.backend.list_jobs("tasks", State.DEAD).jobs}
    assert "TaskNotFoundError: no task is named 'gone'" in (jobs[unknown].error or "")
    assert "DecodeError" in (jobs[wrong].error or "")
    assert jobs[wrong].payload == b"\xc1garbage"
    assert "EncodeError" in (jobs[unencodable.id].error or "")
    assert len(bench.app.backend.revive("tasks")) == 3
    assert bench.app.backend.size("tasks") == 3


def _renamed(bench: Bench, task: str, name: str, **changes: object) -> object:
    import dataclasses

    job = (
        bench.app.tasks[task].s(1.0).job(bench.app)
        if task == "act_async"
        else bench.app.tasks[task].s(["return", 1]).job(bench.app)
    )
    return dataclasses.replace(job, task=name, **changes)


def test_children_are_replaced_after_so_many_jobs(bench: Bench) -> None:
    with bench.working("--concurrency", "1", "--max-jobs-per-child", "10"):
        results = [bench.send("act", ["return", number]) for number in range(60)]
        assert [result.get(20) for result in results] == [*range(60)]

    pids = {line.pid for line in bench.ledger.lines()}
    assert len(pids) >= 3
    assert set(bench.ledger.starts().values()) == {1}


def test_hup_renews_the_children_and_loses_nothing(bench: Bench) -> None:
    with bench.working("--concurrency", "2") as worker:
        first = bench.send("act", ["sleep", 1.0])
        eventually(lambda: bench.ledger.starts()[first.id])
        worker.signal(signal.SIGHUP)
        after = [bench.send("act", ["return", number]) for number in range(20)]
        assert first.get(20) == 1.0
        assert [result.get(20) for result in after] == [*range(20)]
        assert worker.stop() == 0

    assert set(bench.ledger.starts().values()) == {1}


def test_twenty_thousand_jobs_run_once_each(bench: Bench) -> None:
    with bench.working("--concurrency", "2", "--log-level", "warning") as _, bench.app:
        for number in range(20_000):
            bench.send("count", number)
        eventually(lambda: not any(bench.app.backend.counts("tasks").get("tasks", {}).values()), within=60)

    starts = bench.ledger.starts()
    assert len(starts) == 20_000
    assert set(starts.values()) == {1}


def test_workers_are_listed_while_they_live(bench: Bench) -> None:
    with bench.working("--name", "one", "--concurrency", "3") as worker:
        (found,) = eventually(bench.app.inspector.workers)
        assert found.id.startswith("one:")
        assert (found.pid, found.queues, found.pool, found.concurrency) == (
            worker.pid,
            ("tasks",),
            "process",
            3,
        )
        assert worker.stop() == 0

    assert bench.app.inspector.workers() == []
