from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

import pytest
import structlog

from taskq import logs
from taskq.events import Event, Events
from taskq.job import Attempt, Job

JOB = Job(id="j1", queue="mail", task="app.send", payload=b"secret", attempts=2)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def told(level="info", fmt="json"):
    events, stream = Events(), io.StringIO()
    logs.subscribe(events, logs.configure(level, fmt, stream))
    return events, lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_one_fact_is_one_line_with_the_jobs_context():
    events, lines = told()

    events.emit("job.completed", job=JOB, duration=0.25)

    (line,) = lines()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "job.completed",
        "level": "info",
        "job_id": "j1",
        "task": "app.send",
        "queue": "mail",
        "attempt": 3,
        "duration": 0.25,
    }


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("job.completed", "info"),
        ("job.retried", "warning"),
        ("job.dead", "error"),
        ("job.lost", "error"),
        ("worker.started", "info"),
        ("child.died", "error"),
        ("backend.unavailable", "warning"),
        ("something.new", "debug"),
    ],
)
def test_each_fact_has_its_level(name, level):
    events, lines = told("debug")

    events.emit(name)

    assert [line["level"] for line in lines()] == [level]


def test_a_dead_job_is_told_with_error_and_traceback():
    events, lines = told()
    attempt = Attempt(number=3, error_type="ValueError", message="no é", traceback="Traceback …\n  x")

    events.emit("job.dead", job=JOB, attempt=attempt)

    assert lines()[0]["error"] == "ValueError: no é"
    assert lines()[0]["traceback"] == "Traceback …\n  x"


def test_arguments_are_never_told():
    events, lines = told("debug")

    events.emit(
        "job.started", job=JOB, args=("secret",), kwargs={"a": "secret"}, payload=b"secret", body=b"secret"
    )

    assert "secret" not in json.dumps(lines())


def test_below_the_level_nothing_is_told_or_put_together():
    events, lines = told("error")

    assert not events.wanted("job.completed")
    events.emit("job.completed", job=JOB)
    events.emit("job.dead", job=JOB)

    assert [line["event"] for line in lines()] == ["job.dead"]


def test_unsubscribing_ends_the_lines():
    for level in ("info", "error"):
        events, stream = Events(), io.StringIO()
        undo = logs.subscribe(events, logs.configure(level, "json", stream))

        undo()
        events.emit("job.dead", job=JOB)

        assert stream.getvalue() == ""


def test_a_terminal_gets_text_and_a_pipe_gets_json():
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        logs.configure("info", "auto", stream).log("info", "hello", {"a": 1})

    assert "hello" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
    assert json.loads(pipe.getvalue())["event"] == "hello"


def test_the_console_shows_a_traceback_below_its_line():
    stream = io.StringIO()

    logs.configure("info", "console", stream).log("error", "job.dead", {"traceback": "Traceback:\n  boom"})

    assert stream.getvalue().endswith("Traceback:\n  boom\n")


def test_a_bound_job_is_in_the_applications_own_lines():
    with logs.bound(JOB):
        assert structlog.contextvars.get_contextvars()["job_id"] == "j1"
    assert structlog.contextvars.get_contextvars() == {}


def test_the_applications_logging_is_left_alone():
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = list(root.handlers), root.level

    logs.configure("debug", "json", io.StringIO()).log("info", "x", {})

    assert (root.handlers, root.level) == (handlers, level)
    assert structlog.get_config() == before
    assert not structlog.is_configured()


def test_the_module_alone_does_not_load_structlog():
    code = "import sys, taskq.logs; sys.exit('structlog' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fields_of_leaves_out_what_is_unknown():
    assert logs.fields_of(Event("x", {"a": None, "b": ("c",)})) == {"b": "('c',)"}
