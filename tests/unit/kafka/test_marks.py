"""What a commit's metadata tells of the offsets beyond it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taskq.backends.kafka import marks
from taskq.backends.kafka.marks import Mark

WHAT = st.lists(st.sampled_from(Mark), max_size=300)


def written(kinds, base):
    """The marks of a partition whose offsets from ``base`` on are ``kinds``."""
    unfinished = [(base + n, kind) for n, kind in enumerate(kinds) if kind is not Mark.DONE]
    return marks.write(base + len(kinds), unfinished)


def known(kinds, base):
    return {base + n: kind for n, kind in enumerate(kinds) if kind is not Mark.OPEN}


@given(WHAT, st.integers(0, 10**12))
def test_what_is_written_is_read(kinds, base):
    start, text = written(kinds, base)
    told = marks.read(start, text)

    # Everything before the start has ended; beyond it all is told but what waits.
    assert {o: k for o, k in known(kinds, base).items() if o >= start} == told
    assert all(kind is Mark.DONE for kind in kinds[: start - base])


@given(WHAT)
def test_a_tally_counts_what_a_reader_finds(kinds):
    start, text = written(kinds, 0)
    tally, told = marks.tally(text), marks.read(start, text)

    for mark in (Mark.DONE, Mark.LENT, Mark.STARTED):
        assert tally[mark] == list(told.values()).count(mark)


def test_nothing_is_said_where_nothing_is_left():
    assert marks.write(7, []) == (7, "")


def test_runs_are_short():
    kinds = [Mark.LENT] * 3 + [Mark.DONE] * 12 + [Mark.OPEN, Mark.LENT, Mark.OPEN]

    assert written(kinds, 5) == (5, "1:l3d12ol")


def test_a_text_that_is_too_long_forgets_its_end_and_nothing_before():
    kinds = [Mark.LENT, Mark.DONE] * 4000
    start, text = written(kinds, 0)
    told = marks.read(start, text)

    assert len(text) <= marks.MOST
    assert len(told) > 4000
    assert told == {offset: kind for offset, kind in known(kinds, 0).items() if offset < len(told)}


def test_a_text_of_others_says_nothing():
    for text in (None, "", "something", "2:l3"):
        assert marks.read(4, text) == {}
