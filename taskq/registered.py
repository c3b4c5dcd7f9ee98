"""Classes that travel by name: enums, dataclasses, named tuples, pydantic models and registered types.

Decoding never imports anything: a name means something only where the class was registered, by
:func:`register` or by standing in a task's annotations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from taskq.errors import ConfigurationError, DecodeError
from taskq.extensions import Mark, Unencodable, stable_module, type_name

#: What an encoder walks: how to show the step in a path, and the value there.
Parts = Iterable[tuple[str, Any]]

_WITH_CONTENTS: Final = (BaseException, dict, list, set, frozenset, tuple, str, bytes, bytearray, int, float)

ClassT = TypeVar("ClassT", bound=type)


@dataclass(frozen=True, eq=False)
class Opaque:
    """A value whose class is not registered here; shown by tools that have not imported the tasks.

    ``fields`` is what travelled: a mapping of fields, a member's name, a number, or a list of items.
    """

    name: str
    fields: Any

    def __repr__(self) -> str:
        return f"<{self.name} {self.fields!r}>"


@dataclass(frozen=True, slots=True)
class Registered:
    """How one class travels."""

    cls: type
    name: str
    mark: Mark
    parts: Callable[[Any], Parts]
    build: Callable[[list[Any]], Any]


_by_class: Final[dict[type, Registered]] = {}
_by_name: Final[dict[str, Registered]] = {}


def register(
    cls: ClassT,
    name: str | None = None,
    *,
    dump: Callable[[Any], Any] | None = None,
    load: Callable[[Any], Any] | None = None,
) -> ClassT:
    """Let instances of ``cls`` travel under ``name`` (default: module and qualified name); returns ``cls``.

    Enums, dataclasses, named tuples and pydantic models need nothing more; any other class needs ``dump``
    (instance to an encodable value) and ``load`` (back). Registering again under a new name keeps the old one
    readable. Raises :class:`ConfigurationError` if the class cannot travel or the name is another class's.
    """
    if not isinstance(cls, type):
        raise ConfigurationError(f"codec.register takes a class, not {cls!r}")
    entry = _entry(cls, name or default_name(cls), dump, load)
    other = _by_name.get(entry.name)
    if other is not None and not _same_definition(other.cls, cls):
        raise ConfigurationError(
            f"codec: the name {entry.name!r} is taken by {type_name(other.cls)}, so {type_name(cls)} needs another"
        )
    _by_name[entry.name] = entry
    _by_class[cls] = entry
    return cls


def default_name(cls: type) -> str:
    """The name that a class is registered under where none is given."""
    return f"{stable_module(cls)}.{cls.__qualname__}"


def registered_class(cls: type) -> Registered | None:
    """How ``cls`` travels, or ``None``."""
    return _by_class.get(cls)


def registered_name(name: str) -> Registered | None:
    """What ``name`` means here, or ``None``."""
    return _by_name.get(name)


def registrable(cls: type) -> bool:
    """Whether ``cls`` can be registered by itself, without ``dump`` and ``load``."""
    return issubclass(cls, enum.Enum) or dataclasses.is_dataclass(cls) or is_named_tuple(cls) or is_model(cls)


def is_record(cls: type) -> bool:
    """Whether ``cls`` is a dataclass that holds nothing but its fields: an exception or a dict also has contents."""
    return dataclasses.is_dataclass(cls) and not issubclass(cls, _WITH_CONTENTS)


def is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def is_model(cls: type) -> bool:
    """Whether ``cls`` is a pydantic (version 2) model, asked without importing pydantic."""
    return hasattr(cls, "__pydantic_decorators__") and hasattr(cls, "model_fields")


def _same_definition(old: type, new: type) -> bool:
    """Whether ``new`` is ``old``, perhaps executed again by a reload."""
    return old is new or (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)


def _entry(
    cls: type, name: str, dump: Callable[[Any], Any] | None, load: Callable[[Any], Any] | None
) -> Registered:
    if (dump is None) != (load is None):
        raise ConfigurationError(f"codec.register({cls.__name__}): dump and load go together")
    if dump is not None and load is not None:
        return _custom(cls, name, dump, load)
    if issubclass(cls, enum.Flag):
        return Registered(
            cls, name, Mark.FLAG, lambda value: [("", value.value)], functools.partial(_member, cls)
        )
    if issubclass(cls, enum.Enum):
        return _enum(cls, name)
    if is_model(cls):
        return Registered(cls, name, Mark.MODEL, _model_parts, functools.partial(_build_model, cls))
    if is_record(cls):
        return Registered(cls, name, Mark.RECORD, _record_parts(cls), functools.partial(_build_record, cls))
    if is_named_tuple(cls):
        return _named_tuple(cls, name)
    raise ConfigurationError(
        f"codec: {type_name(cls)} is no enum, dataclass, named tuple or pydantic model; "
        f"give codec.register({cls.__name__}, dump=…, load=…)"
    )


def _custom(cls: type, name: str, dump: Callable[[Any], Any], load: Callable[[Any], Any]) -> Registered:
    return Registered(cls, name, Mark.CUSTOM, lambda value: [("", dump(value))], lambda parts: load(*parts))


# -- enums ----------------------------------------------------------------------------


def _enum(cls: type[enum.Enum], name: str) -> Registered:
    def build(parts: list[Any]) -> Any:
        (member,) = parts
        return cls[member]

    # By name: a member's value may be anything, and may change more freely than its name.
    return Registered(cls, name, Mark.ENUM, lambda value: [("", value.name)], build)


def _member(cls: type[enum.Flag], parts: list[Any]) -> Any:
    (number,) = parts
    return cls(number)


# -- dataclasses ----------------------------------------------------------------------


def _record_parts(cls: type) -> Callable[[Any], Parts]:
    names = [field.name for field in dataclasses.fields(cls)]
    known = frozenset(names)

    def parts(value: Any) -> Iterator[tuple[str, Any]]:
        _check_attributes(cls, value, known)
        for name in names:
            step = f".{name}"
            yield "", name
            try:
                yield step, getattr(value, name)
            except AttributeError:
                raise Unencodable(f"the field {name!r} was never set") from None

    return parts


def _check_attributes(cls: type, value: Any, known: frozenset[str]) -> None:
    """Refuse what would get lost: attributes that are not fields, unless computed from them."""
    for name in getattr(value, "__dict__", ()):
        if name not in known and not isinstance(getattr(cls, name, None), functools.cached_property):
            raise Unencodable(f"its attribute {name!r} is not a field of the dataclass and would be lost")


def _build_record(cls: type, parts: list[Any]) -> Any:
    """An instance with these fields, built without ``__init__``: it was checked where it was made."""
    given = _fields_given(parts)
    value: Any = object.__new__(cls)
    for field in dataclasses.fields(cls):
        item = given.pop(field.name, dataclasses.MISSING)
        object.__setattr__(
            value, field.name, _field_default(cls, field) if item is dataclasses.MISSING else item
        )
    _refuse_unknown(cls, given)
    return value


def _fields_given(parts: list[Any]) -> dict[str, Any]:
    if len(parts) % 2:
        raise DecodeError("a field without a value")
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _field_default(cls: type, field: dataclasses.Field[Any]) -> Any:
    """What a field holds that the sender's version of the class did not have."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise DecodeError(f"{type_name(cls)} has a field {field.name!r} without default that was not sent")


def _refuse_unknown(cls: type, rest: dict[str, Any]) -> None:
    if rest:
        raise DecodeError(f"{type_name(cls)} has no field {', '.join(map(repr, rest))} here")


# -- named tuples ---------------------------------------------------------------------


def _named_tuple(cls: Any, name: str) -> Registered:
    steps = [f".{field}" for field in cls._fields]

    def build(parts: list[Any]) -> Any:
        if len(parts) != len(steps):
            raise DecodeError(f"{type_name(cls)} has {len(steps)} fields here, {len(parts)} were sent")
        return tuple.__new__(cls, parts)

    return Registered(cls, name, Mark.NAMED_TUPLE, lambda value: zip(steps, value, strict=True), build)


# -- pydantic models ------------------------------------------------------------------


def _model_parts(value: Any) -> Iterator[tuple[str, Any]]:
    state = value.__getstate__()
    fields = type(value).model_fields
    yield "", sorted(state["__pydantic_fields_set__"])
    own = {name: item for name, item in state["__dict__"].items() if name in fields}
    for group in (own, state.get("__pydantic_extra__") or {}, state.get("__pydantic_private__") or {}):
        for name, item in group.items():
            yield "", name
            yield f".{name}", item


def _build_model(cls: Any, parts: list[Any]) -> Any:
    """The model as it was, not validated again: validators need not accept their own output."""
    given = _fields_given(parts[1:])
    private = {name: given.pop(name) for name in list(given) if name in cls.__private_attributes__}
    own = {
        name: given.pop(name) if name in given else _model_default(cls, name, field)
        for name, field in cls.model_fields.items()
    }
    extra = cls.model_config.get("extra") == "allow"
    if not extra:
        _refuse_unknown(cls, given)
    value = cls.__new__(cls)
    value.__setstate__(
        {
            "__dict__": own,
            "__pydantic_fields_set__": set(parts[0]),
            "__pydantic_extra__": given if extra else None,
            "__pydantic_private__": private if cls.__private_attributes__ else None,
        }
    )
    return value


def _model_default(cls: type, name: str, field: Any) -> Any:
    if field.is_required():
        raise DecodeError(f"{type_name(cls)} has a required field {name!r} that was not sent")
    return field.get_default(call_default_factory=True)


# -- annotations ----------------------------------------------------------------------


def register_annotations(fn: Callable[..., Any]) -> None:
    """Register every class that the annotations of ``fn`` name, its return value's included.

    Looks through unions, containers, ``Annotated``, aliases, type variables and the fields of what it finds.
    An annotation that cannot be resolved is ignored: its values then need :func:`register`.
    """
    pending = list(_hints(inspect.unwrap(fn)))
    seen: set[int] = set()
    keep = []  # holds what `seen` knows by id
    while pending:
        hint = pending.pop()
        if id(hint) in seen:
            continue
        seen.add(id(hint))
        keep.append(hint)
        if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
            if registrable(hint) and hint not in _by_class:
                register(hint)
            pending.extend(_class_hints(hint))
        else:
            pending.extend(_inside(hint))


def _hints(owner: Any) -> Iterator[Any]:
    """The annotations of a function or class, each resolved by itself so that one failure hides no other."""
    annotations: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # lazily evaluated annotations may raise anything
        annotations = dict(owner.__annotations__)
    scope = getattr(owner, "__globals__", None)
    if scope is None:
        scope = vars(inspect.getmodule(owner)) if inspect.getmodule(owner) else {}
    for annotation in annotations.values():
        lone = types.SimpleNamespace(__annotations__={"it": annotation})
        with contextlib.suppress(Exception):  # an annotation is free text; what fails is ignored by promise
            yield typing.get_type_hints(lone, globalns=scope, include_extras=True)["it"]


def _class_hints(cls: type) -> Iterator[Any]:
    """What the fields of a class may hold."""
    if is_model(cls):
        for field in cls.model_fields.values():  # type: ignore[attr-defined]
            yield field.annotation
    elif dataclasses.is_dataclass(cls) or is_named_tuple(cls) or typing.is_typeddict(cls):
        for base in cls.__mro__:
            yield from _hints(base)


def _inside(hint: Any) -> Iterator[Any]:
    """What a typing construct is made of."""
    yield from _flat(typing.get_args(hint))
    yield from _flat(
        [typing.get_origin(hint), getattr(hint, "__supertype__", None), getattr(hint, "__value__", None)]
    )
    if isinstance(hint, TypeVar):
        yield from _flat([hint.__bound__, *hint.__constraints__])
    if isinstance(hint, enum.Enum):  # from Literal[Color.RED]
        yield type(hint)


def _flat(hints: Iterable[Any]) -> Iterator[Any]:
    for hint in hints:
        if isinstance(hint, list):  # the parameters of Callable[[…], …]
            yield from hint
        elif hint is not None:
            yield hint
