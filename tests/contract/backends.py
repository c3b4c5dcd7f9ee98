"""The backends that the contract is held against, one small case each.

A new backend adds one case here and nothing elsewhere: tests ask a case for its capabilities, never for its name.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections import Counter
from contextlib import closing
from functools import cached_property
from pathlib import Path

import pytest

from taskq.backend import Backend, Capabilities
from taskq.backends import from_url
from taskq.backends.beside import Beside
from taskq.clock import SYSTEM_CLOCK, Clock, FrozenClock
from taskq.job import Lane
from tests import servers
from tests.servers import rabbitmq

#: Where time cannot be moved, a test waits for no longer than this; in seconds.
LONGEST_WAIT = 2.0


def at(url: str, **options) -> Backend:
    """The backend that a case's URL names; ``BROKER with STORE`` is one beside the other."""
    url, _, store_url = url.partition(" with ")
    if not store_url:
        return from_url(url, **options)
    clock = options.get("clock", SYSTEM_CLOCK)
    return Beside(from_url(url, clock=clock), from_url(store_url, **options), clock=clock)


class BackendCase:
    """How to open one kind of backend in a fresh place, and again in the same place."""

    name: str
    servers: tuple[str, ...] = ()  #: kinds of ``tests.servers`` that it needs
    many = (
        1250  #: jobs that each of many producers pushes; less where each push is a durable write of a server
    )
    virtual_time = True  #: the backend's clock is an argument; else a server keeps the time

    def url(self, place: Path) -> str:
        raise NotImplementedError

    def open(self, place: Path, clock: Clock, **options) -> Backend:
        """Open what is at ``place``, a directory of the test's own; called again, it finds what is there."""
        return at(self.url(place), clock=clock, **options)

    @property
    def capabilities(self) -> Capabilities:
        backend = self.open(Path("/nowhere"), FrozenClock())
        try:
            return backend.capabilities
        finally:
            backend.close()

    def absent(self) -> bool:
        """Whether a server that it needs is not there."""
        return any(servers.url(kind) is None for kind in self.servers)

    def pass_time(self, clock: FrozenClock, seconds: float) -> None:
        """Let ``seconds`` pass, for a backend whose clock is an argument; others must wait."""
        if self.virtual_time:
            clock.advance(seconds)
        elif seconds > LONGEST_WAIT:
            pytest.skip(f"{self.name}: the server's time cannot be moved, and {seconds:g} s are too long")
        else:
            threading.Event().wait(seconds)
            clock.advance(seconds)

    def verify(self, place: Path) -> None:
        """Fail if what is at ``place`` is damaged, where the backend can tell."""

    def leave(self, place: Path) -> None:
        """The test is over; what it stored elsewhere than in ``place`` can go."""

    def end(self) -> None:
        """All tests are over."""


class MemoryCase(BackendCase):
    name = "memory"

    def url(self, place):
        return "memory://"


class SQLiteCase(BackendCase):
    name = "sqlite"

    def url(self, place):
        return f"sqlite:///{place}/jobs.db"

    def verify(self, place):
        with closing(sqlite3.connect(place / "jobs.db")) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            counted = db.execute("SELECT queue, state, n FROM counter WHERE n <> 0 ORDER BY 1, 2").fetchall()
            there = db.execute(
                "SELECT queue, state, count(*) FROM job GROUP BY 1, 2 ORDER BY 1, 2"
            ).fetchall()
            assert counted == there
            _check_lanes(db)
            assert not db.execute("SELECT 1 FROM attempt WHERE seq NOT IN (SELECT seq FROM job)").fetchall()


def _check_lanes(db):
    """The accounts of lanes and gates are what the jobs add up to."""
    kept = db.execute(
        "SELECT name, queue, rank, pending FROM lane WHERE pending <> 0 ORDER BY 1, 2, 3"
    ).fetchall()
    there = db.execute(
        "SELECT lane, queue, rank, count(*) FROM job WHERE state = 0 AND lane >= '-' GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
    ).fetchall()
    assert kept == there
    lent = Counter()
    for name, unnoted in db.execute("SELECT lane, started IS NULL FROM job WHERE state = 1 AND lane >= '-'"):
        task = Lane.parse(name).task
        for gate in (task, name[1:]) if task else ():
            lent[gate] += 1
            lent[gate, "unseen"] += unnoted
    for name, running, unseen in db.execute("SELECT name, running, unseen FROM gate"):
        assert (running, unseen) == (lent[name], lent[name, "unseen"]), name


class BesideCase(SQLiteCase):
    """A store beside a broker. The part of the broker is played by another file of jobs, which lends as one does."""

    name = "beside"

    def url(self, place):
        return f"sqlite:///{place}/messages.db with sqlite:///{place}/jobs.db"


class KafkaCase(BackendCase):
    """Real topics, of a prefix of the test's own. One partition: the order of several is nobody's promise."""

    name = "kafka"
    servers = ("kafka",)

    def url(self, place):
        prefix = f"t{hashlib.sha1(str(place).encode()).hexdigest()[:12]}"
        return f"{servers.url('kafka') or 'kafka://127.0.0.1:9'}?prefix={prefix}&partitions=1"


class RabbitMQCase(BackendCase):
    """Names with a prefix of the test's own, in one virtual host."""

    name = "rabbitmq"
    servers = ("rabbitmq",)
    virtual_time = False

    def __init__(self):
        self._opened = []

    def url(self, place):
        url = servers.url("rabbitmq") or "amqp://nowhere"
        return f"{url}?prefix={hashlib.blake2b(str(place).encode(), digest_size=6).hexdigest()}."

    def open(self, place, clock, **options):
        self._opened.append(super().open(place, clock, **options))
        return self._opened[-1]

    def leave(self, place):
        opened, self._opened = self._opened, []
        rabbitmq.sweep(self.url(place), {queue for backend in opened for queue in backend.known()})


class MongoCase(BackendCase):
    """Databases are dear to make and to drop, so that one whose test is over is emptied and used again."""

    name = "mongodb"
    servers = ("mongodb",)
    many = 250

    def __init__(self):
        self._places = {}
        self._free = []
        self._made = 0

    def url(self, place):
        if str(place) not in self._places:
            self._places[str(place)] = self._free.pop() if self._free else self._new()
        return self._at(self._places[str(place)])

    def _new(self):
        self._made += 1
        return f"taskq_test_{os.getpid()}_{self._made}"

    @staticmethod
    def _at(database):
        server, _, query = (servers.url("mongodb") or "mongodb://nowhere/").partition("/?")
        return f"{server.rstrip('/')}/{database}" + (f"?{query}" if query else "")

    @property
    def capabilities(self):
        backend = from_url(self._at("nowhere"))
        backend.close()
        return backend.capabilities

    def leave(self, place):
        database = self._places.pop(str(place), None)
        if database is not None:
            for name in self._client[database].list_collection_names():
                if name != "bells":  # capped
                    self._client[database][name].delete_many({"_id": {"$ne": "schema"}})
            self._free.append(database)

    def end(self):
        for database in [*self._places.values(), *self._free]:
            self._client.drop_database(database)
        if "_client" in self.__dict__:
            self._client.close()

    @cached_property
    def _client(self):
        from pymongo import MongoClient

        return MongoClient(servers.url("mongodb"))


CASES = [MemoryCase(), SQLiteCase(), BesideCase(), KafkaCase(), RabbitMQCase(), MongoCase()]
