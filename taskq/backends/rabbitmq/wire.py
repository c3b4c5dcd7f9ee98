"""A job as the body of a message: one msgpack list, with a version in front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgpack

from taskq.errors import DecodeError
from taskq.job import KEPT_ATTEMPTS, Attempt, Job, State

_VERSION: Final = 1
#: What travels, in this order; the attempts come last.
_FIELDS: Final = (
    "id",
    "queue",
    "task",
    "payload",
    "priority",
    "due",
    "expires",
    "lease",
    "max_retries",
    "loss_base",
    "loss_cap",
    "keep",
    "headers",
    "created",
    "attempts",
    "losses",
    "deliveries",
    "generation",
    "first_started",
    "ended",
    "error",
)
_DUE: Final = 1 + _FIELDS.index("due")
_HEADERS: Final = 1 + _FIELDS.index("headers")
_values: Final = attrgetter(*_FIELDS)
_ATTEMPT: Final = tuple(Attempt.__dataclass_fields__)

History = tuple[Attempt, ...]


class Letter(NamedTuple):
    """What a message says."""

    job: Job  #: without its history
    history: History


def packed(job: Job, history: Sequence[Attempt], due: float) -> bytes:
    """The body of the message that carries ``job``, which is due at that time."""
    fields: list[Any] = [_VERSION, *_values(job), [astuple(each) for each in history[-KEPT_ATTEMPTS:]]]
    fields[_DUE] = due
    fields[_HEADERS] = dict(job.headers)
    body: bytes = msgpack.packb(fields, use_bin_type=True, unicode_errors="surrogatepass")
    return body


def unpacked(body: bytes, lent_to: str | None = None) -> Letter:
    """What :func:`packed` made, with the job as it is once it is lent to that worker.

    Raises ``DecodeError`` for anything else.
    """
    try:
        version, *values, attempts = msgpack.unpackb(
            body, strict_map_key=False, unicode_errors="surrogatepass"
        )
        if version != _VERSION:
            raise DecodeError(f"a message of layout {version!r}; this version of taskq reads {_VERSION}")
        fields = dict(zip(_FIELDS, values, strict=True))
        history = tuple(Attempt(**dict(zip(_ATTEMPT, each, strict=True))) for each in attempts)
        if lent_to is None:
            return Letter(Job(**fields), history)
        fields["deliveries"] += 1
        return Letter(Job(**fields, state=State.RESERVED, worker=lent_to), history)
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(f"not a job: {error}") from error


def undecodable(body: bytes, queue: str, job_id: str, error: DecodeError, now: float) -> Letter:
    """A dead letter for a message that is no job: it keeps the raw body."""
    failed = f"DecodeError: {error}"
    job = Job(id=job_id, queue=queue, payload=body, created=now, ended=now, error=failed, max_retries=0)
    return Letter(job, ())
