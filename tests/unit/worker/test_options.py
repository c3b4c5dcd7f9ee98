from __future__ import annotations

import pytest

from taskq.errors import ConfigurationError
from taskq.settings import Settings
from taskq.worker.options import WorkerOptions, parse_queues, worker_options


def test_queues_have_weights():
    assert parse_queues("mail, reports=3,") == {"mail": 1, "reports": 3}
    assert parse_queues("") == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mail=x", "weight of 'mail' is 'x'"),
        ("mail=", "weight of 'mail' is ''"),
        ("mail=-1", "'-1'"),
        ("mail=0", "weight 0"),
        ("mail=1001", "weight 1001"),
        ("mail,mail=2", "stands there twice"),
        ("a b", "queue name 'a b'"),
        ("=3", "queue name ''"),
    ],
)
def test_bad_queues_are_refused(text, why):
    with pytest.raises(ConfigurationError, match=why):
        parse_queues(text)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"pool": "treads"}, "did you mean 'thread'"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"shutdown_timeout": -1}, "shutdown_timeout=-1"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout=nan"),
        ({"max_jobs_per_child": 0}, "max_jobs_per_child=0"),
        ({"max_memory_per_child": 1}, "max_memory_per_child=1"),
        ({"log_level": "loud"}, "log_level='loud'"),
        ({"burst": True, "watch": True}, "give one"),
        ({"pool": "solo", "concurrency": 2}, "one job at a time"),
        ({"concurency": 2}, "did you mean 'concurrency'"),
    ],
)
def test_bad_options_are_refused(given, why):
    with pytest.raises(ConfigurationError) as caught:
        worker_options(Settings(), **given)

    assert why in str(caught.value)


def test_what_is_given_wins_over_settings():
    settings = Settings(pool="thread", concurrency=7, queues="a,b=2")

    options = worker_options(settings, app="app", concurrency=3, pool=None)

    assert options == WorkerOptions(app="app", pool="thread", concurrency=3, queues={"a": 1, "b": 2})
    assert options.slots == 3


def test_slots():
    assert WorkerOptions(pool="solo").slots == 1
    assert WorkerOptions().slots >= 1
