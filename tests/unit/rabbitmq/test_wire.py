"""A job as a message, and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskq.backends.rabbitmq.wire import packed, undecodable, unpacked
from taskq.errors import DecodeError
from taskq.job import KEPT_ATTEMPTS, Attempt, Job, State

JOB = Job(
    id="1",
    queue="q",
    task="t",
    payload=b"\x00\xff",
    priority=3,
    expires=9.5,
    headers={"a": [1, {"b": b"c"}], 7: None},
    attempts=2,
    losses=1,
    deliveries=4,
    generation=5,
    first_started=1.5,
    error="no",
)


def attempt(number):
    return Attempt(number=number, worker="w", started=1.0, error_type="E", message="m\ud800", delay=2.0)


def test_a_job_travels_with_its_attempts():
    history = tuple(attempt(n) for n in range(KEPT_ATTEMPTS + 3))

    assert unpacked(packed(JOB, history, 8.0)) == (replace(JOB, due=8.0), history[-KEPT_ATTEMPTS:])


def test_a_lent_job_says_so():
    job, _ = unpacked(packed(JOB, (), 8.0), "me")

    assert (job.state, job.worker, job.deliveries) == (State.RESERVED, "me", 5)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_by_name(body):
    with pytest.raises(DecodeError):
        unpacked(body)


def test_a_newer_layout_is_refused_by_name():
    body = bytearray(packed(JOB, (), 0.0))
    assert body[3] == 1
    body[3] = 2

    with pytest.raises(DecodeError, match="layout 2"):
        unpacked(bytes(body))


def test_what_is_no_job_becomes_a_dead_letter_with_its_bytes():
    job, history = undecodable(b"hello", "q", "id", DecodeError("why"), 5.0)

    assert (job.id, job.payload, job.error, job.ended, history) == (
        "id",
        b"hello",
        "DecodeError: why",
        5.0,
        (),
    )
