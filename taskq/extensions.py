"""Values that msgpack does not know, as extension codes: one code per type, and never reused.

A *leaf* is an extension with its bytes inside. A *mark* stands first in a list and says what the rest of that
list was: ``(1, 2)`` travels as ``[Ext(TUPLE), 1, 2]``. Containers are marked, because extensions inside
extensions would recurse.
"""

from __future__ import annotations

import decimal
import enum
import pathlib
import struct
import sys
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from typing import Any, Final

import msgpack

from taskq.errors import DecodeError


class Unencodable(Exception):  # noqa: N818 - never leaves the codec, which adds the path
    """A value cannot travel; the message says why and what to write instead."""


class Mark(enum.IntEnum):
    """What a marked list was."""

    TUPLE = 1
    SET = 2
    FROZENSET = 3
    DEQUE = 4  #: the first item is ``maxlen``
    ORDERED_DICT = 5  #: keys and values take turns
    COUNTER = 6  #: keys and counts take turns
    ENUM = 7  #: the member's name; the mark's own bytes are the registered name, here and below
    FLAG = 8  #: the number
    RECORD = 9  #: field names and values take turns
    NAMED_TUPLE = 10
    MODEL = 11  #: the list of fields that were set, then names and values in turns
    CUSTOM = 12  #: whatever the registered ``dump`` made


class Leaf(enum.IntEnum):
    """What an extension's bytes are."""

    BIG_INT = 32
    SURROGATES = 33  #: text that UTF-8 refuses
    BYTEARRAY = 34
    COMPLEX = 35
    DECIMAL = 36
    UUID = 37
    DATETIME = 38
    DATE = 39
    TIME = 40
    TIMEDELTA = 41
    PATH = 42


def dump_text(value: str) -> bytes:
    """UTF-8 that lets lone surrogates through."""
    return value.encode("utf-8", "surrogatepass")


def dump_big_int(value: int) -> bytes:
    """The shortest signed big-endian form."""
    return value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)


def _load_big_int(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def _dump_complex(value: complex) -> bytes:
    return struct.pack(">dd", value.real, value.imag)


def _load_complex(data: bytes) -> complex:
    return complex(*struct.unpack(">dd", data))


def _dump_decimal(value: decimal.Decimal) -> bytes:
    return str(value).encode("ascii")


def _load_decimal(data: bytes) -> decimal.Decimal:
    text = data.decode("ascii")
    value = decimal.Decimal(text)
    # A thread whose decimal context does not trap InvalidOperation would turn damage into NaN.
    if str(value) != text:
        raise DecodeError(f"not a decimal number: {text[:40]!r}")
    return value


def _dump_uuid(value: uuid.UUID) -> bytes:
    return value.bytes


def _load_uuid(data: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=data)


# -- dates and times ------------------------------------------------------------------

_pack = msgpack.packb
_MICROSECOND: Final = timedelta(microseconds=1)


def _dump_zone(zone: tzinfo | None) -> Any:
    """``None`` (naive), a zone's name, an offset in microseconds, or an offset and its name."""
    if zone is None or zone is UTC:
        return None if zone is None else 0
    if type(zone) is timezone:
        offset = zone.utcoffset(None) // _MICROSECOND
        # The name is only in the constructor's arguments: `tzname` invents one where none was given.
        arguments = zone.__getinitargs__()  # type: ignore[attr-defined]
        return [offset, arguments[1]] if len(arguments) > 1 else offset
    if type(zone).__module__ == "zoneinfo" and getattr(zone, "key", None):
        return zone.key  # type: ignore[attr-defined]
    raise Unencodable(
        f"a time zone of type {type(zone).__module__}.{type(zone).__qualname__} has no name to send; "
        "use zoneinfo.ZoneInfo or datetime.timezone"
    )


def _load_zone(zone: Any) -> tzinfo | None:
    if zone is None:
        return None
    if isinstance(zone, str):
        import zoneinfo

        return zoneinfo.ZoneInfo(zone)
    if isinstance(zone, list):
        offset, name = zone
        return timezone(timedelta(microseconds=offset), name)
    return timezone(timedelta(microseconds=zone))


def _dump_datetime(value: datetime) -> bytes:
    fields = [
        value.year,
        value.month,
        value.day,
        value.hour,
        value.minute,
        value.second,
        value.microsecond,
        value.fold,
        _dump_zone(value.tzinfo),
    ]
    return bytes(_pack(fields))


def _load_datetime(data: bytes) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold, zone = msgpack.unpackb(data)
    return datetime(year, month, day, hour, minute, second, microsecond, _load_zone(zone), fold=fold)


def _dump_date(value: date) -> bytes:
    return struct.pack(">HBB", value.year, value.month, value.day)


def _load_date(data: bytes) -> date:
    return date(*struct.unpack(">HBB", data))


def _dump_time(value: time) -> bytes:
    zone = _dump_zone(value.tzinfo)
    return bytes(_pack([value.hour, value.minute, value.second, value.microsecond, value.fold, zone]))


def _load_time(data: bytes) -> time:
    hour, minute, second, microsecond, fold, zone = msgpack.unpackb(data)
    return time(hour, minute, second, microsecond, tzinfo=_load_zone(zone), fold=fold)


def _dump_timedelta(value: timedelta) -> bytes:
    return struct.pack(">iII", value.days, value.seconds, value.microseconds)


def _load_timedelta(data: bytes) -> timedelta:
    return timedelta(*struct.unpack(">iII", data))


# -- paths ----------------------------------------------------------------------------

_PATHS: Final[dict[type, bytes]] = {
    pathlib.PosixPath: b"P",
    pathlib.PurePosixPath: b"p",
    pathlib.WindowsPath: b"W",
    pathlib.PureWindowsPath: b"w",
}
_PATHS_BY_KIND: Final = {kind: cls for cls, kind in _PATHS.items()}


def _dump_path(value: pathlib.PurePath) -> bytes:
    # Names that are not UTF-8 reach Python as lone surrogates.
    return _PATHS[type(value)] + dump_text(str(value))


def _load_path(data: bytes) -> pathlib.PurePath:
    cls = _PATHS_BY_KIND[data[:1]]
    path: pathlib.PurePath = cls(data[1:].decode("utf-8", "surrogatepass"))
    return path


#: How each type becomes bytes.
DUMPERS: Final[dict[type, tuple[Leaf, Callable[[Any], bytes]]]] = {
    bytearray: (Leaf.BYTEARRAY, bytes),
    complex: (Leaf.COMPLEX, _dump_complex),
    decimal.Decimal: (Leaf.DECIMAL, _dump_decimal),
    uuid.UUID: (Leaf.UUID, _dump_uuid),
    datetime: (Leaf.DATETIME, _dump_datetime),
    date: (Leaf.DATE, _dump_date),
    time: (Leaf.TIME, _dump_time),
    timedelta: (Leaf.TIMEDELTA, _dump_timedelta),
    **dict.fromkeys(_PATHS, (Leaf.PATH, _dump_path)),
}

_LOADERS: Final[dict[int, Callable[[bytes], Any]]] = {
    Leaf.BIG_INT: _load_big_int,
    Leaf.SURROGATES: lambda data: data.decode("utf-8", "surrogatepass"),
    Leaf.BYTEARRAY: bytearray,
    Leaf.COMPLEX: _load_complex,
    Leaf.DECIMAL: _load_decimal,
    Leaf.UUID: _load_uuid,
    Leaf.DATETIME: _load_datetime,
    Leaf.DATE: _load_date,
    Leaf.TIME: _load_time,
    Leaf.TIMEDELTA: _load_timedelta,
    Leaf.PATH: _load_path,
}


def load_leaf(code: int, data: bytes) -> Any:
    """The value of a leaf.

    Raises :class:`DecodeError` for a code that this version does not know; damaged bytes raise whatever the
    type's constructor does.
    """
    try:
        loader = _LOADERS[code]
    except KeyError:
        raise DecodeError(
            f"unknown extension code {code}: written by a newer version of taskq, or damaged"
        ) from None
    return loader(data)


def type_name(cls: type) -> str:
    """``module.Class``, with builtins bare."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def stable_module(cls: type) -> str:
    """The module of ``cls`` as another process would import it, also where it runs as a script."""
    if cls.__module__ not in {"__main__", "__mp_main__"}:
        return cls.__module__
    main = sys.modules.get(cls.__module__)
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return pathlib.Path(file).stem if file else cls.__module__
