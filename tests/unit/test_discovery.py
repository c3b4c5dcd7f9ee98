from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

APP = "from taskq import TaskQ\napp = TaskQ('memory://')\n"
FIND = """
import sys
from taskq.discovery import find_app
from taskq.errors import AppNotFoundError
try:
    app = find_app(sys.argv[1])
except AppNotFoundError as error:
    sys.exit(str(error))
print(app.name, *sorted(app.tasks))
"""


@pytest.fixture
def project(tmp_path):
    """Write files, then find an app from there, in a process of its own as the command line does."""

    class Project:
        path = tmp_path

        def write(self, **files):
            for name, text in files.items():
                path = tmp_path / (name.replace("__", "/") + ".py")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(textwrap.dedent(text), encoding="utf-8")
            return self

        def find(self, spec, cwd=""):
            return subprocess.run(
                [sys.executable, "-P", "-c", FIND, spec],
                cwd=tmp_path / cwd,
                capture_output=True,
                text=True,
                check=False,
            )

        def found(self, spec, cwd=""):
            done = self.find(spec, cwd)
            assert done.returncode == 0, done.stderr
            return done.stdout.split()

        def failure(self, spec, cwd=""):
            done = self.find(spec, cwd)
            assert done.returncode == 1, done.stdout
            return done.stderr

    return Project()


@pytest.mark.parametrize("spec", ["app", "app:app", "app.py", "app.py:app", "./app.py", "sub/../app.py"])
def test_a_module_in_the_current_directory(project, spec):
    project.write(app=APP + "@app.task\ndef add(a: int) -> int: return a\n")
    (project.path / "sub").mkdir()

    assert project.found(spec) == ["memory://", "app.add"]


@pytest.mark.parametrize("spec", ["pkg.jobs", "pkg.jobs:app", "pkg/jobs.py", "pkg.jobs:holder.app"])
def test_a_module_in_a_package(project, spec):
    project.write(pkg__jobs=APP + "class holder: app = app\n@app.task\ndef add(): pass\n")

    assert project.found(spec) == ["memory://", "pkg.jobs.add"]


def test_a_package_by_name_or_folder(project):
    (project.path / "pkg").mkdir()
    (project.path / "pkg/__init__.py").write_text(APP + "@app.task\ndef add(): pass\n")

    assert project.found("pkg") == project.found("./pkg") == project.found("pkg/__init__.py")
    assert project.found("pkg") == ["memory://", "pkg.add"]


def test_a_file_elsewhere_is_known_by_its_name(project):
    project.write(other__jobs=APP + "@app.task\ndef add(): pass\n")
    (project.path / "here").mkdir()

    assert project.found("../other/jobs.py", cwd="here") == ["memory://", "jobs.add"]


def test_a_script_and_the_same_file_by_name_agree_on_names(project):
    project.write(jobs=APP + "@app.task\ndef add(): pass\nif __name__ == '__main__': print(*app.tasks)\n")
    script = subprocess.run(
        [sys.executable, "jobs.py"],
        cwd=project.path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert script.stdout.split() == project.found("jobs")[1:] == project.found("jobs.py")[1:]


def test_shared_tasks_alone_get_the_default_app(project):
    project.write(jobs="from taskq import task\n@task\ndef add(): pass\n")

    assert project.found("jobs") == ["default", "jobs.add"]


def test_one_app_with_two_names_is_one_app(project):
    project.write(app=APP + "queue = app\n")

    assert project.found("app") == ["memory://"]


# -- failures, each of which says what it was -----------------------------------------


def test_no_module(project):
    project.write(mailing=APP)

    message = project.failure("mailign")

    assert "there is no module 'mailign'" in message
    assert "did you mean 'mailing'?" in message
    assert "Traceback" not in message


def test_no_module_in_a_package(project):
    project.write(pkg__jobs=APP)

    message = project.failure("pkg.job")

    assert "there is no module 'pkg.job' in the package 'pkg'" in message
    assert "'jobs'" in message


def test_no_package(project):
    assert "there is no module 'nope'" in project.failure("nope.jobs")


def test_no_file(project):
    project.write(app=APP)

    message = project.failure("ap.py")

    assert "there is no file" in message
    assert "did you mean 'app.py'?" in message


def test_a_name_that_python_cannot_import(project):
    project.write(**{"my-app": APP})

    assert "no Python name" in project.failure("my-app.py")


def test_an_empty_name(project):
    assert "names no app" in project.failure(":app")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("import no_such_dependency", "No module named 'no_such_dependency'"),
        ("from os import nothing_like_it", "cannot import name 'nothing_like_it'"),
        ("x = 1 / 0", "ZeroDivisionError"),
        ("def f(:\n", "SyntaxError"),
        ("import other", "other.py"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import app.deeper", "No module named 'app.deeper'"),
        ("from taskq import TaskQ\nTaskQ(urrl='x')", "urrl"),
    ],
)
def test_an_import_that_fails_shows_the_users_own_traceback(project, body, told):
    project.write(app=f"# first\n{body}\n", other="import app, missing_thing\n")

    message = project.failure("app")

    assert "importing 'app' failed" in message
    assert told in message
    frames = [line for line in message.splitlines() if line.strip().startswith('File "')]
    assert str(project.path) in frames[-1]
    assert "importlib" not in message
    assert "discovery.py" not in message


def test_no_app_in_a_module(project):
    project.write(app="x = 1\n")

    message = project.failure("app")

    assert "'app' has no TaskQ and declares no task" in message
    assert "app = TaskQ()" in message


def test_no_app_in_a_package_names_its_modules(project):
    project.write(pkg__jobs=APP, pkg__models="")
    (project.path / "pkg/__init__.py").write_text("")

    assert "modules inside it are pkg.jobs, pkg.models" in project.failure("pkg")


def test_several_apps(project):
    project.write(app=APP + "second = TaskQ('memory://')\n")

    assert "has several apps; name one of app:app, app:second" in project.failure("app")
    assert project.found("app:second") == ["memory://"]


def test_no_such_name_in_a_module(project):
    project.write(app=APP)

    assert "'app' has no 'queue'; its apps are app:app" in project.failure("app:queue")


def test_a_name_of_the_wrong_type(project):
    project.write(app=APP + "def make(): return app\n")

    assert "'make' is a function, not a TaskQ; its apps are app:app" in project.failure("app:make")
