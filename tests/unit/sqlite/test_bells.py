from __future__ import annotations

import os
import signal
import socket
import threading

import pytest

from taskq.backends.sqlite.bells import Bells, Waiting
from tests.conftest import eventually
from tests.contract.acts import blocked_take, job, jobs, joined, take


@pytest.fixture
def bells(tmp_path):
    bells = Bells(str(tmp_path / "jobs.db"))
    yield bells
    bells.close()


@pytest.fixture
def hang(bells):
    hung = []

    def hang_(owner="w"):
        hung.append(bells.bell(owner))
        return hung[-1]

    yield hang_
    for bell in hung:
        bell.close()


def rung(bell):
    """Whether a ring waits to be heard; it is, by this."""
    try:
        return bool(bell._socket.recv(16))
    except BlockingIOError:
        return False


def flags(bells, bell):
    return bells._open()[bell.slot]


def test_one_ring_wakes_the_one_that_slept_longest(bells, hang):
    first, second = hang(), hang()
    order = []
    for _ in range(4):
        with first.idle(Waiting.JOBS, ["q"]), second.idle(Waiting.JOBS, ["q"]):
            bells.ring_takers({"q": 1})
            order.append([rung(first), rung(second)])

    assert order in ([[True, False], [False, True]] * 2, [[False, True], [True, False]] * 2)


def test_as_many_are_rung_as_there_are_jobs(bells, hang):
    waiters = [hang() for _ in range(4)]
    for waiter in waiters:
        bells.raise_flag(waiter.slot, Waiting.JOBS, "w", ["q"])
    bells.ring_takers({"q": 3})

    assert sum(map(rung, waiters)) == 3


def test_only_who_waits_for_it_is_rung(bells, hang):
    mine, other, results, everything, awake = (hang() for _ in range(5))
    bells.raise_flag(mine.slot, Waiting.JOBS, "w", ["q"])
    bells.raise_flag(other.slot, Waiting.JOBS, "w", ["r"])
    bells.raise_flag(results.slot, Waiting.RESULTS, "w", ["q"])
    bells.raise_flag(everything.slot, Waiting.JOBS, "w", [str(n) for n in range(99)])
    bells.ring_takers({"q": 9})

    assert [rung(bell) for bell in (mine, other, results, everything, awake)] == [
        True,
        False,
        False,
        True,
        False,
    ]


def test_a_rung_bell_counts_as_awake(bells, hang):
    bell = hang()
    bells.raise_flag(bell.slot, Waiting.JOBS, "w", ["q"])
    bells.ring_takers({"q": 1})

    assert flags(bells, bell) == 0


def test_the_socket_of_a_dead_waiter_is_removed_and_the_next_one_rung(bells, hang, tmp_path):
    dead, alive = hang(), hang()
    for waiter in (dead, alive):
        bells.raise_flag(waiter.slot, Waiting.JOBS, "w", ["q"])
    slot = dead.slot
    dead._socket.close()  # as the kernel does it: the name stays
    bells.ring_takers({"q": 1})

    assert rung(alive)
    assert not (tmp_path / "jobs.db.bells" / str(slot)).exists()


def test_sockets_are_private(bells, hang, tmp_path):
    folder = tmp_path / "jobs.db.bells"
    bell = hang()

    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / str(bell.slot)).stat().st_mode & 0o777 == 0o600


def test_a_call_reaches_its_owner_awake_or_not(bells, hang):
    mine, other = hang("mine"), hang("other")
    bells.call("mine")

    assert mine.sleep(0) is True
    assert other.sleep(0) is False


def test_a_wake_is_heard_once(hang):
    bell = hang()
    bell.wake()
    bell.wake()

    assert bell.sleep(5) is True
    assert bell.sleep(0) is False


def test_a_file_with_a_very_long_name_has_bells(open_backend, tmp_path):
    folder = tmp_path / ("d" * 120) / ("e" * 120)
    folder.mkdir(parents=True)
    backend = open_backend(str(folder / "jobs.db"))
    consumer = backend.consume({"tasks": 1}, "w")
    take(consumer, 1, timeout=0.01)

    assert any(entry.is_socket() for entry in (folder / "jobs.db.bells").iterdir())


def test_without_a_folder_for_bells_looking_still_works(open_backend, path, tmp_path):
    (tmp_path / "jobs.db.bells").write_text("in the way")
    backend, other = open_backend(), open_backend()
    consumer = backend.consume({"tasks": 1}, "w")
    take(consumer, 1, timeout=0.01)
    other.push([job()])

    assert len(take(consumer, 1, timeout=5)) == 1


def test_a_bell_that_outlives_its_backend_cleans_up(tmp_path, bells, hang):
    bell = hang()
    bells.close()
    bell.close()

    assert not [entry for entry in (tmp_path / "jobs.db.bells").iterdir() if entry.is_socket()]


def test_a_woken_worker_with_a_full_batch_rings_the_next(open_backend, monkeypatch):
    backend = open_backend()
    waiting = [blocked_take(backend.consume({"tasks": 1}, f"w{n}"), limit=2) for n in range(3)]
    eventually(lambda: bytes(backend._file.bells._open()[:1024]).count(1) == 3)
    # One ring for one queue, as if the rings of the others had been lost.
    ring = backend._file.bells.ring_takers
    monkeypatch.setattr(backend._file.bells, "ring_takers", lambda ready: ring(dict.fromkeys(ready, 1)))
    backend.push(jobs(6))

    assert all(joined(thread, within=0.9) for thread, _ in waiting)


def test_whoever_wakes_while_it_is_taken_down_touches_nothing_else(hang):
    for _ in range(200):
        bell = hang()
        wakers = [threading.Thread(target=bell.wake) for _ in range(3)]
        for waker in wakers:
            waker.start()
        bell.close()
        stranger = os.eventfd(0, os.EFD_NONBLOCK)  # gets the number that the bell had
        for waker in wakers:
            waker.join()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(stranger)
        os.close(stranger)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_wakes_it_holds_nobody_up(hang):
    bell = hang()
    held, done = threading.Event(), threading.Event()

    def hold():
        with bell._waking:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        try:
            bell.close()
        finally:
            os._exit(0)
    done.set()
    thread.join()
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0


def test_a_stranger_may_send_what_it_likes(hang, bells):
    bell = hang()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"x" * 1000, bells._path(bell.slot))

    assert bell.sleep(1) is False
