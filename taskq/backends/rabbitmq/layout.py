"""The names and arguments of everything taskq declares in a broker. Frozen: an existing queue refuses others.

A queue of jobs is six queues of the broker: four bands of priority, the suspects, the dead. What waits for its time
waits in the *ladder*, shared by all queues: one level for each power of two of :data:`UNIT`, each of which passes a job
on after its time, either into the next lower level that the job needs or past it. A job's way down is written in its
routing key, one word a level, and after the last level the key's last word says which queue it is for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from taskq.errors import ConfigurationError, InvalidArgumentError

#: The part of every name of the ladder that changes if its layout ever does.
VERSION: Final = "v1"
BANDS: Final = 4
#: The shortest wait that the ladder knows, in seconds; each level doubles it.
UNIT: Final = 0.032
LEVELS: Final = 33
#: No job is sent further than this into the future, in seconds: eight and a half years.
LONGEST_DELAY: Final = 2.0**28
#: Out of reach: a queue that counts deliveries must never drop a job for it.
_DELIVERIES: Final = 1_000_000_000
#: What a name may have, in bytes.
_LONGEST_NAME: Final = 255
_SUFFIXES: Final = (".p1", ".p2", ".p3", ".suspects", ".dead")

Arguments = Mapping[str, Any]


class Queue(NamedTuple):
    """A queue to declare."""

    name: str
    arguments: Arguments


class Exchange(NamedTuple):
    """An exchange to declare."""

    name: str
    kind: str
    arguments: Arguments


class Binding(NamedTuple):
    """A binding to declare; ``to_exchange`` says what ``target`` is."""

    source: str
    target: str
    key: str
    to_exchange: bool = False


Declaration = Queue | Exchange | Binding


def band_of(priority: int) -> int:
    """The band of a priority: 0 alone, then 1 to 3, 4 to 6, 7 to 9."""
    return min(BANDS - 1, (priority + 2) // 3)


def _quorum(**more: Any) -> dict[str, Any]:
    return {"x-queue-type": "quorum", "x-delivery-limit": _DELIVERIES, **more}


class Layout:
    """Names with one prefix, and what stands behind each."""

    def __init__(self, prefix: str = "", kind: str = "quorum") -> None:
        self.prefix = prefix
        self.kind = kind
        self.unrouted = f"{prefix}taskq.unrouted"
        self._ladder = f"{prefix}taskq.delay.{VERSION}"
        self.arrivals = f"{self._ladder}.deliver"  #: the exchange below the lowest level

    # -- queues of jobs ---------------------------------------------------------------

    def check(self, queue: str) -> None:
        """Refuse a name whose queues could not be told from those of others."""
        if queue.endswith(_SUFFIXES) or (self.prefix + queue).startswith(("amq.", "taskq.")):
            raise InvalidArgumentError(
                f"queue {queue!r}: on RabbitMQ names may not begin with 'amq.' or 'taskq.', nor end with "
                + ", ".join(_SUFFIXES)
            )
        if len(self.lock(queue).encode()) > _LONGEST_NAME:
            raise InvalidArgumentError(
                f"queue {queue!r}: too long for RabbitMQ, which takes {_LONGEST_NAME} bytes with prefix and suffix"
            )

    def band(self, queue: str, band: int) -> str:
        """The broker's queue for one band of ``queue``."""
        return f"{self.prefix}{queue}.p{band}" if band else self.prefix + queue

    def suspects(self, queue: str) -> str:
        """Where jobs wait that were lost with a worker, to be run alone."""
        return f"{self.prefix}{queue}.suspects"

    def dead(self, queue: str) -> str:
        return f"{self.prefix}{queue}.dead"

    def lock(self, queue: str) -> str:
        """A queue that only one connection can have: whose turn it is to read the dead of ``queue``."""
        return f"{self.dead(queue)}.lock"

    def ready(self, queue: str) -> list[str]:
        """Every queue of the broker that holds jobs of ``queue`` which are due."""
        return [self.suspects(queue), *(self.band(queue, band) for band in range(BANDS))]

    def queue(self, queue: str) -> Iterator[Declaration]:
        """What must be there for jobs of ``queue``."""
        work = _quorum() if self.kind == "quorum" else {"x-queue-type": "classic"}
        for band in range(BANDS):
            yield Queue(self.band(queue, band), work)
        yield Queue(self.suspects(queue), _quorum())
        yield Queue(self.dead(queue), _quorum())

    # -- the ladder -------------------------------------------------------------------

    def ladder(self) -> Iterator[Declaration]:
        """What must be there before a job is sent to wait; the parts that receive come first."""
        yield Queue(self.unrouted, _quorum())
        yield Exchange(self.unrouted, "fanout", {})
        yield Binding(self.unrouted, self.unrouted, "")
        yield Exchange(self.arrivals, "topic", {"alternate-exchange": self.unrouted})
        below = self.arrivals
        for level in range(LEVELS):
            name = self.level(level)
            yield Exchange(name, "topic", {})
            yield Queue(
                name,
                _quorum(
                    **{
                        "x-message-ttl": round(UNIT * 1000) << level,
                        "x-dead-letter-exchange": below,
                        "x-dead-letter-strategy": "at-least-once",
                        "x-overflow": "reject-publish",
                    }
                ),
            )
            yield Binding(name, name, _pattern(level, "1"))
            yield Binding(name, below, _pattern(level, "0"), to_exchange=True)
            below = name

    def arrival(self, queue: str) -> Iterator[Declaration]:
        """How jobs for ``queue`` leave the ladder."""
        for band in range(BANDS):
            name = self.band(queue, band)
            yield Binding(self.arrivals, name, "*." * LEVELS + _word(name))

    def level(self, level: int) -> str:
        """The exchange and the queue of one level."""
        return f"{self._ladder}.{level}"

    def route(self, queue: str, band: int, units: int) -> tuple[str, str]:
        """Exchange and routing key for a job that waits for ``units``."""
        if not units:
            return "", self.band(queue, band)
        bits = f"{units:0{LEVELS}b}"
        return self.level(units.bit_length() - 1), f"{'.'.join(bits)}.{_word(self.band(queue, band))}"


def _pattern(level: int, bit: str) -> str:
    """Keys with ``bit`` at ``level``: exactly as many words as every key has."""
    return "*." * (LEVELS - 1 - level) + f"{bit}." + "*." * level + "*"


def _word(name: str) -> str:
    """One word for a queue of any name: names may have dots, which would make several."""
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def units(delay: float, *, exact: bool) -> int:
    """How many of :data:`UNIT` a job waits for ``delay`` seconds, never less.

    Where it need not be ``exact``, at most three levels are used, which makes the wait up to a quarter longer.
    """
    if delay <= 0:
        return 0
    if delay > LONGEST_DELAY:
        raise InvalidArgumentError(
            f"a delay of {delay:,.0f} s is too long: RabbitMQ keeps a job waiting for at most {LONGEST_DELAY:,.0f} s"
        )
    count = math.ceil(round(delay / UNIT, 6))
    spare = count.bit_length() - 3
    if exact or spare <= 0:
        return count
    rounded = -(-count >> spare) << spare
    return rounded if rounded < 1 << LEVELS else count


def check_prefix(prefix: str) -> str:
    """A prefix that leaves room for names."""
    if len(prefix.encode()) > 64 or prefix.startswith("amq."):
        raise ConfigurationError(f"prefix={prefix!r}: at most 64 bytes, and not beginning with 'amq.'")
    return prefix
