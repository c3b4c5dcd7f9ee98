"""Jobs as messages, and the names of the topics that they stand in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskq.backends.kafka import wire
from taskq.backends.kafka.delays import HOPS, hop
from taskq.backends.kafka.place import Place, band
from taskq.errors import ConfigurationError, DecodeError
from taskq.job import Attempt, Job, Lane, State, Unique

PLACE = Place(servers="h:9092")


def test_a_job_comes_back_as_it_was():
    job = Job(
        id="1",
        queue="q",
        task="t",
        payload=b"\xff",
        priority=4,
        due=2.5,
        headers={"a": [1, {7: None}]},
        unique=Unique("key", until="period", period=3.0),
        lane=Lane(task="t", key="k", ordered=True),
        attempts=2,
        losses=1,
        generation=3,
        error="ValueError: no",
        history=(Attempt(number=1, error_type="ValueError", message="no", started=1.0),),
    )

    assert wire.unpack(wire.pack(job)) == (job, False)
    assert wire.unpack(wire.pack(job, waits=True), State.DEAD) == (replace(job, state=State.DEAD), True)


@pytest.mark.parametrize("value", [None, b"", b"hello", b"\x93\x02\x80\xc2", b"\x93\x01\x81\xa1x\x01\xc2"])
def test_what_is_no_job_is_named_so(value):
    with pytest.raises(DecodeError):
        wire.unpack(value)


@given(st.text(max_size=40))
def test_a_queue_is_found_again_by_its_topic(queue):
    topics = [*PLACE.bands(queue), PLACE.dead(queue)]

    assert len(set(topics)) == 5
    assert PLACE.queues(topics) == [queue]


@given(st.text(max_size=20), st.text(max_size=20))
def test_two_queues_share_no_topic(one, other):
    topics = {*PLACE.bands(one), PLACE.dead(one)}

    assert one == other or topics.isdisjoint({*PLACE.bands(other), PLACE.dead(other)})


@pytest.mark.parametrize("queue", ["a.dead", "a.p1", "a.b.p3", "dead", "p1"])
def test_a_queue_named_as_a_topic_of_another_is_another(queue):
    assert PLACE.queues([PLACE.work(queue, 0)]) == [queue]
    assert PLACE.work(queue, 0) not in {PLACE.dead("a"), PLACE.work("a", 1), PLACE.work("a.b", 3)}


def test_a_name_that_is_too_long_is_refused():
    with pytest.raises(ConfigurationError, match="249"):
        PLACE.work("x" * 250, 0)


def test_ten_priorities_share_four_bands():
    assert [band(priority) for priority in range(10)] == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


@given(st.floats(0, 86_400 * 500))
def test_a_hop_is_the_longest_that_is_not_too_long(remaining):
    level = hop(remaining)

    assert level == -1 or HOPS[level] <= remaining
    assert level == len(HOPS) - 1 or remaining < HOPS[level + 1]
