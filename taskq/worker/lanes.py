"""Lanes of a child: the main thread, pool threads and coroutines, each running its jobs one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from taskq import codec
from taskq.job import Job
from taskq.worker.durations import Durations
from taskq.worker.executor import Executor, Result, Run
from taskq.worker.limits import SOFT, Interrupter, Interruptible, Key, PoolThread
from taskq.worker.pipes import DONE, EXTEND, PROGRESS, ChildEnd, Closed
from taskq.worker.slots import Slots
from taskq.worker.wire import UNSENDABLE, pack_result, unpack_job, unsendable

#: Finished outcomes wait no longer than this for company, in seconds.
_COMPANY: Final = 0.002


class Report:
    """The outcomes of one chunk on their way to the supervisor."""

    def __init__(self, end: ChildEnd, lane: int, chunk: int) -> None:
        self._end = end
        self._address = (lane, chunk)
        self._results: list[list[Any]] = []
        self._since = 0.0
        self._lock = threading.Lock()

    def add(self, result: list[Any], now: float) -> None:
        """Keep a result; send all once the oldest has waited long enough."""
        with self._lock:
            if not self._results:
                self._since = now
            self._results.append(result)
        if now - self._since > _COMPANY:
            self.flush()

    def flush(self) -> None:
        """Send what there is. Any thread."""
        with self._lock:
            results, self._results = self._results, []
        if not results:
            return
        try:
            self._end.send([DONE, *self._address, results])
        except UNSENDABLE:
            for result in results:
                self._send_alone(result)

    def _send_alone(self, result: list[Any]) -> None:
        """Send one result; one that cannot cross the pipe buries its job and holds up no other."""
        try:
            self._end.send([DONE, *self._address, [result]])
        except UNSENDABLE as error:
            self._end.send([DONE, *self._address, [unsendable(result, error)]])


class RunLink:
    """A run's way to its reservation."""

    def __init__(self, end: ChildEnd, key: Key) -> None:
        self._end = end
        self._key = key

    def extend(self, seconds: float) -> None:
        self._end.send([EXTEND, *self._key, seconds])

    def progress(self, value: Any) -> None:
        self._end.send([PROGRESS, *self._key, codec.encode(value)])


class Lane:
    """What both kinds of lane share: where results go, and the run that can be interrupted."""

    def __init__(
        self, number: int, executor: Executor, end: ChildEnd, slots: Slots, durations: Durations
    ) -> None:
        self.number = number
        self.executor = executor
        self.end = end
        self.slots = slots
        self.durations = durations
        self.report: Report | None = None
        self.context: Any = None
        self.key: Key = (number, 0, 0)

    def open(self, chunk: int, index: int, job: Job, fence: int) -> Run | Result:
        self.context, self.key = None, (self.number, chunk, index)
        opened = self.executor.open(job, fence, RunLink(self.end, self.key))
        self.context = opened.context if isinstance(opened, Run) else None
        return opened

    def conclude(self, index: int, task: str, result: Result, began: float) -> None:
        now = time.monotonic()
        self.slots.ran(self.number)
        self.durations.note(task, now - began)
        assert self.report is not None
        self.report.add(pack_result(index, now - began, result), now)

    def tell(self, key: Key, kind: str) -> None:
        """Let the run of ``key`` know that it should end. Any thread."""
        context = self.context
        if context is not None and self.key == key and kind != SOFT:
            context._cancel(kind)

    def flush(self) -> None:
        """Send finished outcomes that wait behind a job which takes longer than expected. Any thread."""
        report = self.report
        if report is not None:
            report.flush()


class ThreadLane(Lane):
    """Runs its jobs in the thread that calls :meth:`serve`."""

    def __init__(self, number: int, guard: Interrupter, *shared: Any) -> None:
        super().__init__(number, *shared)
        self.inbox: queue.SimpleQueue[tuple[int, list[Any]] | None] = queue.SimpleQueue()
        self._guard = guard
        self._abandoned = False

    def serve(self) -> None:
        """Run chunks until told to stop."""
        with contextlib.suppress(Closed):
            while not self._abandoned and (given := self.inbox.get()) is not None:
                self._run_chunk(*given)

    def interrupt(self, key: Key, kind: str) -> None:
        """Raise inside the body of ``key``, if that is what runs. From another thread."""
        self.tell(key, kind)
        self._guard.interrupt(key, kind)

    def abandon(self) -> None:
        """Take no further job: the thread is stuck and another takes its place."""
        self._abandoned = True

    def _run_chunk(self, chunk: int, jobs: list[Any]) -> None:
        report = self.report = Report(self.end, self.number, chunk)
        for index, packed in enumerate(jobs):
            fence, job = unpack_job(packed)
            if self.durations.expected(job.task) >= _COMPANY:
                report.flush()
            began = time.monotonic()
            if not self.slots.begin(self.number, chunk, index, began):
                break
            try:
                result = self._run_job((self.number, chunk, index), job, fence)
            except BaseException as error:  # noqa: BLE001 - the lane goes on, whatever was overlooked
                result = self.executor.broken(job, error)
            self.conclude(index, job.task, result, began)
        report.flush()
        self.slots.rest(self.number)

    def _run_job(self, key: Key, job: Job, fence: int) -> Result:
        opened = self.open(key[1], key[2], job, fence)
        if isinstance(opened, Result):
            return opened
        _bind_log_context(job)
        return self.executor.run(opened, lambda body: self._guard.run(key, body))


class LoopLanes:
    """Coroutine lanes on one event loop: many jobs at once in one thread."""

    def __init__(self, first: int, count: int, *shared: Any) -> None:
        self.numbers = range(first, first + count)
        self._shared = shared
        self._loop = asyncio.new_event_loop()
        self._lanes: dict[int, Lane] = {}
        self._running: dict[Key, Callable[[str], None]] = {}
        self._chunks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(max_workers=count, thread_name_prefix="taskq-sync")
        self._asked: float | None = None
        self._thread = 0
        self._stopping = False

    def serve(self) -> None:
        """Run the loop in this thread until told to stop."""
        asyncio.set_event_loop(self._loop)
        self._thread = threading.get_ident()
        try:
            while not self._stopping or self._chunks:
                # A task that a body left behind can end the loop by SystemExit; nobody else's jobs end with it.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._loop.close()

    def give(self, lane: int, chunk: int, jobs: list[Any]) -> None:
        """Run a chunk in a lane. From any thread."""
        self._loop.call_soon_threadsafe(self._start, lane, chunk, jobs)

    def interrupt(self, key: Key, kind: str) -> None:
        """Raise inside the coroutine of ``key`` at its next wait. From any thread."""
        self._loop.call_soon_threadsafe(self._interrupt, key, kind)

    def flush(self, lane: int) -> None:
        known = self._lanes.get(lane)
        if known is not None:
            known.flush()

    def stop(self) -> None:
        """Stop once the running chunks have ended. From any thread."""
        self._loop.call_soon_threadsafe(self._begin_to_stop)

    def blocked_by(self, patience: float) -> tuple[str, str] | None:
        """The task and source line that have kept the loop from answering for ``patience`` seconds.

        ``None`` while it answers. Asks it again each time. From another thread.
        """
        if not self._chunks or self._loop.is_closed():
            self._asked = None
            return None
        if self._asked is None:
            self._asked = time.monotonic()
            self._loop.call_soon_threadsafe(self._answer)
            return None
        if time.monotonic() - self._asked < patience:
            return None
        current = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._thread)
        if current is None or frame is None:
            return None
        return current.get_name(), f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def _answer(self) -> None:
        self._asked = None

    def _begin_to_stop(self) -> None:
        self._stopping = True
        if not self._chunks:
            self._loop.stop()

    def _start(self, number: int, chunk: int, jobs: list[Any]) -> None:
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = Lane(number, *self._shared)
        task = self._loop.create_task(self._run_chunk(lane, chunk, jobs))
        self._chunks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._chunks.discard(task)
        if self._stopping and not self._chunks:
            self._loop.stop()

    async def _run_chunk(self, lane: Lane, chunk: int, jobs: list[Any]) -> None:
        report = lane.report = Report(lane.end, lane.number, chunk)
        with contextlib.suppress(Closed):
            for index, packed in enumerate(jobs):
                fence, job = unpack_job(packed)
                if lane.durations.expected(job.task) >= _COMPANY:
                    report.flush()
                began = time.monotonic()
                if not lane.slots.begin(lane.number, chunk, index, began):
                    break
                try:
                    result = await self._run_job(lane, (lane.number, chunk, index), job, fence)
                except asyncio.CancelledError:
                    raise
                except BaseException as error:  # noqa: BLE001 - the lane goes on, whatever was overlooked
                    result = lane.executor.broken(job, error)
                lane.conclude(index, job.task, result, began)
            report.flush()
        lane.slots.rest(lane.number)

    async def _run_job(self, lane: Lane, key: Key, job: Job, fence: int) -> Result:
        opened = lane.open(key[1], key[2], job, fence)
        if isinstance(opened, Result):
            return opened
        _bind_log_context(job)
        if (current := asyncio.current_task()) is not None:
            current.set_name(job.task)  # for the warning about a blocked loop
        try:
            if opened.task.is_async:
                return await lane.executor.run_async(opened, lambda coroutine: self._drive(key, coroutine))
            guard = PoolThread()
            self._running[key] = lambda kind: guard.interrupt(key, kind)
            return await self._loop.run_in_executor(
                self._threads, lane.executor.run, opened, lambda body: guard.run(key, body)
            )
        finally:
            self._running.pop(key, None)

    async def _drive(self, key: Key, coroutine: Any) -> Any:
        driver = Interruptible(coroutine)
        self._running[key] = driver.interrupt
        return await driver

    def _interrupt(self, key: Key, kind: str) -> None:
        interrupt = self._running.get(key)
        if interrupt is not None:
            self._lanes[key[0]].tell(key, kind)
            interrupt(kind)


async def _forget_cancels() -> None:
    """Let no ``cancel()`` that the body asked for itself reach the job that comes next in its lane."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # one that has not been raised yet is raised here
        while task.uncancel():
            continue


def _bind_log_context(job: Job) -> None:
    """Name the job in the log lines of the code that runs it, where the app logs through structlog."""
    structlog = sys.modules.get("structlog")
    if structlog is not None:
        structlog.contextvars.bind_contextvars(
            job_id=job.id, task=job.task, queue=job.queue, attempt=job.attempts + 1
        )
