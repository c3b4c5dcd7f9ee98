"""Slots: a job is begun or withdrawn, never both."""

from __future__ import annotations

import multiprocessing
import pathlib
import threading

from taskq.worker.latch import Latch
from taskq.worker.slots import Activity, Slots, local_memory, map_memory, shared_memory


def make(lanes: int = 2) -> Slots:
    return Slots(local_memory(lanes), threading.Lock())


def test_a_slot_says_what_its_lane_does() -> None:
    slots = make()

    assert slots.begin(1, chunk=7, index=3, now=12.5)

    doing = slots.look(1)
    assert doing is not None
    assert (doing.chunk, doing.position, doing.activity, doing.since) == (7, 3, Activity.RUNNING, 12.5)
    slots.ran(1)
    assert slots.last(1).activity == Activity.RAN
    slots.rest(1)
    assert slots.last(1).activity == Activity.IDLE


def test_what_was_withdrawn_does_not_begin() -> None:
    slots = make()
    slots.begin(0, chunk=1, index=0, now=0)

    assert slots.withdraw(0, 1) == (1, 1)

    assert not slots.begin(0, chunk=1, index=1, now=0)
    assert not slots.begin(0, chunk=1, index=2, now=0)


def test_chunks_that_were_not_begun_are_withdrawn_whole() -> None:
    slots = make()
    slots.begin(0, chunk=1, index=4, now=0)

    assert slots.withdraw(0, 2) == (1, 5)

    assert not slots.begin(0, chunk=2, index=0, now=0)
    assert slots.begin(0, chunk=3, index=0, now=0)


def test_what_was_withdrawn_before_the_child_had_read_it_stays_withdrawn() -> None:
    slots = make()
    slots.begin(0, chunk=1, index=0, now=0)
    slots.withdraw(0, 2)

    slots.withdraw(0, 4)

    assert not slots.begin(0, chunk=2, index=0, now=0)
    assert not slots.begin(0, chunk=4, index=0, now=0)


def test_all_chunks_behind_a_running_job_are_withdrawn_and_later_ones_are_not() -> None:
    slots = make()
    slots.begin(0, chunk=5, index=3, now=0)

    assert slots.withdraw(0, 6) == (5, 4)
    assert slots.withdraw(0, 8) == (5, 4)

    for chunk, index in [(5, 4), (6, 0), (6, 7), (8, 0)]:
        assert not slots.begin(0, chunk=chunk, index=index, now=0)
    assert slots.begin(0, chunk=9, index=0, now=0)


def test_a_lock_that_is_never_released_withdraws_nothing() -> None:
    lock = threading.Lock()
    slots = Slots(local_memory(1), lock)

    with lock:
        assert slots.withdraw(0, 1) is None
        assert slots.look(0) is None


def _begin_all(descriptor: int, lock: object, begun: object) -> None:
    slots = Slots(map_memory(descriptor, 1), lock)
    count = 0
    while slots.begin(0, chunk=1, index=count, now=0) and count < 2_000_000:
        count += 1
    begun.send(count)  # type: ignore[attr-defined]


def test_two_processes_agree_where_a_chunk_was_cut() -> None:
    context = multiprocessing.get_context("fork" if threading.active_count() == 1 else "spawn")
    if context.get_start_method() != "fork":
        return
    descriptor, memory = shared_memory(1)
    lock = context.Lock()
    receive, send = context.Pipe(duplex=False)
    slots = Slots(memory, lock)
    child = context.Process(target=_begin_all, args=(descriptor, lock, send))
    child.start()
    while slots.last(0).position < 100:
        continue

    start = slots.withdraw(0, 1)

    assert (1, receive.recv()) == start
    child.join()
    child.close()
    receive.close()
    send.close()
    memory.close()


def test_a_latch_is_shared_and_leaves_no_name_behind() -> None:
    context = multiprocessing.get_context("spawn")
    latch = Latch()
    receive, send = context.Pipe(duplex=False)
    with latch:
        child = context.Process(target=_try, args=(latch, send))
        child.start()
        assert receive.recv() is False
        name = latch._semaphore.name
        assert not pathlib.Path(f"/dev/shm/sem.{name[1:]}").exists()
    assert receive.recv() is True
    child.join()
    assert not latch.acquire(False)
    latch.release()
    for end in (receive, send):
        end.close()
    child.close()
    latch.forget_name()


def _try(latch: Latch, told: object) -> None:
    told.send(latch.acquire(False))  # type: ignore[attr-defined]
    latch.acquire()
    told.send(True)  # type: ignore[attr-defined]
