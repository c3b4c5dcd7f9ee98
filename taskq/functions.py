"""Decorated functions: the name a worker finds them by, where the context goes, which arguments they take."""

from __future__ import annotations

import difflib
import inspect
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taskq.context import CONTEXT, Context
from taskq.errors import ConfigurationError, InvalidArgumentError


def module_name(fn: Callable[..., Any]) -> str:
    """The module of ``fn`` as ``import`` and ``taskq worker -A`` would name it, also when run as a script."""
    if fn.__module__ not in {"__main__", "__mp_main__"}:
        return fn.__module__
    main = sys.modules[fn.__module__]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in {"__main__", "__mp_main__"}:
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    if file is None:
        return fn.__module__
    path = pathlib.Path(file).resolve()
    root = pathlib.Path(sys.path[0]).resolve()
    relative = path.relative_to(root) if path.is_relative_to(root) else pathlib.Path(path.name)
    return ".".join(relative.with_suffix("").parts)


def place(fn: Callable[..., Any]) -> str:
    """File and line of ``fn``: two tasks of one name are the same if they stand at one place."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(fn)


def refuse_what_no_worker_can_find(fn: Any, name: object) -> None:
    """Raise ``ConfigurationError`` for what a worker in another process could not import by its name."""
    if isinstance(fn, staticmethod | classmethod | property):
        raise ConfigurationError(
            f"{type(fn).__name__} {getattr(fn, '__qualname__', fn)!r} cannot be a task: use a function at module level"
        )
    if not callable(fn) or isinstance(fn, type) or not hasattr(fn, "__qualname__"):
        raise ConfigurationError(f"{fn!r} cannot be a task: decorate a function")
    if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        raise ConfigurationError(
            f"{fn.__qualname__} is a generator, which cannot be a task: return a list instead"
        )
    if name is not None:
        if not isinstance(name, str) or not 1 <= len(name) <= 200 or not name.isprintable():
            raise InvalidArgumentError(f"name={name!r}: use 1 to 200 printable characters")
        return
    if fn.__name__ == "<lambda>":
        raise ConfigurationError("a lambda has no name that a worker could find: use def, or give name=")
    if "<locals>" in fn.__qualname__:
        raise ConfigurationError(
            f"{fn.__qualname__} is defined inside a function, where a worker cannot find it: "
            "move it to module level, or give name= if its module always defines it"
        )
    if "." in fn.__qualname__:
        raise ConfigurationError(
            f"{fn.__qualname__}: a method cannot be a task, because its instance would not travel; "
            "move it to module level and pass what it needs"
        )


def injection(fn: Callable[..., Any], *, bind: bool) -> str | None:
    """Where the context goes: ``""`` first, a parameter's name, or ``None`` nowhere."""
    parameters = list(inspect.signature(fn).parameters.values())
    if bind:
        first = parameters[0] if parameters else None
        if first is None or first.kind not in {
            first.POSITIONAL_ONLY,
            first.POSITIONAL_OR_KEYWORD,
            first.VAR_POSITIONAL,
        }:
            raise ConfigurationError(
                f"{fn.__qualname__}: bind=True needs a first parameter to receive the context"
            )
        return ""
    for parameter in parameters:
        if parameter.default is CONTEXT:
            return parameter.name
        wanted = parameter.annotation is Context or str(parameter.annotation) in {"Context", "taskq.Context"}
        if wanted and parameter.default is parameter.empty:
            raise ConfigurationError(
                f"{fn.__qualname__}: parameter {parameter.name!r} wants the context: "
                f"declare bind=True, or write `{parameter.name}: Context = CONTEXT`"
            )
    return None


class Arguments:
    """Checks a call against the function's parameters; a count decides in the common case."""

    def __init__(self, name: str, fn: Callable[..., Any], inject: str | None) -> None:
        signature = inspect.signature(fn)
        parameters = list(signature.parameters.values())
        if inject == "" and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            parameters = parameters[1:]
        elif inject:
            parameters = [parameter for parameter in parameters if parameter.name != inject]
        self._name = name
        self._signature = signature.replace(parameters=parameters)
        positional = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
        simple = len(positional) == len(parameters)
        self._least = sum(p.default is p.empty for p in positional) if simple else -1
        self._most = len(positional)

    def knows(self, name: str) -> bool:
        """Whether the function has a parameter of that name."""
        return name in self._signature.parameters

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, without those that equal their defaults."""
        given = self._signature.bind(*args, **kwargs).arguments
        parameters = self._signature.parameters
        return {name: value for name, value in given.items() if not _same(value, parameters[name].default)}

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` for arguments that the function does not take."""
        if not kwargs and 0 <= self._least <= len(args) <= self._most:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}{self._signature}: {error}") from None

    def refuse_unknown(self, option: str, parameter: str) -> None:
        """Raise where no parameter has this name."""
        if parameter not in self._signature.parameters:
            known = list(self._signature.parameters)
            near = difflib.get_close_matches(parameter, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            raise InvalidArgumentError(f"{option}={parameter!r}: {self._name} has no such parameter; {hint}")

    def work_out(self, source: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What ``source`` says of a call: a callable of its arguments, a parameter's name, or the value itself."""
        if callable(source):
            return source(*args, **kwargs)
        if not isinstance(source, str):
            return source
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments[source]


def _same(value: Any, default: Any) -> bool:
    try:
        return type(value) is type(default) and bool(value == default)
    except Exception:  # noqa: BLE001 - the user's __eq__ may do anything
        return False
