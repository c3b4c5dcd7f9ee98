"""The worker's side of a consumer: one thread that takes, settles and renews, and survives a backend that is away.

The supervisor's main thread says how many jobs are worth holding and hands over outcomes; what is taken or learned
comes back through :attr:`Session.inbox`. An outcome is kept here until it is settled, however long that takes.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from taskq.backend import Backend, Consumer, Note, Taken
from taskq.clock import SYSTEM_CLOCK, monotonic
from taskq.errors import BackendError
from taskq.events import Events
from taskq.job import Outcome, Reservation, Settlement, Verdict, exhausted

#: How often cancellations are asked for and renewals looked at, at the least, in seconds.
_DUTY: Final = 1.0
#: Longest wait between attempts while the backend is away, in seconds.
_BACKOFF: Final = 5.0
#: Outcomes settled by one write.
_BATCH: Final = 512


class Learned(NamedTuple):
    """Something the main thread should know: ``taken``, ``lost``, ``cancel`` or ``marked``, and about what."""

    what: str
    about: Any


class _Held:
    """A reservation and when its lease is to be renewed."""

    __slots__ = ("renew_at", "reservation")

    def __init__(self, reservation: Reservation, renew_at: float) -> None:
        self.reservation = reservation
        self.renew_at = renew_at


class Session:
    """Owns the consumer of one worker."""

    def __init__(
        self, backend: Backend, queues: dict[str, int], worker: str, events: Events, *, burst: bool
    ) -> None:
        self._consumer: Consumer = backend.consume(queues, worker)
        # A lease that ends with a connection may end at any moment; a look whether it has costs nothing.
        self._longest = _DUTY if backend.capabilities.leases == "connection" else float("inf")
        self._events = events
        self._burst = burst
        self.inbox: deque[Learned] = deque()
        self.target = 0
        self.dry = False  #: the last take found nothing, nothing is held, nothing waits to be settled
        self.last_contact = monotonic()
        self.on_news: Callable[[], None] = _nobody
        self._outcomes: deque[Outcome] = deque()
        self._requests: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        # The latest wish of each run: a task that says more than the backend takes must not fill the memory.
        self._wishes: dict[tuple[str, str], tuple[Callable[..., None], tuple[Any, ...]]] = {}
        self._wishes_lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._bell = threading.Event()
        self._credit = 0  #: what the backend was last told of ``target``
        self._blocked = False
        self._closing = False
        self._failures = 0
        self._next_duty = 0.0
        self._thread = threading.Thread(target=self._serve, name="taskq-session", daemon=True)

    # -- the main thread's side -------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def want(self, target: int) -> None:
        """Hold up to ``target`` jobs."""
        more, stop = target > self.target, target == 0 and self.target > 0
        self.target = target
        if more or stop:
            self._ring()

    def settle(self, outcomes: Iterable[Outcome]) -> None:
        """Settle these as soon as can be."""
        self._outcomes.extend(outcomes)
        self._ring()

    def release(self, reservations: Sequence[Reservation]) -> None:
        """Give back jobs that were not started."""
        if reservations:
            self._request(self._release, reservations)

    def mark(self, reservations: Sequence[Reservation], *, tell: bool = False) -> None:
        """Mark jobs as started, so that their loss can be attributed; ``tell`` when that is durable."""
        self._request(self._mark, reservations, SYSTEM_CLOCK.now(), tell)

    def extend(self, reservation: Reservation, seconds: float) -> None:
        """Hold a lease for at least ``seconds`` from now."""
        self._wish("extend", self._extend, reservation, seconds)

    def progress(self, reservation: Reservation, value: bytes) -> None:
        """Note the progress of a running job."""
        self._wish("progress", self._progress, reservation, value)

    @property
    def idle(self) -> bool:
        """Whether nothing is held and nothing waits to be written."""
        return not (self._held or self._unwritten)

    @property
    def _unwritten(self) -> bool:
        return bool(self._outcomes or self._requests or self._wishes)

    def close(self, timeout: float) -> bool:
        """Write what is left and end; whether that was done within ``timeout`` seconds."""
        self._closing = True
        self._ring()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _request(self, do: Callable[..., None], *arguments: Any) -> None:
        self._requests.append((do, arguments))
        self._ring()

    def _wish(self, what: str, do: Callable[..., None], reservation: Reservation, value: Any) -> None:
        with self._wishes_lock:
            self._wishes[what, reservation.job.id] = (do, (reservation, value))
        self._ring()

    def _ring(self) -> None:
        self._bell.set()
        if self._blocked:
            self._consumer.wake()

    # -- the session's own thread -----------------------------------------------------

    def _serve(self) -> None:
        outcomes: list[Outcome] = []
        while not (self._closing and not self._unwritten and not outcomes and not self.inbox):
            try:
                self._step(outcomes)
                self._reached()
            except BackendError as error:
                self._unreachable(error)
            except Exception as error:  # noqa: BLE001 - outcomes must survive whatever a driver raises
                self._unreachable(error)
            self.on_news()
        try:
            self._consumer.close()
        except Exception as error:  # noqa: BLE001 - what was held is settled already
            self._events.emit("backend.unavailable", error=repr(error))

    def _step(self, outcomes: list[Outcome]) -> None:
        """One round. ``outcomes`` are kept across failures: settling is repeatable."""
        self._bell.clear()
        if self._credit != self.target:
            self._credit = self.target
            self._consumer.credit(self._credit)
        if self._closing:
            self._return_unheard()
        self._do_requests()
        self._do_duties()
        while self._outcomes and len(outcomes) < _BATCH:
            outcomes.append(self._outcomes.popleft())
        # An outcome makes room only if its job is still held: a lost lease has made it before.
        freed = sum(outcome.reservation.job.id in self._held for outcome in outcomes)
        wanted = 0 if self._closing else self.target - len(self._held) + freed
        looked = wanted > 0 and not outcomes
        if outcomes:
            settlements, taken = self._consumer.exchange(outcomes, max(0, wanted))
            self._settled(outcomes, settlements)
            outcomes.clear()
        elif looked:
            taken = self._wait_for_jobs(wanted)
        else:
            taken = Taken([], None)
            self._bell.wait(self._rest())
        self._taken(taken, looked=looked)

    def _return_unheard(self) -> None:
        """Give back what was taken while the main thread was leaving."""
        while self.inbox:
            what, about = self.inbox.popleft()
            if what == "taken":
                self._requests.append((self._release, (about,)))

    def _do_requests(self) -> None:
        while self._requests:
            do, arguments = self._requests[0]
            do(*arguments)  # a failure leaves it where it is, to be repeated
            self._requests.popleft()
        with self._wishes_lock:
            wishes = list(self._wishes.items())
        for key, (do, arguments) in wishes:
            try:
                do(*arguments)
            except BackendError:
                raise
            except Exception as error:  # noqa: BLE001 - a wish that cannot be granted must not hold up outcomes
                self._events.emit("note.failed", job=arguments[0].job, what=key[0], error=repr(error))
            with self._wishes_lock:
                if self._wishes[key][1] is arguments:  # else there is a newer one
                    del self._wishes[key]

    def _wait_for_jobs(self, wanted: int) -> Taken:
        timeout = 0.0 if self._burst and not self._held else self._rest()
        self._blocked = True
        try:
            if self._unwritten or self._bell.is_set():
                timeout = 0.0
            return self._consumer.take(wanted, timeout)
        finally:
            self._blocked = False

    def _rest(self) -> float:
        """Seconds until the next duty."""
        return max(0.0, self._next_duty - monotonic()) if self._held else 5 * _DUTY

    def _taken(self, taken: Taken, *, looked: bool) -> None:
        if taken.reservations:
            now = monotonic()
            # Lost, and lent to us again, before we looked: what runs is not to be taken for what comes.
            self._lost([each.job.id for each in taken.reservations if each.job.id in self._held])
            for each in taken.reservations:
                held = self._held[each.job.id] = _Held(each, self._renewal(each, now))
                self._next_duty = min(self._next_duty, held.renew_at)
            self.inbox.append(Learned("taken", taken.reservations))
        # An exchange brings what is at hand: that it brought nothing says little.
        self.dry = looked and not taken.reservations and self.idle
        if self.dry and self._burst:
            self.on_news()
            self._bell.wait(0.05)

    def _settled(self, outcomes: Sequence[Outcome], settlements: Sequence[Settlement]) -> None:
        for outcome, settlement in zip(outcomes, settlements, strict=True):
            held = self._held.get(outcome.reservation.job.id)
            if held is not None and held.reservation.token == outcome.reservation.token:
                del self._held[outcome.reservation.job.id]
            self._announce(outcome, settlement)

    def _announce(self, outcome: Outcome, settlement: Settlement) -> None:
        if settlement is Settlement.LOST:
            self._events.emit(
                "job.lost", job=outcome.reservation.job, reason="lease lost: the outcome was not written"
            )
        elif settlement is Settlement.SETTLED:
            job, verdict = outcome.reservation.job, outcome.verdict
            if verdict is Verdict.RETRY and exhausted(job, job.attempts + 1):
                verdict = Verdict.BURY
            name = _EVENTS[verdict]
            if self._events.wanted(name):
                self._events.emit(name, job=job, attempt=outcome.attempt, error=outcome.error)

    # -- duties -----------------------------------------------------------------------

    def _do_duties(self) -> None:
        now = monotonic()
        if not self._held or now < self._next_duty:
            return
        due = [held for held in self._held.values() if held.renew_at <= now]
        if due:
            extended = self._consumer.extend([held.reservation for held in due])
            for held in due:
                held.renew_at = self._renewal(held.reservation, now)
            self._lost(extended.lost)
            self._cancel(extended.cancelled)
        self._cancel(self._consumer.cancellations())
        nearest = min((held.renew_at for held in self._held.values()), default=now + _DUTY)
        self._next_duty = min(now + _DUTY, nearest)

    def _renewal(self, reservation: Reservation, now: float) -> float:
        """When to see to a lease again."""
        lease = reservation.job.lease
        return now + min(lease / 3 if lease > 0 else float("inf"), self._longest)

    def _lost(self, ids: Sequence[str]) -> None:
        for job_id in ids:
            held = self._held.pop(job_id, None)
            if held is not None:
                self._events.emit("job.lost", job=held.reservation.job, reason="lease lost while it ran")
                self.inbox.append(Learned("lost", job_id))

    def _cancel(self, ids: Sequence[str]) -> None:
        for job_id in ids:
            self.inbox.append(Learned("cancel", job_id))

    # -- requests; each may be repeated after a failure -------------------------------

    def _release(self, reservations: Sequence[Reservation]) -> None:
        self._consumer.release(reservations)
        for each in reservations:
            self._held.pop(each.job.id, None)

    def _mark(self, reservations: Sequence[Reservation], now: float, tell: bool) -> None:
        lost = set(self._consumer.note([Note(reservation=each, started=now) for each in reservations]))
        self._lost(list(lost))
        if tell:
            self.inbox.extend(Learned("marked", each) for each in reservations if each.job.id not in lost)

    def _extend(self, reservation: Reservation, seconds: float) -> None:
        extended = self._consumer.extend([reservation], seconds)
        self._lost(extended.lost)
        held = self._held.get(reservation.job.id)
        if held is not None:
            # The next renewal sets the job's own lease: not before two thirds of what was asked for are over.
            held.renew_at = max(held.renew_at, monotonic() + seconds * 2 / 3)

    def _progress(self, reservation: Reservation, value: bytes) -> None:
        self._consumer.note([Note(reservation=reservation, progress=value)])

    # -- a backend that is away -------------------------------------------------------

    def _reached(self) -> None:
        self.last_contact = monotonic()
        if self._failures:
            self._events.emit("backend.available", failures=self._failures)
            self._failures = 0

    def _unreachable(self, error: Exception) -> None:
        if not self._failures:
            self._events.emit("backend.unavailable", error=f"{type(error).__name__}: {error}")
        self._failures += 1
        ceiling = min(_BACKOFF, 0.05 * 2 ** min(self._failures, 10))
        self._bell.clear()
        self._bell.wait(random.uniform(ceiling / 2, ceiling))  # noqa: S311 - spreads retries, guards nothing


_EVENTS: Final = {
    Verdict.COMPLETE: "job.completed",
    Verdict.RETRY: "job.retried",
    Verdict.SNOOZE: "job.snoozed",
    Verdict.BURY: "job.dead",
    Verdict.CANCEL: "job.cancelled",
    Verdict.RELEASE: "job.released",
}


def _nobody() -> None:
    """Before the supervisor listens."""
