"""Classes that travel by name: what registers them, and what becomes of names that mean nothing here."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import pathlib
import subprocess
import sys
from typing import Annotated, Literal, NamedTuple, NewType, Optional, TypedDict, TypeVar

import pydantic
import pytest

from taskq import codec, registered
from taskq.errors import ConfigurationError, DecodeError


class Color(enum.Enum):
    RED = "red"


class Rights(enum.Flag):
    READ = 1


class Point(NamedTuple):
    x: int
    y: object


@dataclasses.dataclass(frozen=True)
class Key:
    name: str
    part: Point | None = None


class Open(pydantic.BaseModel, extra="allow"):
    a: int


class Money:
    def __init__(self, cents):
        self.cents = cents


class Fragile:
    pass


class Unregistered(enum.Enum):
    A = 1


@dataclasses.dataclass
class UnregisteredRecord:
    a: int


for cls in (Color, Rights, Point, Key, Open):
    codec.register(cls)
codec.register(Money, "test_registered.money", dump=lambda money: money.cents, load=Money)


@pytest.fixture
def registry(monkeypatch):
    """A registry to spoil."""
    monkeypatch.setattr(registered, "_by_name", dict(registered._by_name))
    monkeypatch.setattr(registered, "_by_class", dict(registered._by_class))
    return registered


def forget(registry, cls):
    entry = registry._by_class.pop(cls)
    del registry._by_name[entry.name]


@pytest.mark.parametrize(
    ("value", "fields"),
    [
        (Color.RED, "RED"),
        (Rights.READ, 1),
        (Key("a", Point(1, 2)), {"name": "a", "part": Point(1, 2)}),
        (Point(1, 2), [1, 2]),
        (Open(a=1, b=2), {"a": 1, "b": 2}),
        (Money(3), 3),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list | dict | str | int) else "",
)
def test_a_name_unknown_here_is_opaque_or_an_error(registry, value, fields):
    data = codec.encode([value, {"k": (value,)}])
    forget(registry, type(value))

    with pytest.raises(DecodeError, match="is not registered here"):
        codec.decode(data)
    opaque = codec.decode(data, opaque=True)[0]

    assert isinstance(opaque, codec.Opaque)
    assert opaque.name == (
        "test_registered.money" if type(value) is Money else f"{__name__}.{type(value).__qualname__}"
    )
    assert opaque.fields == fields
    assert opaque.name in repr(opaque)


def test_an_unknown_key_can_still_be_shown(registry):
    data = codec.encode({Key("a"): 1})
    forget(registry, Key)
    (key,) = codec.decode(data, opaque=True)
    assert key.name.endswith("Key")


def evolve(registry, old, new):
    """Encode with one version of a class, and let the next one bear its name."""
    codec.register(old, "evolving")
    data = codec.encode(old(1))
    forget(registry, old)
    codec.register(new, "evolving")
    return data


def test_a_new_field_gets_its_default(registry):
    old = dataclasses.make_dataclass("Evolving", ["a"])
    new = dataclasses.make_dataclass("Evolving", ["a", ("b", list, dataclasses.field(default_factory=list))])
    back = codec.decode(evolve(registry, old, new))
    assert (back.a, back.b) == (1, [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [(["a", "b"], "has a field 'b' without default that was not sent"), ([], "has no field 'a' here")],
)
def test_fields_that_do_not_fit_are_an_error(registry, fields, message):
    data = evolve(
        registry, dataclasses.make_dataclass("Old", ["a"]), dataclasses.make_dataclass("Evolved", fields)
    )
    with pytest.raises(DecodeError, match=message):
        codec.decode(data)
    assert isinstance(codec.decode(data, opaque=True), codec.Opaque)


def test_model_fields_that_do_not_fit_are_an_error(registry):
    old = pydantic.create_model("Old", a=(int, ...))
    data = evolve(registry, lambda_model(old), pydantic.create_model("Same", a=(int, ...), b=(int, 5)))
    assert codec.decode(data).b == 5
    forget(registry, type(codec.decode(data)))
    codec.register(pydantic.create_model("Wants", a=(int, ...), c=(int, ...)), "evolving")
    with pytest.raises(DecodeError, match="required field 'c'"):
        codec.decode(data)


def lambda_model(model):
    """A model that takes its field by position."""

    class Positional(model):
        def __init__(self, a):
            super().__init__(a=a)

    return Positional


def test_a_removed_member_is_an_error(registry):
    codec.register(Unregistered, "changing")
    data = codec.encode(Unregistered.A)
    forget(registry, Unregistered)
    codec.register(enum.Enum("Other", ["B"]), "changing")
    with pytest.raises(DecodeError, match="KeyError: 'A'"):
        codec.decode(data)


def test_a_name_that_means_another_kind_of_class_is_unknown(registry):
    codec.register(Unregistered, "changing")
    data = codec.encode(Unregistered.A)
    forget(registry, Unregistered)
    codec.register(UnregisteredRecord, "changing")
    with pytest.raises(DecodeError, match="not registered"):
        codec.decode(data)


def test_the_old_name_stays_readable_after_registering_a_new_one(registry):
    codec.register(UnregisteredRecord, "old")
    data = codec.encode(UnregisteredRecord(1))
    codec.register(UnregisteredRecord, "new")
    assert b"new" in codec.encode(UnregisteredRecord(1))
    assert codec.decode(data) == UnregisteredRecord(1)


def test_one_name_means_one_class(registry):
    codec.register(Unregistered, "taken")
    with pytest.raises(ConfigurationError, match="'taken' is taken by"):
        codec.register(UnregisteredRecord, "taken")
    codec.register(Unregistered, "taken")  # again is fine


@pytest.mark.parametrize(
    ("cls", "options"),
    [(object, {}), (int, {}), (Fragile, {"dump": str}), (Fragile, {"load": str}), ("text", {}), (3, {})],
)
def test_what_cannot_be_registered_is_refused(cls, options):
    with pytest.raises(ConfigurationError):
        codec.register(cls, **options)


@pytest.mark.parametrize("base", [Exception, dict, list, int])
def test_a_dataclass_that_is_also_a_container_is_refused_early(base):
    cls = dataclasses.make_dataclass("Both", ["a"], bases=(base,))
    with pytest.raises(ConfigurationError, match="dump=…, load=…"):
        codec.register(cls)


def test_register_is_a_decorator(registry):
    @codec.register
    class Local(enum.Enum):
        A = 1

    assert codec.decode(codec.encode(Local.A)) is Local.A


# -- annotations ----------------------------------------------------------------------


def named(index):
    """A fresh class of its own name for each use."""
    return enum.Enum(f"Named{index}", ["A"], module=__name__)


E1, E2, E3, E4, E5, E6, E7, E8, E9, E10, E11, E12, E13 = (named(i) for i in range(1, 14))
Alias = NewType("Alias", E8)
Bound = TypeVar("Bound", bound=E9)


@dataclasses.dataclass
class Outer:
    inner: list[Middle]
    lost: NoSuchThing  # noqa: F821 - cannot be resolved


@dataclasses.dataclass
class Middle:
    color: E1 | None
    back: Outer | None = None


class Shape(TypedDict):
    color: E10


class Pair(NamedTuple):
    color: E11


class Holder(pydantic.BaseModel):
    color: dict[str, E12]


def annotated(
    a: Outer,
    b: Annotated[Optional[E2], "meta"],  # noqa: UP045
    c: dict[E3, tuple[E4, ...]],
    d: Literal[E5.A],
    *e: E6,
    lost: NoSuchThing = None,  # noqa: F821
    f: Alias,
    g: Bound,
    h: Shape,
    i: Pair,
    j: type[Holder],
    **k: collections.abc.Callable[[E13], int],
) -> list[E7]: ...


def test_annotations_register_what_they_name(registry):
    codec.register_annotations(annotated)
    for cls in (E1, E2, E3, E4, E5, E6, E7, E8, E9, E10, E11, E12, E13, Outer, Middle, Pair, Holder):
        assert registered.registered_class(cls), cls
    value = Outer([Middle(E1.A)], None)
    assert codec.decode(codec.encode(value)) == value


def test_annotations_of_wrapped_and_bare_functions(registry):
    @functools.wraps(annotated)
    def wrapper(*args, **kwargs): ...

    codec.register_annotations(wrapper)
    assert registered.registered_class(E7)
    codec.register_annotations(lambda x: x)
    codec.register_annotations(len)
    codec.register_annotations(functools.partial(annotated, 1))


def test_a_name_given_by_hand_is_not_replaced_by_an_annotation(registry):
    codec.register(E7, "by hand")
    codec.register_annotations(annotated)
    assert b"by hand" in codec.encode(E7.A)


@pytest.mark.parametrize("launch", [["script.py"], ["-m", "script"]])
def test_a_class_of_a_script_bears_the_scripts_name(tmp_path, launch):
    (tmp_path / "script.py").write_text(
        "import enum\nfrom taskq import codec\n"
        "class Color(enum.Enum):\n    RED = 1\n"
        "codec.register(Color)\nprint(codec.encode(Color.RED))\n"
    )
    done = subprocess.run(
        [sys.executable, *launch],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env=_environment(),
    )
    assert "script.Color" in done.stdout


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": str(pathlib.Path(registered.__file__).parents[1])}
