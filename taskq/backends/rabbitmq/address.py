"""Where the broker is, and how it is spoken to: everything that a URL says."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pika

from taskq._version import __version__
from taskq.backends import suggestion
from taskq.backends.rabbitmq.layout import check_prefix
from taskq.errors import ConfigurationError

_PORTS: Final = {"amqp": 5672, "amqps": 5671}
#: What version 4 of the broker takes by default; earlier ones take more.
MAX_MESSAGE: Final = 16 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Address:
    """A broker, a virtual host in it, and the options of a URL."""

    host: str
    port: int
    vhost: str
    user: str
    password: str
    tls: bool
    prefix: str = ""
    type: str = "quorum"  #: of the queues that hold work; all others are quorum queues
    heartbeat: int = 30  #: seconds; a broker that says nothing for two of them is away, and so are we to it
    connect_timeout: float = 10.0  #: seconds for the connection, its encryption and its greeting
    publish_timeout: float = 30.0
    consumer_timeout: float = 1800.0  #: how long the broker lets a job run, in seconds; 0 for ever
    max_message_size: int = MAX_MESSAGE  #: the broker's limit, in bytes
    cafile: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    verify: bool = True

    @property
    def location(self) -> str:
        """The URL for people: no password."""
        scheme = "amqps" if self.tls else "amqp"
        host = f"[{self.host}]" if ":" in self.host else self.host
        prefix = f"?prefix={quote(self.prefix)}" if self.prefix else ""
        vhost = "" if self.vhost == "/" else quote(self.vhost, safe="")
        return f"{scheme}://{quote(self.user)}:***@{host}:{self.port}/{vhost}{prefix}"

    def parameters(self, name: str) -> pika.ConnectionParameters:
        """How the driver is to connect; ``name`` is what the broker shows."""
        return pika.ConnectionParameters(
            host=self.host,
            port=self.port,
            virtual_host=self.vhost,
            credentials=pika.PlainCredentials(self.user, self.password),
            heartbeat=self.heartbeat,
            connection_attempts=1,
            socket_timeout=self.connect_timeout,
            stack_timeout=self.connect_timeout,
            blocked_connection_timeout=None,
            ssl_options=self._tls_options(),
            client_properties={
                "connection_name": f"taskq {name}",
                "product": "taskq",
                "version": __version__,
            },
        )

    def _tls_options(self) -> pika.SSLOptions | None:
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.cafile)
            if self.certfile:
                context.load_cert_chain(self.certfile, self.keyfile)
        except OSError as error:
            raise ConfigurationError(
                f"{self.location}: a certificate file cannot be used: {error}"
            ) from error
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return pika.SSLOptions(context, self.host)


def parse(url: str, publish_timeout: float | None = None, **options: Any) -> Address:
    """The address that ``url`` and ``options`` name; ``publish_timeout`` where they name none.

    Raises ``ConfigurationError``, which shows no password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"not an address of a broker: {error}") from error
    scheme = parts.scheme.lower()
    given = {**dict(parse_qsl(parts.query, keep_blank_values=True)), **options}
    for name in given:
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"{scheme}:// has no parameter {name!r}{suggestion(name, list(_OPTIONS))}"
            )
    if publish_timeout is not None:
        given.setdefault("publish_timeout", publish_timeout)
    if parts.path.count("/") > 1:
        raise ConfigurationError(f"{scheme}://…{parts.path}: write a virtual host with a slash in it as %2F")
    return Address(
        host=parts.hostname or "localhost",
        port=port or _PORTS[scheme],
        vhost=unquote(parts.path[1:]) or "/",
        user=unquote(parts.username or "guest"),
        password=unquote(parts.password if parts.password is not None else "guest"),
        tls=scheme == "amqps",
        **{name: _OPTIONS[name](name, value) for name, value in given.items()},
    )


# -- checks ---------------------------------------------------------------------------


def _number(least: float, most: float, kind: type[int | float]) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> int | float:
        try:
            number = kind(value)
        except (TypeError, ValueError):
            number = kind(-1)
        if not least <= number <= most:
            raise ConfigurationError(f"{name} is a number from {least:g} to {most:g}, not {value!r}")
        return number

    return check


def _choice(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise ConfigurationError(f"{name} is one of {', '.join(choices)}, not {value!r}")
        return str(value)

    return check


def _yes(name: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in {"1", "true", "yes", "0", "false", "no"}:
        raise ConfigurationError(f"{name} is yes or no, not {value!r}")
    return text in {"1", "true", "yes"}


def _text(name: str, value: Any) -> str:
    return str(value)


_OPTIONS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "cafile": _text,
    "certfile": _text,
    "connect_timeout": _number(0.1, 3600, float),
    "consumer_timeout": _number(0, 10**7, float),
    "heartbeat": _number(1, 3600, int),
    "keyfile": _text,
    "max_message_size": _number(1024, 512 * 1024 * 1024, int),
    "prefix": lambda _, value: check_prefix(str(value)),
    "publish_timeout": _number(0.001, 86_400, float),
    "type": _choice("quorum", "classic"),
    "verify": _yes,
}
