"""What can be set, from arguments and from the environment; the only reader of ``TASKQ_*`` names."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

from taskq.errors import ConfigurationError

PREFIX: Final = "TASKQ_"
#: Names that belong to the command line and the test suite, or were set aside for users.
_OTHER_NAMES: Final = frozenset({"TASKQ_APP", "TASKQ_REQUIRE_SERVERS"})
_OTHER_PREFIXES: Final = ("TASKQ_TEST_", "TASKQ_X_")

POOLS: Final = ("process", "thread", "async", "solo")
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS: Final = ("auto", "console", "json")

#: What may be called a backend, and the URL that its name alone stands for.
DEFAULT_URLS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sqlite": "sqlite:///taskq.db",
        "file": "sqlite:///taskq.db",
        "memory": "memory://",
        "mongodb": "mongodb://localhost:27017/taskq",
        "rabbitmq": "amqp://localhost:5672/",
        "kafka": "kafka://localhost:9092",
    }
)
_KIND_OF_SCHEME: Final[Mapping[str, str]] = MappingProxyType(
    {
        "sqlite": "sqlite",
        "file": "sqlite",
        "memory": "memory",
        "mongodb": "mongodb",
        "mongodb+srv": "mongodb",
        "amqp": "rabbitmq",
        "amqps": "rabbitmq",
        "kafka": "kafka",
    }
)
#: These hold jobs and results in one object, so a second place for results would only disagree.
_OWN_STORE: Final = frozenset({"sqlite", "memory", "mongodb"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set for an app and its workers. Durations are seconds."""

    url: str = DEFAULT_URLS["sqlite"]
    store_url: str | None = None  #: where results live beside a broker that keeps none
    visibility_timeout: float = 300.0  #: the lease of a job that names none
    queue: str = "tasks"  #: of a task that names none
    result_ttl: float = 3600.0  #: how long an ended job and its result are remembered; 0 not at all
    max_payload: int = 16 * 1024 * 1024  #: bytes of one encoded job
    publish_timeout: float = 30.0  #: how long a push may take before it is an error
    queues: str = ""  #: that a worker serves, as ``a,b=3``; empty: those of its app's tasks
    pool: str = "process"
    concurrency: int | None = None  #: jobs at a time per worker; ``None`` for one per CPU
    shutdown_timeout: float = 30.0  #: grace for running jobs when a worker is told to stop
    max_jobs_per_child: int | None = None
    max_memory_per_child: int | None = None  #: MiB
    log_level: str = "info"
    log_format: str = "auto"  #: console on a terminal, JSON lines elsewhere

    @property
    def backend(self) -> str:
        """The kind of :attr:`url`: ``sqlite memory mongodb rabbitmq kafka``."""
        return kind_of(self.url)

    @property
    def stores(self) -> bool:
        """Whether something outlives a delivery: results, unique keys, schedules."""
        return self.backend in _OWN_STORE or self.store_url is not None


def load(arguments: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    """The settings that ``arguments`` and the ``TASKQ_*`` names of ``environ`` add up to.

    Arguments win; an argument that is ``None`` was not given. Raises ``ConfigurationError`` for unknown names
    and impossible values, naming where each came from.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    _refuse_unknown(given, NAMES, "setting")
    ours = _environment(environ)
    values = {name: _PARSERS[name](value, _variable(name)) for name, value in ours.items()}
    values |= {name: _PARSERS[name](value, name) for name, value in given.items()}
    values["url"] = _url(given, ours)
    values.pop("backend", None)
    settings = Settings(**values)
    _check_store(settings)
    return settings


def kind_of(url: str) -> str:
    """Which kind of backend ``url`` addresses."""
    scheme, separator, _ = url.partition("://")
    kind = _KIND_OF_SCHEME.get(scheme.lower()) if separator else None
    if kind is None:
        known = ", ".join(f"{scheme}://" for scheme in _KIND_OF_SCHEME)
        raise ConfigurationError(
            f"no backend for the URL {mask(url)!r}{suggestion(scheme, _KIND_OF_SCHEME)}; "
            f"a URL begins with one of {known}"
        )
    return kind


# A password may hold any character, also unescaped ones: up to the last "@" is taken for it. Hiding too much
# is the better mistake.
_USERINFO = re.compile(r"(://[^:/?#@\s]*):\S*@")
_SECRET_PARAMETER = re.compile(
    r"([?&][\w.\-]*(?:passw|pwd|secret|token|private)[\w.\-]*=)[^&\s]*", re.IGNORECASE
)


def mask(url: str) -> str:
    """``url`` with its passwords replaced by ``***``, fit for people to see. Text around URLs is kept."""
    return _SECRET_PARAMETER.sub(r"\1***", _USERINFO.sub(r"\1:***@", url))


def suggestion(name: str, known: Iterable[str]) -> str:
    """``(did you mean ...?)`` where something near ``name`` is known, else nothing."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


# -- reading --------------------------------------------------------------------------


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the environment sets, by setting name. An empty value is as good as none."""
    ours = {
        name: value
        for name, value in environ.items()
        if name.startswith(PREFIX) and name not in _OTHER_NAMES and not name.startswith(_OTHER_PREFIXES)
    }
    by_variable = {_variable(name): name for name in NAMES}
    _refuse_unknown(ours, by_variable, "environment variable")
    return {by_variable[variable]: value for variable, value in ours.items() if value.strip()}


def _refuse_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigurationError(f"unknown {what} {name!r}; {hint}")


def _url(given: Mapping[str, object], ours: Mapping[str, str]) -> str:
    """The one URL that ``url`` and ``backend`` of both sources name; arguments beat the environment."""
    if "url" in given:
        return _agreeing(_text(given["url"], "url"), "url", given.get("backend"), "backend")
    if "backend" in given:
        kind = _backend(given["backend"], "backend")
        from_environment = ours.get("url")
        same = from_environment is not None and kind_of(from_environment) == kind_of(DEFAULT_URLS[kind])
        return str(from_environment) if same else DEFAULT_URLS[kind]
    if "url" in ours:
        return _agreeing(ours["url"], "TASKQ_URL", ours.get("backend"), "TASKQ_BACKEND")
    if "backend" in ours:
        return DEFAULT_URLS[_backend(ours["backend"], "TASKQ_BACKEND")]
    return DEFAULT_URLS["sqlite"]


def _agreeing(url: str, url_name: str, backend: object, backend_name: str) -> str:
    kind = kind_of(url)
    if backend is not None and kind_of(DEFAULT_URLS[_backend(backend, backend_name)]) != kind:
        raise ConfigurationError(
            f"{backend_name}={backend!s} and {url_name}={mask(url)} disagree; set one of them, or both to the same"
        )
    return url


def _check_store(settings: Settings) -> None:
    if settings.store_url is None:
        return
    kind_of(settings.store_url)
    if settings.backend in _OWN_STORE:
        raise ConfigurationError(
            f"store_url={mask(settings.store_url)} is refused beside {mask(settings.url)}: "
            f"{settings.backend} keeps results itself"
        )


# -- one value ------------------------------------------------------------------------

_Parser = Callable[[object, str], Any]


def _bad(name: str, value: object, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"{name}={mask(str(value))!r} cannot be used; allowed: {allowed}")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _bad(name, value, "a text that is not empty")
    return value.strip()


def _number(value: object, name: str, allowed: str) -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    try:
        number = (
            float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        )
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _bad(name, value, allowed)
    return number


def _seconds(minimum: float | None) -> _Parser:
    allowed = "a number of seconds" + ("" if minimum is None else f", at least {minimum:g}")

    def parse(value: object, name: str) -> float:
        number = _number(value, name, allowed)
        if minimum is not None and number < minimum:
            raise _bad(name, value, allowed)
        return number

    return parse


def _whole(minimum: int, maximum: int) -> _Parser:
    allowed = f"a whole number from {minimum} to {maximum}"

    def parse(value: object, name: str) -> int:
        number = _number(value, name, allowed)
        if number != int(number) or not minimum <= number <= maximum:
            raise _bad(name, value, allowed)
        return int(number)

    return parse


def _choice(*choices: str) -> _Parser:
    def parse(value: object, name: str) -> str:
        text = str(value).strip().lower()
        if text not in choices:
            raise _bad(name, value, f"{', '.join(choices)}{suggestion(text, choices)}")
        return text

    return parse


_backend = _choice(*DEFAULT_URLS)

_PARSERS: Final[Mapping[str, _Parser]] = MappingProxyType(
    {
        "url": _text,
        "backend": _backend,
        "store_url": _text,
        "visibility_timeout": _seconds(None),
        "queue": _text,
        "result_ttl": _seconds(0),
        "max_payload": _whole(1024, 2**31),
        "publish_timeout": _seconds(0.001),
        "queues": _text,
        "pool": _choice(*POOLS),
        "concurrency": _whole(1, 10_000),
        "shutdown_timeout": _seconds(0),
        "max_jobs_per_child": _whole(1, 2**31),
        "max_memory_per_child": _whole(16, 2**24),
        "log_level": _choice(*LOG_LEVELS),
        "log_format": _choice(*LOG_FORMATS),
    }
)

#: Every name that can be set; ``TASKQ_`` and the name in capitals is its variable.
NAMES: Final = frozenset(_PARSERS)


def described(settings: Settings) -> dict[str, object]:
    """The settings in force, passwords masked, in the order of their definition."""
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {name: mask(value) if isinstance(value, str) else value for name, value in values.items()}
