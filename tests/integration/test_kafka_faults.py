"""Kafka: workers that die, partitions that pass on, topics and messages that cannot work."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from taskq.backend import Note
from taskq.backends import from_url
from taskq.errors import ConfigurationError, PayloadTooLargeError
from taskq.job import Settlement, State
from tests import servers
from tests.conftest import eventually
from tests.contract.acts import complete, failure, ids, job, jobs, listed, settle, take

pytestmark = pytest.mark.server("kafka")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def prefix(tmp_path):
    return f"f{hashlib.sha1(str(tmp_path).encode()).hexdigest()[:12]}"


@pytest.fixture
def open_backend(prefix):
    """Open the test's place; all are closed at the end."""
    opened = []

    def open_(partitions=1, **options):
        opened.append(from_url(f"{servers.url('kafka')}?prefix={prefix}&partitions={partitions}", **options))
        return opened[-1]

    yield open_
    for backend in opened:
        backend.close()


@pytest.fixture
def admin():
    return AdminClient({"bootstrap.servers": servers.url("kafka").removeprefix("kafka://")})


@pytest.fixture
def doomed(prefix):
    """A process that takes and then does as it is told, until it is killed."""
    started = []

    def start(*commands, partitions=1):
        url = f"{servers.url('kafka')}?prefix={prefix}&partitions={partitions}"
        process = subprocess.Popen(
            [sys.executable, "-c", _DOOMED, url, *commands],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


_DOOMED = """
import sys
from taskq.backend import Note
from taskq.backends import from_url
from taskq.job import Outcome, Verdict

_, url, *commands = sys.argv
consumer = from_url(url).consume({"tasks": 1}, "doomed")
taken = consumer.take(100, 20.0).reservations
if "all" in commands:
    while more := consumer.take(100).reservations:
        taken += more
if "complete the odd" in commands:
    consumer.settle([Outcome(reservation=one, verdict=Verdict.COMPLETE) for one in taken[1::2]])
if "begin" in commands:
    begun = [one for one in taken if one.job.task == "begun"]
    consumer.note([Note(reservation=one, started=1.0) for one in begun])
    consumer.settle([Outcome(reservation=one, verdict=Verdict.COMPLETE) for one in taken if one not in begun][:1])
print(*(one.job.id for one in taken), flush=True)
sys.stdin.read()
"""


def told(process):
    return process.stdout.readline().split()


def kill(process):
    process.kill()
    process.wait()


def take_all(consumer, n, within=20.0):
    """Take until there are ``n``."""
    found = []
    eventually(lambda: found.extend(take(consumer, 100, timeout=1.0)) or len(found) >= n, within=within)
    return found


# -- workers that die -----------------------------------------------------------------


def test_what_had_finished_is_not_repeated_and_the_rest_are_suspects(open_backend, doomed):
    backend = open_backend()
    pushed = backend.push(jobs(20))
    victim = doomed("all", "complete the odd")
    assert told(victim) == pushed
    kill(victim)

    consumer = backend.consume({"tasks": 1}, "heir")
    found = take_all(consumer, 10)

    assert sorted(ids(found)) == sorted(pushed[::2])
    assert {(one.job.losses, one.job.attempts) for one in found} == {(1, 0)}
    complete(consumer, *found)
    assert take(consumer) == []
    assert backend.counts() == {}


def test_a_job_that_had_begun_is_counted(open_backend, doomed):
    backend = open_backend()
    first, _, second = backend.push([job(task="begun", loss_base=0.0, max_retries=1), job(), job()])
    victim = doomed("all", "begin")
    told(victim)
    kill(victim)

    consumer = backend.consume({"tasks": 1}, "heir")
    found = {one.job.id: one.job for one in take_all(consumer, 2)}

    assert (found[first].attempts, found[first].losses, found[first].error) == (
        1,
        0,
        "WorkerLost: reservation timed out",
    )
    assert (found[second].attempts, found[second].losses) == (0, 1)


def test_a_job_that_kills_its_workers_ends_dead(open_backend, doomed):
    backend = open_backend()
    (job_id,) = backend.push([job(task="begun", loss_base=0.0, max_retries=1)])
    for _ in range(2):
        backend.push([job()])  # its end commits what was begun
        victim = doomed("all", "begin")
        assert job_id in told(victim)
        kill(victim)
    consumer = backend.consume({"tasks": 1}, "heir")

    (dead,) = eventually(lambda: take(consumer) is not None and listed(backend, "tasks", State.DEAD))
    assert (dead.id, dead.attempts, [a.error_type for a in dead.history]) == (job_id, 2, ["WorkerLost"] * 2)


# -- partitions that pass on ----------------------------------------------------------


def test_what_runs_stays_with_who_runs_it_when_another_worker_joins(open_backend):
    here, there = open_backend(4), open_backend(4)
    pushed = here.push(jobs(40))
    veteran = here.consume({"tasks": 1}, "veteran")
    running = take_all(veteran, 40)
    novice = there.consume({"tasks": 1}, "novice")
    assert take(novice, timeout=3.0) == [], "nothing runs twice"
    there.push(jobs(8))
    fresh = take_all(novice, 1)

    assert veteran.extend(running) == ([], [])
    assert set(complete(veteran, *running)) == {Settlement.SETTLED}
    assert sorted(ids(running)) == sorted(pushed)
    assert not set(ids(fresh)) & set(pushed)


def test_a_retry_of_what_was_moved_is_one_job(open_backend):
    here, there = open_backend(4), open_backend(4)
    here.push(jobs(12))
    veteran = here.consume({"tasks": 1}, "veteran")
    running = take_all(veteran, 12)
    novice = there.consume({"tasks": 1}, "novice")
    assert take(novice, timeout=2.0) == []
    assert set(settle(veteran, *map(failure, running))) == {Settlement.SETTLED}

    found = {}
    eventually(
        lambda: (
            found.update((one.job.id, one.job) for c in (novice, veteran) for one in take(c, timeout=0.2))
            or len(found) == 12
        )
    )
    assert {one.attempts for one in found.values()} == {1}
    assert take(novice) == take(veteran) == []


def test_a_worker_that_leaves_in_good_order_leaves_no_suspects(open_backend):
    here, there = open_backend(), open_backend()
    pushed = here.push(jobs(5))
    leaving = here.consume({"tasks": 1}, "leaving")
    take_all(leaving, 5)
    leaving.close()

    found = take_all(there.consume({"tasks": 1}, "heir"), 5)
    assert ids(found) == pushed
    assert {(one.job.losses, one.job.deliveries) for one in found} == {(0, 1)}


def test_a_spare_worker_waits_and_takes_over(open_backend):
    here, there = open_backend(), open_backend()
    first = here.consume({"tasks": 1}, "first")
    here.push([job()])
    complete(first, *take_all(first, 1))
    spare = there.consume({"tasks": 1}, "spare")
    assert take(spare, timeout=0.5) == []
    here.push([job()])
    first.close()

    assert len(take_all(spare, 1)) == 1


# -- one job among others -------------------------------------------------------------


def test_a_long_job_does_not_hold_up_the_others_of_its_partition(open_backend):
    backend = open_backend()
    consumer = backend.consume({"tasks": 1}, "worker-1")
    (long,) = backend.push([job()])
    (first,) = take_all(consumer, 1)
    for _ in range(6):
        backend.push(jobs(1000))
        done = take_all(consumer, 1000)
        assert set(complete(consumer, *done)) == {Settlement.SETTLED}

    assert first.job.id == long
    assert complete(consumer, first) == Settlement.SETTLED
    assert backend.counts() == {}


def test_high_priority_passes_what_waits(open_backend):
    backend = open_backend()
    consumer = backend.consume({"tasks": 1}, "worker-1")
    backend.push(jobs(3000))
    complete(consumer, *take_all(consumer, 1))
    (urgent,) = backend.push([job(priority=9)])

    eventually(lambda: urgent in ids(take(consumer, 10)))


def test_a_message_that_is_no_job_becomes_a_dead_letter(open_backend, prefix):
    from confluent_kafka import Producer

    backend = open_backend()
    (good,) = backend.push([job()])
    producer = Producer({"bootstrap.servers": servers.url("kafka").removeprefix("kafka://")})
    producer.produce(f"{prefix}.tasks", b"hello")
    producer.flush(10)
    consumer = backend.consume({"tasks": 1}, "worker-1")

    assert ids(take_all(consumer, 1)) == [good]
    (dead,) = eventually(lambda: listed(backend, "tasks", State.DEAD))
    assert dead.payload == b"hello"
    assert "no job" in dead.error


# -- sizes ----------------------------------------------------------------------------


def test_a_job_that_is_too_large_is_refused_with_both_sizes(open_backend):
    backend = open_backend()

    with pytest.raises(PayloadTooLargeError, match=r"9,\d{3},\d{3} bytes; .* takes 8,388,608"):
        backend.push([job(payload=b"x" * 9_000_000)])
    assert backend.counts() == {}


def test_a_follow_up_that_is_too_large_buries_its_job_and_no_other(open_backend):
    backend = open_backend()
    backend.push(jobs(2))
    consumer = backend.consume({"tasks": 1}, "worker-1")
    one, other = take_all(consumer, 2)
    large = failure(one, pushes=(job(payload=b"x" * 9_000_000),))

    assert settle(consumer, large, failure(other)) == [Settlement.SETTLED] * 2
    (dead,) = listed(backend, "tasks", State.DEAD)
    assert (dead.id, dead.error[:16]) == (one.job.id, "PayloadTooLargeE")
    assert backend.size("tasks") == 1


# -- topics ---------------------------------------------------------------------------


def test_a_topic_that_would_lose_jobs_is_refused_with_the_command(open_backend, admin, prefix):
    topic = NewTopic(f"{prefix}.tasks", 1, 1, config={"retention.ms": "3600000"})
    admin.create_topics([topic])[topic.topic].result()

    with pytest.raises(ConfigurationError, match=r"kafka-configs\.sh .*--add-config .*retention\.ms=-1"):
        open_backend().push([job()])


def test_topics_that_are_there_keep_their_width(open_backend):
    open_backend(3).push([job()])
    other = open_backend(5)
    other.push([job()])

    assert other.size("tasks") == 2


def test_what_has_ended_is_deleted_so_that_lost_offsets_replay_nothing(open_backend, admin, prefix):
    backend = open_backend()
    backend.push(jobs(10))
    consumer = backend.consume({"tasks": 1}, "worker-1")
    complete(consumer, *take_all(consumer, 10))
    consumer.close()
    admin.delete_consumer_groups([prefix])[prefix].result()
    (fresh,) = backend.push([job()])

    assert ids(take_all(backend.consume({"tasks": 1}, "worker-2"), 1)) == [fresh]
    assert take(backend.consume({"tasks": 1}, "worker-3")) == []


def test_housekeeping_deletes_what_has_ended(open_backend, admin, prefix):
    backend = open_backend()
    backend.push(jobs(10))
    consumer = backend.consume({"tasks": 1}, "worker-1")
    complete(consumer, *take_all(consumer, 10)[:7])
    backend.housekeep()

    reader = backend.topics.ends([(f"{prefix}.tasks", 0)], first=True)
    assert reader == {(f"{prefix}.tasks", 0): 7}


def test_delays_of_seconds_arrive_in_time_and_far_ones_stand_in_nobodys_way(open_backend):
    backend = open_backend()
    now = time.time()
    far, near = job(due=now + 86_400 * 400), job(due=now + 1.6)
    backend.push([far, near])
    consumer = backend.consume({"tasks": 1}, "worker-1")

    assert ids(take_all(consumer, 1)) == [near.id]
    assert time.time() >= near.due


def test_a_mark_is_committed_without_being_asked_for(open_backend, prefix):
    backend = open_backend()
    backend.push(jobs(2))
    consumer = backend.consume({"tasks": 1}, "worker-1")
    first, _ = take_all(consumer, 2)
    consumer.note([Note(reservation=first, started=1.0)])
    slot = (f"{prefix}.tasks", 0)

    eventually(lambda: backend.topics.committed([slot])[slot] == (0, "1:sl"))
    assert backend.counts() == {}


def test_partitions_begin_where_the_group_stands(open_backend, admin, prefix):
    """The offsets that the group keeps are those of the classic tools."""
    backend = open_backend()
    backend.push(jobs(4))
    consumer = backend.consume({"tasks": 1}, "worker-1")
    complete(consumer, *take_all(consumer, 4))

    assert backend.topics.committed([(f"{prefix}.tasks", 0)])[f"{prefix}.tasks", 0].offset == 4
    assert TopicPartition(f"{prefix}.tasks", 0).offset < 0
