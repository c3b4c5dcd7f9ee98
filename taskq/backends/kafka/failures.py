"""What the driver raises, in the words of taskq."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from taskq.errors import BackendError, BackendUnavailableError, ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError


def driver() -> Any:
    """The module ``confluent_kafka``, which is imported where it is first needed."""
    try:
        import confluent_kafka
    except ImportError as error:
        raise ConfigurationError("kafka:// needs confluent-kafka: pip install 'taskq[kafka]'") from error
    return confluent_kafka


@contextlib.contextmanager
def translated(what: str, location: str) -> Iterator[None]:
    """Within the block, what the driver raises becomes an error of taskq about ``what``."""
    from confluent_kafka import KafkaException

    try:
        yield
    except KafkaException as error:
        raise told(error.args[0], what, location) from error
    except RuntimeError as error:  # a client that was closed meanwhile
        raise BackendUnavailableError(f"{what}: {error}") from error


def told(error: KafkaError, what: str, location: str) -> BackendError:
    """The error of taskq for ``error``."""
    from confluent_kafka import KafkaError

    text = f"{what} at {location}: {error.str()} ({error.name()})"
    if error.code() in {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }:
        return BackendError(f"{text}; the user of the URL lacks a right, see docs/kafka.md")
    return BackendUnavailableError(text)
