"""From a job to the message about it: where it goes, what it says, how long it waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from taskq.backend import store_needed
from taskq.backends.rabbitmq.address import Address
from taskq.backends.rabbitmq.layout import BANDS, LONGEST_DELAY, Layout, band_of, units
from taskq.backends.rabbitmq.publisher import Parcel, Publisher, unroutable
from taskq.backends.rabbitmq.topology import Topology
from taskq.backends.rabbitmq.wire import packed
from taskq.clock import Clock, monotonic
from taskq.errors import (
    BackendUnavailableError,
    ConfigurationError,
    PayloadTooLargeError,
    PublishUnknownError,
)
from taskq.job import Attempt, Job

#: Room for what stands in a message beside its body, in bytes.
_AROUND: Final = 4096


class Post:
    """Sends jobs. Any thread."""

    def __init__(self, address: Address, layout: Layout, clock: Clock) -> None:
        self._address = address
        self._layout = layout
        self._clock = clock
        self.publisher = Publisher(address)
        self.topology = Topology(layout, self.publisher.link)
        self.publisher.on_lost = self.topology.forget

    # -- what is sent -----------------------------------------------------------------

    def new(self, job: Job) -> Parcel:
        """A job that a caller pushes. Raises for what can only be kept by a store, or not at all."""
        if job.unique is not None:
            raise store_needed("unique jobs", self._address.location)
        if job.lane is not None:
            raise store_needed("limits, keys and ordered jobs", self._address.location)
        if job.lease <= 0:
            raise ConfigurationError(
                "visibility_timeout <= 0 cannot work on RabbitMQ, where a lease is a connection: "
                "what a lost one held is always given to others"
            )
        self._layout.check(job.queue)
        return self.again(job, (), exact=True)

    def again(
        self, job: Job, history: Sequence[Attempt], *, exact: bool = False, ahead: bool = False
    ) -> Parcel:
        """A job that is due at ``job.due``. ``ahead`` of those that wait already: in the band above its own."""
        band = band_of(job.priority)
        if ahead:
            band = min(BANDS - 1, band + 1)
        now = self._clock.now()
        due = job.due or now
        delay = due - now
        if not exact:
            delay = min(delay, LONGEST_DELAY)
        exchange, key = self._layout.route(job.queue, band, units(delay, exact=exact))
        return self._parcel(exchange, key, job, history, due)

    def suspect(self, job: Job, history: Sequence[Attempt]) -> Parcel:
        """A job that may have ended its worker."""
        return self._parcel("", self._layout.suspects(job.queue), job, history)

    def dead(self, job: Job, history: Sequence[Attempt], queue: str) -> Parcel:
        """A job for the dead letters of ``queue``."""
        return self._parcel("", self._layout.dead(queue), job, history)

    def _parcel(
        self, exchange: str, key: str, job: Job, history: Sequence[Attempt], due: float | None = None
    ) -> Parcel:
        due = job.due if due is None else due
        body = packed(job, history, due)
        while len(body) + _AROUND > self._address.max_message_size and history:
            history = history[len(history) // 2 + 1 :]  # the oldest go first
            body = packed(job, history, due)
        if len(body) + _AROUND > self._address.max_message_size:
            raise PayloadTooLargeError(
                f"job {job.id} is {len(body):,} bytes, and {self._address.location} takes messages of "
                f"{self._address.max_message_size:,} (max_message_size)"
            )
        return Parcel(exchange, key, body, job.id, job.task, _headers(job), job.queue)

    # -- sending ----------------------------------------------------------------------

    def send(self, parcels: Sequence[Parcel], timeout: float | None = None) -> None:
        """Return once the broker has all of them.

        A queue that somebody deleted is declared once more. Raises ``NotPublishedError`` where none is stored,
        ``PublishUnknownError`` where that cannot be known, ``UnroutableError`` where no queue takes them.
        """
        timeout = self._address.publish_timeout if timeout is None else timeout
        end = monotonic() + timeout
        try:
            self.prepare(parcels, timeout)
        except BackendUnavailableError as error:
            raise self.publisher.unsent(len(parcels), error) from error
        returned = self.publisher.send(parcels, max(0.0, end - monotonic()))
        if not returned:
            return
        self.topology.forget()
        self.prepare(returned, max(0.0, end - monotonic()))
        still = self.publisher.send([parcel.copy() for parcel in returned], max(0.0, end - monotonic()))
        if still:
            cause = unroutable(still, self._address)
            if len(still) < len(parcels):
                raise PublishUnknownError(str(cause), job_ids=tuple(p.job_id for p in still)) from cause
            raise cause

    def prepare(self, parcels: Iterable[Parcel], timeout: float) -> None:
        """See that there are queues for them."""
        for queue, delayed in {(parcel.queue, bool(parcel.exchange)) for parcel in parcels}:
            self.topology.ensure(queue, timeout, delayed=delayed)


def _headers(job: Job) -> dict[str, int]:
    """For whoever looks at the broker; nobody here reads them. Those that are 0 are left out."""
    counts = {"taskq-attempts": job.attempts, "taskq-losses": job.losses, "taskq-generation": job.generation}
    return {name: count for name, count in counts.items() if count}
