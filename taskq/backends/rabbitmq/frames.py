"""A message as the bytes of its frames: what the driver would write, in one piece and for a tenth of the time.

AMQP 0-9-1, 2.3.5 and 4.2: a method frame that says where to, a header frame with the properties, the body in pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

_frame_head: Final = struct.Struct(">BHI").pack  # type, channel, size
_header_head: Final = struct.Struct(">HHQH").pack  # class, weight, size of the body, which properties follow
_long: Final = struct.Struct(">q").pack
_size: Final = struct.Struct(">I").pack

_METHOD, _HEADER, _BODY = 1, 2, 3
_END: Final = b"\xce"
_BASIC: Final = 60
_PUBLISH: Final = 40
_MANDATORY: Final = 1
#: Content type, headers, delivery mode and message id follow; with ``_TYPE`` also the message's type.
_PROPERTIES: Final = 1 << 15 | 1 << 13 | 1 << 12 | 1 << 7
_TYPE: Final = 1 << 5
_PERSISTENT: Final = b"\x02"
#: What a frame is longer than what is in it, in bytes.
_AROUND: Final = 8


def _short(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    return bytes((len(data),)) + data if len(data) < 256 else b"\x00"  # too long to be told


CONTENT_TYPE: Final = "application/x-taskq"
_content_type: Final = _short(CONTENT_TYPE)


@lru_cache(maxsize=1024)
def _publish(channel: int, exchange: str, key: str) -> bytes:
    """The frame that says where the next message goes, and that it is to be returned if nothing takes it."""
    method = struct.pack(">HHH", _BASIC, _PUBLISH, 0) + _short(exchange) + _short(key) + bytes((_MANDATORY,))
    return _frame_head(_METHOD, channel, len(method)) + method + _END


@lru_cache(maxsize=1024)
def _name(text: str) -> bytes:
    return _short(text)


def message(
    channel: int,
    frame_max: int,
    exchange: str,
    key: str,
    body: bytes,
    message_id: str,
    kind: str,
    headers: Mapping[str, int],
) -> bytes:
    """All frames of one message, persistent and mandatory; ``kind`` may be empty."""
    table = b"".join([_name(name) + b"l" + _long(value) for name, value in headers.items()])
    flags = _PROPERTIES | _TYPE if kind else _PROPERTIES
    properties = b"".join(
        (
            _header_head(_BASIC, 0, len(body), flags),
            _content_type,
            _size(len(table)),
            table,
            _PERSISTENT,
            _short(message_id),
            _name(kind) if kind else b"",
        )
    )
    parts = [
        _publish(channel, exchange, key),
        _frame_head(_HEADER, channel, len(properties)),
        properties,
        _END,
    ]
    most = frame_max - _AROUND
    for start in range(0, len(body), most):
        piece = body[start : start + most]
        parts += (_frame_head(_BODY, channel, len(piece)), piece, _END)
    return b"".join(parts)
