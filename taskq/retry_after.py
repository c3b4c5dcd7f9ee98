"""How long an exception asks to be left alone: HTTP's ``Retry-After``, wherever libraries keep it."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any


def retry_after(error: BaseException | None, now: float) -> float | None:
    """Seconds from ``now`` that ``error`` asks for, 0 or more; ``None`` if it does not say, or not clearly.

    Looks at ``error.retry_after``, then at the header in ``error.response.headers`` (httpx, requests, urllib3)
    and ``error.headers`` (urllib). Only attributes are read; no library is imported.
    """
    for value in _said(error):
        wanted = _seconds(value, now)
        if wanted is not None:
            return wanted
    return None


def _said(error: BaseException | None) -> list[Any]:
    said = [_attribute(error, "retry_after")]
    for owner in (_attribute(error, "response"), error):
        headers = _attribute(owner, "headers")
        said.extend(_header(headers, name) for name in ("Retry-After", "retry-after"))
    return said


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001 - a property of a stranger; what it cannot say was not said
        return None


def _header(headers: Any, name: str) -> Any:
    try:
        return headers.get(name)
    except Exception:  # noqa: BLE001 - as above
        return None


def _seconds(value: Any, now: float) -> float | None:
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if isinstance(value, str):
        return _from_text(value.strip(), now)
    if isinstance(value, timedelta):
        return _sensible(value.total_seconds())
    if isinstance(value, datetime):
        return _until(value, now)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _sensible(value)
    return None


def _from_text(text: str, now: float) -> float | None:
    try:
        return _sensible(float(text))
    except ValueError:
        pass_on = text
    try:
        return _until(parsedate_to_datetime(pass_on), now)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _until(moment: datetime, now: float) -> float | None:
    # An HTTP date is in GMT; some write "-0000", which the parser returns naive.
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    try:
        return max(0.0, aware.timestamp() - now)
    except (OverflowError, ValueError):
        return None


def _sensible(number: float) -> float | None:
    try:
        value = float(number)
    except OverflowError:
        return None
    return value if 0 <= value < math.inf else None
