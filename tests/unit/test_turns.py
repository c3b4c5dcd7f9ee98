from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from taskq.backends.turns import Turns

QUEUES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1)


def test_turns_are_spread_out():
    assert "".join(Turns({"a": 3, "b": 1}).share(8, {"a": 99, "b": 99})) == "aabaaaba"


def test_small_steps_add_up_to_the_same_order():
    whole, steps = Turns({"a": 5, "b": 2, "c": 1}), Turns({"a": 5, "b": 2, "c": 1})
    plenty = dict.fromkeys("abc", 99)

    assert whole.share(16, plenty) == [queue for _ in range(16) for queue in steps.share(1, plenty)]


def test_an_empty_queue_is_owed_nothing():
    turns = Turns({"a": 1, "b": 1})
    turns.share(50, {"a": 50})

    assert Counter(turns.share(10, {"a": 50, "b": 50})) == {"a": 5, "b": 5}


@given(
    weights=QUEUES,
    available=st.dictionaries(st.sampled_from("abcde"), st.integers(0, 20)),
    limit=st.integers(0, 50),
)
def test_no_turn_is_wasted_or_invented(weights, available, limit):
    turns = Counter(Turns(weights).share(limit, available))
    usable = {queue: n for queue, n in available.items() if queue in weights}

    assert sum(turns.values()) == min(limit, sum(usable.values()))
    assert all(n <= usable[queue] for queue, n in turns.items())


@given(weights=QUEUES)
def test_shares_are_exact_over_a_full_round(weights):
    turns = Counter(Turns(weights).share(sum(weights.values()), dict.fromkeys(weights, 100)))

    assert turns == weights
