"""Starting and stopping, one kind of server at a time or all at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

from tests.servers import kafka, mongodb, rabbitmq
from tests.servers.processes import Running, ServerError

KINDS: Mapping[str, ModuleType] = {"mongodb": mongodb, "rabbitmq": rabbitmq, "kafka": kafka}


def home(kind: str) -> pathlib.Path:
    """Where everything of one server is kept."""
    root = pathlib.Path(os.environ.get("TASKQ_TEST_SERVERS_DIR") or ".servers")
    return root.absolute() / kind


def url(kind: str) -> str | None:
    """Where the server answers: ``TASKQ_TEST_<KIND>_URL``, else the one started here; ``None`` for neither."""
    given = os.environ.get(f"TASKQ_TEST_{kind.upper()}_URL")
    if given:
        return given
    running = Running.load(home(kind))
    return running.url if running is not None and running.alive() else None


def pids(kind: str) -> list[int]:
    """The processes of the server that was started here, if it runs."""
    running = Running.load(home(kind))
    return [process.pid for process in running.processes if process.alive()] if running else []


def up(kind: str) -> str:
    """Start one server, with the data it had, unless it runs already; returns its URL once it really answers."""
    directory = home(kind)
    with _alone(directory):
        running = Running.load(directory)
        if running is not None and running.alive():
            return running.url
        if running is not None:
            running.stop()  # a half of it may be left
        server = KINDS[kind]
        server.install(directory)
        return _start(server, directory, running)


def _start(server: ModuleType, directory: pathlib.Path, before: Running | None) -> str:
    running = Running(directory, before.ports if before else {})
    try:
        running.url = server.start(running)
    except BaseException:
        running.stop()
        raise
    running.save()
    return running.url


def down(kind: str, *, wipe: bool = False) -> None:
    """Stop one server; what it stored stays for the next start unless ``wipe``."""
    directory = home(kind)
    with _alone(directory):
        running = Running.load(directory)
        if running is not None:
            running.stop()
        if wipe:
            shutil.rmtree(directory / "data", ignore_errors=True)


def status(kind: str) -> str:
    """One line about one server."""
    running = Running.load(home(kind))
    if running is None:
        return "never started"
    return f"up at {running.url}" if running.alive() else "down"


def up_all(kinds: Iterable[str]) -> dict[str, str | ServerError]:
    """Start several side by side; each one's URL, or why it did not start."""
    kinds = list(kinds)
    with ThreadPoolExecutor(len(kinds)) as threads:
        return dict(zip(kinds, threads.map(_up_or_error, kinds), strict=True))


def _up_or_error(kind: str) -> str | ServerError:
    try:
        return up(kind)
    except ServerError as error:
        return error


def down_all(kinds: Iterable[str], *, wipe: bool = False) -> None:
    """Stop several side by side."""
    kinds = list(kinds)
    with ThreadPoolExecutor(len(kinds)) as threads:
        list(threads.map(lambda kind: down(kind, wipe=wipe), kinds))


@contextlib.contextmanager
def _alone(directory: pathlib.Path) -> Iterator[None]:
    """Keep two commands from starting or stopping one server at once."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
