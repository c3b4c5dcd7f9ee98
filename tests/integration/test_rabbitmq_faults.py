"""RabbitMQ while the way to it is cut, held up or refused, and while it raises alarms or loses queues."""

from __future__ import annotations

import threading
import uuid

import pytest

from taskq.backends import from_url
from taskq.errors import (
    BackendBlockedError,
    BackendError,
    BackendUnavailableError,
    NotPublishedError,
    PublishUnknownError,
)
from taskq.job import Settlement, State
from tests import servers
from tests.conftest import eventually
from tests.contract.acts import complete, failure, ids, job, jobs, settle, take, take_one
from tests.servers import rabbitmq
from tests.servers.control import home
from tests.servers.processes import Running
from tests.servers.proxy import Proxy

pytestmark = [pytest.mark.server("rabbitmq"), pytest.mark.slow]


@pytest.fixture
def proxy():
    host, _, port = servers.url("rabbitmq").rpartition("@")[2].rstrip("/").partition(":")
    with Proxy(host, int(port)) as proxy:
        yield proxy


@pytest.fixture
def prefix():
    return f"f{uuid.uuid4().hex[:12]}."


@pytest.fixture
def opened(proxy, prefix):
    """Open a backend: through the proxy, or with ``direct`` past it."""
    backends = []

    def open_(*, direct=False, **options):
        url = f"{servers.url('rabbitmq')}?prefix={prefix}"
        backends.append(from_url(url if direct else proxy.url(url), **options))
        return backends[-1]

    yield open_
    proxy.restore()
    queues = {queue for backend in backends for queue in backend.known()}
    for backend in backends:
        backend.close()
    rabbitmq.sweep(f"{servers.url('rabbitmq')}?prefix={prefix}", queues)


@pytest.fixture
def backend(opened):
    return opened()


@pytest.fixture
def control():
    """``rabbitmqctl``, where the server is ours to command."""
    running = Running.load(home("rabbitmq"))
    if running is None or running.url != servers.url("rabbitmq"):
        pytest.skip("the server was not started here")
    return lambda *words: rabbitmq.control(running, *words)


@pytest.fixture
def alarm(control):
    """Raise one of the broker's alarms, until the end of the test or until told."""
    calm = {
        "memory": ("set_vm_memory_high_watermark", "absolute", "1GB"),
        "disk": ("set_disk_free_limit", "50MB"),
    }
    storm = {
        "memory": ("set_vm_memory_high_watermark", "absolute", "1MB"),
        "disk": ("set_disk_free_limit", "90000GB"),
    }
    raised = []

    def change(kind, *, on):
        control(*(storm if on else calm)[kind])
        raised.append(kind)
        eventually(lambda: bool(control("eval", "rabbit_alarm:get_alarms().").strip("[]\n ")) == on)

    yield change
    for kind in set(raised):
        control(*calm[kind])


def all_of(backend, queue="tasks"):
    """Take and complete everything."""
    consumer = backend.consume({queue: 1}, "the last")
    found = []
    while reservations := take(consumer, 500):
        found += reservations
        complete(consumer, *reservations)
    consumer.close()
    return found


def attempts(act, within=20.0):
    """Do ``act`` until the backend is there again."""

    def attempt():
        try:
            return [act()]
        except BackendError:
            return None

    return eventually(attempt, within=within)[0]


# -- pushing --------------------------------------------------------------------------


def test_an_idle_publisher_connects_again(backend, proxy):
    backend.push([job()])
    for _ in range(3):
        proxy.cut()
        attempts(lambda: backend.push([job()]))

    assert len(all_of(backend)) >= 4


def test_cuts_in_the_middle_of_pushes_lose_nothing_confirmed(opened, proxy):
    backend = opened(publish_timeout=10.0)
    confirmed, doubtful = set(), set()
    done = threading.Event()

    def push(size):
        while not done.is_set():
            batch = jobs(size)
            try:
                confirmed.update(backend.push(batch))
            except PublishUnknownError as error:
                doubtful.update(error.job_ids)
                confirmed.update(set(ids(batch)) - set(error.job_ids))
            except NotPublishedError:
                doubtful.update(ids(batch))

    threads = [threading.Thread(target=push, args=(size,)) for size in (1, 1, 7, 300)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        before = len(confirmed)
        eventually(lambda before=before: len(confirmed) > before + 200, within=30)
        proxy.cut()
    done.set()
    for thread in threads:
        thread.join()

    found = set(ids(all_of(opened(direct=True))))
    assert confirmed <= found
    assert found <= confirmed | doubtful


def test_a_broker_that_falls_silent_leaves_a_doubt_that_has_names(opened, proxy):
    backend = opened(publish_timeout=0.5)
    backend.push([job()])
    proxy.stall()
    batch = jobs(3)

    with pytest.raises(PublishUnknownError) as caught:
        backend.push(batch)

    assert list(caught.value.job_ids) == ids(batch)
    proxy.restore()
    attempts(lambda: backend.push([job()]))
    assert set(ids(batch)) < set(ids(all_of(backend)))


@pytest.mark.parametrize("warm", [True, False])
def test_a_broker_that_cannot_be_reached_has_stored_nothing(opened, proxy, warm):
    backend = opened(publish_timeout=0.5)
    if warm:
        backend.push([job()])
    proxy.refuse()
    eventually(lambda: not warm or backend._post.publisher.link.connection is None)

    with pytest.raises(BackendUnavailableError, match="is away") as caught:
        backend.push([job()])

    assert isinstance(caught.value, NotPublishedError)
    assert "guest:guest" not in str(caught.value)
    proxy.restore()
    attempts(lambda: backend.push([job()]))
    assert len(all_of(backend)) == 1 + warm


def test_a_wrong_password_is_said_at_once():
    url = servers.url("rabbitmq").replace("guest:guest", "guest:wrong")
    backend = from_url(url)
    try:
        with pytest.raises(BackendUnavailableError, match="does not let 'guest' in"):
            backend.push([job()])
    finally:
        backend.close()


# -- alarms ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_an_alarm_refuses_pushes_and_lets_work_end(opened, alarm, kind):
    backend = opened(direct=True, publish_timeout=1.0)
    consumer = backend.consume({"tasks": 1}, "worker-1")
    backend.push(jobs(3))
    held = take(consumer, 2)
    alarm(kind, on=True)

    with pytest.raises(
        (PublishUnknownError, BackendBlockedError)
    ):  # the broker says so once something is sent
        backend.push([job()])
    with pytest.raises(BackendBlockedError, match="alarm") as caught:
        backend.push([job()])
    assert isinstance(caught.value, NotPublishedError)
    assert complete(consumer, held[0]) is Settlement.SETTLED
    with pytest.raises(BackendError):
        settle(consumer, failure(held[1]))
    assert consumer.extend([held[1]]).lost == []

    alarm(kind, on=False)
    attempts(lambda: backend.push([job()]))
    assert settle(consumer, failure(held[1])) in {Settlement.SETTLED, Settlement.ALREADY_YOURS}


# -- consuming ------------------------------------------------------------------------


def test_what_was_lent_over_a_lost_connection_is_lost_and_comes_again(opened, proxy):
    backend = opened()
    consumer = backend.consume({"tasks": 1}, "worker-1")
    pushed = backend.push(jobs(3))
    done, failed, running = take(consumer, 3)
    proxy.cut()
    eventually(lambda: consumer.extend([running]).lost)

    assert complete(consumer, done) is Settlement.LOST
    assert settle(consumer, failure(failed)) is Settlement.LOST
    again = []
    while len(again) < 3:
        (suspect,) = attempts(lambda: take(consumer, 3, timeout=5.0))
        assert (suspect.job.losses, suspect.job.attempts) == (1, 0)
        assert take(consumer, 3) == [], "suspects come one at a time"
        complete(consumer, suspect)
        again.append(suspect.job.id)
    assert sorted(again) == sorted(pushed)
    assert backend.size("tasks") == 0


def test_a_take_says_that_the_broker_is_away_and_goes_on_when_it_is_back(backend, proxy):
    consumer = backend.consume({"tasks": 1}, "worker-1")
    assert take(consumer, 1) == []
    proxy.refuse()

    def away():
        try:
            return consumer.take(1, 0.2) is None
        except BackendUnavailableError as error:
            return "is away" in str(error)

    eventually(away)
    proxy.restore()
    attempts(lambda: backend.push([job()]))
    assert attempts(lambda: take(consumer, 1, timeout=2.0) or take(consumer, 1))


def test_a_cut_while_outcomes_are_settled_neither_loses_nor_settles_twice(opened, proxy):
    backend = opened()
    consumer = backend.consume({"tasks": 1}, "worker-1")
    backend.push(jobs(400, max_retries=None))
    ends, failures = {}, {}
    cuts = iter((50, 150, 250, 300))
    next_cut = next(cuts)
    while len(ends) < 400:
        reservations = attempts(lambda: take(consumer, 8, timeout=1.0) or take(consumer, 8))
        if len(ends) >= next_cut:
            next_cut = next(cuts, 10**9)
            threading.Timer(0.002, proxy.cut).start()
        outcomes = []
        for n, each in enumerate(reservations):
            retry = n % 3 == 0 and each.job.id not in failures
            failures[each.job.id] = failures.get(each.job.id, 0) + retry
            outcomes.append((each, failure(each) if retry else None))
        for each, bad in outcomes:
            answer = attempts(
                lambda each=each, bad=bad: settle(consumer, bad) if bad else complete(consumer, each)
            )
            if bad is None and answer is not Settlement.LOST:
                ends[each.job.id] = ends.get(each.job.id, 0) + 1

    repeated = [job_id for job_id, n in ends.items() if n > 1]
    assert len(repeated) <= 4 * 8, "only what was on its way during a cut"


def test_a_queue_that_was_deleted_is_there_for_the_next_push(opened, prefix):
    import pika

    backend = opened(direct=True)
    consumer = backend.consume({"tasks": 1}, "worker-1")
    backend.push(jobs(2))
    lost = take(consumer, 2)
    connection = pika.BlockingConnection(pika.URLParameters(servers.url("rabbitmq") + "%2f"))
    for name in ("tasks", "tasks.suspects", "tasks.dead"):
        connection.channel().queue_delete(prefix + name)
    connection.close()

    eventually(lambda: len(consumer.extend(lost).lost) == 2)
    assert complete(consumer, lost[0]) is Settlement.LOST
    (job_id,) = backend.push([job()])
    assert ids(attempts(lambda: take(consumer, 1, timeout=5.0))) == [job_id]


def test_a_connection_closed_by_an_operator_is_opened_again(opened, control):
    backend = opened(direct=True)
    consumer = backend.consume({"tasks": 1}, "worker-1")
    backend.push([job()])
    held = take_one(consumer)
    control("close_all_connections", "--vhost", "/", "for a test")

    eventually(lambda: consumer.extend([held]).lost)
    (again,) = attempts(lambda: take(consumer, 1, timeout=5.0))
    assert again.job.id == held.job.id
    assert attempts(lambda: backend.push([job()]))


def test_a_broker_that_is_restarted_loses_nothing(opened, control):
    backend = opened(direct=True)
    consumer = backend.consume({"tasks": 1}, "worker-1")
    pushed = backend.push(jobs(20))
    taken = take(consumer, 5)
    complete(consumer, taken[0])
    eventually(lambda: backend.size("tasks") == 15)
    control("stop_app")
    with pytest.raises(BackendError):
        backend.counts("tasks")
    control("start_app")

    attempts(lambda: backend.push([job()]), within=60)
    found = set()
    while len(found) < 20:
        reservations = attempts(lambda: take(consumer, 30, timeout=2.0), within=30)
        found |= set(ids(reservations))
        complete(consumer, *reservations)
    assert found >= set(pushed[5:])


def test_a_job_that_takes_longer_than_the_broker_allows_is_lost_and_the_session_goes_on(opened, control):
    control("eval", "application:set_env(rabbit, consumer_timeout, 1000).")
    control("eval", "application:set_env(rabbit, channel_tick_interval, 500).")
    try:
        backend = opened(direct=True)
        consumer = backend.consume({"tasks": 1}, "worker-1")
        backend.push([job()])
        held = take_one(consumer)
        eventually(lambda: consumer.extend([held]).lost, within=20)
        (again,) = attempts(lambda: take(consumer, 1, timeout=5.0))
        assert (again.job.id, again.job.losses) == (held.job.id, 1)
        assert complete(consumer, held) is Settlement.LOST
        assert complete(consumer, again) is Settlement.SETTLED
    finally:
        control("eval", "application:set_env(rabbit, consumer_timeout, 1800000).")
        control("eval", "application:set_env(rabbit, channel_tick_interval, 60000).")


def test_a_broker_that_is_away_for_a_while_changes_nothing_but_time(opened, proxy):
    backend = opened(publish_timeout=1.0)
    consumer = backend.consume({"tasks": 1}, "worker-1")
    backend.push([job(queue="tasks")])
    complete(consumer, take_one(consumer))
    proxy.refuse()
    with pytest.raises(BackendError):
        backend.push([job()])
    eventually(lambda: proxy.turned_away > 5, within=30)
    proxy.restore()

    (job_id,) = attempts(lambda: backend.push([job()]))
    assert job_id in ids(attempts(lambda: take(consumer, 5, timeout=5.0)))
    assert backend.size("tasks", State.DEAD) == 0
