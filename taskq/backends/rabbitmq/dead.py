"""Dead letters: read by one at a time, who has the queue for itself meanwhile, and put back as they were.

The broker cannot show a queue without lending what is in it. So a listing is lent all of it, over a channel of its own,
and gives it back in one stroke; whatever ends the channel before gives it back too. Others wait meanwhile: for this
process's own lock, and for a queue of the broker that only one connection can have.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

import pika
from pika.channel import Channel

from taskq.backend import Page
from taskq.backends import moves
from taskq.backends.rabbitmq.layout import Layout
from taskq.backends.rabbitmq.link import Link, Script
from taskq.backends.rabbitmq.post import Post
from taskq.backends.rabbitmq.publisher import Fate, Parcel, Shipment
from taskq.backends.rabbitmq.refusals import MissingError, TakenError
from taskq.backends.rabbitmq.topology import cancelled, reply_of
from taskq.backends.rabbitmq.wire import undecodable, unpacked
from taskq.clock import Clock, monotonic
from taskq.errors import BackendUnavailableError, DecodeError, InvalidArgumentError
from taskq.job import Attempt, Job, State

T = TypeVar("T")

#: As many as one consumer may be lent.
_PREFETCH: Final = 65_535
#: Looks in a row at a queue whose messages are neither there nor sent.
_VAIN: Final = 200
#: Between attempts to have a queue for oneself, in seconds.
_PAUSE: Final = 0.02


class Letter(NamedTuple):
    """A dead job, and the tag by which it is lent."""

    tag: int
    job: Job
    history: tuple[Attempt, ...]

    @property
    def order(self) -> tuple[float, int]:
        """Oldest first; of those that died together, as they stand in the queue."""
        return (self.job.ended or 0.0, self.tag)


class DeadLetters:
    """The dead of all queues. Any thread; each call speaks on a channel of its own."""

    def __init__(self, link: Link, post: Post, layout: Layout, clock: Clock) -> None:
        self._link = link
        self._post = post
        self._layout = layout
        self._clock = clock
        self._turn = threading.Lock()

    def page(self, queue: str, limit: int, cursor: str | None, timeout: float) -> Page:
        """A slice of the dead of ``queue``, oldest first."""
        after = None if cursor is None else _parse_cursor(cursor)
        letters = self._alone(queue, lambda channel: self._listed(channel, queue), timeout)
        jobs = [replace(letter.job, state=State.DEAD, history=letter.history) for letter in letters]
        if after is not None:
            jobs = [job for job in jobs if _place(job) > after]
        more = json.dumps(_place(jobs[limit - 1])) if len(jobs) > limit else None
        return Page(jobs[:limit], more)

    def revive(self, queue: str, ids: Sequence[str] | None, due: float, timeout: float) -> list[str]:
        """Send dead jobs to their queues again, and only then forget that they were dead."""
        wanted = None if ids is None else set(ids)
        self._post.topology.ensure(queue, timeout, delayed=due > self._clock.now())
        return self._alone(queue, lambda channel: self._revived(channel, queue, wanted, due), timeout)

    def _alone(self, queue: str, script: Callable[[Channel], Script[list[T]]], timeout: float) -> list[T]:
        """Play ``script`` when nobody else has the queue."""
        end = monotonic() + timeout
        pause = threading.Event()
        with self._turn:
            while True:
                left = max(0.0, end - monotonic())
                try:
                    return self._link.ask(script, left)
                except MissingError:
                    return []
                except BackendUnavailableError:
                    self._link.call(lambda: self._unlock(queue))
                    raise
                except TakenError:
                    if not left:
                        raise
                    pause.wait(_PAUSE)

    def _unlock(self, queue: str) -> None:
        """A script was given up: what it locked is free again."""
        name = self._layout.lock(queue)

        def script(channel: Channel) -> Script[Any]:
            return (yield reply_of(channel.queue_delete, name))

        self._link.play(script)

    # -- scripts ----------------------------------------------------------------------

    def _listed(self, channel: Channel, queue: str) -> Script[list[Letter]]:
        letters = yield from self._read(channel, queue)
        yield from self._let_go(channel, queue, len(letters))
        return letters

    def _revived(
        self, channel: Channel, queue: str, wanted: set[str] | None, due: float
    ) -> Script[list[str]]:
        letters = yield from self._read(channel, queue)
        chosen = [letter for letter in letters if wanted is None or letter.job.id in wanted]
        parcels = [self._living(letter, due) for letter in chosen]
        if parcels:
            yield lambda reply: self._send(parcels, reply)
        revived = []
        for letter, parcel in zip(chosen, parcels, strict=True):
            if parcel.fate is Fate.CONFIRMED:
                channel.basic_ack(letter.tag)
                revived.append(letter.job.id)
        yield from self._let_go(channel, queue, len(letters) - len(revived))
        if len(revived) < len(chosen):
            raise BackendUnavailableError(
                f"{len(revived)} of {len(chosen)} dead jobs were revived; the others are still dead: "
                f"{self._link.failure or 'the broker did not confirm them'}"
            )
        return revived

    def _living(self, letter: Letter, due: float) -> Parcel:
        job = moves.revived(letter.job, due, self._clock.now())
        return self._post.again(job, letter.history, exact=True)

    def _send(self, parcels: Sequence[Parcel], reply: Callable[[Any], None]) -> None:
        self._post.publisher.start(Shipment(parcels, lambda _: self._link.call(lambda: reply(None))))

    def _read(self, channel: Channel, queue: str) -> Script[list[Letter]]:
        """All of them, lent over ``channel``."""
        name = self._layout.dead(queue)
        yield reply_of(channel.queue_declare, name, passive=True)
        yield reply_of(channel.queue_declare, self._layout.lock(queue), exclusive=True)
        found: list[tuple[int, str, bytes]] = []

        def on_message(_: Channel, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
            found.append((method.delivery_tag, properties.message_id or "", body))

        vain = 0
        while vain < _VAIN:
            before = len(found)
            if before % _PREFETCH == 0:
                yield reply_of(channel.basic_qos, prefetch_count=_PREFETCH)
                yield reply_of(channel.basic_consume, name, on_message, exclusive=not before)
            reply = yield reply_of(channel.queue_declare, name, passive=True)
            yield reply_of(channel.basic_qos, prefetch_count=_PREFETCH)  # what was sent has come
            if not reply.method.message_count:
                break
            vain = vain + 1 if len(found) == before else 0
        return sorted((self._letter(queue, *each) for each in found), key=lambda letter: letter.order)

    def _let_go(self, channel: Channel, queue: str, count: int) -> Script[None]:
        """Give back what is lent over ``channel``, in one stroke; once this is over the queue has these ``count``."""
        for tag in list(channel.consumer_tags):
            yield cancelled(channel, tag)
        channel.basic_nack(0, multiple=True, requeue=True)
        for _ in range(_VAIN):
            reply = yield reply_of(channel.queue_declare, self._layout.dead(queue), passive=True)
            if reply.method.message_count >= count:
                break
        yield reply_of(channel.queue_delete, self._layout.lock(queue))

    def _letter(self, queue: str, tag: int, message_id: str, body: bytes) -> Letter:
        try:
            job, history = unpacked(body)
        except DecodeError as error:
            job, history = undecodable(body, queue, message_id or str(tag), error, self._clock.now())
        return Letter(tag, job, history)


def _place(job: Job) -> tuple[float, str]:
    return (job.ended or 0.0, job.id)


def _parse_cursor(cursor: str) -> tuple[float, str]:
    try:
        ended, job_id = json.loads(cursor)
        return float(ended), str(job_id)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{cursor!r} is not a cursor of this listing") from error
