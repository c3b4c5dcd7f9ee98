"""Jobs in RabbitMQ, by the ``pika`` driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taskq.clock import SYSTEM_CLOCK, Clock
from taskq.errors import ConfigurationError

if TYPE_CHECKING:
    from taskq.backends.rabbitmq.backend import RabbitBackend


def open_url(
    url: str, *, clock: Clock = SYSTEM_CLOCK, publish_timeout: float | None = None, **options: Any
) -> RabbitBackend:
    """``amqp://user:password@host:port/vhost`` (``amqps://`` for TLS, whose certificates are verified), and options.

    The virtual host is percent-decoded and ``/`` by default. See ``docs/rabbitmq.md`` for the options. Opens nothing.
    """
    try:
        import pika  # noqa: F401
    except ImportError as error:
        raise ConfigurationError("RabbitMQ needs the pika driver: pip install 'taskq[rabbitmq]'") from error
    from taskq.backends.rabbitmq.address import parse
    from taskq.backends.rabbitmq.backend import RabbitBackend

    return RabbitBackend(parse(url, publish_timeout, **options), clock=clock)
