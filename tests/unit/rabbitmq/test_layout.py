"""Names, arguments and ways down the ladder: pure rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskq.backends.rabbitmq.layout import (
    LEVELS,
    LONGEST_DELAY,
    UNIT,
    Binding,
    Layout,
    Queue,
    band_of,
    units,
)
from taskq.errors import InvalidArgumentError

DELAYS = st.floats(0.001, LONGEST_DELAY)


@given(DELAYS)
def test_no_delay_is_shorter_than_asked_for(delay):
    assert units(delay, exact=True) * UNIT >= delay - 1e-5
    assert units(delay, exact=True) * UNIT < delay + UNIT + 1e-5


@given(DELAYS)
def test_a_rounded_delay_takes_three_levels_and_a_quarter_more_at_most(delay):
    exact, rounded = units(delay, exact=True), units(delay, exact=False)

    assert rounded.bit_count() <= 3 or (rounded == exact and exact > 7 << (LEVELS - 3))
    assert exact <= rounded <= exact * 1.25
    assert rounded < 1 << LEVELS


def test_a_delay_beyond_the_ladder_is_refused():
    with pytest.raises(InvalidArgumentError, match="too long"):
        units(LONGEST_DELAY * 1.01, exact=True)


def test_ten_priorities_are_four_bands():
    assert [band_of(priority) for priority in range(10)] == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def matches(pattern, key):
    """Whether a topic exchange takes ``key`` for ``pattern``, which has no ``#``."""
    wanted, words = pattern.split("."), key.split(".")
    return len(wanted) == len(words) and all(w in {"*", word} for w, word in zip(wanted, words, strict=True))


def walk(layout, exchange, key):
    """Every queue that a message passes, to where it comes out."""
    declared = list(layout.ladder()) + [b for q in ("mail", "eu.mail", "#.*") for b in layout.arrival(q)]
    bindings = [each for each in declared if isinstance(each, Binding)]
    queues = {each.name: each for each in declared if isinstance(each, Queue)}
    waited = 0
    while True:
        (taken,) = [b for b in bindings if b.source == exchange and matches(b.key, key)]
        if taken.to_exchange:
            exchange = taken.target
        elif taken.target in queues:
            arguments = queues[taken.target].arguments
            waited += arguments["x-message-ttl"]
            exchange = arguments["x-dead-letter-exchange"]
        else:
            return taken.target, waited


@given(st.sampled_from(["mail", "eu.mail", "#.*"]), st.integers(0, 3), st.integers(1, (1 << LEVELS) - 1))
def test_every_delay_ends_where_it_should_after_its_time(queue, band, count):
    layout = Layout("p.")
    exchange, key = layout.route(queue, band, count)

    assert len(key.encode()) <= 255
    assert walk(layout, exchange, key) == (layout.band(queue, band), count * round(UNIT * 1000))


def test_no_delay_goes_straight_to_the_queue():
    assert Layout("p.").route("mail", 2, 0) == ("", "p.mail.p2")


def test_the_arguments_are_what_they_were():
    """An existing queue refuses any others: to change one is to rename them all."""
    work = {"x-queue-type": "quorum", "x-delivery-limit": 1_000_000_000}
    assert [(q.name, q.arguments) for q in Layout().queue("mail")] == [
        (name, work) for name in ("mail", "mail.p1", "mail.p2", "mail.p3", "mail.suspects", "mail.dead")
    ]
    classic = [q.arguments["x-queue-type"] for q in Layout("", "classic").queue("mail")]
    assert classic == ["classic"] * 4 + ["quorum"] * 2
    levels = [each for each in Layout().ladder() if isinstance(each, Queue)]
    assert (levels[0].name, levels[0].arguments) == ("taskq.unrouted", work)
    assert (levels[4].name, levels[4].arguments) == (
        "taskq.delay.v1.3",
        work
        | {
            "x-message-ttl": 256,
            "x-dead-letter-exchange": "taskq.delay.v1.2",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        },
    )
    assert levels[1].arguments["x-dead-letter-exchange"] == "taskq.delay.v1.deliver"
    assert len(levels) == 1 + LEVELS


@pytest.mark.parametrize("name", ["taskq.delay.v1.3", "amq.mail", "mail.dead", "mail.p3", "é" * 125])
def test_names_that_cannot_be_are_refused(name):
    with pytest.raises(InvalidArgumentError):
        Layout().check(name)
