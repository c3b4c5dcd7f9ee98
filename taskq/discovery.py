"""Finds the app that ``-A`` names: a module, ``module:name``, or a file."""

from __future__ import annotations

import difflib
import importlib
import pathlib
import pkgutil
import sys
import traceback
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, NamedTuple, cast

from taskq.errors import AppNotFoundError

if TYPE_CHECKING:
    from taskq.app import TaskQ

_HERE = pathlib.Path(__file__).resolve()
_PACKAGE = str(_HERE.parent) + "/"


class Spec(NamedTuple):
    """What ``-A`` names."""

    module: str
    attribute: str  #: empty where none is named


def find_app(spec: str) -> TaskQ:
    """The app that ``spec`` names: ``app``, ``pkg.mod``, ``pkg.mod:attr``, ``path/to/file.py``, ``file.py:attr``.

    The current directory is put first on ``sys.path``, so that a file is imported under the name that it has as
    a module. A module that only declares shared tasks gets the default app. Raises ``AppNotFoundError``, which
    says which step failed.
    """
    parsed = parse(spec)
    module = _import(parsed.module, spec)
    return _named(module, parsed, spec) if parsed.attribute else _only(module, spec)


def parse(spec: str) -> Spec:
    """Split ``spec`` and make its module importable.

    A file below the current directory is known by its path from there; any other by its name alone, from its
    own directory.
    """
    where, _, attribute = spec.strip().partition(":")
    if not where:
        raise AppNotFoundError(
            f"{spec!r} names no app; give a module (-A app), module:name, or a file (-A app.py)"
        )
    cwd = pathlib.Path.cwd()
    _put_first(cwd)
    if where.endswith(".py") or "/" in where:
        return Spec(_module_of_file(pathlib.Path(where), cwd, spec), attribute)
    return Spec(where, attribute)


def _put_first(directory: pathlib.Path) -> None:
    if sys.path[:1] != [str(directory)]:
        sys.path.insert(0, str(directory))
        importlib.invalidate_caches()


def _module_of_file(path: pathlib.Path, cwd: pathlib.Path, spec: str) -> str:
    path = (cwd / path).absolute()
    path = pathlib.Path(*_without_dots(path.parts))
    if path.is_dir() and (path / "__init__.py").is_file():
        path /= "__init__.py"
    if not path.is_file():
        raise AppNotFoundError(f"-A {spec}: there is no file {path}{_near(path.name, _neighbours(path))}")
    target = path.parent if path.name == "__init__.py" else path.with_suffix("")
    parts = target.relative_to(cwd).parts if target.is_relative_to(cwd) else ()
    if parts and all(part.isidentifier() for part in parts):
        return ".".join(parts)
    if not target.name.isidentifier():
        raise AppNotFoundError(
            f"-A {spec}: {path.name} cannot be imported, its name is no Python name; rename it"
        )
    _put_first(target.parent)
    return target.name


def _without_dots(parts: tuple[str, ...]) -> list[str]:
    """``a/./b/../c`` without its detours; symbolic links stay, for the name is what was written."""
    kept: list[str] = []
    for part in parts:
        if part == "..":
            kept.pop()
        elif part != ".":
            kept.append(part)
    return kept


# -- importing ------------------------------------------------------------------------


def _import(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if _is_missing(name, error):
            raise _not_found(name, spec, error) from None
        raise _import_failed(name, spec, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, spec, error) from error


def _is_missing(name: str, error: ModuleNotFoundError) -> bool:
    """Whether ``name`` or a parent of it is what is missing, rather than something that it imports."""
    missing = error.name or ""
    return (name == missing or name.startswith(missing + ".")) and not _user_frames(error.__traceback__)


def _user_frames(tb: TracebackType | None) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(tb) if _is_users(frame)]


def _is_users(frame: traceback.FrameSummary) -> bool:
    name = frame.filename
    machinery = name.startswith("<frozen") or name == importlib.__file__
    return not machinery and not name.startswith(_PACKAGE)


def _not_found(name: str, spec: str, error: ModuleNotFoundError) -> AppNotFoundError:
    missing = error.name or name
    parent, _, last = missing.rpartition(".")
    near = _near(last, _modules_in(parent))
    where = f" in the package {parent!r}" if parent else f" in {pathlib.Path.cwd()} or on sys.path"
    return AppNotFoundError(f"-A {spec}: there is no module {missing!r}{where}{near}")


def _modules_in(package: str) -> list[str]:
    """Modules beside which one was looked for: of ``package``, or of the current directory."""
    paths = [str(pathlib.Path.cwd())] if not package else getattr(sys.modules.get(package), "__path__", [])
    return [found.name for found in pkgutil.iter_modules(list(paths))]


def _neighbours(path: pathlib.Path) -> list[str]:
    return sorted(found.name for found in path.parent.glob("*.py")) if path.parent.is_dir() else []


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(repr(one) for one in near)}?"
    return f"; there are {', '.join(sorted(names)[:10])}" if names else ""


def _import_failed(name: str, spec: str, error: BaseException) -> AppNotFoundError:
    return AppNotFoundError(f"-A {spec}: importing {name!r} failed:\n\n{_report(error)}")


def _report(error: BaseException) -> str:
    """The traceback of ``error``, and of what caused it, without the import machinery and this package."""
    report = traceback.TracebackException.from_exception(error)
    _cut(report)
    return "".join(report.format()).rstrip()


def _cut(report: traceback.TracebackException | None) -> None:
    if report is not None:
        report.stack = traceback.StackSummary.from_list([frame for frame in report.stack if _is_users(frame)])
        _cut(report.__cause__)
        _cut(report.__context__)


# -- choosing -------------------------------------------------------------------------


def _named(module: ModuleType, parsed: Spec, spec: str) -> TaskQ:
    value: object = module
    for step in parsed.attribute.split("."):
        try:
            value = getattr(value, step)
        except AttributeError:
            raise AppNotFoundError(
                f"-A {spec}: {module.__name__!r} has no {step!r}{_candidates(module)}"
            ) from None
    if not _is_app()(value):
        raise AppNotFoundError(
            f"-A {spec}: {parsed.attribute!r} is a {type(value).__name__}, not a TaskQ{_candidates(module)}"
        )
    return cast("TaskQ", value)


def _only(module: ModuleType, spec: str) -> TaskQ:
    apps = _apps(module)
    if len(apps) > 1:
        names = ", ".join(f"{module.__name__}:{name}" for name in apps)
        raise AppNotFoundError(f"-A {spec}: {module.__name__!r} has several apps; name one of {names}")
    if apps:
        return next(iter(apps.values()))
    if any(_is_task(value) for value in vars(module).values()):
        return _default_app()
    raise AppNotFoundError(
        f"-A {spec}: {module.__name__!r} has no TaskQ and declares no task{_candidates(module)}"
    )


def _apps(module: ModuleType) -> dict[str, TaskQ]:
    """The apps among a module's globals; one that has two names counts once."""
    is_app = _is_app()
    found: dict[int, tuple[str, TaskQ]] = {}
    for name, value in vars(module).items():
        if is_app(value):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def _candidates(module: ModuleType) -> str:
    """What could have been meant: apps of the module, else modules inside it."""
    apps = [f"{module.__name__}:{name}" for name in _apps(module)]
    inside = [f"{module.__name__}.{name}" for name in _modules_in(module.__name__)] if not apps else []
    names = apps or inside
    if names:
        return f"; {'its apps are' if apps else 'modules inside it are'} {', '.join(names[:10])}"
    return "; write app = TaskQ() there"


def _is_task(value: object) -> bool:
    from taskq.tasks import Task

    return isinstance(value, Task)


def _is_app() -> Callable[[object], bool]:
    from taskq.app import TaskQ

    return lambda value: isinstance(value, TaskQ)


def _default_app() -> TaskQ:
    from taskq.app import default_app

    return cast("TaskQ", default_app())
