"""The rules of the house: sizes of rooms, names on doors, and who may bring in what.

A room may be larger where a comment in it gives the reason:

    # budget: 520 lines: one dialogue with the server, told in order
    # budget: 55 lines in parse_frame: one branch per frame type
"""

from __future__ import annotations

import ast
import pathlib
import pkgutil
import re
import statistics
import subprocess
import sys

import pytest

import taskq

PACKAGE = pathlib.Path(taskq.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

FILE_LINES = 400
BACKEND_LINES = 600
FUNCTION_LINES = 40
MEDIAN_LINES = 8
#: Names that say nothing about what is in the room.
EMPTY_NAMES = {"base", "common", "core", "helper", "helpers", "lib", "misc", "tools", "util", "utils"}
#: Where each foreign system's library may be imported.
ROOMS = {
    "pymongo": "backends/mongodb",
    "bson": "backends/mongodb",
    "pika": "backends/rabbitmq",
    "confluent_kafka": "backends/kafka",
    "click": "cli",
    "structlog": "logs",
}
#: The environment is the caller's: read where an app or a command begins, handed on as an argument.
ENVIRONMENT_READERS = re.compile(r"app|cli/\w+|worker/\w+")
#: What ``import taskq`` must not load: what it does not use yet, or never.
NOT_LOADED = [
    "aiosmtpd",
    "bson",
    "click",
    "confluent_kafka",
    "cryptography",
    "http.server",
    "importlib.metadata",
    "multiprocessing",
    "pika",
    "pydantic",
    "pymongo",
    "rich",
    "sqlite3",
    "structlog",
    "unittest",
]

_FILE_EXCEPTION = re.compile(r"^# budget: (\d+) lines: \S.{10,}$", re.MULTILINE)
_FUNCTION_EXCEPTION = re.compile(r"^ *# budget: (\d+) lines in (\w+): \S.{10,}$", re.MULTILINE)


def room(path):
    """``backends/sqlite`` for the file of that module."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def files():
    return pytest.mark.parametrize("path", FILES, ids=room)


def source(path):
    return path.read_text(encoding="utf-8")


def functions(path):
    """Each function's name and the lines of its body, docstring and signature aside."""
    for node in ast.walk(ast.parse(source(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, (node.end_lineno - body[0].lineno + 1) if body else 1


def imports(path):
    """The top names of everything that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(source(path))):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


@files()
def test_a_file_is_a_room_not_a_hall(path):
    lines = len(source(path).splitlines())
    budget = BACKEND_LINES if room(path).startswith("backends/") else FILE_LINES
    exception = _FILE_EXCEPTION.search(source(path))

    assert lines <= (int(exception[1]) if exception else budget)


@files()
def test_functions_are_short(path):
    exceptions = {name: int(lines) for lines, name in _FUNCTION_EXCEPTION.findall(source(path))}
    long = {name: lines for name, lines in functions(path) if lines > exceptions.get(name, FUNCTION_LINES)}

    assert not long


@files()
def test_no_exception_outlives_its_reason(path):
    exception = _FILE_EXCEPTION.search(source(path))
    budget = BACKEND_LINES if room(path).startswith("backends/") else FILE_LINES
    lines = dict(functions(path))

    assert exception is None or len(source(path).splitlines()) > budget
    for _, name in _FUNCTION_EXCEPTION.findall(source(path)):
        assert lines.get(name, 0) > FUNCTION_LINES


def test_most_functions_fit_in_a_glance():
    lengths = [lines for path in FILES for _, lines in functions(path)]

    assert statistics.median(lengths) < MEDIAN_LINES


@files()
def test_names_of_rooms_say_something(path):
    assert path.stem not in EMPTY_NAMES
    assert path.parent.name not in EMPTY_NAMES


def test_no_module_bears_a_public_name():
    """``from taskq import task`` must never be a module."""
    modules = {module.name for module in pkgutil.iter_modules(taskq.__path__)}

    assert not modules & set(getattr(taskq, "__all__", ()))


@files()
def test_each_library_has_its_room(path):
    for name in imports(path):
        if name in ROOMS:
            assert re.match(rf"{ROOMS[name]}(/|$)", room(path)), f"{name} is imported in {room(path)}"


@files()
def test_the_environment_is_read_at_the_edge(path):
    reads = re.search(r"\bos\.(environ|getenv)\b", source(path))

    assert reads is None or ENVIRONMENT_READERS.fullmatch(room(path))


def test_import_taskq_stays_light():
    code = f"import sys, taskq; print(*[name for name in {NOT_LOADED!r} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []


def test_help_opens_nothing():
    code = (
        "import sys\nfrom taskq.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(*[n for n in ('sqlite3', 'taskq.backends.sqlite', 'taskq.worker.supervisor', 'structlog') if n in sys.modules],"
        " file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stderr.split() == []


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
