from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from taskq.backends.sqlite import SQLiteBackend
from taskq.backends.sqlite.connection import Database
from taskq.backends.sqlite.wal import WalGauge
from taskq.errors import BackendUnavailableError, InvalidArgumentError, NotPublishedError
from taskq.job import Settlement, State
from tests.conftest import eventually
from tests.contract.acts import complete, job, jobs, outcome, states, take


@pytest.fixture
def locked(path):
    """Hold the writers' lock from another connection."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        yield other


def test_a_lock_held_for_a_while_is_waited_for(backend, locked):
    backend.counts()
    locked.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.1, locked.execute, ["COMMIT"])
    timer.start()
    backend.push([job()])
    timer.join()

    assert states(backend) == {"pending": 1}


def test_a_lock_held_for_too_long_is_a_clear_error(open_backend, locked):
    backend = open_backend(timeout=0.05)
    backend.counts()
    locked.execute("BEGIN IMMEDIATE")

    with pytest.raises(BackendUnavailableError, match="locked for too long"):
        backend.push([job()])
    locked.execute("COMMIT")
    backend.push([job()])
    assert states(backend) == {"pending": 1}


def test_a_full_disk_stores_nothing_and_harms_nothing(backend):
    backend.push(jobs(3))
    writer = backend._file.database._writer
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count = {pages + 2}")

    with pytest.raises(NotPublishedError, match="disk is full") as caught:
        backend.push([job(payload=b"x" * 100_000)])
    assert isinstance(caught.value, BackendUnavailableError)
    assert states(backend) == {"pending": 3}
    writer.execute("PRAGMA max_page_count = 1000000")
    backend.push([job(payload=b"x" * 100_000)])
    assert states(backend) == {"pending": 4}


def test_a_full_disk_while_settling_loses_no_job(backend):
    consumer = backend.consume({"tasks": 1}, "w")
    backend.push(jobs(3))
    reservations = take(consumer)
    writer = backend._file.database._writer
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count = {pages + 2}")
    outcomes = [outcome(r, result=b"x" * 100_000) for r in reservations]

    with pytest.raises(BackendUnavailableError, match="disk is full"):
        consumer.settle(outcomes)
    assert states(backend) == {"reserved": 3}
    writer.execute("PRAGMA max_page_count = 1000000")
    assert consumer.settle(outcomes) == [Settlement.SETTLED] * 3


def test_a_damaged_file_is_a_clear_error(backend, open_backend, tmp_path):
    backend.push(jobs(200))
    backend.close()
    with (tmp_path / "jobs.db").open("r+b") as file:
        file.seek(3 * 2048)
        file.write(os.urandom(40 * 2048))
    consumer = open_backend().consume({"tasks": 1}, "w")

    with pytest.raises(BackendUnavailableError, match="damaged"):
        list(iter(lambda: take(consumer), []))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_a_clear_error(open_backend, tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(BackendUnavailableError, match="writable"):
            open_backend().push([job()])
    finally:
        tmp_path.chmod(0o700)


def test_a_job_that_cannot_be_stored_is_the_callers_error(backend):
    for broken in (
        job(payload="\ud800"),
        job(due=float("nan")),
        job(queue=None),
        job(headers={"k": object()}),
    ):
        with pytest.raises(InvalidArgumentError, match="cannot be stored"):
            backend.push([broken])
    backend.push([job()])

    assert states(backend) == {"pending": 1}


def test_an_outcome_that_cannot_be_stored_buries_its_job_and_harms_no_other(backend):
    consumer = backend.consume({"tasks": 1}, "w")
    backend.push([*jobs(2), *jobs(2, keep=0.0)])
    good, bad, deleted, bad_push = take(consumer)
    answers = consumer.settle(
        [
            outcome(good),
            outcome(bad, result=object()),
            outcome(deleted),
            outcome(bad_push, pushes=(job(queue=None),)),
        ]
    )

    assert answers == [Settlement.SETTLED] * 4
    assert states(backend) == {"completed": 1, "dead": 2}
    assert "cannot be stored" in backend.find(bad.job.id).error


def test_pushes_of_many_threads_share_commits(backend, locked):
    backend.counts()
    commits = []
    write = backend._file.database.write

    def counted(work, **how):
        commits.append(1)
        return write(work, **how)

    backend._file.database.write = counted
    locked.execute("BEGIN IMMEDIATE")
    threads = [threading.Thread(target=backend.push, args=(jobs(3),)) for _ in range(12)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(backend._file._pushes._line) == 11)
    locked.execute("COMMIT")
    for thread in threads:
        thread.join()

    assert states(backend) == {"pending": 36}
    assert len(commits) == 2


def test_of_pushes_that_share_a_commit_only_the_broken_one_fails(backend, locked):
    backend.counts()
    locked.execute("BEGIN IMMEDIATE")
    failed = []

    def push(batch):
        try:
            backend.push(batch)
        except InvalidArgumentError:
            failed.append(batch)

    broken = [job(), job(queue=None)]
    threads = [threading.Thread(target=push, args=(batch,)) for batch in (jobs(1), jobs(1), broken, jobs(1))]
    for thread in threads:
        thread.start()
    eventually(lambda: len(backend._file._pushes._line) == 3)
    locked.execute("COMMIT")
    for thread in threads:
        thread.join()

    assert failed == [broken]
    assert states(backend) == {"pending": 3}


def test_full_synchronisation_is_for_pushes(path):
    with closing(Database(path, timeout=5.0, full=True)) as database:
        levels = [
            database.write(lambda db: db.execute("PRAGMA synchronous").fetchone()[0], durable=durable)
            for durable in (True, False, True)
        ]

    assert levels == [2, 1, 2]


def test_the_gauge_tells_the_log_in_use_from_the_files_size(backend, path):
    backend.push(jobs(500))
    with closing(WalGauge(path)) as gauge:
        assert gauge.passed(100_000)
        assert not gauge.passed(10_000_000)
        backend._file.database._checkpoint(backend._file.database._writer)
        backend.push([job()])
        assert not gauge.passed(100_000)


def test_a_consuming_process_keeps_the_log_short(backend, path):
    consumer = backend.consume({"tasks": 1}, "w")
    backend._file.database.wal_limit = 500_000
    for _ in range(40):
        backend.push(jobs(50, payload=b"x" * 1000))
        complete(consumer, *take(consumer))

    assert Path(f"{path}-wal").stat().st_size < 1_500_000


def test_a_reader_in_the_way_delays_the_checkpoint_not_the_work(backend, path):
    consumer = backend.consume({"tasks": 1}, "w")
    backend.push(jobs(100, payload=b"x" * 1000))
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM job").fetchone()
        backend._file.database.wal_limit = 100_000
        for _ in range(20):
            backend.push(jobs(20, payload=b"x" * 1000))
            assert len(complete(consumer, *take(consumer, 20))) == 20
        assert backend._file.database._next_checkpoint > 0


def test_a_fork_begins_anew(backend, path):
    backend.push([job()])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            backend.push([job()])
            os.write(write, b"%d" % backend.size("tasks"))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    backend.push([job()])

    assert os.read(read, 9) == b"2"
    os.close(read)
    os.close(write)
    assert backend.size("tasks") == 3


def test_a_consumer_does_not_cross_a_fork(backend):
    consumer = backend.consume({"tasks": 1}, "w")
    take(consumer, 1, timeout=0.01)
    child = os.fork()
    if child == 0:
        try:
            consumer.take(1)
        except Exception as error:  # noqa: BLE001 - a child must not run on
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 7
    backend.push([job()])
    assert len(take(consumer, 1, timeout=5)) == 1


def test_what_a_child_inherits_dies_with_its_parent(backend, path, tmp_path):
    """A forked child that lives on must not seem to be its parent: neither by its lock nor by its bell."""
    read, write = os.pipe()
    born, birth = os.pipe()
    parent = os.fork()
    if parent == 0:
        consumer = backend.consume({"tasks": 1}, "parent")
        backend.push([job(lease=0.0)])
        take(consumer)
        child = os.fork()
        if child == 0:
            os.write(birth, b"x")  # a fork returns once the child has let go of what is not its own
            os.read(read, 1)
            os._exit(0)
        os._exit(0)
    os.waitpid(parent, 0)
    os.close(birth)
    try:
        assert os.read(born, 1) == b"x"
        assert len(backend.reclaim().suspects) == 1
        backend._file.bells.call("parent")
        assert not [entry for entry in (tmp_path / "jobs.db.bells").iterdir() if entry.is_socket()]
    finally:
        os.write(write, b"x")
        for end in (read, write, born):
            os.close(end)


def test_a_settle_of_a_deleted_job_is_remembered_by_its_process_only(backend, path):
    consumer = backend.consume({"tasks": 1}, "w")
    backend.push(jobs(1, keep=0.0))
    (reservation,) = take(consumer)
    complete(consumer, reservation)
    with closing(SQLiteBackend(path)) as elsewhere:
        assert complete(elsewhere.consume({"tasks": 1}, "w"), reservation) is Settlement.LOST

    assert complete(consumer, reservation) is Settlement.ALREADY_YOURS
    assert backend.size("tasks", State.COMPLETED) == 0
