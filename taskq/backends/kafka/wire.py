"""A job as the value of a message, and back."""

from __future__ import annotations

import operator
from typing import Any, Final, NamedTuple

import msgpack

from taskq.errors import DecodeError
from taskq.job import Attempt, Job, Lane, State, Unique

_VERSION: Final = 1


class Parcel(NamedTuple):
    """What a message bears."""

    job: Job
    waits: bool  #: not due yet when it was sent: its due time counts. Else it is due, whatever the reader's clock says


def pack(job: Job, *, due: float | None = None, waits: bool = False) -> bytes:
    """All of ``job`` that must travel, due at ``due`` if that is given; its state is where the message stands."""
    fields: dict[str, Any] = {
        name: value
        for name, value, default in zip(_PLAIN, _VALUES(job), _DEFAULTS, strict=True)
        if value != default
    }
    if due is not None:
        fields["due"] = due
    if job.headers:
        fields["headers"] = dict(job.headers)
    if job.unique is not None:
        fields["unique"] = list(job.unique)
    if job.lane is not None:
        fields["lane"] = job.lane.packed()
    if job.history:
        fields["history"] = [[getattr(attempt, name) for name in _ATTEMPT] for attempt in job.history]
    packed = msgpack.packb([_VERSION, fields, waits])
    assert isinstance(packed, bytes)
    return packed


def unpack(value: bytes | None, state: State = State.PENDING) -> Parcel:
    """What :func:`pack` packed. Raises ``DecodeError`` for anything else."""
    try:
        version, fields, waits = msgpack.unpackb(value, strict_map_key=False)
        if version != _VERSION:
            raise DecodeError(f"a message of version {version!r}; this taskq reads {_VERSION}")
        if "unique" in fields:
            fields["unique"] = Unique(*fields["unique"])
        if "lane" in fields:
            fields["lane"] = Lane.unpacked(fields["lane"])
        if "history" in fields:
            fields["history"] = tuple(
                Attempt(**dict(zip(_ATTEMPT, values, strict=True))) for values in fields["history"]
            )
        return Parcel(Job(**fields, state=state), waits)
    except (TypeError, ValueError, AttributeError, msgpack.UnpackException) as error:
        raise DecodeError(f"a message that is no job: {error}") from error


#: Fields that msgpack takes as they are.
_PLAIN: Final = (
    *("id", "queue", "task", "payload", "priority", "due", "expires", "lease", "max_retries"),
    *("loss_base", "loss_cap", "keep", "created", "attempts", "losses", "deliveries", "generation"),
    *("first_started", "ended", "error", "result"),
)
_ATTEMPT: Final = (
    *("number", "generation", "worker", "started", "ended"),
    *("error_type", "message", "traceback", "delay"),
)
_VALUES: Final = operator.attrgetter(*_PLAIN)
_DEFAULTS: Final = _VALUES(Job(id=""))
