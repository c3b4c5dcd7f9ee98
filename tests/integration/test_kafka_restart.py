"""A Kafka server that is killed, stays away for a while, and comes back."""

from __future__ import annotations

import os
import signal
import threading
import uuid

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from taskq.backends import from_url
from taskq.errors import BackendError, BackendUnavailableError
from taskq.job import Settlement
from tests import servers
from tests.conftest import eventually
from tests.contract.acts import complete, failure, ids, job, jobs, settle, take
from tests.servers import control, kafka
from tests.servers.processes import Running

pytestmark = pytest.mark.server("kafka")


class Server:
    """A server of these tests' own, which may be killed."""

    def __init__(self, directory):
        self.running = Running(directory)
        self.url = self.start()

    def start(self):
        self.running.url = kafka.start(self.running)
        return self.running.url

    def be_patient_with(self, group):
        """Members of ``group`` may be unheard of for as long as a start takes."""
        admin = AdminClient({"bootstrap.servers": self.url.removeprefix("kafka://")})
        entry = ConfigEntry(
            "consumer.session.timeout.ms", "45000", incremental_operation=AlterConfigOpType.SET
        )
        resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result()

    def kill(self):
        for process in self.running.processes:
            if process.alive():
                os.kill(process.pid, signal.SIGKILL)
                eventually(lambda process=process: not process.alive())
                os.waitpid(process.pid, 0)
        self.running.processes.clear()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if "TASKQ_TEST_KAFKA_URL" in os.environ or servers.url("kafka") is None:
        pytest.skip("the jars of the server are not here")
    directory = tmp_path_factory.mktemp("kafka")
    (directory / "jars").symlink_to(control.home("kafka") / "jars")
    server = Server(directory)
    yield server
    server.kill()


@pytest.fixture
def open_backend(server):
    opened = []
    prefix = f"r{uuid.uuid4().hex[:12]}"
    server.be_patient_with(prefix)

    def open_(**options):
        opened.append(from_url(f"{server.url}?prefix={prefix}&partitions=1", **options))
        return opened[-1]

    yield open_
    for backend in opened:
        backend.close()


def take_all(consumer, n):
    found = []

    def taken():
        try:
            found.extend(take(consumer, 100, timeout=1.0))
        except BackendUnavailableError:
            return False
        return len(found) >= n

    eventually(taken, within=60)
    return found


def test_a_restart_loses_nothing_and_doubles_nothing(server, open_backend):
    backend = open_backend(publish_timeout=3.0)
    pushed = backend.push(jobs(50))
    consumer = backend.consume({"tasks": 1}, "worker-1")
    lent = take_all(consumer, 20)
    assert complete(consumer, *lent[:10]) == [Settlement.SETTLED] * 10
    server.kill()
    with pytest.raises(BackendError):
        eventually(lambda: take(consumer, 1, timeout=1.0) and False)
    with pytest.raises(BackendError):
        backend.push([job()])
    server.start()

    more = backend.push(jobs(5)) if eventually(lambda: answers(backend), within=60) else []
    done = lent + take_all(consumer, len(pushed) + len(more) - len(lent))
    assert set(complete(consumer, *done[10:])) == {Settlement.SETTLED}
    assert {*pushed, *more} <= set(ids(done))
    assert len(ids(done)) == len(set(ids(done)))


def answers(backend):
    try:
        backend.counts()
    except BackendError:
        return False
    return True


def test_outcomes_that_meet_a_dead_server_are_written_once_it_is_back(server, open_backend):
    backend = open_backend(publish_timeout=3.0)
    pushed = backend.push(jobs(6))
    consumer = backend.consume({"tasks": 1}, "worker-1")
    lent = take_all(consumer, 6)
    outcomes = [failure(one) for one in lent]
    settle(consumer, outcomes[0])
    server.kill()
    with pytest.raises(BackendError):
        consumer.settle(outcomes[1:])
    server.start()

    answers_ = []

    def settled():
        try:
            answers_[:] = consumer.settle(outcomes)
        except BackendError:
            return False
        return True

    eventually(settled, within=60)
    assert set(answers_) <= {Settlement.SETTLED, Settlement.ALREADY_YOURS}
    again = take_all(consumer, 6)
    assert sorted(ids(again)) == sorted(pushed)
    assert {one.job.attempts for one in again} == {1}
    assert take(consumer) == []


def test_a_server_killed_amid_transactions_leaves_each_job_once(server, open_backend):
    backend = open_backend(publish_timeout=10.0)
    pushed = backend.push(jobs(100, max_retries=None))
    stop = threading.Event()
    seen = {}

    def work():
        consumer = backend.consume({"tasks": 1}, "worker-1")
        outcomes = []
        while not stop.is_set() or outcomes:
            try:
                if outcomes:
                    consumer.settle(outcomes)
                    outcomes = []
                lent = take(consumer, 10, timeout=0.2)
            except BackendError:
                continue
            for one in lent:
                seen[one.job.id, one.job.attempts] = seen.get((one.job.id, one.job.attempts), 0) + 1
            outcomes = [failure(one) for one in lent]
        consumer.close()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        eventually(lambda: len(seen) > 50, within=60)
        server.kill()
        server.start()
        before = len(seen)
        eventually(lambda: len(seen) > before + 150, within=60)
    finally:
        stop.set()
        worker.join(60)

    # The session outlives the restart: no attempt was begun twice.
    assert set(seen.values()) == {1}
    left = take_all(backend.consume({"tasks": 1}, "worker-2"), 100)
    assert sorted(ids(left)) == sorted(pushed)
