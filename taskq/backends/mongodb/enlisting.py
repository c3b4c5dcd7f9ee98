"""Pushes in the caller's own transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from taskq.backends.mongodb.connection import CALLERS
from taskq.errors import ConfigurationError


@contextlib.contextmanager
def enlist(session: Any) -> Iterator[None]:
    """Let what is pushed in the block belong to the transaction of ``session``, a pymongo ``ClientSession``.

    The jobs exist only if it commits, together with everything else it wrote::

        with client.start_session() as session, session.start_transaction():
            orders.insert_one(order, session=session)
            with enlist(session):
                confirm.delay(order["_id"])

    The session must be of the same servers as the backend. Raises ``ConfigurationError`` where it is in no transaction.
    """
    if not getattr(session, "in_transaction", False):
        raise ConfigurationError(
            "enlist(session) needs a session in a transaction: session.start_transaction()"
        )
    token = CALLERS.set(session)
    try:
        yield
    finally:
        CALLERS.reset(token)
