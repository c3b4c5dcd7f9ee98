"""A bench for whoever tests real workers."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Final

import pytest

from tests.workers import Bench, set_up


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Iterator[Bench]:
    with set_up(tmp_path) as bench:
        yield bench


_HERE: Final = pathlib.Path(__file__).parent
#: Real processes for seconds on end: one Python is enough for these.
_SLOW = frozenset(
    {
        "test_bodies",
        "test_crash_points",
        "test_group_kills",
        "test_kafka_faults",
        "test_kafka_restart",
        "test_leases",
        "test_limits",
        "test_rough_use",
        "test_schedules",
        "test_shutdown",
        "test_store_away",
        "test_unique",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow by its file."""
    for item in items:
        if item.path.parent == _HERE and item.path.stem in _SLOW:
            item.add_marker("slow")
