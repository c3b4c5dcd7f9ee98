"""What the broker or the way to it said no with, as errors that name the thing and the remedy."""

from __future__ import annotations

import re
from typing import Final

from pika import exceptions

from taskq.backends.rabbitmq.address import Address
from taskq.errors import (
    BackendBlockedError,
    BackendError,
    BackendUnavailableError,
    NotPublishedError,
    SchemaError,
)


class MissingError(BackendError):
    """A queue or exchange is not there."""


class RefusedError(BackendUnavailableError):
    """The broker does not let this user in, or not there."""


class TakenError(BackendError):
    """Another connection has the queue for itself."""


class AwayError(NotPublishedError, BackendUnavailableError):
    """Nothing was sent: the broker is away."""


class BlockedError(NotPublishedError, BackendBlockedError):
    """Nothing was sent: the broker has raised an alarm."""


_INEQUIVALENT: Final = re.compile(
    r"inequivalent arg '(?P<argument>[^']*)' for (?P<what>queue|exchange) '(?P<name>.*?)' in vhost .*?: "
    r"received (?P<ours>.*?) but current is (?P<theirs>.*)",
    re.DOTALL,
)


def explain(error: BaseException | str, address: Address) -> BackendError:
    """The error of this package for one of the driver's."""
    if isinstance(error, BackendError):
        return error
    if isinstance(error, exceptions.ChannelClosedByBroker):
        return _channel_closed(error.reply_code, error.reply_text, address)
    if isinstance(error, exceptions.ConnectionClosedByBroker) and error.reply_code in {403, 530}:
        return RefusedError(f"{address.location}: {error.reply_text}")
    cause = _cause(error)
    if isinstance(
        cause,
        exceptions.ProbableAuthenticationError
        | exceptions.ProbableAccessDeniedError
        | exceptions.AuthenticationError,
    ):
        return RefusedError(f"{address.location} does not let {address.user!r} in: {cause!r}")
    text = str(cause) or type(cause).__name__
    return BackendUnavailableError(f"{address.location} is away: {text}")


def is_refusal(error: BackendError) -> bool:
    """Whether waiting will not help."""
    return isinstance(error, RefusedError)


def _plain(value: str) -> str:
    """A value as the broker writes it, without its type."""
    return re.sub(r"the value (.*) of type '\w+'", r"\1", value)


def _cause(error: BaseException | str) -> BaseException | str:
    """What is at the bottom of the driver's nested errors."""
    for _ in range(5):
        inner = getattr(error, "exceptions", None) or getattr(error, "exception", None)
        if isinstance(inner, list | tuple):
            inner = inner[-1] if inner else None
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def _channel_closed(code: int, text: str, address: Address) -> BackendError:
    found = _INEQUIVALENT.search(text)
    if found:
        return SchemaError(
            f"{found['what']} {found['name']!r} at {address.location} is not as taskq declares it: "
            f"{found['argument']} is {_plain(found['theirs'])}, not {_plain(found['ours'])}. Delete it once it is empty, or use "
            "other names: prefix=… in the URL"
        )
    if code == 404:
        return MissingError(f"{address.location}: {text}")
    if code == 405 or (code == 403 and "exclusive" in text):
        return TakenError(f"{address.location}: {text}")
    return BackendError(f"{address.location}: {code} {text}")
