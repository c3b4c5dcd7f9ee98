"""The command line, as a user types it: real processes, a real SQLite file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

APP = """
from taskq import TaskQ

app = TaskQ("sqlite:///jobs.db")

@app.task(queue="sums")
def add(a: int, b: int = 0) -> int:
    return a + b

@app.task(queue="bad", max_retries=0)
def fail(text: str) -> None:
    raise ValueError(text)
"""


class Shell:
    """A directory with an app in it, and ``taskq`` to run there."""

    def __init__(self, path):
        self.path = path
        (path / "app.py").write_text(APP, encoding="utf-8")

    def run(self, *words, environ=None, stdin=""):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TASKQ_")}
        return subprocess.run(
            [sys.executable, "-m", "taskq", *words],
            cwd=self.path,
            env={**clean, **(environ or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def taskq(self, *words, **options):
        """Run a command that must succeed; returns what it printed."""
        done = self.run("-A", "app", *words, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def counts(self, queue):
        return json.loads(self.taskq("size", queue, "--json"))[queue]


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


def test_bench_measures_the_backend_and_leaves_nothing(shell):
    done = shell.run("-A", "app", "bench", "--jobs", "200", "--processes", "1", "--json")

    figures = json.loads(done.stdout)
    assert figures.pop("url") == "sqlite:///jobs.db"
    assert len(figures) == 5
    assert all(figure > 0 for figure in figures.values())
    left = json.loads(shell.run("-A", "app", "size", "--json").stdout)
    assert not any(sum(states.values()) for states in left.values())


def test_a_call_is_stored_and_a_worker_runs_it(shell):
    job_id = shell.taskq("call", "app.add", "[1]", '{"b": 2}').strip()
    assert shell.counts("sums")["pending"] == 1

    shell.taskq("worker", "--burst", "-c", "1")

    assert re.fullmatch(r"[0-9a-f]{32}", job_id)
    assert shell.counts("sums")["completed"] == 1
    assert "completed" in shell.taskq("dead", "show", job_id)


def test_the_worker_introduces_itself(shell):
    done = shell.run("worker", "-A", "app", "--burst", "-c", "1")

    banner = done.stdout + done.stderr
    assert done.returncode == 0
    assert str(shell.path / "jobs.db") in banner
    assert "sums" in banner


def test_call_options(shell):
    shell.taskq("call", "app.add", "[1]", "--countdown", "3600", "--queue", "other", "--priority", "3")

    assert shell.counts("other")["scheduled"] == 1


def test_an_app_before_or_after_the_command_or_from_the_environment(shell):
    before = shell.run("-A", "app", "tasks")
    after = shell.run("tasks", "-A", "app:app")
    environ = shell.run("tasks", environ={"TASKQ_APP": "app.py"})

    assert before.stdout == after.stdout == environ.stdout
    assert re.search(r"app\.add +sums", before.stdout)


def test_the_app_after_the_command_wins(shell):
    assert shell.run("-A", "nonsense", "tasks", "-A", "app").returncode == 0
    assert shell.run("-A", "app", "tasks", environ={"TASKQ_APP": "nonsense"}).returncode == 0


def test_sizes(shell):
    shell.taskq("call", "app.add", "[1]")
    shell.taskq("pause", "sums")

    shown = shell.taskq("size")

    assert re.search(r"QUEUE +SCHEDULED +PENDING", shown)
    assert re.search(r"sums \(paused\) +0 +1", shown)
    shell.taskq("resume", "sums")
    assert "paused" not in shell.taskq("size")


def test_the_size_of_a_queue_that_nobody_used_is_zero(shell):
    assert shell.counts("nobody") == dict.fromkeys(shell.counts("nobody"), 0)


def test_without_an_app_the_settings_say_where_jobs_are(shell):
    shell.taskq("call", "app.add", "[1]")

    done = shell.run("size", "sums", "--json", environ={"TASKQ_URL": "sqlite:///jobs.db"})

    assert json.loads(done.stdout)["sums"]["pending"] == 1


def test_the_life_of_a_dead_job(shell):
    job_id = shell.taskq("call", "app.fail", '["no é"]').strip()
    shell.taskq("worker", "--burst", "-c", "1")

    listed = shell.taskq("dead", "list", "bad")
    shown = shell.taskq("dead", "show", job_id)

    assert re.search(rf"{job_id} +app\.fail .* ValueError: no é", listed)
    assert "raise ValueError(text)" in shown
    assert [job["id"] for job in json.loads(shell.taskq("dead", "list", "bad", "--json"))] == [job_id]

    assert shell.taskq("dead", "revive", "bad", job_id).split() == [job_id]
    assert shell.counts("bad")["pending"] == 1

    shell.taskq("worker", "--burst", "-c", "1")
    assert shell.run("dead", "purge", "bad", "-A", "app", stdin="n\n").returncode == 1
    assert shell.counts("bad")["dead"] == 1
    assert "1 deleted" in shell.taskq("dead", "purge", "bad", "--yes")
    assert shell.counts("bad")["dead"] == 0


def test_reviving_what_is_not_dead_fails(shell):
    done = shell.run("-A", "app", "dead", "revive", "bad", "nothing")

    assert done.returncode == 1
    assert "not dead in bad: nothing" in done.stderr


def test_a_dead_job_whose_unique_key_another_holds_is_not_revived(shell):
    (shell.path / "make.py").write_text(
        "from app import fail\nprint(fail.options(unique='k').delay('boom').id)\n", encoding="utf-8"
    )

    def push():
        return subprocess.run(
            [sys.executable, "make.py"],
            cwd=shell.path,
            check=True,
            timeout=60,
            capture_output=True,
            text=True,
        ).stdout.strip()

    dead = push()
    shell.taskq("worker", "--burst", "--pool", "solo")
    push()
    done = shell.run("-A", "app", "dead", "revive", "bad", dead)

    assert done.returncode == 1
    assert f"still dead, because another job holds its unique key: {dead}" in done.stderr


def test_cancelling(shell):
    job_id = shell.taskq("call", "app.add", "[1]", "--countdown", "3600").strip()

    assert "cancelled" in shell.taskq("cancel", job_id)
    unknown = shell.run("-A", "app", "cancel", "nothing")

    assert unknown.returncode == 1
    assert "nothing is not known" in unknown.stdout


def test_doctor(shell):
    shell.taskq("call", "app.add", "[1]")

    report = shell.taskq("doctor")

    assert str(shell.path / "jobs.db") in report
    assert "schema 1" in report
    assert re.search(r"(ok|warn) +sqlite +3\.", report)
    assert re.search(r"visibility_timeout +300", report)


def test_doctor_says_where_it_cannot_look(shell):
    done = shell.run("doctor", environ={"TASKQ_URL": "sqlite:////nowhere/at/all/jobs.db"})

    assert done.returncode == 1
    assert re.search(r"fail +backend .*/nowhere/at/all/jobs\.db", done.stdout)


# -- what goes wrong is one clear line ------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("wrker",), "did you mean 'worker'?"),
        (("tasks",), "which app?"),
        (("worker", "-A", "app", "--queus", "x"), "--queues"),
        (("worker", "-A", "app", "-Q", "a=b"), "weight of 'a'"),
        (("worker", "-A", "app", "--pool", "treads"), "'thread'"),
        (("worker", "-A", "app", "-c", "0"), "concurrency=0"),
        (("tasks", "-A", "ap"), "there is no module 'ap'"),
        (("tasks", "-A", "app:nope"), "has no 'nope'"),
        (("call", "-A", "app", "app.ad"), "did you mean 'app.add'?"),
        (("call", "-A", "app", "app.add", '{"c": 1}'), "app.add"),
        (("call", "-A", "app", "app.add", "1"), "give an array, [1]"),
        (("call", "-A", "app", "app.add", "{a"), "is not JSON"),
        (("call", "-A", "app", "app.add", "[1]", "[2]"), "one array and one object at most"),
        (("call", "-A", "app", "app.add", "[1]", "--priority", "10"), "0<=x<=9"),
        (("call", "-A", "app", "app.add", "[1]", "--queue", "a b"), "a b"),
    ],
)
def test_misuse(shell, words, told):
    done = shell.run(*words)

    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_a_setting_that_does_not_exist(shell):
    done = shell.run("size", environ={"TASKQ_VISIBLITY_TIMEOUT": "3"})

    assert done.returncode == 2
    assert "TASKQ_VISIBILITY_TIMEOUT" in done.stderr


def test_an_app_that_does_not_import_shows_its_own_traceback(shell):
    (shell.path / "broken.py").write_text("import no_such_dependency\n", encoding="utf-8")

    done = shell.run("worker", "-A", "broken", "--burst")

    assert done.returncode != 0
    assert "broken.py" in done.stderr
    assert "No module named 'no_such_dependency'" in done.stderr


def test_a_memory_app_has_no_worker_elsewhere(shell):
    (shell.path / "mem.py").write_text(APP.replace("sqlite:///jobs.db", "memory://"), encoding="utf-8")

    done = shell.run("worker", "-A", "mem", "--burst")

    assert done.returncode != 0
    assert "memory://" in done.stderr


def test_version(shell):
    assert re.fullmatch(r"taskq, version \d+\.\d+\.\d+\n", shell.run("--version").stdout)


def test_the_life_of_a_schedule(shell):
    (shell.path / "make.py").write_text(
        "from app import add, app\n"
        "app.schedules.create('nightly sum', add.s(1, 2), cron='0 3 * * *', timezone='Asia/Tokyo')\n",
        encoding="utf-8",
    )
    subprocess.run([sys.executable, "make.py"], cwd=shell.path, check=True, timeout=60)

    listed = shell.taskq("schedule", "list")
    assert re.search(
        r"nightly sum +app\.add +At 03:00 every day \(Asia/Tokyo\) +\d{4}-\d\d-\d\d 03:00:00 JST +-", listed
    )
    assert "nightly sum is paused" in shell.taskq("schedule", "pause", "nightly sum")
    shown = json.loads(shell.taskq("schedule", "show", "nightly sum", "--json"))
    assert (shown["paused"], shown["next"], shown["queue"], shown["declared"]) == (True, None, "sums", None)
    assert "nightly sum (paused)" in shell.taskq("schedule", "list")
    assert "goes on; next" in shell.taskq("schedule", "resume", "nightly sum")
    job_id = shell.taskq("schedule", "trigger", "nightly sum").strip()
    assert re.fullmatch("[0-9a-f]{32}", job_id)
    assert shell.counts("sums")["pending"] == 1
    assert "state       active" in shell.taskq("schedule", "show", "nightly sum")
    assert len(json.loads(shell.taskq("schedule", "list", "--json"))) == 1
    shell.taskq("schedule", "remove", "nightly sum")
    assert json.loads(shell.taskq("schedule", "list", "--json")) == []
    gone = shell.run("-A", "app", "schedule", "pause", "nightly")
    assert gone.returncode == 2
    assert "no schedule is named 'nightly'" in gone.stderr
