"""One queue of the broker as one session consumes it: a channel of its own, a buffer, what is lent, what is done with.

Everything here happens on the link's thread, except where a method says otherwise.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import pika
from pika.channel import Channel
from pika.exceptions import AMQPError

from taskq.backends.rabbitmq.link import Link, Script
from taskq.backends.rabbitmq.topology import cancelled, reply_of
from taskq.backends.rabbitmq.wire import Letter, unpacked
from taskq.clock import monotonic
from taskq.errors import BackendError, BackendUnavailableError

#: Finished deliveries that stand behind an unfinished one are acknowledged one by one, together, this late at most.
_ACK_WITHIN: Final = 0.05
_ACK_AT: Final = 100
#: A buffer that turns over in less than this holds nothing back from others; in seconds.
_SWIFT: Final = 0.25
#: More looks than this at a queue that sends nothing are in vain.
_LOOKS: Final = 200
#: The protocol's largest prefetch.
_MOST: Final = 65_535


class Standing(enum.Enum):
    """Where a delivery stands."""

    HERE = enum.auto()  #: in the buffer, or being moved elsewhere
    LENT = enum.auto()
    SETTLING = enum.auto()
    SETTLED = enum.auto()


class Delivery:
    """A message that the broker has lent to this connection."""

    __slots__ = (
        "body",
        "channel",
        "lane",
        "lent_at",
        "letter",
        "message_id",
        "redelivered",
        "standing",
        "started",
        "tag",
        "token",
        "ward",
    )

    def __init__(
        self, lane: Lane, tag: int, body: bytes, message_id: str, *, redelivered: bool, ward: str
    ) -> None:
        self.lane = lane
        self.channel = lane.channel
        self.tag = tag
        self.body = body
        self.message_id = message_id
        self.redelivered = redelivered
        self.ward = ward  #: the consumer whose prefetch it counts against
        self.standing = Standing.HERE
        self.token = 0
        self.lent_at = 0.0
        self.started: float | None = None
        self.letter: Letter | None = None

    @property
    def alive(self) -> bool:
        """Whether it is still lent to us: any thread."""
        return self.channel is not None and self.lane.channel is self.channel

    def read(self, lent_to: str | None = None) -> Letter:
        """What it says, with the job as lent to that worker. Raises ``DecodeError``."""
        self.letter = letter = unpacked(self.body, lent_to)
        return letter


class Lane:
    """``name`` is the broker's queue, ``queue`` the one that users know."""

    def __init__(
        self,
        link: Link,
        name: str,
        queue: str,
        arguments: dict[str, Any],
        *,
        on_arrival: Callable[[Delivery], None],
        on_gone: Callable[[BackendError], None],
        alone: bool = False,
    ) -> None:
        self.name = name
        self.queue = queue
        self.alone = alone  #: one at a time: the next only once the last has run for long, or ended
        self._link = link
        self._arguments = arguments
        self._on_arrival = on_arrival
        self._on_gone = on_gone
        self.channel: Channel | None = None
        self.buffer: deque[Delivery] = deque()
        self.arrived = 0  #: ever
        self.moved = 0.0  #: when the buffer last gave something, or began to fill
        self.prefetch = 0
        self._ward = ""  #: the present consumer's tag; empty where there is none
        self._against = 0  #: deliveries that count against its prefetch
        self._unacked: dict[int, Delivery] = {}  #: by tag, in order
        self._finished: set[int] = set()
        self._timer = False
        self._turn = (0.0, 0)  #: when the prefetch was last looked at, and ``arrived`` then
        self._scripts: deque[tuple[Callable[[], Script[Any]], Future[Any]]] = deque()
        self._script: Script[Any] | None = None
        self._future: Future[Any] | None = None

    # -- steering ---------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no script is played."""
        return self._script is None and not self._scripts

    @property
    def saturated(self) -> bool:
        """Whether the broker may send nothing more."""
        return self._against >= self.prefetch

    def want(self, missing: int, share: int, most: int) -> None:
        """``missing`` jobs are wanted that the buffer may not have: see that the broker may send them.

        A lane begins with ``share``, and is allowed ``most`` where that is used up; twice as many while they come
        and go so swiftly that none is kept from others.
        """
        if missing <= len(self.buffer) or not self.idle:
            return
        if not self._ward:
            self.play(lambda: self._consume(share))
        elif not self.alone and (wanted := self._more(missing, most)) > self.prefetch:
            self.play(lambda: self._consume(wanted))

    def _more(self, missing: int, most: int) -> int:
        """What the prefetch should be, now that it has left somebody wanting."""
        swift = self._swift()
        if self.prefetch < most and (self.saturated or swift):
            return min(most, max(self.prefetch * 2, missing))
        return 2 * most if swift else 0

    def next_alone(self, long_ago: float) -> None:
        """For a lane of one at a time: go on if all that is lent was started before ``long_ago``."""
        held = self._unacked.values()
        due = self._ward and self.idle and self.saturated and not self.buffer
        if due and all(each.started is not None and each.started < long_ago for each in held):
            self.play(lambda: self._consume(1))

    def _swift(self) -> bool:
        since, before = self._turn
        now = monotonic()
        if self.arrived - before < self.prefetch:
            return False
        self._turn = (now, self.arrived)
        return now - since < _SWIFT

    def look(self, wanted: int) -> Script[int]:
        """A script: bring jobs into the buffer, ``wanted`` of them once the prefetch is used up; what there is more."""
        if not self._ward:
            yield from self._consume(wanted)
        ready = 0
        for _ in range(_LOOKS):
            reply = yield reply_of(self._open_channel.queue_declare, self.name, passive=True)
            ready = int(reply.method.message_count)
            yield from self.flush()
            if not ready or len(self.buffer) >= wanted:
                return ready
            if self.saturated:
                if self.alone:
                    return 0
                yield from self._consume(max(self.prefetch * 2, wanted - len(self.buffer)))
        return 0

    def flush(self) -> Script[None]:
        """A script: whatever the broker has sent to this lane has arrived."""
        if self.channel is not None:
            yield reply_of(self.channel.basic_qos, prefetch_count=max(1, self.prefetch))

    def _consume(self, prefetch: int) -> Script[None]:
        """A script: let the broker send so many more, beside those that are not acknowledged yet."""
        if self.channel is None:
            yield self._new_channel
        yield from self.silence()
        self.prefetch = min(prefetch, _MOST)
        self._turn = (monotonic(), self.arrived)
        channel = self._open_channel
        yield reply_of(channel.basic_qos, prefetch_count=self.prefetch)
        self._against = 0
        self._ward = f"taskq-{id(self):x}-{self.arrived}-{monotonic():.6f}"
        yield reply_of(
            channel.basic_consume,
            self.name,
            self._delivered,
            consumer_tag=self._ward,
            arguments=self._arguments,
        )

    def silence(self) -> Script[None]:
        """A script: the broker sends nothing more. What it has sent stays."""
        if self._ward and self.channel is not None:
            ward, self._ward = self._ward, ""
            yield cancelled(self.channel, ward)

    @property
    def _open_channel(self) -> Channel:
        if self.channel is None:
            raise BackendUnavailableError(f"the channel of {self.name} is closed")
        return self.channel

    # -- scripts, one after the other -------------------------------------------------

    def play(self, make: Callable[[], Script[Any]], future: Future[Any] | None = None) -> Future[Any]:
        """Play a script once those before it are over."""
        future = future or Future()
        self._scripts.append((make, future))
        if self._script is None:
            self._next()
        return future

    def _next(self) -> None:
        while self._scripts and self._script is None:
            make, self._future = self._scripts.popleft()
            self._script = make()
            self._advance(self._script, None)

    def _advance(self, script: Script[Any], reply: Any) -> None:
        if script is not self._script:
            return  # it was overtaken by a loss
        try:
            script.send(reply)(lambda reply: self._advance(script, reply))
        except StopIteration as stop:
            self._over(stop.value, None)
        except (AMQPError, BackendError) as error:
            known = error if isinstance(error, BackendError) else BackendUnavailableError(str(error))
            self._over(None, known)

    def _over(self, value: Any, error: BackendError | None) -> None:
        future, self._script, self._future = self._future, None, None
        if future is not None and not future.done():
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
        self._next()

    # -- the channel ------------------------------------------------------------------

    def _new_channel(self, reply: Callable[[Any], None]) -> None:
        connection = self._link.connection
        if connection is None or not connection.is_open:
            raise self._link.failure or BackendUnavailableError("the broker is away")

        def opened(channel: Channel) -> None:
            self.channel = channel
            channel.add_on_close_callback(self._closed)
            channel.add_on_cancel_callback(lambda frame: self._cancelled(channel))
            reply(channel)

        connection.channel(on_open_callback=opened)

    def _cancelled(self, channel: Channel) -> None:
        """The broker sends no more: the queue is gone, or a job took longer than it allows."""
        if channel.is_open:
            channel.close()

    def _closed(self, channel: Channel, reason: Exception) -> None:
        if channel is self.channel:
            error = self._link.explained(reason)
            self.lose(error)
            self._on_gone(error)

    def lose(self, error: BackendError) -> None:
        """The channel is gone, and with it everything that was lent over it."""
        self.channel = None
        self._ward, self.prefetch, self._against = "", 0, 0
        self.buffer.clear()
        self._unacked.clear()
        self._finished.clear()
        scripts = [future for _, future in self._scripts]
        self._scripts.clear()
        self._over(None, error)
        for future in scripts:
            if not future.done():
                future.set_exception(error)

    # -- messages ---------------------------------------------------------------------

    def _delivered(
        self, channel: Channel, method: Any, properties: pika.BasicProperties, body: bytes
    ) -> None:
        if channel is not self.channel:
            return
        ward = method.consumer_tag
        delivery = Delivery(
            self,
            method.delivery_tag,
            body,
            properties.message_id or "",
            redelivered=method.redelivered,
            ward=ward,
        )
        self._unacked[method.delivery_tag] = delivery
        self._against += ward == self._ward
        self.arrived += 1
        self._on_arrival(delivery)

    def put(self, delivery: Delivery) -> None:
        """To be lent."""
        if not self.buffer:
            self.moved = monotonic()
        self.buffer.append(delivery)

    def finish(self, deliveries: list[Delivery], *, at_once: bool = False) -> None:
        """These are done with: acknowledge them soon; those of another channel are no longer ours to acknowledge."""
        for delivery in deliveries:
            if delivery.channel is self.channel and delivery.tag in self._unacked:
                self._finished.add(delivery.tag)
            else:
                self._link.log("a job was lost before its end could be acknowledged: %s", delivery.message_id)
        self._acknowledge_prefix()
        if self._finished:
            if at_once or len(self._finished) >= _ACK_AT:
                self._acknowledge_rest()
            elif not self._timer:
                self._timer = True
                self._link.later(_ACK_WITHIN, self._acknowledge_rest)

    def _acknowledge_prefix(self) -> None:
        last = 0
        finished, unacked = self._finished, self._unacked
        while finished and (tag := next(iter(unacked))) in finished:
            finished.discard(tag)
            self._against -= unacked.pop(tag).ward == self._ward
            last = tag
        if last and self.channel is not None and self.channel.is_open:
            self.channel.basic_ack(last, multiple=True)

    def _acknowledge_rest(self) -> None:
        self._timer = False
        if self.channel is None or not self.channel.is_open:
            return
        for tag in sorted(self._finished):
            self._against -= self._unacked.pop(tag).ward == self._ward
            self.channel.basic_ack(tag)
        self._finished.clear()

    def leave(self) -> Script[None]:
        """A script: close the channel; what is still lent goes back to the broker."""
        yield from self.silence()
        self._acknowledge_rest()
        channel, self.channel = self.channel, None
        if channel is not None and channel.is_open:
            channel.close()
        self.lose(BackendUnavailableError("this consumer is closed"))
