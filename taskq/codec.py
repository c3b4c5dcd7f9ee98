"""Values to bytes and back: msgpack with a version, in which every type keeps its identity.

What decodes is what was encoded, of the very same type, or an error: subclasses never turn into their base.
Nothing is imported or executed by decoding; classes come back only where they were registered.

The wire: byte 0 is 0xC1 (which msgpack never uses), byte 1 the format, then one msgpack value.

- *plain* holds only what msgpack itself knows; its encoder and decoder run in C.
- *rich* also holds extensions and marked lists (``extensions.py``) and is written and read by ``rich.py``.

Nesting of at least :data:`MAX_DEPTH` levels works. Sets are written in iteration order, so equal values need
not have equal bytes.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import msgpack

from taskq.errors import DecodeError
from taskq.registered import Opaque, register, register_annotations
from taskq.rich import MAX_DEPTH, read_rich, write_rich

__all__ = [
    "MAX_DEPTH",
    "Opaque",
    "decode",
    "decode_call",
    "encode",
    "encode_call",
    "register",
    "register_annotations",
]

_PLAIN: Final = b"\xc1\x01"
_RICH: Final = b"\xc1\x02"


def encode_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The arguments of a call as bytes.

    Raises :class:`EncodeError` with the path (``kwargs['items'][3].when``) to what cannot travel.
    """
    body = _plain([list(args), kwargs])
    if body is not None:
        return _PLAIN + body
    return _RICH + write_rich([("args", list(args)), ("kwargs", kwargs)], length=2)


def decode_call(payload: bytes, *, opaque: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in ``payload``. Raises :class:`DecodeError` for anything but an encoded call."""
    value = decode(payload, opaque=opaque)
    if type(value) is list and len(value) == 2:
        args, kwargs = value
        if type(args) is list and type(kwargs) is dict and all(type(key) is str for key in kwargs):
            return tuple(args), kwargs
    raise DecodeError("the payload is not an encoded call")


def encode(value: Any, *, root: str = "result") -> bytes:
    """``value`` as bytes; ``root`` begins the paths in errors. Raises :class:`EncodeError`."""
    body = _plain(value)
    if body is not None:
        return _PLAIN + body
    return _RICH + write_rich([(root, value)])


def decode(data: bytes, *, opaque: bool = False) -> Any:
    """The value in ``data``.

    With ``opaque``, values of classes unknown here become :class:`Opaque`. Raises :class:`DecodeError`, and
    nothing else, if the bytes are damaged or newer than this version.
    """
    head, body = data[:2], data[2:]
    try:
        if head == _PLAIN:
            return _read_plain(body)
        if head == _RICH:
            return read_rich(body, opaque=opaque)
    except DecodeError:
        raise
    except Exception as error:  # every way in which damaged bytes can fail
        raise DecodeError(f"damaged data: {type(error).__name__}: {error}") from error
    raise DecodeError(_unknown_format(head))


def _unknown_format(head: bytes) -> str:
    if head[:1] != b"\xc1" or len(head) < 2:
        return "these bytes were not written by taskq's codec"
    return f"format {head[1]} is not known here: written by a newer version of taskq, sealed, or damaged"


# -- the plain format -----------------------------------------------------------------

#: The first bytes of msgpack's bin and ext types. Where none of them occurs anywhere, no such value does.
_BIN_AND_EXT: Final = bytes([*range(0xC4, 0xCA), *range(0xD4, 0xD9)])
#: A packer that has grown beyond this is not kept.
_KEPT_BUFFER: Final = 1 << 20


class _NotPlain(Exception):  # noqa: N818 - a signal between two functions
    pass


def _refuse(_: object) -> NoReturn:
    raise _NotPlain


# Packers are reused for speed and must not be shared. A free list, unlike a thread local, also serves an
# encode that interrupts another on the same thread (a finaliser, a signal handler).
_packers: Final[list[Any]] = []


def _plain(value: Any) -> bytes | None:
    """``value`` by msgpack alone, or ``None`` if it needs the rich format."""
    try:
        packer = _packers.pop()
    except IndexError:
        packer = msgpack.Packer(default=_refuse, strict_types=True, buf_size=1 << 14)
    try:
        body: bytes = packer.pack(value)
    except Exception:  # noqa: BLE001 - whatever it was, the rich writer says it better
        _packers.append(packer)
        return None
    if len(body) < _KEPT_BUFFER:
        _packers.append(packer)
    # msgpack takes a bytearray or memoryview for bytes, and an ExtType of the user's for ours.
    return body if _is_plain(body) else None


def _is_plain(body: bytes) -> bool:
    return len(body.translate(None, _BIN_AND_EXT)) == len(body)


def _read_plain(body: bytes) -> Any:
    # The writer has promised this; without it the decoder might meet extensions.
    if not _is_plain(body):
        raise DecodeError("damaged data: plain format with extensions")
    return msgpack.unpackb(body, strict_map_key=False)
