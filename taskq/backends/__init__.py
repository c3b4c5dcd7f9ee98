"""The places jobs can be kept. One room per system; each driver is imported in its own room only."""

from __future__ import annotations

import difflib
import importlib
from typing import Any, Final

from taskq.backend import Backend
from taskq.clock import SYSTEM_CLOCK, Clock
from taskq.errors import ConfigurationError
from taskq.store import Ledger

#: URL scheme to the module that opens it.
#: Such a module has ``open_url(url, *, clock, **options) -> Backend``.
SCHEMES: Final[dict[str, str]] = {
    "sqlite": "taskq.backends.sqlite",
    "file": "taskq.backends.sqlite",
    "memory": "taskq.backends.memory",
    "mongodb": "taskq.backends.mongodb",
    "mongodb+srv": "taskq.backends.mongodb",
    "amqp": "taskq.backends.rabbitmq",
    "amqps": "taskq.backends.rabbitmq",
    "kafka": "taskq.backends.kafka",
}


def from_url(
    url: str,
    *,
    store_url: str | None = None,
    clock: Clock = SYSTEM_CLOCK,
    publish_timeout: float | None = None,
    **options: Any,
) -> Backend:
    """The backend that ``url`` names, with the store of ``store_url`` beside it if one is given.

    Opens nothing yet; a push may take ``publish_timeout`` seconds; ``options`` are the backend's own. Raises
    ``ConfigurationError`` for a scheme, parameter or option that is not known.
    """
    backend = _open(url, clock=clock, publish_timeout=publish_timeout, **options)
    if store_url is None:
        return backend
    from taskq.backends.beside import Beside

    store = _open(store_url, clock=clock, publish_timeout=publish_timeout)
    if not isinstance(store, Ledger):
        raise ConfigurationError(
            f"{store.location} keeps no results, so it cannot be the store beside {backend.location}"
        )
    return Beside(backend, store, clock=clock)


def _open(url: str, **options: Any) -> Backend:
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ConfigurationError(f"{url!r} is not a backend URL; write it as sqlite:///taskq.db")
    scheme = scheme.lower()
    if scheme not in SCHEMES:
        raise ConfigurationError(f"no backend has the scheme {scheme!r}{suggestion(scheme, list(SCHEMES))}")
    backend = importlib.import_module(SCHEMES[scheme]).open_url(url, **options)
    assert isinstance(backend, Backend)
    return backend


def suggestion(name: str, known: list[str]) -> str:
    """The tail of an error about an unknown ``name``: the nearest known one, else all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
