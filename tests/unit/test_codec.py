# ruff: noqa: DTZ001, DTZ901 - naive datetimes travel too
"""What the codec promises: the same value of the same type, or an error that says where and what to do."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import math
import pathlib
import subprocess
import sys
import threading
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple, Optional
from zoneinfo import ZoneInfo

import msgpack
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskq import codec
from taskq.errors import DecodeError, EncodeError

PARIS = ZoneInfo("Europe/Paris")


class Color(enum.Enum):
    RED = "red"
    CRIMSON = "red"  # noqa: PIE796 - an alias
    PAIR = (1, 2)


class Size(enum.IntEnum):
    SMALL = 1


class Word(enum.StrEnum):
    HELLO = "hello"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


class Point(NamedTuple):
    x: int
    y: object


Legacy = collections.namedtuple("Legacy", "a b")  # noqa: PYI024 - the old form travels too


@dataclasses.dataclass
class Order:
    id: uuid.UUID
    when: datetime
    lines: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    total: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.total = len(self.lines)

    @functools.cached_property
    def doubled(self):
        return self.total * 2


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    name: str
    part: Point | None = None


@dataclasses.dataclass(kw_only=True)
class Child(Order):
    extra: Color = Color.RED


class Model(pydantic.BaseModel):
    name: str
    when: datetime | None = None
    inner: Optional[Model] = None  # noqa: UP045
    tags: set[str] = pydantic.Field(default_factory=set, alias="labels")
    _secret: int = pydantic.PrivateAttr(default=3)


class Open(pydantic.BaseModel, extra="allow", frozen=True):
    a: int


class Numbers(pydantic.RootModel[list[int]]):
    pass


class Money:
    def __init__(self, cents):
        self.cents = cents

    def __eq__(self, other):
        return type(other) is Money and other.cents == self.cents

    def __hash__(self):
        return hash(self.cents)

    def __repr__(self):
        return f"Money({self.cents})"


class Unregistered(enum.Enum):
    A = 1


@dataclasses.dataclass
class UnregisteredRecord:
    a: int


for cls in (Color, Size, Word, Rights, Bits, Point, Legacy, Order, Key, Child, Model, Open, Numbers):
    codec.register(cls)
codec.register(Money, "money", dump=lambda money: money.cents, load=Money)


def same(a: Any, b: Any) -> bool:
    """Equal, of the same type all the way down, and alike in what equality overlooks."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Decimal):
        return str(a) == str(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, datetime | time):
        return a.replace(tzinfo=None) == b.replace(tzinfo=None) and a.fold == b.fold and _zones(a, b)
    if isinstance(a, dict):
        return all(map(same, a, b)) and all(map(same, a.values(), b.values())) and len(a) == len(b)
    if isinstance(a, list | tuple | deque):
        return (
            len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        )
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and sorted(map(repr, a)) == sorted(map(repr, b))
    return a == b


def _zones(a: Any, b: Any) -> bool:
    return type(a.tzinfo) is type(b.tzinfo) and a.tzinfo == b.tzinfo and repr(a.tzinfo) == repr(b.tzinfo)


ORDER = Order(uuid.UUID("a58d509c-da87-43f8-b31b-6f2e5c1d0a47"), datetime(2026, 1, 1, tzinfo=UTC), [("a", 1)])
VALUES = [
    *(None, True, False, 0, -1, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**400, -(10**400)),
    *(127, 128, -128, -129, 255, 256, 32767, 32768, 65536, 2**31, 2**32),
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308),
    *("", "é", "\0", "\ud800", "a\udfffb", "😀", "x" * 70_000, "ğ" * 40, "ش"),
    *(b"", b"\xc1\x02", b"x" * 70_000, bytearray(b""), bytearray(b"ab")),
    *([], {}, (), set(), frozenset(), [[]], ((),), {"a": {}}),
    (1, [2, (3, {4}), frozenset({5})], {"k": (6,)}),
    [[1, 2], [(1, 2)], ["", b""], [None]],
    {1: "int", "1": "str", None: 0, (1, (2,)): "tuple", b"1": "bytes", 2.5: 0, frozenset({1}): 1},
    *({True: 1}, {1: True}, {1.0: 1}),
    {
        datetime(2026, 1, 1, tzinfo=UTC): 1,
        date(2026, 1, 1): 2,
        uuid.UUID(int=1): 3,
        Decimal(1): 4,
        Color.RED: 5,
    },
    *({Key("a", Point(1, 2)): 1}, {"\ud800": "\udfff"}, {Word.HELLO: 1}, {2**70: 1}),
    *(1 + 2j, complex(-0.0, math.nan), complex(math.inf, -0.0)),
    *(Decimal("NaN"), Decimal("sNaN"), Decimal("-NaN123"), Decimal("1E+999"), Decimal("-0"), Decimal("0E-7")),
    *(Decimal("Infinity"), Decimal("-Infinity"), Decimal("1.10"), Decimal("1E+999999")),
    *(uuid.UUID(int=0), uuid.UUID("639f5c69-6533-4e4a-8a1b-0d3c2b1a4f5e"), ORDER.id),
    *(datetime(2026, 1, 1), datetime(1, 1, 1), datetime.max, datetime(2026, 10, 25, 2, 30, 0, 1, fold=1)),
    *(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 10, 25, 2, 30, 0, 999_999, PARIS, fold=1)),
    datetime(2026, 10, 25, 2, 30, tzinfo=PARIS),
    datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC")),
    *(datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=h, minutes=m))) for h, m in ((5, 45), (-3, -30))),
    datetime(2026, 1, 1, tzinfo=timezone(timedelta(seconds=1, microseconds=1))),
    datetime(2026, 1, 1, tzinfo=timezone(timedelta(0), "Z")),
    *(date(1, 1, 1), date.max, time(), time(1, 2, 3, 4, fold=1), time(1, tzinfo=UTC), time(1, tzinfo=PARIS)),
    *(timedelta(0), timedelta.max, timedelta.min, timedelta(microseconds=-1), timedelta(days=1, seconds=2)),
    *(
        pathlib.Path("/a/b"),
        pathlib.PurePosixPath("."),
        pathlib.PureWindowsPath("C:\\a"),
        pathlib.Path("a\udcff"),
    ),
    *(Color.RED, Color.CRIMSON, Color.PAIR, Size.SMALL, Word.HELLO, Rights.READ, Rights.READ | Rights.WRITE),
    *(Rights(0), Bits.ONE | Bits.TWO, Bits(8)),
    *(Point(1, Point(2, None)), Legacy(1, [Legacy(2, 3)])),
    *(ORDER, Key("a"), Key("b", Point(1, (2,))), Child(ORDER.id, ORDER.when, extra=Color.PAIR)),
    *(OrderedDict([(2, 1), (1, 2)]), OrderedDict(), Counter("abca"), Counter({"a": -1}), Counter()),
    *(deque([1, (2,)]), deque([1], maxlen=3), deque()),
    *(Open(a=1, b=(1, 2)), Numbers([1, 2]), Model(name="a", labels={"x"})),
    [Money(3), {Money(4): {Money(5)}}],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{repr(value)[:30]}")
def test_a_value_comes_back_as_it_was(value):
    assert same(value, codec.decode(codec.encode(value)))
    args, kwargs = codec.decode_call(codec.encode_call((value, value), {"key": value, "\ud800": 1}))
    assert same((value, value), args)
    assert same({"key": value, "\ud800": 1}, kwargs)


def test_a_model_comes_back_with_all_it_holds():
    model = Model(name="a", when=datetime(2026, 1, 1, tzinfo=PARIS), inner=Model(name="b"))
    model._secret = 4

    back = codec.decode(codec.encode(model))

    assert model == back
    assert same(model.when, back.when)
    assert {"name", "when", "inner"} == back.model_fields_set
    assert back._secret == 4


def test_a_dataclass_is_not_built_again():
    order = dataclasses.replace(ORDER)
    order.total = 99  # __post_init__ would say 1
    assert order.doubled == 198  # cached in the instance's dict, and not a field

    back = codec.decode(codec.encode(order))

    assert back.total == 99
    assert "doubled" not in vars(back)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None))
    | st.binary()
    | st.decimals()
    | st.uuids()
    | st.datetimes(timezones=st.none() | st.timezones() | st.just(UTC))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.complex_numbers()
    | st.sampled_from([Color.RED, Size.SMALL, Rights.READ, Key("k"), Point(1, 2)])
)
keys = (
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.sets(keys)
        | st.frozensets(keys)
        | st.lists(inner).map(deque)
        | st.builds(Point, st.integers(), inner)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=300)
@given(values)
def test_any_value_comes_back_as_it_was(value):
    assert same(value, codec.decode(codec.encode(value)))


# -- depth ----------------------------------------------------------------------------

WRAPS = {
    "list": lambda inner: [inner],
    "tuple": lambda inner: (inner,),
    "dict": lambda inner: {"k": inner},
    "tuple in dict": lambda inner: {1: (inner,)},
    "named tuple": lambda inner: Point(1, inner),
    "deque": lambda inner: deque([inner]),
}


def nested(wrap, depth):
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_nesting_five_hundred_deep_works(wrap):
    value = nested(wrap, 497)
    back = codec.decode(codec.encode(value))
    call = codec.decode_call(codec.encode_call((value,), {}))
    assert type(value) is type(back) is type(call[0][0])


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("depth", [*range(990, 1040), 20_000])
def test_nesting_works_both_ways_or_is_refused_with_the_path(wrap, depth):
    value = nested(wrap, depth)
    refused = ""
    try:
        codec.decode(codec.encode(value))
    except EncodeError as error:
        refused = str(error)
    assert refused or depth <= 1024
    assert not refused or depth > 990 or wrap is WRAPS["tuple in dict"]
    assert not refused or (refused.startswith("result") and "nested more than 1000 levels deep" in refused)
    assert len(refused) < 500


def test_what_contains_itself_is_refused():
    value: dict[str, Any] = {}
    value["list"] = [value]
    with pytest.raises(EncodeError, match=r"^args\[0\]\['list'\]\[0\].*the value contains itself"):
        codec.encode_call((value,), {})


def test_a_value_met_twice_is_no_cycle():
    shared = [1]
    assert codec.decode(codec.encode((shared, shared))) == ([1], [1])


# -- refusals -------------------------------------------------------------------------


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Bag(dict):
    pass


class Row(list):
    pass


class Moment(datetime):
    pass


class Later(date):
    pass


REFUSED = [
    (memoryview(b"x"), "bytes(value)"),
    (msgpack.ExtType(1, b""), "the codec's own"),
    (msgpack.Timestamp(1), "to_datetime"),
    (defaultdict(list), "dict(value)"),
    (Text("a"), "str(value)"),
    (Number(1), "int(value)"),
    (Bag(), "dict(value)"),
    (Row(), "list(value)"),
    (Moment(2026, 1, 1), "codec.register"),
    (Later(2026, 1, 1), "codec.register"),
    (Unregistered.A, "codec.register(Unregistered)"),
    (UnregisteredRecord(1), "codec.register(UnregisteredRecord)"),
    (iter([1]), "list(value)"),
    ((n for n in ()), "list(value)"),
    (len, "code does not travel"),
    (int, "code does not travel"),
    (lambda: 0, "code does not travel"),
    (ValueError("x"), "repr(value)"),
    (object(), "plain data"),
    (threading.Lock(), "plain data"),
    (..., "plain data"),
]


@pytest.mark.parametrize(("value", "remedy"), REFUSED, ids=lambda value: type(value).__name__)
def test_what_cannot_travel_is_refused_with_path_and_remedy(value, remedy):
    for wrapped, path in (
        (value, "kwargs['items']"),
        ([0, (value,)], "kwargs['items'][1][0]"),
        ({"a": {5: value}}, "kwargs['items']['a'][5]"),
        (Key("a", Point(1, value)), "kwargs['items'].part.y"),
        (OrderedDict(a=value), "kwargs['items']['a']"),
        (deque([value]), "kwargs['items'][0]"),
    ):
        with pytest.raises(EncodeError) as caught:
            codec.encode_call((), {"items": wrapped})
        assert str(caught.value).startswith(f"{path}: ")
        assert remedy in str(caught.value)


class Zone(timezone.__base__):
    """A time zone without a name that another process could look up."""

    def utcoffset(self, _):
        return timedelta(hours=1)

    dst = tzname = lambda *_: None


@pytest.mark.parametrize("value", [datetime(2026, 1, 1, tzinfo=Zone()), time(1, tzinfo=Zone())])
def test_a_zone_without_a_name_is_refused(value):
    with pytest.raises(EncodeError, match=r"result\[0\]: a time zone of type .*Zone has no name"):
        codec.encode([value])


def test_a_zone_read_from_a_file_is_refused():
    path = next(p for root in map(pathlib.Path, _zone_roots()) if (p := root / "Europe/Paris").exists())
    with path.open("rb") as file, pytest.raises(EncodeError, match="has no name to send"):
        codec.encode(datetime(2026, 1, 1, tzinfo=ZoneInfo.from_file(file)))


def _zone_roots():
    import importlib.util
    import zoneinfo

    found = importlib.util.find_spec("tzdata").submodule_search_locations
    return [*zoneinfo.TZPATH, *(f"{root}/zoneinfo" for root in found)]


def test_what_a_dataclass_holds_beside_its_fields_is_not_lost_silently():
    order = dataclasses.replace(ORDER)
    order.note = "x"
    with pytest.raises(EncodeError, match=r"result\[0\]: its attribute 'note' is not a field"):
        codec.encode([order])
    counter = Counter()
    counter.note = 1
    with pytest.raises(EncodeError, match="has attributes"):
        codec.encode(counter)


def test_a_field_that_was_never_set_is_refused():
    order = Order.__new__(Order)
    with pytest.raises(EncodeError, match="the field 'id' was never set"):
        codec.encode(order)


def test_a_key_of_the_users_own_class_is_named_by_its_class_in_a_path():
    with pytest.raises(EncodeError, match=r"^result\[<.*Money>\]: object cannot travel"):
        codec.encode({Money(1): object()})


def test_a_failing_dump_is_an_encode_error_with_its_path():
    codec.register(Fragile, dump=lambda _: 1 / 0, load=lambda _: None)
    with pytest.raises(EncodeError, match=r"^result\[1\]: .*Fragile.*ZeroDivisionError"):
        codec.encode([0, Fragile()])


class Fragile:
    pass


# -- damage ---------------------------------------------------------------------------


def decodes_or_says_so(data):
    for decode in (codec.decode, codec.decode_call, functools.partial(codec.decode, opaque=True)):
        try:
            decode(data)
        except DecodeError as error:
            assert str(error)  # noqa: PT017 - both ends are right


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=200), st.sampled_from([b"", b"\xc1", b"\xc1\x01", b"\xc1\x02"]))
def test_random_bytes_decode_or_raise_decode_error(data, head):
    decodes_or_says_so(head + data)


@settings(deadline=None, max_examples=500)
@given(values, st.data())
def test_damaged_bytes_decode_or_raise_decode_error(value, data):
    whole = bytearray(codec.encode_call((value,), {}))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_says_so(bytes(whole))


@settings(deadline=None)
@given(values, st.binary(min_size=1, max_size=5))
def test_truncated_bytes_and_trailing_garbage_raise_decode_error(value, garbage):
    data = codec.encode(value)
    for cut in range(len(data)) if len(data) < 100 else (0, 1, 2, len(data) // 2, len(data) - 1):
        with pytest.raises(DecodeError):
            codec.decode(data[:cut])
    with pytest.raises(DecodeError):
        codec.decode(data + garbage)


def mark(code, *items, name=b""):
    return [msgpack.ExtType(code, name), *items]


def rich(value):
    return b"\xc1\x02" + msgpack.packb(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xc1\x01",
        b"\xc1\x00\xc0",
        b"\xc1\x03\xc0",
        b"\xc1\xff\xc0",
        b"\xc0",
        b"\x93\x01\x02\x03",
        b"{}",
        b"\xc1\x01\xd4\x01\x00",  # an extension in plain data
        b"\xc1\x01\xd6\xff\x00\x00\x00\x01",
        rich(msgpack.ExtType(99, b"x")),
        rich(msgpack.ExtType(0, b"x")),
        rich(msgpack.ExtType(1, b"")),  # a mark that is in no list
        rich([0, msgpack.ExtType(1, b"")]),  # … that is not first
        rich(mark(1, msgpack.ExtType(2, b""))),
        rich({"a": msgpack.ExtType(1, b"")}),
        rich(msgpack.Timestamp(1)),
        rich([msgpack.Timestamp(1)]),
        b"\xc1\x02\xc7\x04\xff\x00\x00\x00\x01",  # … with heads that msgpack reads but does not write
        b"\xc1\x02\xc8\x00\x08\xff" + bytes(8),
        b"\xc1\x02\xc9\x00\x00\x00\x0c\xff" + bytes(12),
        rich({"a": {1: msgpack.Timestamp(1, 5)}}),
        rich(mark(1, msgpack.Timestamp(2**40, 5))),
        rich(mark(2, [])),  # a set of lists
        rich(mark(5, 1)),  # a key without a value
        rich(mark(4)),  # a deque without its length
        rich(mark(7, "RED", name=b"nobody.Knows")),
        rich(mark(7, "RED", name=b"\xff")),
        rich(msgpack.ExtType(36, b"12x")),
        rich(msgpack.ExtType(37, b"short")),
        rich(msgpack.ExtType(38, msgpack.packb([2026, 13, 1, 0, 0, 0, 0, 0, None]))),
        rich(msgpack.ExtType(38, msgpack.packb([2026, 1, 1, 0, 0, 0, 0, 0, "Nowhere/Land"]))),
        rich(msgpack.ExtType(38, msgpack.packb([2026, 1, 1, 0, 0, 0, 0, 0, "../../etc/passwd"]))),
        rich(msgpack.ExtType(42, b"?x")),
    ],
)
def test_bytes_of_no_version_known_here_raise_decode_error(data):
    for decode in (codec.decode, functools.partial(codec.decode, opaque=True)):
        if b"nobody" not in data:
            with pytest.raises(DecodeError):
                decode(data)
    with pytest.raises(DecodeError):
        codec.decode(data)


def test_damaged_decimals_are_found_in_any_decimal_context():
    import decimal

    with decimal.localcontext() as context:
        context.traps[decimal.InvalidOperation] = False
        with pytest.raises(DecodeError):
            codec.decode(rich(msgpack.ExtType(36, b"12x")))


@pytest.mark.parametrize("value", [1, [], [1, 2], [[], {1: 2}], [(), {}], [[], []], [[], {}, 3]])
def test_what_is_no_call_is_not_decoded_as_one(value):
    with pytest.raises(DecodeError, match="not an encoded call"):
        codec.decode_call(codec.encode(value))


def test_a_call_and_its_value_share_one_format():
    assert codec.decode(codec.encode_call((1,), {"a": (2,)})) == [[1], {"a": (2,)}]


# -- the rest -------------------------------------------------------------------------


def test_importing_the_codec_stays_light():
    code = "import sys, taskq.codec; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment()
    )
    assert not {"pydantic", "zoneinfo", "tenacity", "asyncio"} & set(done.stdout.split())


def test_many_threads_may_encode_at_once():
    wrong = []

    def work(number):
        value = ([number] * 50, {"n": number}, "x" * number)
        wrong.extend(number for _ in range(500) if codec.decode(codec.encode(value)) != value)
        wrong.extend(number for _ in range(500) if codec.decode(codec.encode([number])) != [number])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong


def test_big_values_do_not_keep_their_buffers():
    codec.encode("x" * (4 << 20))
    assert codec.decode(codec.encode(["é" * 100_000, b"\xc4" * 100_000])) == [
        "é" * 100_000,
        b"\xc4" * 100_000,
    ]


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": str(pathlib.Path(codec.__file__).parents[1])}
