"""A job as the body of a message: one msgpack list, with a version in front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any, Final, NamedTuple

import msgpack

from taskq.errors import DecodeError
from taskq.job import KEPT_ATTEMPTS, Attempt, Job, State

_VERSION: Final = 1

History = tuple[Attempt, ...]


class Letter(NamedTuple):
    """What a message says."""

    job: Job  #: without its history
    history: History


def packed(job: Job, history: Sequence[Attempt], due: float) -> bytes:
    """The body of the message that carries ``job``, which is due at that time."""
    kept = [astuple(attempt) for attempt in history[-KEPT_ATTEMPTS:]]
    fields = (
        _VERSION,
        job.id,
        job.queue,
        job.task,
        job.payload,
        job.priority,
        due,
        job.expires,
        job.lease,
        job.max_retries,
        job.loss_base,
        job.loss_cap,
        job.keep,
        dict(job.headers),
        job.created,
        job.attempts,
        job.losses,
        job.deliveries,
        job.generation,
        job.first_started,
        job.ended,
        job.error,
        kept,
    )
    body: bytes = msgpack.packb(fields, use_bin_type=True, unicode_errors="surrogatepass")
    return body


def unpacked(body: bytes, lent_to: str | None = None) -> Letter:
    """What :func:`packed` made, with the job as it is once it is lent to that worker.

    Raises ``DecodeError`` for anything else.
    """
    try:
        fields: list[Any] = msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass")
        if fields[0] != _VERSION:
            raise DecodeError(f"a message of layout {fields[0]!r}; this version of taskq reads {_VERSION}")
        return Letter(
            _job(fields, lent_to), tuple(Attempt(**dict(zip(_ATTEMPT, a, strict=True))) for a in fields[-1])
        )
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(f"not a job: {error}") from error


_ATTEMPT: Final = tuple(Attempt.__dataclass_fields__)


def _job(fields: list[Any], lent_to: str | None) -> Job:
    (
        _,
        job_id,
        queue,
        task,
        payload,
        priority,
        due,
        expires,
        lease,
        max_retries,
        loss_base,
        loss_cap,
        keep,
        headers,
        created,
        attempts,
        losses,
        deliveries,
        generation,
        first_started,
        ended,
        error,
        _,
    ) = fields
    return Job(
        id=job_id,
        queue=queue,
        task=task,
        payload=payload,
        priority=priority,
        due=due,
        expires=expires,
        lease=lease,
        max_retries=max_retries,
        loss_base=loss_base,
        loss_cap=loss_cap,
        keep=keep,
        headers=headers,
        created=created,
        attempts=attempts,
        losses=losses,
        deliveries=deliveries if lent_to is None else deliveries + 1,
        state=State.PENDING if lent_to is None else State.RESERVED,
        worker=lent_to,
        generation=generation,
        first_started=first_started,
        ended=ended,
        error=error,
    )


def undecodable(body: bytes, queue: str, job_id: str, error: DecodeError, now: float) -> Letter:
    """A dead letter for a message that is no job: it keeps the raw body."""
    job = Job(id=job_id, queue=queue, payload=body, created=now, ended=now, error=f"DecodeError: {error}")
    return Letter(replace(job, max_retries=0), ())
