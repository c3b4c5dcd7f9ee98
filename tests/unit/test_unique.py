from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskq import TaskQ
from taskq.errors import ConfigurationError, DuplicateJobError, EncodeError, InvalidArgumentError
from taskq.job import State
from taskq.testing import isolated
from taskq.unique import MAX_NESTING, check_unique, digest


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    tags: frozenset[str] = frozenset()


app = TaskQ("memory://")


@app.task(name="plain")
def plain(a: int = 1, b: int = 2) -> None: ...


@app.task(name="all", unique=True)
def by_all(a: object, b: object = 2, *rest: object, **more: object) -> object:
    return a


@app.task(name="some", unique=["user"])
def by_some(user: int, text: str = "", point: Point | None = None) -> None: ...


@app.task(name="function", unique=lambda user, text="": f"user {user}")
def by_function(user: int, text: str = "") -> None: ...


@app.task(name="one", unique="the only one", on_conflict="raise")
def only_one(n: int) -> None: ...


@app.task(name="settled", debounce=10, debounce_max=25, unique=["doc"])
def debounced(doc: str, version: int) -> None: ...


@app.task(name="slowed", throttle=60)
def throttled(n: int) -> None: ...


@pytest.fixture
def bench():
    with isolated(app) as bench:
        yield bench


def key(call):
    return call.job(app).unique.key


# -- keys -----------------------------------------------------------------------------


def test_the_same_call_in_other_words_has_the_same_key(bench):
    same = [
        by_all.s(1),
        by_all.s(a=1),
        by_all.s(1, 2),
        by_all.s(1, b=2),
        by_all.s(b=2, a=1),
    ]

    assert len({key(call) for call in same}) == 1


def test_other_calls_have_other_keys(bench):
    other = [
        by_all.s(1),
        by_all.s(2),
        by_all.s("1"),
        by_all.s(1.0),
        by_all.s(True),
        by_all.s(None),
        by_all.s([1]),
        by_all.s((1,)),
        by_all.s({1}),
        by_all.s(1, 3),
        by_all.s(1, 2, 3),
        by_all.s(1, c=3),
        by_all.s({"a": 1}),
        by_all.s({"a": [1, 2]}),
        by_all.s({"a": 1, "b": 2}),
        by_all.s([["a", 1], ["b", 2]]),
        by_all.s(Decimal(1)),
        by_all.s(datetime(2026, 1, 1, tzinfo=UTC)),
        by_all.s(Point(1)),
        by_all.s(b"1"),
        by_some.s(1),
    ]

    assert len({key(call) for call in other}) == len(other)


def test_the_order_in_which_sets_and_dicts_were_built_does_not_count():
    names = [str(n) for n in range(50)]
    pairs = [(name, {name, "x"}) for name in names]

    shuffled = set[str]()
    for name in reversed(names):
        shuffled.add(name)
    assert digest(set(names)) == digest(shuffled)
    assert digest(dict(pairs)) == digest(dict(reversed(pairs)))
    assert digest({(1, frozenset(names)): 1, 2: 3}) == digest({2: 3, (1, frozenset(reversed(names))): 1})
    assert digest(Counter(names)) == digest(Counter(reversed(names)))
    assert digest([set(names)]) != digest([names])
    assert digest(OrderedDict(pairs)) != digest(OrderedDict(reversed(pairs)))
    assert digest(names) != digest(names[::-1])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, VALUES)
def test_equal_values_of_equal_types_and_no_others_have_one_digest(a, b):
    assert (digest(a) == digest(b)) == (typed(a) == typed(b))


def typed(value):
    """Something that is equal only for values of the same types."""
    if isinstance(value, dict):
        return {("key", typed(key)): typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return (type(value).__name__, repr(value))


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def test_what_is_nested_deeply_has_a_key():
    assert digest(nested(MAX_NESTING - 1)) != digest(nested(MAX_NESTING - 2))


@pytest.mark.parametrize("levels", [MAX_NESTING + 1, 900])
def test_what_is_nested_too_deeply_is_refused(levels):
    with pytest.raises(EncodeError, match=f"more than {MAX_NESTING} levels"):
        digest(nested(levels))


def test_only_the_named_arguments_count(bench):
    assert key(by_some.s(1, "a")) == key(by_some.s(user=1, text="b", point=Point(1)))
    assert key(by_some.s(1)) != key(by_some.s(2))


def test_a_function_or_a_text_makes_the_key(bench):
    assert key(by_function.s(1, text="b")) == "function:=user 1"
    assert key(only_one.s(1)) == key(only_one.s(2)) == "one:=the only one"
    assert len(key(plain.s().set(unique="x" * 5000))) < 300
    with pytest.raises(InvalidArgumentError, match="expected a str"):
        plain.options(unique=lambda *a, **k: 1).delay()


# -- calls ----------------------------------------------------------------------------


def test_a_call_that_met_the_key_says_so(bench):
    heard = []
    unsubscribe = app.subscribe(heard.append, "job.deduplicated")
    first, second = by_all.delay(1), by_all.delay(1)
    unsubscribe()

    assert (first.deduplicated, second.deduplicated) == (False, True)
    assert second == first
    assert [job.id for job in bench.pushed] == [first.id]
    assert [(event.name, event.fields["job_id"]) for event in heard] == [("job.deduplicated", first.id)]


def test_enqueue_many_says_it_too(bench):
    results = app.enqueue_many([by_all.s(1), plain.s(), by_all.s(1)])

    assert [result.deduplicated for result in results] == [False, False, True]


def test_raise_raises(bench):
    first = only_one.delay(1)
    with pytest.raises(DuplicateJobError, match="the only one") as caught:
        only_one.delay(2)

    assert caught.value.job_id == first.id


def test_a_call_may_be_unique_by_itself_or_not_at_all(bench):
    assert plain.options(unique=True).delay() == plain.options(unique=True).delay()
    assert plain.delay() != plain.delay()
    assert by_all.delay(1) != by_all.options(unique=False).delay(1)
    second = only_one.options(on_conflict="return").delay(1)
    assert only_one.apply_async((2,), on_conflict="return") == second


def test_debounce_waits_for_the_latest_call_and_no_longer_than_its_limit(bench):
    first = debounced.delay("d", 1)
    due = first.job().due
    assert first.state is State.SCHEDULED
    second = debounced.delay("d", version=2)

    assert second == first
    assert second.deduplicated
    assert due <= second.job().due <= first.job().created + 25
    assert second.job().unique.latest == first.job().created + 25
    assert debounced.delay("other", 1) != first
    bench.drain(scheduled=True)
    assert debounced.delay("d", 3) != first


def test_throttle_lets_one_through_in_a_period(bench):
    first = throttled.delay(1)
    bench.drain()

    assert throttled.delay(1) == first
    assert throttled.delay(2) != first
    assert throttled.options(throttle=5).delay(1) == first


# -- declarations ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"unique_for": 5}, "needs unique="),
        ({"on_conflict": "raise"}, "needs unique="),
        ({"unique": 5}, "argument names"),
        ({"unique": []}, "argument names"),
        ({"unique": ""}, "argument names"),
        ({"unique": True, "on_conflict": "explode"}, "'return', 'raise', 'replace', 'reschedule'"),
        ({"unique": True, "unique_until": "period"}, "'ended', 'started'"),
        ({"unique": True, "unique_for": 0}, "more than 0"),
        ({"unique": True, "unique_for": -1}, "0 or more"),
        ({"debounce": 5, "throttle": 5}, "contradict"),
        ({"debounce": 5, "unique": True, "unique_for": 5}, "contradict"),
        ({"throttle": 5, "on_conflict": "raise"}, "contradict"),
        ({"debounce": 5, "debounce_max": 1}, "less than"),
        ({"unique": True, "debounce_max": 1}, "needs debounce"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_declared(options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        app.task(name="bad", **options)


def test_a_parameter_that_is_not_there_is_refused():
    with pytest.raises(ConfigurationError, match="no parameter 'usr'"):

        @app.task(name="bad", unique=["usr"])
        def bad(user: int) -> None: ...


def test_debounce_and_a_countdown_contradict_each_other(bench):
    with pytest.raises(ConfigurationError, match="debounce"):
        debounced.options(countdown=5).delay("d", 1)


def test_a_call_that_debounces_takes_only_the_key_of_the_declaration():
    rule = check_unique({"unique": "k", "unique_for": 5}, {"throttle": 7})

    assert (rule.by, rule.until, rule.period) == ("k", "period", 7.0)
    assert check_unique({"unique": True}, {"unique": False, "unique_for": 5}) is None
    assert check_unique({}) is None
