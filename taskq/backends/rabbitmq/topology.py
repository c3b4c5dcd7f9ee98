"""Declaring what jobs need, once for each connection and queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from pika import spec
from pika.channel import Channel

from taskq.backends.rabbitmq.layout import Binding, Declaration, Exchange, Layout, Queue
from taskq.backends.rabbitmq.link import Link, Script, Step


class Topology:
    """What is known to be there, as seen from one link."""

    def __init__(self, layout: Layout, link: Link) -> None:
        self._layout = layout
        self._link = link
        self._lock = threading.Lock()
        self._queues: set[str] = set()
        self.seen: set[str] = set()  #: queues ever declared here
        self._ladder: set[str] = set()  #: queues that jobs reach from the ladder

    def ensure(self, queue: str, timeout: float, *, delayed: bool = False) -> None:
        """Return once there is everything for jobs of ``queue``; with ``delayed`` also for those that wait."""
        known = self._ladder if delayed else self._queues
        if queue in known:
            return
        with self._lock:
            if queue not in self._queues:
                self._declare(self._layout.queue(queue), timeout)
                self._queues.add(queue)
                self.seen.add(queue)
            if delayed and queue not in self._ladder:
                if not self._ladder:
                    self._declare(self._layout.ladder(), timeout)
                self._declare(self._layout.arrival(queue), timeout)
                self._ladder.add(queue)

    def forget(self) -> None:
        """Nothing is certain any more: the connection was lost, or a queue is gone."""
        self._queues.clear()
        self._ladder.clear()

    def _declare(self, declarations: Iterable[Declaration], timeout: float) -> None:
        self._link.ask(lambda channel: _declared(channel, declarations), timeout)


def _declared(channel: Channel, declarations: Iterable[Declaration]) -> Script[None]:
    for each in declarations:
        yield _step(channel, each)


def _step(channel: Channel, what: Declaration) -> Step:
    match what:
        case Queue(name, arguments):
            return reply_of(channel.queue_declare, name, durable=True, arguments=arguments)
        case Exchange(name, kind, arguments):
            return reply_of(channel.exchange_declare, name, kind, durable=True, arguments=arguments)
        case Binding(source, target, key, True):
            return reply_of(channel.exchange_bind, target, source, key)
        case Binding(source, target, key):
            return reply_of(channel.queue_bind, target, source, key)


def cancelled(channel: Channel, tag: str) -> Step:
    """The step that ends a consumer, once the broker has said so.

    The driver's own cancel sends back what arrives meanwhile, as if it had been lost; here it arrives.
    """

    def start(reply: Callable[[Any], None]) -> None:
        def over(frame: Any) -> None:
            channel._consumers.pop(tag, None)
            reply(frame)

        channel._rpc(
            spec.Basic.Cancel(consumer_tag=tag), over, [(spec.Basic.CancelOk, {"consumer_tag": tag})]
        )

    return start


def reply_of(do: Callable[..., Any], *arguments: Any, **named: Any) -> Step:
    """The step that calls a method of the driver and goes on with the broker's reply."""

    def start(reply: Callable[[Any], None]) -> None:
        do(*arguments, **named, callback=reply)

    return start
