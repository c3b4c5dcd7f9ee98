"""The examples, run as a user runs them: copied somewhere, started from a shell."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("TASKQ_")}


@pytest.fixture
def here(request, tmp_path):
    """A copy of the example, in a directory of its own."""
    return shutil.copytree(EXAMPLES / request.param, tmp_path / request.param)


def run(here, *words, timeout=180):
    done = subprocess.run(
        [sys.executable, *words],
        cwd=here,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def started(here, *words):
    """A program that has said its first line, and is waited for at the end."""
    process = subprocess.Popen(
        [sys.executable, *words], cwd=here, env=ENVIRON, text=True, stdout=subprocess.PIPE
    )
    try:
        yield process.stdout.readline(), process
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("here", ["mailing"], indirect=True)
def test_mailing(here):
    """300 rows: 290 good ones arrive once each, 10 bad ones are dead letters with a reason."""
    run(here, "demo.py")

    report = (here / "report.txt").read_text(encoding="utf-8")
    mail = [json.loads(line) for line in (here / "mailbox.jsonl").read_text(encoding="utf-8").splitlines()]
    assert re.findall(r"^(rows|sent|dead) +(\d+)$", report, re.MULTILINE) == [
        ("rows", "300"),
        ("sent", "290"),
        ("dead", "10"),
    ]
    assert int(re.search(r"^retried +(\d+)$", report, re.MULTILINE)[1]) >= 20
    assert len(mail) == len({line["id"] for line in mail}) == 290
    assert "nina.berg.example.com" in report
    assert "550 5.1.2 no such domain" in report
    assert any("é" in line["name"] for line in mail)


@pytest.mark.slow
@pytest.mark.parametrize("here", ["mailing"], indirect=True)
def test_dead_letters_of_the_mailing_can_be_looked_at(here):
    run(here, "demo.py")

    dead = json.loads(run(here, "-m", "taskq", "-A", "app", "dead", "list", "mail", "--json"))

    assert len(dead) == 10
    assert any("not an address" in job["error"] for job in dead)


@pytest.mark.slow
@pytest.mark.parametrize("here", ["text_stats"], indirect=True)
def test_text_stats(here):
    with started(here, "run.py") as (first, process):
        assert first == "stored 4 jobs; waiting for a worker\n"
        run(here, "-m", "taskq", "worker", "-A", "app", "--burst", "-c", "2")
        table = process.stdout.read()
        process.wait(timeout=60)

    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()[1:]}
    assert set(rows) == {"bread.txt", "ferry.txt", "jardin.txt", "muehle.txt"}
    assert int(rows["ferry.txt"][0].replace(",", "")) > 250
    assert process.returncode == 0
