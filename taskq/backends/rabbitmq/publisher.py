"""Messages out: many threads share one channel, and each waits for what became of its own.

Confirms are asked for always, and so is the return of what no queue takes. Parcels wait in a line until there is room
among those in flight, so nothing is written that could not be accounted for.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import pika
from pika import spec
from pika.channel import Channel

from taskq.backends.rabbitmq.address import Address
from taskq.backends.rabbitmq.frames import message
from taskq.backends.rabbitmq.link import Link
from taskq.backends.rabbitmq.refusals import AwayError, BlockedError, explain, is_refusal
from taskq.errors import (
    BackendError,
    BackendUnavailableError,
    NotPublishedError,
    PublishUnknownError,
    UnroutableError,
)

#: Parcels in flight: written, not yet confirmed.
_MOST: Final = 2000
_MOST_BYTES: Final = 32 * 1024 * 1024
#: The header by which a returned message is known.
_NONCE: Final = "taskq-nonce"
#: How long a thread that gives up waits to hear how far its parcels came, in seconds.
_LAST_WORD: Final = 5.0


class Fate(enum.Enum):
    """What became of a parcel."""

    WAITING = enum.auto()  #: not written
    WRITTEN = enum.auto()  #: no answer: nobody knows
    CONFIRMED = enum.auto()
    RETURNED = enum.auto()  #: no queue took it
    REFUSED = enum.auto()  #: the queue could not take it


class Parcel:
    """One message on its way."""

    __slots__ = ("body", "exchange", "fate", "headers", "job_id", "key", "nonce", "queue", "shipment", "task")

    def __init__(
        self,
        exchange: str,
        key: str,
        body: bytes,
        job_id: str,
        task: str,
        headers: dict[str, int],
        queue: str,
    ) -> None:
        self.exchange = exchange
        self.key = key
        self.body = body
        self.job_id = job_id
        self.task = task
        self.headers = headers
        self.queue = queue
        self.fate = Fate.WAITING
        self.nonce = 0
        self.shipment: Shipment | None = None

    def copy(self) -> Parcel:
        """The same once more, as if it had never been sent."""
        return Parcel(self.exchange, self.key, self.body, self.job_id, self.task, self.headers, self.queue)


class Shipment:
    """Parcels whose sender waits for all of them. ``on_done`` is called on the link's thread."""

    __slots__ = ("_gate", "error", "left", "on_done", "parcels", "sent")

    def __init__(self, parcels: Sequence[Parcel], on_done: Callable[[Shipment], None] | None = None) -> None:
        self.parcels = parcels
        self.left = len(parcels)
        self.sent = 0
        self.error: BackendError | None = None
        self.on_done = on_done
        self._gate = threading.Lock()
        self._gate.acquire()
        for parcel in parcels:
            parcel.shipment = self

    def wait(self, timeout: float) -> bool:
        """Whether all of it is decided within ``timeout`` seconds."""
        return self._gate.acquire(timeout=timeout)

    def decide(self, parcel: Parcel, fate: Fate) -> None:
        """Say what became of one of its parcels; once."""
        parcel.fate = fate
        self.left -= 1
        if not self.left:
            self.finish()

    def finish(self) -> None:
        """Let the sender go on."""
        self.left = 0
        if self._gate.locked():
            self._gate.release()
        if self.on_done is not None:
            on_done, self.on_done = self.on_done, None
            on_done(self)


class Publisher:
    """Speaks on one link, whose life it follows by :meth:`opened` and :meth:`lost`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.link = Link(address, "publish", on_open=self._opened, on_lost=self._lost)
        self.on_lost: Callable[[], None] = _nobody  #: what was known of the broker may be so no longer
        self._channel: Channel | None = None
        self._line: deque[Shipment] = deque()
        self._flight: dict[int, Parcel] = {}  #: by delivery tag, in order
        self._bytes = 0
        self._tag = 0
        self._nonce = 0

    # -- any thread -------------------------------------------------------------------

    def send(self, parcels: Sequence[Parcel], timeout: float) -> list[Parcel]:
        """Return once every parcel is decided; those that no queue took are the answer.

        Raises ``NotPublishedError`` where none is stored, ``PublishUnknownError`` where that cannot be known.
        """
        shipment = Shipment(parcels)
        self.start(shipment)
        if not shipment.wait(timeout):
            self.link.call(lambda: self._give_up(shipment, timeout))
            shipment.wait(_LAST_WORD)
        if any(parcel.fate not in _GOOD for parcel in parcels):
            self._raise(shipment, timeout)
        return [parcel for parcel in parcels if parcel.fate is Fate.RETURNED]

    def start(self, shipment: Shipment) -> None:
        """Send without waiting."""
        self._line.append(shipment)
        self.link.call(self._pump)

    def _raise(self, shipment: Shipment, timeout: float) -> NoReturn:
        open_ids = tuple(p.job_id for p in shipment.parcels if p.fate is not Fate.CONFIRMED)
        written = any(p.fate is Fate.WRITTEN for p in shipment.parcels)
        refused = any(p.fate is Fate.REFUSED for p in shipment.parcels)
        cause = shipment.error or self.link.unreachable(timeout)
        if written or len(open_ids) < len(shipment.parcels):
            raise PublishUnknownError(
                f"{len(open_ids)} of {len(shipment.parcels)} jobs may or may not be stored ({open_ids[0]}, …): {cause}",
                job_ids=open_ids,
            ) from cause
        if refused:
            raise NotPublishedError(f"{self._address.location} refused the job {open_ids[0]}") from cause
        raise self.unsent(len(open_ids), cause) from cause

    def unsent(self, count: int, cause: BackendError) -> NotPublishedError:
        """The error of so many jobs that were not sent."""
        kind = BlockedError if self.link.blocked else AwayError
        return kind(f"nothing was stored ({count} jobs): {cause}")

    # -- the link's thread ------------------------------------------------------------

    def _opened(self) -> None:
        if self._channel is not None:  # an alarm is over
            self._pump()
        elif self.link.connection is not None:
            self.link.connection.channel(on_open_callback=self._channel_opened)

    def _channel_opened(self, channel: Channel) -> None:
        channel.add_on_close_callback(self._channel_closed)
        channel.add_on_return_callback(self._returned)
        channel.confirm_delivery(self._answered, lambda _: self._ready(channel))

    def _ready(self, channel: Channel) -> None:
        self._channel, self._tag = channel, 0
        self._pump()

    def _pump(self) -> None:
        """Write what waits, as far as there is room."""
        channel = self._channel
        if channel is None or self.link.blocked or not channel.is_open:
            return
        line, flight = self._line, self._flight
        written: list[bytes] = []
        while line and len(flight) < _MOST and self._bytes < _MOST_BYTES:
            shipment = line[0]
            if shipment.sent >= len(shipment.parcels) or not shipment.left:
                line.popleft()
                continue
            parcel = shipment.parcels[shipment.sent]
            shipment.sent += 1
            written.append(self._written(channel, parcel))
        if written:
            channel.connection._output_marshaled_frames([b"".join(written)])

    def _written(self, channel: Channel, parcel: Parcel) -> bytes:
        self._nonce += 1
        parcel.nonce = self._nonce
        self._tag += 1
        parcel.fate = Fate.WRITTEN
        self._flight[self._tag] = parcel
        self._bytes += len(parcel.body)
        return message(
            channel.channel_number,
            channel.connection.params.frame_max,
            parcel.exchange,
            parcel.key,
            parcel.body,
            parcel.job_id,
            parcel.task,
            {**parcel.headers, _NONCE: parcel.nonce},
        )

    def _answered(self, frame: Any) -> None:
        """A confirm or a refusal, of one or of all up to it."""
        method = frame.method
        fate = Fate.CONFIRMED if isinstance(method, spec.Basic.Ack) else Fate.REFUSED
        flight, tag = self._flight, method.delivery_tag
        if method.multiple:
            while flight and (first := next(iter(flight))) <= tag:
                self._landed(flight.pop(first), fate)
        elif tag in flight:
            self._landed(flight.pop(tag), fate)
        self._pump()

    def _landed(self, parcel: Parcel, fate: Fate) -> None:
        self._bytes -= len(parcel.body)
        assert parcel.shipment is not None
        # What was returned is confirmed too, after it.
        parcel.shipment.decide(parcel, Fate.RETURNED if parcel.fate is Fate.RETURNED else fate)

    def _returned(self, _: Channel, __: Any, properties: pika.BasicProperties, ___: bytes) -> None:
        nonce = (properties.headers or {}).get(_NONCE)
        for parcel in self._flight.values():
            if parcel.nonce == nonce:
                parcel.fate = Fate.RETURNED

    def _give_up(self, shipment: Shipment, timeout: float) -> None:
        """Its sender waits no longer: what has not been written never will be."""
        shipment.error = shipment.error or self.link.unreachable(timeout)
        shipment.finish()

    def _channel_closed(self, channel: Channel, reason: Exception) -> None:
        """Nobody will say what became of the parcels in flight."""
        if self._channel is channel:
            self._channel = None
        self.on_lost()
        self._lose(explain(reason, self._address))
        connection = self.link.connection
        if connection is not None and connection.is_open:
            connection.channel(on_open_callback=self._channel_opened)

    def _lost(self, error: BackendError) -> None:
        """The connection is gone, or cannot be had at all."""
        self._channel = None
        self.on_lost()
        self._lose(error)
        if is_refusal(error):
            self._fail_line(error)

    def _fail_line(self, error: BackendError) -> None:
        while self._line:
            shipment = self._line.popleft()
            shipment.error = error
            shipment.finish()

    def _lose(self, error: BackendError) -> None:
        lost, self._flight = list(self._flight.values()), {}
        self._bytes = 0
        for parcel in lost:
            shipment = parcel.shipment
            if shipment is not None and shipment.left:
                shipment.error = error
                shipment.finish()

    def close(self) -> None:
        """Idempotent; whoever waits is told."""
        self.link.close()
        error = BackendUnavailableError("this backend is closed")
        self._lose(error)
        self._fail_line(error)


_GOOD: Final = frozenset({Fate.CONFIRMED, Fate.RETURNED})


def unroutable(parcels: Sequence[Parcel], address: Address) -> UnroutableError:
    """The error of parcels that no queue took although it was declared."""
    first = parcels[0]
    return UnroutableError(
        f"{address.location} has no queue for {len(parcels)} jobs ({first.job_id}, …): "
        f"nothing takes {first.key!r} of exchange {first.exchange!r}"
    )


def _nobody() -> None:
    """Before somebody wants to know."""
