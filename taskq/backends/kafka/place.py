"""Where the jobs are: the servers, and what the topics and the group are called."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from taskq.errors import ConfigurationError

#: Topics per queue, from the lowest priority to the highest.
BANDS: Final = 4
_SUFFIXES: Final = ("", ".p1", ".p2", ".p3")
_DEAD: Final = ".dead"
#: The longest topic name that Kafka takes.
_LONGEST: Final = 249
_PLAIN: Final = re.compile(r"[A-Za-z0-9-]|\.")
_OWN_ENDINGS: Final = re.compile(r"\.(?=(p[123]|dead)$)")


def band(priority: int) -> int:
    """Which of the four bands serves ``priority``: 0, 1 to 3, 4 to 6, 7 and more."""
    return max(0, min(BANDS - 1, (priority + 2) // 3))


@dataclass(frozen=True, slots=True)
class Place:
    """One set of queues in one cluster."""

    servers: str
    prefix: str = "taskq"
    partitions: int = 12
    security: Mapping[str, Any] = field(default_factory=dict)  #: librdkafka's settings
    location: str = ""  #: for people, with the password masked

    @property
    def group(self) -> str:
        """The consumer group of all workers."""
        return self.prefix

    @property
    def delays(self) -> str:
        """The topic of jobs that are due later; each partition is one hop."""
        return f"{self.prefix}-delay.v1"

    def work(self, queue: str, band: int) -> str:
        """The topic of one priority band of ``queue``."""
        return self._topic(queue, _SUFFIXES[band])

    def bands(self, queue: str) -> list[str]:
        return [self.work(queue, n) for n in range(BANDS)]

    def dead(self, queue: str) -> str:
        """The compacted topic of the dead letters of ``queue``."""
        return self._topic(queue, _DEAD)

    def queues(self, topics: list[str]) -> list[str]:
        """The queues whose topics are among ``topics``."""
        start = f"{self.prefix}."
        names = (topic.removeprefix(start) for topic in topics if topic.startswith(start))
        return [_decoded(name) for name in names if not name.endswith((*_SUFFIXES[1:], _DEAD))]

    def client(self, **settings: Any) -> dict[str, Any]:
        """Settings of a client of these servers."""
        return {
            "bootstrap.servers": self.servers,
            "client.id": "taskq",
            "log_level": 0,
            "socket.keepalive.enable": True,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 1000,
            **self.security,
            **{
                name if callable(value) else name.replace("_", "."): value for name, value in settings.items()
            },
        }

    def _topic(self, queue: str, suffix: str) -> str:
        topic = f"{self.prefix}.{_encoded(queue)}{suffix}"
        if len(topic) > _LONGEST:
            raise ConfigurationError(
                f"queue {queue!r} makes a topic name of {len(topic)} characters ({topic}); Kafka takes {_LONGEST}"
            )
        return topic


@functools.lru_cache(4096)
def _encoded(queue: str) -> str:
    """``queue`` in letters that a topic may have: others as ``_`` and two hex digits per byte."""
    text = "".join(
        char if _PLAIN.fullmatch(char) else "".join(f"_{byte:02X}" for byte in char.encode())
        for char in queue
    )
    return _OWN_ENDINGS.sub("_2E", text)


def _decoded(name: str) -> str:
    raw = re.sub(rb"_([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), name.encode())
    return raw.decode(errors="replace")
