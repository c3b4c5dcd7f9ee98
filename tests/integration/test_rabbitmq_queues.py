"""What RabbitMQ users must find handled: foreign queues, deleted ones, delays, the dead, and jobs that kill workers."""

from __future__ import annotations

import multiprocessing
import multiprocessing.dummy
import subprocess
import sys
import uuid
from pathlib import Path

import pika
import pytest

from taskq.backends import from_url
from taskq.backends.rabbitmq.layout import Layout
from taskq.clock import SYSTEM_CLOCK
from taskq.errors import ConfigurationError, InvalidArgumentError, PayloadTooLargeError, SchemaError
from taskq.job import Settlement, State, Unique, Verdict
from tests import servers
from tests.conftest import eventually
from tests.contract.acts import (
    bury,
    complete,
    failure,
    ids,
    job,
    jobs,
    listed,
    outcome,
    settle,
    take,
    take_one,
)
from tests.servers import rabbitmq

pytestmark = [pytest.mark.server("rabbitmq"), pytest.mark.slow]


@pytest.fixture
def prefix():
    return f"q{uuid.uuid4().hex[:12]}."


@pytest.fixture
def url(prefix):
    return f"{servers.url('rabbitmq')}?prefix={prefix}"


@pytest.fixture
def opened(url):
    backends = []

    def open_(more="", **options):
        backends.append(from_url(url + more, **options))
        return backends[-1]

    yield open_
    queues = {queue for backend in backends for queue in backend.known()}
    for backend in backends:
        backend.close()
    rabbitmq.sweep(url, queues)


@pytest.fixture
def backend(opened):
    return opened()


@pytest.fixture
def consumer(backend):
    consumer = backend.consume({"tasks": 1}, "worker-1")
    yield consumer
    consumer.close()


@pytest.fixture
def channel():
    """The broker as its own tools see it."""
    connection = pika.BlockingConnection(pika.URLParameters(servers.url("rabbitmq") + "%2f"))
    yield connection.channel()
    if connection.is_open:
        connection.close()


def ready(channel, name):
    return channel.queue_declare(name, passive=True).method.message_count


# -- queues ---------------------------------------------------------------------------


def test_a_foreign_queue_is_named_with_both_values(backend, channel, prefix):
    channel.queue_declare(f"{prefix}tasks", durable=True)

    with pytest.raises(SchemaError) as caught:
        backend.push([job()])

    said = str(caught.value)
    assert all(part in said for part in (f"{prefix}tasks", "x-queue-type is none, not 'quorum'"))


def test_a_classic_queue_holds_work_and_nothing_else(opened):
    backend = opened("&type=classic")
    consumer = backend.consume({"tasks": 1}, "worker-1")
    job_id = bury(backend, consumer)
    backend.push(jobs(3, priority=5))

    assert len(take(consumer, 5)) == 3
    assert ids(listed(backend, "tasks", State.DEAD)) == [job_id]
    with pytest.raises(SchemaError, match="x-queue-type"):
        opened().push([job()])


@pytest.mark.parametrize("name", ["jobs.dead", "a.p1", "b.suspects", "x" * 240])
def test_names_that_could_not_be_told_apart_are_refused(backend, name):
    with pytest.raises(InvalidArgumentError, match="RabbitMQ"):
        backend.push([job(queue=name)])


def test_what_only_a_store_can_keep_is_refused_by_name(backend):
    with pytest.raises(ConfigurationError, match="unique jobs need a store beside amqp"):
        backend.push([job(unique=Unique("key"))])
    with pytest.raises(ConfigurationError, match="visibility_timeout"):
        backend.push([job(lease=0.0)])
    for use in (backend.pause, backend.resume):
        with pytest.raises(ConfigurationError, match="pauses need a store"):
            use("tasks")
    with pytest.raises(ConfigurationError, match="cancels need a store"):
        backend.cancel(["1"])


def test_a_job_that_is_too_large_is_refused_before_it_is_sent(opened):
    backend = opened("&max_message_size=65536")
    with pytest.raises(PayloadTooLargeError, match="max_message_size"):
        backend.push([job(payload=bytes(70_000))])

    assert backend.push([job()])


def test_names_with_dots_do_not_hear_one_another(opened):
    backend = opened()
    inner, outer = backend.consume({"mail": 1}, "one"), backend.consume({"eu.mail": 1}, "two")
    due = SYSTEM_CLOCK.now() + 0.05
    backend.push([job(queue="mail"), job(queue="mail", due=due), job(queue="eu.mail", due=due)])

    found = [r.job.queue for _ in range(2) for r in take(inner, 1, timeout=5.0)]
    assert found == ["mail", "mail"]
    assert [r.job.queue for r in take(outer, 5, timeout=5.0)] == ["eu.mail"]
    assert take(inner, 5) == take(outer, 5) == []


def test_bands_are_served_from_the_highest(backend, consumer):
    pushed = {n: backend.push([job(priority=n)])[0] for n in range(10)}

    found = [r.job.priority for r in take(consumer, 10)]
    assert found == [7, 8, 9, 4, 5, 6, 1, 2, 3, 0]
    assert len(pushed) == 10


def test_a_given_back_job_goes_ahead_of_those_that_wait(backend, consumer):
    first, *others = backend.push(jobs(5))
    consumer.release([take_one(consumer)])

    other = backend.consume({"tasks": 1}, "worker-2")
    found = eventually(lambda: take(other, 1))
    assert ids(found) == [first]
    assert (found[0].job.losses, found[0].job.priority, found[0].job.deliveries) == (0, 0, 1)
    assert len(others) == 4


def test_what_is_at_hand_and_not_wanted_goes_back(opened):
    idle, busy = opened(), opened()
    sleeper = idle.consume({"tasks": 1}, "sleeper")
    idle.push(jobs(10))
    assert len(take(sleeper, 4)) == 4
    sleeper.exchange([], 4)  # asks for more, and never comes for it
    worker = busy.consume({"tasks": 1}, "worker")
    found = []
    eventually(lambda: found.extend(take(worker, 10)) or len(found) == 6)

    assert {r.job.losses for r in found} == {0}


# -- delays ---------------------------------------------------------------------------


def test_jobs_for_a_deleted_queue_stand_in_nobodys_way(opened, channel, prefix):
    backend = opened()
    due = SYSTEM_CLOCK.now() + 0.6
    backend.push([*jobs(40, queue="gone", due=due), *jobs(10, due=due)])
    for each in Layout(prefix).queue("gone"):
        channel.queue_delete(each.name)

    consumer = backend.consume({"tasks": 1}, "worker-1")
    found = []
    eventually(lambda: found.extend(take(consumer, 10, timeout=1.0)) or len(found) == 10)
    eventually(lambda: ready(channel, f"{prefix}taskq.unrouted") == 40)


def test_twenty_delayed_retries_are_twenty_retries(backend, consumer):
    (job_id,) = backend.push([job(max_retries=None)])
    for attempts in range(20):
        (reservation,) = take(consumer, 1, timeout=10.0)
        assert (reservation.job.id, reservation.job.attempts) == (job_id, attempts)
        settle(consumer, failure(reservation, due=SYSTEM_CLOCK.now() + 0.1))

    assert take(consumer, 1, timeout=10.0)[0].job.attempts == 20


def test_short_delays_pass_long_ones(backend, consumer):
    now = SYSTEM_CLOCK.now()
    delays = [3600.0, 86_400.0 * 365 * 8, 0.5, 0.25, 60.0, 0.1]
    pushed = [job(due=now + delay) for delay in delays]
    backend.push(pushed)

    found = [r.job.id for _ in range(3) for r in take(consumer, 1, timeout=10.0)]
    assert found == ids([pushed[5], pushed[3], pushed[2]])
    with pytest.raises(InvalidArgumentError, match="too long"):
        backend.push([job(due=now + 86_400.0 * 365 * 9)])


def test_an_expired_job_is_dropped_however_it_waited(backend, consumer):
    now = SYSTEM_CLOCK.now()
    backend.push([job(due=now + 0.3, expires=now + 0.1)])
    (good,) = backend.push([job(due=now + 0.3)])

    assert ids(take(consumer, 2, timeout=10.0)) == [good]


# -- the dead -------------------------------------------------------------------------


def test_fifty_listings_lose_nobody(backend, consumer):
    dead = [bury(backend, consumer) for _ in range(5)]

    for _ in range(50):
        assert ids(listed(backend, "tasks", State.DEAD, limit=2)) == dead
    assert backend.size("tasks", State.DEAD) == 5


def test_two_who_list_at_once_wait_for_one_another(opened):
    here, there = opened(), opened()
    dead = [bury(here, here.consume({"tasks": 1}, "worker-1"))]
    with multiprocessing.dummy.Pool(6) as pool:
        found = pool.map(lambda n: ids((here, there)[n % 2].list_jobs("tasks", State.DEAD).jobs), range(12))

    assert found == [dead] * 12


def test_a_message_that_is_no_job_is_buried_as_it_is(backend, consumer, channel, prefix):
    take(consumer)
    channel.basic_publish("", f"{prefix}tasks", b"hello", pika.BasicProperties(message_id="theirs"))
    (good,) = backend.push([job()])

    assert ids(take(consumer, 2, timeout=5.0) or take(consumer, 2)) == [good]
    (dead,) = listed(backend, "tasks", State.DEAD)
    assert (dead.id, dead.payload) == ("theirs", b"hello")
    assert dead.error.startswith("DecodeError")


# -- losses ---------------------------------------------------------------------------


@pytest.fixture
def hold(url):
    """A process that takes what is there, and dies."""

    def run():
        holder = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.program", "hold", url, "holder"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        count = int(holder.stdout.readline())
        holder.kill()
        holder.communicate()
        return count

    return run


def test_who_was_lost_alone_is_to_blame_and_the_neighbours_are_not(backend, hold):
    pushed = backend.push(jobs(4, max_retries=0))
    assert hold() == 4
    assert eventually(hold) == 1, "suspects come one at a time"

    consumer = backend.consume({"tasks": 1}, "worker-1")
    innocent = []
    while len(innocent) < 3:
        (each,) = eventually(lambda: take(consumer, 5, timeout=1.0))
        assert (each.job.losses, each.job.attempts) == (1, 0)
        complete(consumer, each)
        innocent.append(each.job.id)
    (dead,) = eventually(lambda: listed(backend, "tasks", State.DEAD))
    assert dead.error == "WorkerLost: reservation timed out"
    assert sorted([dead.id, *innocent]) == sorted(pushed)


def test_a_suspect_that_fails_is_counted_like_any_other(backend, consumer):
    backend.push([job(max_retries=0)])
    answer = settle(consumer, outcome(take_one(consumer), Verdict.RELEASE, suspect=True))
    assert answer is Settlement.SETTLED
    (suspect,) = take(consumer, 1, timeout=5.0)
    assert (suspect.job.losses, suspect.job.attempts) == (1, 0)
    settle(consumer, failure(suspect))

    assert backend.size("tasks", State.DEAD) == 1


def test_the_child_of_a_fork_speaks_for_itself(backend, consumer):
    (mine,) = backend.push([job()])
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: backend.push([job(payload=b"the child's")]))
    child.start()
    child.join(20)
    assert child.exitcode == 0

    found = take(consumer, 5)
    assert ids(found)[0] == mine
    assert [r.job.payload for r in found] == [b"payload", b"the child's"]
    assert set(complete(consumer, *found)) == {Settlement.SETTLED}
