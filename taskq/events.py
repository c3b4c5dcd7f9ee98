"""Facts, announced once where they become true; logging and metrics subscribe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Subscriber = Callable[["Event"], None]


class Event(NamedTuple):
    """One fact: ``job.completed`` and what is known about it."""

    name: str
    fields: Mapping[str, Any]


class Events:
    """Hands events to subscribers, in the order they subscribed, in the thread that emits."""

    def __init__(self, on_error: Callable[[Event, BaseException], None] | None = None) -> None:
        self._subscribers: list[tuple[str, Subscriber]] = []
        self._on_error = on_error

    def subscribe(self, subscriber: Subscriber, prefix: str = "") -> Callable[[], None]:
        """Call ``subscriber`` for every event whose name starts with ``prefix``; returns what undoes it."""
        entry = (prefix, subscriber)
        self._subscribers.append(entry)

        def unsubscribe() -> None:
            if entry in self._subscribers:
                self._subscribers.remove(entry)

        return unsubscribe

    def wanted(self, name: str) -> bool:
        """Whether anybody listens; lets hot paths skip building the fields."""
        return bool(self._subscribers) and any(name.startswith(prefix) for prefix, _ in self._subscribers)

    def emit(self, name: str, /, **fields: Any) -> None:
        """Announce a fact. A subscriber that raises does not hold up the others, nor the emitter."""
        event: Event | None = None
        for prefix, subscriber in list(self._subscribers):
            if name.startswith(prefix):
                event = event or Event(name, fields)
                try:
                    subscriber(event)
                except Exception as error:  # noqa: BLE001 - a listener must not break what it listens to
                    if self._on_error is not None:
                        self._on_error(event, error)
