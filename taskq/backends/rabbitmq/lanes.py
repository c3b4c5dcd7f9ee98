"""All lanes of one session: how many jobs the broker may send to each, and what is sent back unstarted.

A queue has a lane for the suspects, which come one at a time, and one for each band of priority, the highest first.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, Final

from taskq.backends import moves
from taskq.backends.beside import ANNOUNCEMENT
from taskq.backends.rabbitmq.lane import Delivery, Lane
from taskq.backends.rabbitmq.layout import BANDS, Layout
from taskq.backends.rabbitmq.link import Link, Script
from taskq.backends.rabbitmq.post import Post
from taskq.backends.rabbitmq.publisher import Fate, Parcel
from taskq.backends.rabbitmq.wire import undecodable
from taskq.clock import Clock, monotonic
from taskq.errors import BackendError, DecodeError
from taskq.job import State, new_id

#: A buffer from which nothing is taken for this long goes back to the broker, in seconds.
_STALE: Final = 2.0
_ROUND: Final = 1.0
#: A suspect that has run for this long no longer keeps others away, in seconds.
_SOLITUDE: Final = 5.0
#: How long closing waits for the broker, in seconds.
_LEAVE: Final = 5.0


class Lanes:
    """The lanes of ``weights``, queue to weight. ``ring`` is called when there may be something to lend."""

    def __init__(
        self,
        link: Link,
        post: Post,
        layout: Layout,
        clock: Clock,
        weights: Mapping[str, int],
        arguments: dict[str, Any],
        ring: Callable[[], None],
    ) -> None:
        self._link = link
        self._post = post
        self._clock = clock
        self._ring = ring
        self._weights = weights
        self._arguments = arguments
        self._misplaced: deque[tuple[Delivery, bool]] = deque()
        self._moving = False
        self._ringing = False
        self._closed = False
        self.trouble: BackendError | None = None  #: why a lane was closed, until somebody has heard of it
        self.lanes = {queue: self._of(layout, queue) for queue in weights}
        link.call(self._every_round)

    def _of(self, layout: Layout, queue: str) -> list[Lane]:
        bands = [layout.band(queue, band) for band in reversed(range(BANDS))]
        first = self._lane(layout.suspects(queue), queue, alone=True)
        return [first, *(self._lane(name, queue, alone=False) for name in bands)]

    def _lane(self, name: str, queue: str, *, alone: bool) -> Lane:
        return Lane(
            self._link,
            name,
            queue,
            self._arguments,
            on_arrival=self._arrived,
            on_gone=self._gone,
            alone=alone,
        )

    @property
    def all(self) -> list[Lane]:
        return [lane for lanes in self.lanes.values() for lane in lanes]

    # -- the session's thread ---------------------------------------------------------

    def available(self) -> dict[str, int]:
        """Jobs at hand, by queue."""
        return {queue: sum(len(lane.buffer) for lane in lanes) for queue, lanes in self.lanes.items()}

    def pop(self, queue: str) -> Delivery | None:
        """The next job of ``queue`` that is at hand."""
        for lane in self.lanes[queue]:
            if lane.buffer:
                lane.moved = monotonic()
                try:
                    return lane.buffer.popleft()
                except IndexError:  # it went back to the broker just now
                    continue
        return None

    def want(self, limit: int, most: int) -> None:
        """See that the broker may send ``limit`` jobs, and ``most`` to what is served fastest. Returns at once."""
        self._link.call(lambda: self._want(limit, most))

    def look(self, limit: int, timeout: float) -> None:
        """Bring ``limit`` jobs to hand, if the broker has them."""
        end = monotonic() + timeout
        total = sum(self._weights.values())
        wanted = {queue: math.ceil(limit * weight / total) for queue, weight in self._weights.items()}
        ready = self._looked([(lane, wanted[lane.queue]) for lane in self.all], end)
        while (missing := limit - sum(self.available().values())) > 0:
            more = [next((lane for lane in lanes if ready.get(lane)), None) for lanes in self.lanes.values()]
            lanes = [lane for lane in more if lane is not None]
            if not lanes:
                return
            ready |= self._looked([(lane, len(lane.buffer) + missing) for lane in lanes], end)

    def _looked(self, wanted: Sequence[tuple[Lane, int]], end: float) -> dict[Lane, int]:
        """What each lane has beyond its buffer, after a look."""
        looks = [(lane, partial(lane.look, 1 if lane.alone else n)) for lane, n in wanted]
        return dict(zip((lane for lane, _ in wanted), self._all_play(looks, end), strict=True))

    def _all_play(self, plays: Sequence[tuple[Lane, Callable[[], Script[Any]]]], end: float) -> list[Any]:
        """Play one script on each lane, side by side, and wait for what they return."""
        futures: list[Future[Any]] = [Future() for _ in plays]

        def start() -> None:
            for (lane, script), future in zip(plays, futures, strict=True):
                lane.play(script, future)

        self._link.call(start)
        return [self._result(future, end) for future in futures]

    def flush(self, lanes: Sequence[Lane], timeout: float) -> int:
        """Whatever the broker has sent to ``lanes`` has arrived; how many that were, ever."""
        self._all_play([(lane, lane.flush) for lane in lanes], monotonic() + timeout)
        return sum(lane.arrived for lane in lanes)

    def silence(self, timeout: float) -> None:
        """Ask the broker for nothing more, until something is wanted again."""
        self._all_play([(lane, lane.silence) for lane in self.all], monotonic() + timeout)

    def _result(self, future: Future[Any], end: float) -> Any:
        timeout = max(0.0, end - monotonic())
        try:
            return future.result(timeout)
        except FutureTimeoutError:
            raise self._link.unreachable(timeout) from None

    def close(self) -> None:
        """Send back what is at hand, and let go of what is lent. Idempotent."""
        if self._closed:
            return
        self._closed = True
        done: Future[None] = Future()
        self._link.call(lambda: self._leave(done))
        try:
            done.result(_LEAVE)
        except (FutureTimeoutError, BackendError) as error:
            self._link.log("a session ended without a word to the broker: %s", error)

    # -- the link's thread ------------------------------------------------------------

    def _want(self, limit: int, most: int) -> None:
        total = sum(self._weights.values())
        for queue, lanes in self.lanes.items():
            share = max(1, math.ceil(most * self._weights[queue] / total))
            missing = limit
            for lane in lanes:
                if missing <= 0:
                    break
                lane.want(missing, 1 if lane.alone else min(share, limit), most)
                missing -= len(lane.buffer)

    def _arrived(self, delivery: Delivery) -> None:
        if delivery.redelivered and not _announces(delivery):
            self._misplace([delivery], lost=True)
        else:
            delivery.lane.put(delivery)
            if not self._ringing:  # once for everything that came by the same read
                self._ringing = True
                self._link.later(0, self._rung)

    def _rung(self) -> None:
        self._ringing = False
        self._ring()

    def _gone(self, error: BackendError) -> None:
        self.trouble = error
        self._ring()

    def lose(self, error: BackendError) -> None:
        """The connection is gone."""
        for lane in self.all:
            lane.lose(error)
        self._misplaced.clear()
        self._ring()

    def _every_round(self) -> None:
        """Send back what nobody takes; let the next suspect come where the last has run for long."""
        if self._closed:
            return
        now = monotonic()
        for lane in self.all:
            if lane.alone:
                lane.next_alone(self._clock.now() - _SOLITUDE)
            if lane.buffer and now - lane.moved > _STALE and lane.idle:
                lane.play(partial(self._send_back, lane))
        self._link.later(_ROUND, self._every_round)

    def _send_back(self, lane: Lane) -> Script[None]:
        """A script: nothing more comes, and what has come goes."""
        yield from lane.silence()
        held: list[Delivery] = []
        while lane.buffer:
            held.append(lane.buffer.popleft())
        self._misplace(held, lost=False)

    def _misplace(self, deliveries: list[Delivery], *, lost: bool) -> None:
        self._misplaced.extend((each, lost) for each in deliveries)
        if self._misplaced and not self._moving:
            self._moving = True
            threading.Thread(target=self._move_all, name="taskq-moves", daemon=True).start()

    def _leave(self, done: Future[None]) -> None:
        left = self.all

        def gone(_: Future[Any]) -> None:
            left.pop()
            if not left and not done.done():
                done.set_result(None)

        for lane in self.all:
            lane.play(partial(self._send_back_and_leave, lane)).add_done_callback(gone)

    def _send_back_and_leave(self, lane: Lane) -> Script[None]:
        yield from lane.silence()
        held = list(lane.buffer)
        lane.buffer.clear()
        if held:
            yield lambda reply: self._send_copies(held, reply)
        yield from lane.leave()

    def _send_copies(self, held: list[Delivery], reply: Callable[[Any], None]) -> None:
        def send() -> None:
            self._move([(each, False) for each in held])
            self._link.call(lambda: reply(None))

        threading.Thread(target=send, name="taskq-moves", daemon=True).start()

    # -- a thread for once: what came back is sent where it belongs --------------------

    def _move_all(self) -> None:
        while True:
            batch: list[tuple[Delivery, bool]] = []
            while self._misplaced and len(batch) < 500:
                batch.append(self._misplaced.popleft())
            if not batch:
                self._moving = False
                if not self._misplaced:
                    return
                self._moving = True
            self._move(batch)

    def _move(self, batch: list[tuple[Delivery, bool]]) -> None:
        """Send copies to where the jobs belong; those that arrive there are acknowledged here."""
        parcels = [
            (delivery, self._parcel(delivery, lost=lost)) for delivery, lost in batch if delivery.alive
        ]
        try:
            self._post.send([parcel for _, parcel in parcels])
        except BackendError as error:
            self._link.log("jobs that came back stay where they are: %s", error)
        sent = [delivery for delivery, parcel in parcels if parcel.fate is Fate.CONFIRMED]
        self._link.call(lambda: finish(sent, at_once=True))

    def _parcel(self, delivery: Delivery, *, lost: bool) -> Parcel:
        now = self._clock.now()
        lane = delivery.lane
        try:
            job, history = delivery.read()
        except DecodeError as error:
            job, history = undecodable(delivery.body, lane.queue, delivery.message_id or new_id(), error, now)
            return self._post.dead(job, history, lane.queue)
        if not lost:
            if lane.alone:
                return self._post.suspect(job, history)
            return self._post.again(job, history, ahead=True)
        # Who was lost while it ran alone has only itself to blame.
        move = moves.lost(job, now if lane.alone else None, now)
        if move.attempt is not None:
            history = (*history, move.attempt)
        if move.job.state is State.DEAD:
            return self._post.dead(move.job, history, lane.queue)
        if move.attempt is None:
            return self._post.suspect(move.job, history)
        return self._post.again(move.job, history)


def _announces(delivery: Delivery) -> bool:
    """Whether it only bears the id of a job: the store knows who is to blame."""
    try:
        return ANNOUNCEMENT in delivery.read().job.headers
    except DecodeError:
        return True  # who takes it finds out


def finish(deliveries: list[Delivery], *, at_once: bool) -> None:
    """On the link's thread: these are done with."""
    by_lane: dict[Lane, list[Delivery]] = {}
    for delivery in deliveries:
        by_lane.setdefault(delivery.lane, []).append(delivery)
    for lane, done in by_lane.items():
        lane.finish(done, at_once=at_once)
