"""Declarations and calls: what works, and what fails where it is given, with advice."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

import taskq
from taskq import CONTEXT, ConfigurationError, Context, Retry, TaskQ
from taskq.errors import EncodeError, InvalidArgumentError, TaskNotFoundError
from taskq.job import Job
from taskq.testing import isolated

app = TaskQ("memory://", name="tests")


@app.task
def add(a: int, b: int = 1, *, c: int = 0) -> int:
    """Add numbers."""
    return a + b + c


@app.task(bind=True)
def bound(ctx: Context, a: int) -> tuple[str, int]:
    return ctx.task, a


@app.task
def injected(a: int, ctx: Context = CONTEXT) -> tuple[int, int]:
    return a, ctx.attempt


def pushed(**options: Any) -> Job:
    with isolated(app) as bench:
        add.apply_async((1,), **options)
        return bench.pushed[0]


def test_a_task_is_still_its_function() -> None:
    assert add(1, 2, c=3) == 6
    assert add.__doc__ == "Add numbers."
    assert add.name == f"{__name__}.add"
    assert injected(5) == (5, 1)
    assert bound(7) == ("", 7)


@pytest.mark.parametrize("args", [(), (1, 2, 3)])
def test_wrong_arguments_are_refused_by_the_call(args: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=r"add\(a: 'int', b: 'int' = 1"):
        add.delay(*args)


def test_an_unknown_keyword_is_refused_by_the_call() -> None:
    with pytest.raises(TypeError, match="colour"):
        add.delay(1, colour="red")  # type: ignore[call-arg]


def test_the_context_is_not_an_argument() -> None:
    with isolated(app) as bench:
        results = [bound.delay(7), injected.delay(5)]
        bench.drain()
        assert [result.get(0) for result in results] == [(bound.name, 7), (5, 1)]


def test_values_that_cannot_travel_are_named_by_their_path() -> None:
    with isolated(app), pytest.raises(EncodeError, match=r"args\[0\]\['x'\]\[1\]"):
        add.delay({"x": [1, object()]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"queue": "has space"}, "queue name 'has space'"),
        ({"queue": ""}, "queue name ''"),
        ({"priority": 10}, "priority 10"),
        ({"priority": -1}, "priority -1"),
        ({"priority": True}, "priority True"),
        ({"countdown": -1}, "countdown=-1"),
        ({"countdown": float("nan")}, "countdown=nan"),
        ({"countdown": "soon"}, "countdown='soon'"),
        ({"countdown": 1e10}, "countdown"),
        ({"eta": datetime(2030, 1, 1)}, "no time zone"),  # noqa: DTZ001
        ({"eta": datetime(2030, 1, 1, tzinfo=UTC), "countdown": 1}, "contradict"),
        ({"expires": datetime(2030, 1, 1)}, "no time zone"),  # noqa: DTZ001
        ({"expires": -5}, "expires=-5"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"max_retries": 1.5}, "max_retries=1.5"),
        ({"max_retries": 10**9}, "max_retries="),
        ({"headers": {1: 2}}, "headers="),
        ({"headers": {"x": object()}}, "headers="),
        ({"job_id": ""}, "job_id=''"),
        ({"prioritiy": 3}, "did you mean 'priority'"),
        ({"nonsense": 3}, "known: countdown"),
    ],
)
def test_bad_options_of_a_call_are_named(options: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        add.options(**options)

    assert names in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"queue": "a b"}, "queue name 'a b'"),
        ({"soft_time_limit": 2, "time_limit": 1}, "soft_time_limit=2 must be less than time_limit=1"),
        ({"soft_time_limit": 2, "time_limit": 2}, "soft_time_limit=2 must be less than time_limit=2"),
        ({"time_limit": 0}, "time_limit=0"),
        ({"max_retries": -1}, "max_retries"),
        ({"max_retires": 3}, "did you mean 'max_retries'"),
        ({"visibility_timeout": "long"}, "visibility_timeout='long'"),
        ({"on_failure": 3}, "on_failure=3"),
        ({"name": ""}, "name=''"),
        ({"retry": 3}, "retry"),
        ({"retry": Retry(max_retries=1), "max_retries": 2}, "max_retries"),
    ],
)
def test_bad_options_of_a_declaration_are_named(options: dict[str, Any], names: str) -> None:
    fresh = TaskQ("memory://")
    with pytest.raises(ConfigurationError) as caught:
        fresh.task(**options)(add.fn)

    assert names in str(caught.value)


def test_options_of_a_call_reach_the_job() -> None:
    eta = datetime(2040, 5, 1, 12, tzinfo=timezone(timedelta(hours=5)))
    job = pushed(queue="mail", priority=7, eta=eta, headers={"trace": "x"}, max_retries=None, result_ttl=5)

    assert (job.queue, job.priority, job.due) == ("mail", 7, eta.timestamp())
    assert (dict(job.headers), job.max_retries, job.keep) == ({"trace": "x"}, None, 5.0)


def test_defaults_of_a_job() -> None:
    job = pushed()

    assert (job.queue, job.priority, job.max_retries, job.lease, job.keep) == ("tasks", 0, 3, 300.0, 3600.0)


def test_the_same_job_id_is_stored_once() -> None:
    with isolated(app) as bench:
        first = add.options(job_id="order-7").delay(1)
        again = add.options(job_id="order-7").delay(2)
        assert bench.backend.size("tasks") == 1
        assert first.id == again.id == "order-7"


def test_what_no_worker_could_find_is_refused_with_advice() -> None:
    fresh = TaskQ("memory://")

    def nested() -> None: ...

    with pytest.raises(ConfigurationError, match=r"move it to module level, or give name="):
        fresh.task(nested)
    with pytest.raises(ConfigurationError, match="lambda"):
        fresh.task(lambda: None)
    with pytest.raises(ConfigurationError, match="decorate a function"):
        fresh.task(print.__class__)
    with pytest.raises(ConfigurationError, match="generator"):
        fresh.task(name="g")(_generates)
    assert fresh.task(name="nested")(nested).name == "nested"


def _generates() -> Any:
    yield 1


def test_a_method_is_refused() -> None:
    fresh = TaskQ("memory://")
    with pytest.raises((ConfigurationError, RuntimeError)) as caught:

        class Mailer:
            @fresh.task(name="send")
            def send(self) -> None: ...

    assert "a method cannot be a task" in f"{caught.value}{caught.value.__cause__}"


def test_a_context_without_default_needs_bind() -> None:
    fresh = TaskQ("memory://")

    def wants(ctx: Context, a: int) -> None: ...

    with pytest.raises(ConfigurationError, match=r"bind=True, or write `ctx: Context = CONTEXT`"):
        fresh.task(name="wants")(wants)


def test_two_tasks_of_one_name_are_refused() -> None:
    fresh = TaskQ("memory://")
    fresh.task(name="same")(add.fn)
    fresh.task(name="same")(add.fn)  # the same function: a module imported twice

    with pytest.raises(ConfigurationError, match="two tasks are named 'same'"):
        fresh.task(name="same")(injected.fn)


def test_an_unknown_task_is_named_with_the_nearest() -> None:
    with pytest.raises(TaskNotFoundError, match=r"did you mean '.*add'"):
        app.send(f"{__name__}.ad")


def test_a_shared_task_joins_the_current_app() -> None:
    one, two = TaskQ("memory://", name="one"), TaskQ("memory://", name="two")
    shared = taskq.task(name="shared-by-all")(add.fn)
    with one:
        shared.delay(1)
        assert one.backend.size("tasks") == 1
    with two:
        assert two.backend.size("tasks") == 0
    with pytest.raises(ConfigurationError, match=r"several apps exist \(.*one.*two.*\)"):
        shared.delay(1)


SCRIPT = """
from taskq import TaskQ
app = TaskQ("memory://")
@app.task
def send(): ...
print(send.name)
"""


@pytest.mark.parametrize("arguments", [["mail.py"], ["-m", "mail"], ["-c", "import mail"]])
def test_a_script_and_a_module_give_a_task_one_name(tmp_path: Any, arguments: list[str]) -> None:
    (tmp_path / "mail.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")

    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert done.stdout == "mail.send\n"
