"""Declared limits: how often and how many at once, per task and per key, and whose turn it is among keys."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, get_args
from uuid import UUID

from taskq.errors import InvalidArgumentError
from taskq.job import Lane

#: A key as callers give it; it travels as text.
Key = str | int | UUID
#: Where a task's keys come from: the name of a parameter, or a callable that is given the call's arguments.
KeySource = str | Callable[..., Key | None]
WeightSource = float | Callable[..., float]
Overflow = Literal["raise", "drop_newest", "drop_oldest"]

#: Longest key, in characters.
MAX_KEY: Final = 200
#: Longest window of a rate: 31 days.
MAX_PER: Final = 31 * 86_400.0
MAX_COUNT: Final = 1_000_000

_UNITS: Final = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
}
_RATE: Final = re.compile(r"\s*(\d+)\s*/\s*(\d+(?:\.\d+)?)?\s*([A-Za-z]+)\s*")


@dataclass(frozen=True, slots=True)
class Rate:
    """At most ``count`` starts in any ``per`` seconds, counted over all workers.

    The window slides: no stretch of ``per`` seconds, wherever it begins, holds more. Without ``burst`` all of them
    may start at once. With it, at most ``burst`` start in any ``per * burst / count`` seconds: 1 spaces them evenly.
    """

    count: int
    per: float | timedelta = 60.0
    burst: int | None = None

    def __post_init__(self) -> None:
        per = self.per.total_seconds() if isinstance(self.per, timedelta) else self.per
        if not _is_count(self.count) or self.count > MAX_COUNT:
            raise InvalidArgumentError(f"Rate({self.count!r}): use an int from 1 to {MAX_COUNT:,}")
        if isinstance(per, bool) or not 0.001 <= per <= MAX_PER:
            raise InvalidArgumentError(f"Rate(per={self.per!r}): use 0.001 to {MAX_PER:,.0f} seconds")
        if self.burst is not None and (not _is_count(self.burst) or self.burst > self.count):
            raise InvalidArgumentError(f"Rate(burst={self.burst!r}): use an int from 1 to {self.count}")
        object.__setattr__(self, "per", float(per))

    @property
    def seconds(self) -> float:
        """``per`` as a number."""
        assert isinstance(self.per, float)
        return self.per

    def __str__(self) -> str:
        burst = "" if self.burst is None else f" (burst {self.burst})"
        return f"{self.count}/{self.seconds:g}s{burst}"


RateLimit = str | int | Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a task declares, in numbers: the form that is kept beside the jobs."""

    task: str
    rate: Rate | None = None
    concurrency: int | None = None
    key_rate: Rate | None = None
    key_concurrency: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A task's declaration, checked."""

    rate: Rate | None = None
    concurrency: int | None = None
    key_rate: Rate | None = None
    key_concurrency: int | None = None
    ordered: bool = False
    key: KeySource | None = None
    fairness_key: KeySource | None = None
    weight: WeightSource | None = None
    most: int | None = None
    overflow: Overflow = "raise"

    def limits(self, task: str) -> Limits:
        """The numbers, for the backend to keep."""
        return Limits(
            task=task,
            rate=self.rate,
            concurrency=self.concurrency,
            key_rate=self.key_rate,
            key_concurrency=self.key_concurrency,
        )

    @property
    def per_key(self) -> bool:
        """Whether each key has limits of its own."""
        return self.key_rate is not None or self.key_concurrency is not None

    @property
    def limited(self) -> bool:
        """Whether its jobs are under limits, and not only sharing."""
        bounds = (self.rate, self.concurrency, self.most)
        return self.per_key or self.ordered or any(bound is not None for bound in bounds)


NOTHING: Final = Declared()


def as_facts(limits: Limits) -> dict[str, Any]:
    """Limits as plain values, to send to another process; :func:`from_facts` reads them."""
    return {
        "task": limits.task,
        "concurrency": limits.concurrency,
        "key_concurrency": limits.key_concurrency,
        **{
            name: None if rate is None else [rate.count, rate.seconds, rate.burst]
            for name, rate in (("rate", limits.rate), ("key_rate", limits.key_rate))
        },
    }


def from_facts(facts: Mapping[str, Any]) -> Limits:
    """Limits from :func:`as_facts`."""
    rates = {name: None if facts[name] is None else Rate(*facts[name]) for name in ("rate", "key_rate")}
    return Limits(**{**facts, **rates})


def parse_rate(name: str, value: object) -> Rate:
    """``"10/m"``, ``"100/s"``, ``"5/30s"``, a number of starts per second, or a ``Rate``."""
    if isinstance(value, Rate):
        return value
    if _is_count(value):
        return Rate(value, 1.0)  # type: ignore[arg-type] # checked
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{name}={value!r}: write it as '10/m' or Rate(10, per=60)")
    match = _RATE.fullmatch(value)
    if match is None:
        raise InvalidArgumentError(f"{name}={value!r}: {_meant(value)}")
    count, many, unit = match.groups()
    if unit.lower() not in _UNITS:
        near = difflib.get_close_matches(unit.lower(), _UNITS, n=1, cutoff=0.5)
        said = f"{count}/{many or ''}{near[0] if near else 'm'}"
        raise InvalidArgumentError(
            f"{name}={value!r}: no unit {unit!r} (did you mean {said!r}?); use s, m, h, d"
        )
    return Rate(int(count), _UNITS[unit.lower()] * float(many or 1))


def check_key(name: str, value: object) -> str:
    """A key as text: a str, an int or a UUID."""
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise InvalidArgumentError(f"{name}={value!r}: use a str, an int or a UUID")
    text = str(value)
    if not 1 <= len(text) <= MAX_KEY or not text.isprintable():
        raise InvalidArgumentError(f"{name}={value!r}: use 1 to {MAX_KEY} printable characters")
    return text


def check_weight(value: object) -> float:
    """A share: a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgumentError(f"weight={value!r}: use a number above 0")
    if not math.isfinite(value) or not 0.001 <= value <= 1000:
        raise InvalidArgumentError(f"weight={value!r}: use 0.001 to 1000")
    return float(value)


def declared(given: Mapping[str, Any]) -> Declared | None:
    """The limits among a task's keywords, checked; ``None`` where there are none."""
    found: dict[str, Any] = {}
    for keyword, check in _CHECKS.items():
        if given.get(keyword) is not None:
            found[_FIELDS.get(keyword, keyword)] = check(keyword, given[keyword])
    if "key" in found and "fairness_key" in found:
        raise InvalidArgumentError(
            "key and fairness_key: give one; keys share fairly among themselves already"
        )
    if found.get("ordered") and found.get("key_concurrency", 1) != 1:
        raise InvalidArgumentError("ordered=True runs one job of a key at a time: leave key_concurrency out")
    per_key = "key_rate" in found or "key_concurrency" in found
    if per_key and "fairness_key" in found:
        raise InvalidArgumentError(
            "limits per key need key=, not fairness_key=; its keys share fairly as well"
        )
    if "overflow" in found and "most" not in found:
        raise InvalidArgumentError(f"overflow={found['overflow']!r} needs max_waiting=, how many may wait")
    if not found.get("ordered"):
        found.pop("ordered", None)
    return Declared(**found) if found else None


def lane(
    task: str,
    limits: Declared | None,
    given: tuple[str | None, str | None, float | None],
    value: Callable[[KeySource | WeightSource], Any],
) -> Lane | None:
    """The lane of one call. ``given`` are the call's own key, fairness key and weight; ``value`` works out what the
    declaration takes from the arguments."""
    limits = limits or NOTHING
    key, share, weight = given
    if key is None and limits.key is not None and share is None:
        key = _optional_key("key", value(limits.key))
    if share is None and limits.fairness_key is not None and key is None:
        share = _optional_key("fairness_key", value(limits.fairness_key))
    if key is not None and share is not None:
        raise InvalidArgumentError(f"{task}: key and fairness_key contradict each other: give one of them")
    if key is None and limits.per_key:
        raise InvalidArgumentError(f"{task} has limits per key: declare key=, or give key= with the call")
    line = key or share or ""
    if not line and not limits.limited:
        return None
    if weight is None and limits.weight is not None:
        weight = check_weight(value(limits.weight))
    return Lane(
        task=task if limits.limited else "",
        key=line,
        weight=weight or 1.0,
        ordered=limits.ordered,
        most=limits.most,
        overflow=limits.overflow,
    )


def _optional_key(name: str, value: object) -> str | None:
    return None if value is None else check_key(name, value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _meant(value: str) -> str:
    """The nearest rate that can be read, of a text that cannot."""
    number, words = re.search(r"\d+", value), re.findall(r"[A-Za-z]+", value)
    if number is None:
        return "write it as '10/m': a count, a slash, and s, m, h or d"
    units = difflib.get_close_matches(words[-1].lower(), _UNITS, n=1) if words else []
    return f"did you mean '{int(number[0])}/{units[0] if units else 's'}'? A count, a slash, and s, m, h or d"


def _count(name: str, value: object) -> int:
    if not _is_count(value):
        raise InvalidArgumentError(f"{name}={value!r}: use an int of at least 1")
    return value  # type: ignore[return-value] # checked


def _source(name: str, value: object) -> object:
    if callable(value) or (isinstance(value, str) and value.isidentifier()):
        return value
    raise InvalidArgumentError(
        f"{name}={value!r}: use the name of a parameter, or a callable of the arguments"
    )


def _weight(name: str, value: object) -> object:
    return value if callable(value) else check_weight(value)


def _overflow(name: str, value: object) -> object:
    if value in _OVERFLOWS:
        return value
    near = difflib.get_close_matches(str(value), _OVERFLOWS, n=1)
    raise InvalidArgumentError(
        f"{name}={value!r}: use one of {', '.join(map(repr, _OVERFLOWS))}"
        + (f" (did you mean {near[0]!r}?)" if near else "")
    )


_OVERFLOWS: Final = get_args(Overflow)
_FIELDS: Final = {"rate_limit": "rate", "key_rate_limit": "key_rate", "max_waiting": "most"}
_CHECKS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "rate_limit": parse_rate,
    "concurrency": _count,
    "key_rate_limit": parse_rate,
    "key_concurrency": _count,
    "ordered": lambda _, value: bool(value),
    "key": _source,
    "fairness_key": _source,
    "weight": _weight,
    "max_waiting": _count,
    "overflow": _overflow,
}
