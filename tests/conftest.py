"""What every test may use: a clock that stands still, and patience for facts."""

from __future__ import annotations

import threading
import time

import pytest

from taskq.clock import FrozenClock


def eventually(fact, *, within=10.0):
    """Wait until ``fact()`` is truthy and return it; fail after ``within`` seconds."""
    end = time.monotonic() + within
    pause = threading.Event()
    while True:
        value = fact()
        if value:
            return value
        if time.monotonic() > end:
            pytest.fail(f"not within {within} s: {getattr(fact, '__name__', fact)}")
        pause.wait(0.005)


@pytest.fixture
def clock():
    return FrozenClock()
