"""The rich format: one msgpack value in which extensions and marked lists carry the types msgpack lacks.

Written by a loop, not by recursion: so depth is bounded by :data:`MAX_DEPTH` and not by the caller's stack, and
an error knows the way to what cannot travel. Read by msgpack with hooks.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, ClassVar, Final, NoReturn

import msgpack

from taskq.errors import DecodeError, EncodeError
from taskq.extensions import DUMPERS, Leaf, Mark, Unencodable, dump_big_int, dump_text, load_leaf, type_name
from taskq.registered import Opaque, Registered, registered_class, registered_name, registrable

#: Levels of nesting that always work; msgpack's own decoder ends at 1,024.
MAX_DEPTH: Final = 1000


def write_rich(roots: Sequence[tuple[str, Any]], *, length: int | None = None) -> bytes:
    """The values of ``roots``, one after the other, in a list of ``length`` if that is given.

    A root's name begins the paths in errors. Raises :class:`EncodeError`.
    """
    return _Writer(length).write(roots)


def read_rich(body: bytes, *, opaque: bool) -> Any:
    """The value in ``body``. Raises :class:`DecodeError`, or whatever damaged bytes make a constructor raise."""
    return _Reader(opaque).read(body)


# -- writing --------------------------------------------------------------------------

#: A step in a path: an index, a dict's key in a tuple of one, or text to show as it is.
_Step = int | tuple[Any] | str
_Children = Iterator[tuple[_Step, Any]]

_ATOMS: Final = frozenset({NoneType, bool, float, bytes})
_INT_RANGE: Final = range(-(1 << 63), 1 << 64)


class _Writer:
    """Writes one value without recursion, knowing the way to wherever it is."""

    def __init__(self, length: int | None = None) -> None:
        self._packer = msgpack.Packer(autoreset=False, buf_size=1 << 12)
        if length is not None:
            self._packer.pack_array_header(length)
        self._steps: list[_Step] = []
        self._open: list[Any] = []

    def write(self, roots: Iterable[tuple[str, Any]]) -> bytes:
        frames: list[_Children] = [iter(roots)]
        self._steps.append("")
        self._open.append(None)
        while frames:
            inner = self._until_container(frames[-1])
            if inner is None:
                frames.pop()
                self._steps.pop()
                self._open.pop()
            else:
                frames.append(inner)
                self._steps.append("")
        return bytes(self._packer.bytes())

    def _until_container(self, children: _Children) -> _Children | None:
        """Write ``children`` up to the first that has children itself; its own, or ``None`` at the end."""
        atom = self._packer.pack
        try:
            for self._steps[-1], child in children:
                if type(child) in _ATOMS:
                    atom(child)
                else:
                    inner = self._value(child)
                    if inner is not None:
                        self._enter(child)
                        return inner
        except Unencodable as error:
            self._fail(str(error))
        return None

    def _value(self, value: Any) -> _Children | None:
        """Write a leaf, or the head of a container whose children are returned."""
        cls = type(value)
        special = self._special.get(cls)
        if special is not None:
            return special(self, value)
        leaf = DUMPERS.get(cls)
        if leaf is not None:
            code, dump = leaf
            self._packer.pack_ext_type(code, dump(value))
            return None
        entry = registered_class(cls)
        if entry is None:
            raise Unencodable(_advice(value))
        parts = _parts(entry, value)
        return self._marked(entry.mark, iter(parts), len(parts), entry.name.encode())

    def _marked(self, mark: Mark, children: _Children, length: int, name: bytes = b"") -> _Children:
        self._packer.pack_array_header(length + 1)
        self._packer.pack_ext_type(mark, name)
        return children

    def _int(self, value: int) -> None:
        if value in _INT_RANGE:
            self._packer.pack(value)
        else:
            self._packer.pack_ext_type(Leaf.BIG_INT, dump_big_int(value))

    def _str(self, value: str) -> None:
        try:
            value.isascii() or value.encode()
        except UnicodeEncodeError:
            self._packer.pack_ext_type(Leaf.SURROGATES, dump_text(value))
        else:
            self._packer.pack(value)

    def _list(self, value: list[Any]) -> _Children:
        self._packer.pack_array_header(len(value))
        return enumerate(list(value))

    def _dict(self, value: dict[Any, Any]) -> _Children:
        items = list(value.items())
        self._packer.pack_map_header(len(items))
        return _turns(items)

    def _tuple(self, value: tuple[Any, ...]) -> _Children:
        return self._marked(Mark.TUPLE, enumerate(value), len(value))

    def _set(self, value: set[Any] | frozenset[Any]) -> _Children:
        mark = Mark.SET if type(value) is set else Mark.FROZENSET
        return self._marked(mark, _members(list(value)), len(value))

    def _deque(self, value: deque[Any]) -> _Children:
        items: list[tuple[_Step, Any]] = [("", value.maxlen), *enumerate(value)]
        return self._marked(Mark.DEQUE, iter(items), len(items))

    def _mapping(self, value: OrderedDict[Any, Any] | Counter[Any]) -> _Children:
        if getattr(value, "__dict__", None):
            raise Unencodable(f"this {type(value).__name__} has attributes, which would be lost")
        mark = Mark.ORDERED_DICT if type(value) is OrderedDict else Mark.COUNTER
        items = list(value.items())
        return self._marked(mark, _turns(items), 2 * len(items))

    def _enter(self, container: Any) -> None:
        self._open.append(container)
        if len(self._open) > MAX_DEPTH:
            self._fail(_too_deep(self._open))

    def _fail(self, reason: str) -> NoReturn:
        raise EncodeError(f"{_path(self._steps)}: {reason}") from None

    _special: ClassVar[dict[type, Callable[[Any, Any], _Children | None]]] = {
        int: _int,
        str: _str,
        list: _list,
        dict: _dict,
        tuple: _tuple,
        set: _set,
        frozenset: _set,
        deque: _deque,
        OrderedDict: _mapping,
        Counter: _mapping,
    }


def _parts(entry: Registered, value: Any) -> list[tuple[_Step, Any]]:
    try:
        return list(entry.parts(value))
    except Unencodable:
        raise
    except Exception as error:  # a property, a `dump`: the user's code
        raise Unencodable(
            f"{type_name(entry.cls)} failed to encode: {type(error).__name__}: {error}"
        ) from error


def _turns(items: list[tuple[Any, Any]]) -> _Children:
    for key, value in items:
        yield (key,), key
        yield (key,), value


def _members(items: list[Any]) -> _Children:
    for item in items:
        yield f"{{{_brief(item)}}}", item


# -- what an error says ---------------------------------------------------------------

#: Steps shown at either end of a long path.
_SHOWN: Final = 12


def _path(steps: Sequence[_Step]) -> str:
    shown = [_show(step) for step in steps]
    if len(shown) > 2 * _SHOWN:
        shown[_SHOWN:-_SHOWN] = ["…"]
    return "".join(shown)


def _show(step: _Step) -> str:
    if isinstance(step, tuple):
        return f"[{_brief(step[0])}]"
    return f"[{step}]" if isinstance(step, int) else step


def _brief(value: Any) -> str:
    """A short text for a key; of a user's own class only the name, since its ``repr`` may do anything."""
    if type(value) in {str, bytes, int, float, bool, NoneType}:
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}…"
    return f"<{type_name(type(value))}>"


def _too_deep(containers: list[Any]) -> str:
    if len({id(container) for container in containers}) < len(containers):
        return "the value contains itself"
    return f"nested more than {MAX_DEPTH} levels deep"


def _advice(value: Any) -> str:
    """Why ``value`` cannot travel, and the line to write."""
    cls = type(value)
    name = type_name(cls)
    if registrable(cls) and cls is not msgpack.ExtType:
        return (
            f"{name} is not registered; name it in the task's annotations, or write "
            f"codec.register({cls.__qualname__}) where producer and worker both import it"
        )
    for known, remedy in _REMEDIES:
        if isinstance(value, known):
            return f"{name} cannot travel; {remedy}"
    return f"{name} cannot travel; send plain data (an id, a dict), or codec.register({cls.__qualname__}, dump=…, load=…)"


_SUBCLASS: Final = "a subclass would come back as its base: convert it with {0}(value), or codec.register it"
_REMEDIES: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (memoryview, "send bytes(value)"),
    (msgpack.ExtType, "extension types are the codec's own; send its bytes"),
    (msgpack.Timestamp, "send value.to_datetime()"),
    (defaultdict, "its factory is code: send dict(value)"),
    *((base, _SUBCLASS.format(base.__name__)) for base in (str, bytes, int, float, dict, list, tuple, set)),
    (Iterator, "an iterator can be read once only: send list(value)"),
    ((type, Callable), "code does not travel: send a name that the task looks up"),  # type: ignore[arg-type]
    (BaseException, "send repr(value)"),
)


# -- reading --------------------------------------------------------------------------


class _Marker:
    """Stands first in a marked list while it is read."""

    __slots__ = ("mark", "name")

    def __init__(self, mark: Mark, name: str) -> None:
        self.mark = mark
        self.name = name


#: All heads of extension -1, msgpack's own timestamp, which its decoder does not show to a hook.
_TIMESTAMP: Final = re.compile(rb"[\xd4-\xd8]\xff|\xc7.\xff|\xc8..\xff|\xc9....\xff", re.DOTALL)
_LAST_MARK: Final = max(Mark)


class _Reader:
    """Reads one value."""

    def __init__(self, opaque: bool) -> None:
        self._opaque = opaque
        self._loose = 0  # marks that no list has claimed

    def read(self, body: bytes) -> Any:
        strict = b"\xff" in body and _TIMESTAMP.search(body) is not None
        value = msgpack.unpackb(
            body,
            strict_map_key=False,
            ext_hook=self._extension,
            list_hook=self._strict_list if strict else self._list,
            object_pairs_hook=_strict_dict if strict else None,
        )
        if strict:
            _refuse_timestamps([value])
        if self._loose:
            raise DecodeError("a mark that begins no list")
        return value

    def _extension(self, code: int, data: bytes) -> Any:
        if 1 <= code <= _LAST_MARK:
            self._loose += 1
            return _Marker(Mark(code), data.decode())
        return load_leaf(code, data)

    def _list(self, items: list[Any]) -> Any:
        if not items or type(items[0]) is not _Marker:
            return items
        marker = items.pop(0)
        self._loose -= 1
        build = _BUILDERS.get(marker.mark)
        if build is not None:
            return build(items)
        return self._named(marker, items)

    def _named(self, marker: _Marker, items: list[Any]) -> Any:
        entry = registered_name(marker.name)
        if entry is not None and entry.mark is marker.mark:
            try:
                return entry.build(items)
            except Exception:
                if not self._opaque:
                    raise
        if self._opaque:
            return Opaque(marker.name, _bare(marker.mark, items))
        raise DecodeError(
            f"{marker.name!r} is not registered here; name the class in the task's annotations, or "
            "codec.register it where the worker imports it"
        )

    def _strict_list(self, items: list[Any]) -> Any:
        _refuse_timestamps(items)
        return self._list(items)


def _strict_dict(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    for pair in pairs:
        _refuse_timestamps(pair)
    return dict(pairs)


def _refuse_timestamps(values: Iterable[Any]) -> None:
    if any(type(value) is msgpack.Timestamp for value in values):
        raise DecodeError("unknown extension code -1")


def _build_deque(items: list[Any]) -> deque[Any]:
    return deque(items[1:], items[0])


def _build_ordered(items: list[Any]) -> OrderedDict[Any, Any]:
    return OrderedDict(_pairs(items))


def _build_counter(items: list[Any]) -> Counter[Any]:
    return Counter(dict(_pairs(items)))


def _pairs(items: list[Any]) -> Iterable[tuple[Any, Any]]:
    if len(items) % 2:
        raise DecodeError("a key without a value")
    return zip(items[::2], items[1::2], strict=True)


_BUILDERS: Final[dict[Mark, Callable[[list[Any]], Any]]] = {
    Mark.TUPLE: tuple,
    Mark.SET: set,
    Mark.FROZENSET: frozenset,
    Mark.DEQUE: _build_deque,
    Mark.ORDERED_DICT: _build_ordered,
    Mark.COUNTER: _build_counter,
}


def _bare(mark: Mark, items: list[Any]) -> Any:
    """What travelled of a value whose class is unknown."""
    if mark in {Mark.RECORD, Mark.MODEL}:
        rest = items[1:] if mark is Mark.MODEL else items
        return dict(_pairs(rest))
    return items if mark is Mark.NAMED_TUPLE or len(items) != 1 else items[0]
