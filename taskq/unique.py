"""Unique jobs, debounce and throttle: what is declared, and the key that a call gets.

A key is made of the task's name and the call's arguments as *values*, not of the encoded bytes: sets and dicts
that are equal give equal keys in whatever order they were built, an argument counts the same by position and by
name, and one that is left out the same as its default. Values of different types are different (``1``, ``1.0``
and ``True``; one instant in two time zones).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict, get_args

import msgpack

from taskq import codec
from taskq.clock import Duration
from taskq.errors import ConfigurationError, EncodeError, InvalidArgumentError
from taskq.extensions import Mark
from taskq.job import Unique
from taskq.strategies import duration

#: What tells calls apart: all arguments, some of them by name, a function of them, or a text for all calls.
KeySource = bool | str | Sequence[str] | Callable[..., str]
Until = Literal["ended", "started"]
Conflict = Literal["return", "raise", "replace", "reschedule"]


class UniqueKeywords(TypedDict, total=False):
    """Options of tasks and of calls."""

    unique: KeySource
    unique_for: Duration
    unique_until: Until
    on_conflict: Conflict
    debounce: Duration
    debounce_max: Duration
    throttle: Duration


UNIQUE_KEYWORDS: Final = frozenset(UniqueKeywords.__annotations__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueRule:
    """A declaration, checked."""

    by: str | tuple[str, ...] | Callable[..., str] | None = None  #: ``None``: all arguments
    until: Literal["ended", "started", "period"] = "ended"
    period: float = 0.0
    conflict: Conflict = "return"
    wait: float | None = None  #: debounce: how long after the latest call
    longest: float | None = None  #: and at most this long after the first

    def key(
        self,
        task: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        named: Callable[[], Mapping[str, Any]],
    ) -> str:
        """The key of a call; ``named`` gives its arguments by name, without those that are the default."""
        if isinstance(self.by, str):
            return _short(task, self.by)
        if callable(self.by):
            text = self.by(*args, **kwargs)
            if not isinstance(text, str):
                raise InvalidArgumentError(f"unique= of {task} returned {text!r}: expected a str")
            return _short(task, text)
        arguments = named()
        if self.by is not None:
            arguments = {name: arguments[name] for name in self.by if name in arguments}
        return f"{task}:{digest(arguments)}"

    def unique(self, key: str, now: float) -> Unique:
        """What the job carries."""
        latest = None if self.longest is None else now + self.longest
        return Unique(key, self.until, self.period, self.conflict, latest)


def check_unique(declared: Mapping[str, Any], call: Mapping[str, Any] | None = None) -> UniqueRule | None:
    """The rule that a task's options and a call's make together; the call's win."""
    given = _merged(declared, call or {})
    source = given.pop("unique", None)
    modes = [name for name in ("debounce", "throttle") if name in given]
    if source is False or (source is None and not given):
        return None
    if source is None and not modes:
        raise ConfigurationError(f"{next(iter(given))}= needs unique=: say what makes two calls the same")
    if len(modes) == 2 or (modes and given.keys() & {"unique_for", "unique_until", "on_conflict"}):
        raise ConfigurationError(
            f"{' and '.join(f'{name}=' for name in given)} contradict each other: {modes[0]}= says it all"
        )
    by = _source(source)
    if "throttle" in given:
        return UniqueRule(by=by, until="period", period=_seconds(given, "throttle"))
    if "debounce" in given:
        return _debounce(by, given)
    if "debounce_max" in given:
        raise ConfigurationError("debounce_max= needs debounce=")
    return UniqueRule(
        by=by,
        until=_choice(given, "unique_until", Until),
        period=_seconds(given, "unique_for") if "unique_for" in given else 0.0,
        conflict=_choice(given, "on_conflict", Conflict),
    )


#: Levels of nesting that a unique key may have: what the smallest stack of any supported Python bears.
MAX_NESTING: Final = 200


def digest(value: Any) -> str:
    """A text that is the same for equal values of the same types, and for no others.

    Raises ``EncodeError`` for what cannot be encoded, or is nested more than :data:`MAX_NESTING` levels deep.
    """
    data = codec.encode(value, root="arguments")
    try:
        found = msgpack.unpackb(data[2:], strict_map_key=False, object_pairs_hook=_Pairs)
        return _digest(found, MAX_NESTING).hex()
    except (RecursionError, ValueError) as error:
        raise EncodeError(
            f"the arguments are nested more than {MAX_NESTING} levels deep, too deeply to make a unique key of them"
        ) from error


class _Pairs(list[Any]):
    """A dict's items, whose keys may be what Python cannot hash."""


_SETS: Final = frozenset({Mark.SET, Mark.FROZENSET})


def _digest(value: Any, levels: int) -> bytes:
    if levels < 0:
        raise RecursionError
    inner = levels - 1
    if isinstance(value, _Pairs):
        return _hash(b"map", sorted(_digest(key, inner) + _digest(item, inner) for key, item in value))
    if not isinstance(value, list):
        return _hash(b"leaf", [msgpack.packb(value)])
    parts = [_digest(item, inner) for item in value]
    mark = value[0].code if value and isinstance(value[0], msgpack.ExtType) else None
    if mark in _SETS:
        parts[1:] = sorted(parts[1:])
    elif mark == Mark.COUNTER:
        parts[1:] = sorted(a + b for a, b in zip(parts[1::2], parts[2::2], strict=True))
    return _hash(b"list", parts)


def _hash(kind: bytes, parts: Iterable[bytes]) -> bytes:
    return hashlib.blake2b(kind + b"".join(parts), digest_size=16).digest()


def _short(task: str, text: str) -> str:
    key = f"{task}:={text}"
    return key if len(key) <= 300 else f"{task}:{digest(text)}"


def _merged(declared: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """A call that debounces or throttles takes from the declaration only what makes two calls the same."""
    if call.get("unique") is False:
        return {}
    if call.keys() & {"debounce", "throttle"}:
        declared = {name: value for name, value in declared.items() if name == "unique"}
    return {name: value for name, value in {**declared, **call}.items() if value is not None}


def _source(source: Any) -> str | tuple[str, ...] | Callable[..., str] | None:
    if source is None or source is True:
        return None
    if isinstance(source, str) and source:
        return source
    if callable(source):
        return source  # type: ignore[no-any-return]
    if (
        isinstance(source, Sequence | set | frozenset)
        and source
        and all(isinstance(name, str) for name in source)
    ):
        return tuple(sorted(source))
    raise InvalidArgumentError(
        f"unique={source!r}: use True (all arguments), a list of argument names, a function of the arguments, "
        "or a text"
    )


def _debounce(by: Any, given: Mapping[str, Any]) -> UniqueRule:
    wait = _seconds(given, "debounce")
    longest = _seconds(given, "debounce_max") if "debounce_max" in given else None
    if longest is not None and longest < wait:
        raise ConfigurationError(f"debounce_max={longest:g} is less than debounce={wait:g}")
    return UniqueRule(by=by, until="started", conflict="reschedule", wait=wait, longest=longest)


def _seconds(given: Mapping[str, Any], name: str) -> float:
    number = duration(given[name], name)
    if not 0 < number < math.inf:
        raise InvalidArgumentError(f"{name}={given[name]!r}: use more than 0 seconds")
    return number


def _choice(given: Mapping[str, Any], name: str, choices: Any) -> Any:
    allowed = get_args(choices)
    value = given.get(name, allowed[0])
    if value not in allowed:
        raise InvalidArgumentError(f"{name}={value!r}: use {', '.join(map(repr, allowed))}")
    return value
