from __future__ import annotations

import pytest

from taskq.backends import from_url
from taskq.errors import BackendUnavailableError, ConfigurationError


@pytest.fixture
def opened():
    """Open a URL; closed at the end."""
    backends = []

    def open_(url, **options):
        backends.append(from_url(url, **options))
        return backends[-1]

    yield open_
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("scheme", ["sqlite", "file", "SQLite"])
def test_three_slashes_are_relative_to_the_present_directory(opened, tmp_path, monkeypatch, scheme):
    monkeypatch.chdir(tmp_path)
    backend = opened(f"{scheme}:///sub%20dir/my.db")
    monkeypatch.chdir("/")

    assert backend.location == f"{tmp_path}/sub dir/my.db"


def test_four_slashes_are_absolute(opened):
    assert opened("sqlite:////var/lib/my.db").location == "/var/lib/my.db"


def test_memory(opened):
    assert opened("memory://").location == "memory://"
    assert opened("memory://", max_finished=5).capabilities.persistent is False


def test_nothing_is_opened_before_its_first_use(opened, tmp_path):
    opened(f"sqlite:///{tmp_path}/x.db")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqllite:///x.db", "did you mean 'sqlite'"),
        ("redis://host", "known are"),
        ("taskq.db", "write it as sqlite:///taskq.db"),
        ("sqlite://", "names no file"),
        ("sqlite:///", "names no file"),
        ("sqlite://x.db", "names no file"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite:///x.db?synchronus=full", "did you mean 'synchronous'"),
        ("sqlite:///x.db?synchronous=maybe", "'normal' or 'full'"),
        ("sqlite:///x.db?timeout=soon", "timeout is a number"),
        ("sqlite:///x.db?max_finished=-1", "max_finished is a number"),
        ("memory://somewhere", "takes no path"),
        ("amqp://host/a/b", "with a slash in it as %2F"),
        ("amqp://host?hartbeat=3", "did you mean 'heartbeat'"),
        ("amqp://host?heartbeat=0", "heartbeat is a number from 1"),
        ("amqp://host?type=stream", "type is one of quorum, classic"),
        ("amqps://host?verify=perhaps", "verify is yes or no"),
        ("amqp://u:secret@host:port", "not an address"),
        ("kafka://", "names no server"),
        ("kafka://host?mode=share", "not available in this version"),
        ("kafka://host?mode=fast", "mode is 'transactional'"),
        ("kafka://host?partitions=0", "from 1 to 1000"),
        ("kafka://host?prefix=a/b", "prefix has letters"),
        ("kafka://host?partition=3", "did you mean 'partitions'"),
    ],
)
def test_what_cannot_work_says_why(url, message):
    with pytest.raises(ConfigurationError, match=message):
        from_url(url)


def test_unknown_options_are_refused_with_a_suggestion():
    for url in ("memory://", "sqlite:///x.db"):
        with pytest.raises(ConfigurationError, match="did you mean 'max_finished'"):
            from_url(url, max_finishd=1)


def test_a_missing_directory_is_named_with_the_remedy(opened, tmp_path):
    with pytest.raises(BackendUnavailableError, match=f"mkdir -p {tmp_path}/no"):
        opened(f"sqlite:///{tmp_path}/no/x.db").counts()
