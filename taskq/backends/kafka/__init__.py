"""Jobs in the topics of Kafka, each ended by one transaction or one commit."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from taskq.backends import suggestion
from taskq.backends.kafka.backend import KafkaBackend
from taskq.backends.kafka.place import Place
from taskq.clock import SYSTEM_CLOCK, Clock
from taskq.errors import ConfigurationError
from taskq.settings import mask

__all__ = ["KafkaBackend", "open_url"]

#: What may follow the servers in a URL, or be given as an option.
OPTIONS: Final = (
    *("prefix", "partitions", "mode", "security_protocol"),
    *("sasl_mechanism", "sasl_username", "sasl_password"),
    *("ssl_ca", "ssl_certificate", "ssl_key"),
)
_SECURITY: Final = {
    "security_protocol": "security.protocol",
    "sasl_mechanism": "sasl.mechanism",
    "sasl_username": "sasl.username",
    "sasl_password": "sasl.password",
    "ssl_ca": "ssl.ca.location",
    "ssl_certificate": "ssl.certificate.location",
    "ssl_key": "ssl.key.location",
}


def open_url(
    url: str, *, clock: Clock = SYSTEM_CLOCK, publish_timeout: float | None = None, **options: Any
) -> KafkaBackend:
    """``kafka://user:password@host:9092,other:9092``, and options.

    ``prefix`` begins the names of all topics and of the group (``taskq``). ``partitions`` are made per topic (12):
    no more workers than that share a queue. ``security_protocol`` (``SASL_SSL``, ``SSL``, …), ``sasl_mechanism``,
    ``ssl_ca``, ``ssl_certificate`` and ``ssl_key`` are those of Kafka. A push may take ``publish_timeout`` seconds
    (30).
    """
    location, _, query = url.partition("?")
    rest = location.partition("://")[2].rstrip("/")
    credentials, _, servers = rest.rpartition("@")
    if not servers or "/" in servers:
        raise ConfigurationError(f"kafka:// names no server; write kafka://host:9092, not {mask(url)!r}")
    given = {**dict(parse_qsl(query, keep_blank_values=True)), **options}
    for name in given:
        if name not in OPTIONS:
            raise ConfigurationError(f"kafka:// has no parameter {name!r}{suggestion(name, list(OPTIONS))}")
    _check_mode(given.get("mode", "transactional"))
    place = Place(
        servers=",".join(_with_port(server) for server in servers.split(",")),
        prefix=_prefix(given.get("prefix", "taskq")),
        partitions=_partitions(given.get("partitions", 12)),
        security=_security(given, credentials),
        location=mask(location),
    )
    return KafkaBackend(place, clock=clock, timeout=30.0 if publish_timeout is None else publish_timeout)


def _check_mode(mode: Any) -> None:
    if mode == "share":
        raise ConfigurationError(
            "kafka://…?mode=share (share groups) is not available in this version; leave it out: transactions "
            "are the default"
        )
    if mode != "transactional":
        raise ConfigurationError(f"mode is 'transactional', not {mode!r}")


def _with_port(server: str) -> str:
    return server if re.search(r":\d+$", server) else f"{server}:9092"


def _prefix(value: Any) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", str(value)):
        raise ConfigurationError(f"prefix has letters, digits, dots, dashes and underscores, not {value!r}")
    return str(value)


def _partitions(value: Any) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if not 1 <= count <= 1000:
        raise ConfigurationError(f"partitions is a number from 1 to 1000, not {value!r}")
    return count


def _security(given: dict[str, Any], credentials: str) -> dict[str, Any]:
    found = {_SECURITY[name]: value for name, value in given.items() if name in _SECURITY}
    if "sasl.username" in found or credentials:
        found.setdefault("security.protocol", "SASL_SSL")
        found.setdefault("sasl.mechanism", "PLAIN")
    if credentials:
        user, _, password = credentials.partition(":")
        found |= {"sasl.username": unquote(user), "sasl.password": unquote(password)}
    return found
