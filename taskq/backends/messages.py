"""The messages of a broker that stands before a store: received, waited for, acknowledged.

The broker's session is driven by one thread at a time: by the worker's own, and while that is blocked in the store,
by a thread that waits for messages in its place.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from taskq.backend import Consumer
from taskq.errors import BackendError
from taskq.job import Outcome, Reservation, Verdict

#: How long one wait for messages lasts before it looks whether it is still wanted, in seconds.
_LOOK: Final = 5.0


class Messages:
    """One worker's session with the broker. ``on_arrival`` is called from another thread."""

    def __init__(self, consumer: Consumer, on_arrival: Callable[[], None]) -> None:
        self._consumer = consumer
        self._on_arrival = on_arrival
        self._arrived: deque[Reservation] = deque()
        self._waiter = ThreadPoolExecutor(1, "taskq-messages")
        self._watching = False
        self.failure: BackendError | None = None  #: why nothing comes, since the last message

    def take(self, limit: int, *, ask: bool) -> list[Reservation]:
        """At most ``limit`` messages, without waiting; none while the broker is away.

        Those at hand; with ``ask`` also those that the broker has but has not sent yet, which may cost a round trip.
        """
        found = [self._arrived.popleft() for _ in range(min(limit, len(self._arrived)))]
        if (missing := limit - len(found)) > 0:
            try:
                taken = self._consumer.take(missing) if ask else self._consumer.exchange([], missing)[1]
                found += taken.reservations
            except BackendError as error:
                self.failure = error
                return found
            self.failure = None
        return found

    def put_back(self, messages: Sequence[Reservation]) -> None:
        """These come first in the next take."""
        self._arrived.extendleft(reversed(messages))

    def acknowledge(self, messages: Sequence[Reservation]) -> None:
        """These are done with. Where that does not reach the broker they come again, and are found to be stale."""
        try:
            self._consumer.settle(
                [Outcome(reservation=message, verdict=Verdict.COMPLETE) for message in messages]
            )
        except BackendError as error:
            self.failure = error

    def credit(self, n: int) -> None:
        self._consumer.credit(n)

    @contextlib.contextmanager
    def awaited(self, limit: int) -> Iterator[None]:
        """Within the block, wait for messages elsewhere; call ``on_arrival`` once there are some."""
        self._watching = True
        try:
            waiting: Future[None] | None = self._waiter.submit(self._wait, limit)
        except RuntimeError:  # closed meanwhile
            waiting = None
        try:
            yield
        finally:
            self._watching = False
            if waiting is not None:
                self._consumer.wake()
                waiting.result()

    def _wait(self, limit: int) -> None:
        while self._watching:
            try:
                arrived = self._consumer.take(limit, _LOOK).reservations
            except BackendError as error:
                self.failure = error
                return
            if arrived:
                self.failure = None
                self._arrived.extend(arrived)
                self._on_arrival()
                return

    def close(self) -> None:
        """What has not been acknowledged comes again to somebody else."""
        self._watching = False
        self._consumer.wake()
        self._consumer.close()
        self._waiter.shutdown(wait=False)
