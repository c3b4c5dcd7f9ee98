"""Messages as bytes, read by the driver."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import frame, spec

from taskq.backends.rabbitmq.frames import CONTENT_TYPE, message

WORDS = st.text(max_size=60)


def read(data):
    """Every frame in ``data``."""
    frames = []
    while data:
        size, one = frame.decode_frame(data)
        assert one is not None
        frames.append(one)
        data = data[size:]
    return frames


@given(
    WORDS,
    WORDS,
    st.binary(max_size=300),
    WORDS,
    WORDS,
    st.dictionaries(WORDS, st.integers(-(1 << 63), (1 << 63) - 1), max_size=4),
)
def test_the_driver_reads_what_is_written(exchange, key, body, message_id, kind, headers):
    publish, header, *bodies = read(message(3, 108, exchange, key, body, message_id, kind, headers))

    assert isinstance(publish.method, spec.Basic.Publish)
    assert {publish.channel_number, header.channel_number, *(b.channel_number for b in bodies)} == {3}
    assert (publish.method.exchange, publish.method.routing_key) == (exchange, key)
    assert publish.method.mandatory
    assert header.body_size == len(body)
    assert b"".join(each.fragment for each in bodies) == body
    assert all(len(each.fragment) <= 100 for each in bodies)
    properties = header.properties
    assert (properties.message_id, properties.type or "") == (message_id, kind)
    assert (properties.content_type, properties.delivery_mode) == (CONTENT_TYPE, 2)
    assert properties.headers == headers


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 201])
def test_a_body_is_cut_at_the_frame_size(size):
    frames = read(message(1, 108, "", "q", bytes(size), "id", "", {}))

    assert [len(each.fragment) for each in frames[2:]] == [100] * (size // 100) + [size % 100] * bool(
        size % 100
    )


def test_what_is_too_long_to_be_told_is_left_out():
    _, header = read(message(1, 108, "", "q", b"", "i" * 256, "t" * 256, {}))

    assert header.properties.message_id == header.properties.type == ""
