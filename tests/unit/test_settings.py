from __future__ import annotations

from datetime import timedelta

import pytest

from taskq.errors import ConfigurationError
from taskq.settings import NAMES, Settings, described, load, mask


def refused(arguments=None, environ=None):
    with pytest.raises(ConfigurationError) as caught:
        load(arguments or {}, environ or {})
    return str(caught.value)


def test_nothing_given_is_one_sqlite_file():
    assert load({}, {}) == Settings()
    assert Settings().url == "sqlite:///taskq.db"
    assert Settings().backend == "sqlite"


def test_arguments_win_over_the_environment():
    settings = load({"visibility_timeout": 5}, {"TASKQ_VISIBILITY_TIMEOUT": "9", "TASKQ_QUEUE": "mail"})

    assert (settings.visibility_timeout, settings.queue) == (5.0, "mail")


def test_an_argument_of_none_was_not_given():
    assert load({"queue": None}, {"TASKQ_QUEUE": "mail"}).queue == "mail"


def test_an_empty_variable_was_not_given():
    assert load({}, {"TASKQ_CONCURRENCY": "  "}).concurrency is None


def test_a_timedelta_is_a_duration():
    assert load({"result_ttl": timedelta(minutes=2)}, {}).result_ttl == 120.0


def test_every_name_can_be_set():
    fields = set(Settings.__dataclass_fields__)

    assert fields | {"backend"} == NAMES


def test_an_unknown_variable_is_refused_with_the_nearest():
    message = refused(environ={"TASKQ_VISIBLITY_TIMEOUT": "9"})

    assert "TASKQ_VISIBLITY_TIMEOUT" in message
    assert "did you mean 'TASKQ_VISIBILITY_TIMEOUT'" in message


def test_an_unknown_argument_is_refused_with_the_nearest():
    assert "did you mean 'log_level'" in refused({"loglevel": "info"})


def test_an_unknown_name_like_no_other_is_refused_with_the_list():
    assert "known are" in refused({"zzzz": 1})


@pytest.mark.parametrize(
    "name", ["TASKQ_APP", "TASKQ_TEST_MONGODB_URL", "TASKQ_REQUIRE_SERVERS", "TASKQ_X_MINE", "PATH"]
)
def test_other_names_are_left_alone(name):
    assert load({}, {name: "1"}) == Settings()


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("TASKQ_VISIBILITY_TIMEOUT", "soon", "a number of seconds"),
        ("TASKQ_VISIBILITY_TIMEOUT", "nan", "a number of seconds"),
        ("TASKQ_RESULT_TTL", "-1", "at least 0"),
        ("TASKQ_CONCURRENCY", "0", "from 1 to"),
        ("TASKQ_CONCURRENCY", "2.5", "a whole number"),
        ("TASKQ_POOL", "treads", "process, thread, async, solo (did you mean 'thread'?)"),
        ("TASKQ_LOG_LEVEL", "loud", "debug, info"),
        ("TASKQ_BACKEND", "redis", "sqlite, file, memory, mongodb, rabbitmq, kafka"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_is_allowed(variable, value, allowed):
    message = refused(environ={variable: value})

    assert variable in message
    assert repr(value) in message
    assert allowed in message


def test_a_flag_is_no_number():
    assert "concurrency='True'" in refused({"concurrency": True})


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("file", "sqlite:///taskq.db"),
        ("SQLite ", "sqlite:///taskq.db"),
        ("memory", "memory://"),
        ("mongodb", "mongodb://localhost:27017/taskq"),
        ("rabbitmq", "amqp://localhost:5672/"),
        ("kafka", "kafka://localhost:9092"),
    ],
)
def test_a_backend_alone_picks_its_default_url(kind, url):
    assert load({}, {"TASKQ_BACKEND": kind}).url == url
    assert load({"backend": kind}, {}).url == url


def test_backend_and_url_that_agree_are_fine():
    environ = {"TASKQ_BACKEND": "file", "TASKQ_URL": "sqlite:////var/jobs.db"}

    assert load({}, environ).url == "sqlite:////var/jobs.db"


def test_backend_and_url_that_disagree_are_both_named():
    message = refused(environ={"TASKQ_BACKEND": "kafka", "TASKQ_URL": "amqp://me:secret@h/"})

    assert "TASKQ_BACKEND=kafka" in message
    assert "TASKQ_URL=amqp://me:***@h/" in message


def test_a_url_argument_beats_the_environments_backend():
    assert load({"url": "memory://"}, {"TASKQ_BACKEND": "kafka"}).url == "memory://"


def test_a_backend_argument_takes_the_environments_url_of_that_kind():
    environ = {"TASKQ_URL": "amqp://h:1/"}

    assert load({"backend": "rabbitmq"}, environ).url == "amqp://h:1/"
    assert load({"backend": "memory"}, environ).url == "memory://"


def test_an_unknown_scheme_is_refused_with_the_nearest():
    message = refused({"url": "sqlit:///x.db"})

    assert "did you mean 'sqlite'?" in message
    assert "kafka://" in message


def test_a_path_is_no_url():
    assert "begins with one of" in refused({"url": "jobs.db"})


def test_a_store_stands_beside_a_broker_only():
    assert load({"url": "amqp://h/", "store_url": "mongodb://h/"}, {}).store_url == "mongodb://h/"
    assert "keeps results itself" in refused({"url": "memory://", "store_url": "mongodb://h/"})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://me:secret@host:5672/vh", "amqp://me:***@host:5672/vh"),
        ("mongodb://me:p%40ss@a:1,b:2/db?replicaSet=r", "mongodb://me:***@a:1,b:2/db?replicaSet=r"),
        ("amqp://me:p@ss/wo?rd@host/", "amqp://me:***@host/"),
        ("amqp://:secret@host/", "amqp://:***@host/"),
        ("kafka://h:1?sasl_password=abc&x=1", "kafka://h:1?sasl_password=***&x=1"),
        ("kafka://h:1?x=1&sslPassword=abc", "kafka://h:1?x=1&sslPassword=***"),
        ("sqlite:////srv/me@home/jobs.db", "sqlite:////srv/me@home/jobs.db"),
        ("memory://", "memory://"),
        ("cannot reach amqp://a:b@h/ or amqp://c:d@i/", "cannot reach amqp://a:***@h/ or amqp://c:***@i/"),
    ],
)
def test_passwords_are_masked(url, shown):
    assert mask(url) == shown


def test_described_settings_show_no_password():
    shown = described(load({"url": "amqp://me:secret@h/"}, {}))

    assert shown["url"] == "amqp://me:***@h/"
    assert "secret" not in repr(shown)
