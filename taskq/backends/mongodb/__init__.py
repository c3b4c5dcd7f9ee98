"""Jobs in MongoDB: a replica set, and as many machines as one likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode

from taskq.backends import suggestion
from taskq.backends.mongodb.backend import MongoBackend
from taskq.backends.mongodb.enlisting import enlist
from taskq.clock import SYSTEM_CLOCK, Clock
from taskq.errors import ConfigurationError

__all__ = ["MongoBackend", "enlist", "open_url"]

#: What taskq reads of a URL's query, or is given as an option; everything else there is the driver's.
OPTIONS: Final = ("ageing", "max_finished", "prefix", "timeout")
#: The database of a URL that names none.
DATABASE: Final = "taskq"


def open_url(
    url: str, *, clock: Clock = SYSTEM_CLOCK, publish_timeout: float | None = None, **options: Any
) -> MongoBackend:
    """``mongodb://host:port/database?replicaSet=name`` or ``mongodb+srv://…``, and options.

    ``prefix`` goes before the names of the collections, so that several may share a database. ``timeout`` is how
    long a server that does not answer is tried, in seconds (default: ``publish_timeout``, else 30). ``max_finished``
    is how many completed jobs per queue are remembered. ``ageing`` guards against starvation: each so many seconds
    that a job has been due raise its priority by one.
    """
    server, database, driver, given = _split(url)
    for name in options:
        if name not in OPTIONS:
            raise ConfigurationError(f"mongodb:// has no option {name!r}{suggestion(name, list(OPTIONS))}")
    given |= options
    if publish_timeout is not None:
        given.setdefault("timeout", publish_timeout)
    checked: dict[str, Any] = {name: _CHECKS[name](value) for name, value in given.items()}
    query = f"?{urlencode(driver)}" if driver else ""
    return MongoBackend(f"{server}/{query}", database or DATABASE, clock=clock, **checked)


def _split(url: str) -> tuple[str, str, list[tuple[str, str]], dict[str, Any]]:
    """The servers, the database, what the driver reads of the query, and what taskq reads."""
    location, _, query = url.partition("?")
    scheme, _, rest = location.partition("://")
    hosts, _, path = rest.partition("/")
    if not hosts or hosts.endswith("@"):
        raise ConfigurationError(f"{scheme}:// names no server; write {scheme}://host:27017/{DATABASE}")
    database = unquote(path)
    if any(character in database for character in '/\\. "$*<>:|?\0'):
        raise ConfigurationError(f"{database!r} cannot be the name of a database")
    pairs = parse_qsl(query, keep_blank_values=True)
    # Who logs in by a name in the URL is known to the database that the URL names, unless it says otherwise.
    if database and "@" in hosts and not any(name.lower() == "authsource" for name, _ in pairs):
        pairs.append(("authSource", database))
    own = {name: value for name, value in pairs if name in OPTIONS}
    return f"{scheme}://{hosts}", database, [pair for pair in pairs if pair[0] not in OPTIONS], own


def _number(name: str, value: Any, what: str, least: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not least <= number < float("inf"):
        raise ConfigurationError(f"{name} is {what}, not {value!r}")
    return number


def _prefix(value: Any) -> str:
    if not isinstance(value, str) or "$" in value or "\0" in value or len(value) > 60:
        raise ConfigurationError(f"prefix is the beginning of a collection's name, not {value!r}")
    return value


_CHECKS: Final[dict[str, Callable[[Any], Any]]] = {
    "ageing": lambda value: _number("ageing", value, "a number of seconds above 0", 1e-3),
    "max_finished": lambda value: int(_number("max_finished", value, "a number of jobs", 0)),
    "prefix": _prefix,
    "timeout": lambda value: _number("timeout", value, "a number of seconds above 0", 1e-3),
}
