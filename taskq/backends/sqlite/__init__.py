"""Jobs in one SQLite file: no server, and as many processes of one machine as one likes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from taskq.backends import suggestion
from taskq.backends.sqlite.backend import SQLiteBackend
from taskq.clock import SYSTEM_CLOCK, Clock
from taskq.errors import ConfigurationError

__all__ = ["SQLiteBackend", "open_url"]

#: What may follow the file in a URL, or be given as an option.
OPTIONS: Final = ("ageing", "max_finished", "synchronous", "timeout")


def open_url(
    url: str, *, clock: Clock = SYSTEM_CLOCK, publish_timeout: float | None = None, **options: Any
) -> SQLiteBackend:
    """``sqlite:///relative.db`` (to the present directory) or ``sqlite:////absolute.db``, and options.

    ``synchronous=full`` makes a push survive a power cut (``normal``, the default, may lose the last moments;
    the file stays whole). ``timeout`` is how long a lock is waited for, in seconds (default:
    ``publish_timeout``, else 30). ``max_finished`` is how many completed jobs per queue are remembered. ``ageing``
    guards against starvation: each so many seconds that a job has been due raise its priority by one.
    """
    location, _, query = url.partition("?")
    scheme, _, rest = location.partition("://")
    if not rest.startswith("/") or rest == "/":
        raise ConfigurationError(
            f"{url!r} names no file; write {scheme}:///taskq.db, or {scheme}:////absolute/taskq.db"
        )
    path = unquote(rest[1:])
    if path == ":memory:":
        raise ConfigurationError("jobs in memory are memory://, not sqlite:///:memory:")
    given = {**dict(parse_qsl(query, keep_blank_values=True)), **options}
    for name in given:
        if name not in OPTIONS:
            raise ConfigurationError(
                f"{scheme}:// has no parameter {name!r}{suggestion(name, list(OPTIONS))}"
            )
    if publish_timeout is not None:
        given.setdefault("timeout", publish_timeout)
    checked: dict[str, Any] = {name: _CHECKS[name](value) for name, value in given.items()}
    return SQLiteBackend(str(Path.cwd() / path), clock=clock, **checked)


def _synchronous(value: Any) -> str:
    if str(value).lower() not in ("normal", "full"):
        raise ConfigurationError(f"synchronous is 'normal' or 'full', not {value!r}")
    return str(value).lower()


def _timeout(value: Any) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigurationError(f"timeout is a number of seconds, not {value!r}")
    return seconds


def _max_finished(value: Any) -> int:
    try:
        count = int(value)
    except ValueError:
        count = -1
    if count < 0:
        raise ConfigurationError(f"max_finished is a number of jobs, not {value!r}")
    return count


def _ageing(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(f"ageing is a number of seconds above 0, not {value!r}")
    return seconds


_CHECKS: Final = {
    "ageing": _ageing,
    "max_finished": _max_finished,
    "synchronous": _synchronous,
    "timeout": _timeout,
}
