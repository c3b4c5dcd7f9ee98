from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from taskq.cli import COMMANDS, doctor, main, show


def test_help_lists_every_command():
    shown = CliRunner().invoke(main, ["--help"]).output

    for name in COMMANDS:
        assert f"  {name} " in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_takes_an_app(name):
    done = CliRunner().invoke(main, [name, "--help"])

    assert done.exit_code == 0
    assert "-A, --app" in done.output


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("3.40.1", "warn"),
        ("3.44.5", "warn"),
        ("3.44.6", "ok"),
        ("3.45.0", "warn"),
        ("3.50.6", "warn"),
        ("3.50.7", "ok"),
        ("3.51.2", "warn"),
        ("3.51.3", "ok"),
        ("3.52.0", "ok"),
        ("4.0.0", "ok"),
    ],
)
def test_doctor_knows_the_libraries_that_corrupt(version, level):
    assert doctor.library(version).level == level


def test_tables_align():
    @click.command()
    def command():
        show.table(("NAME", "N"), [("a", 5), ("long", 12)])

    assert CliRunner().invoke(command).output == "NAME   N\na      5\nlong  12\n"


def test_an_empty_table_is_its_header():
    @click.command()
    def command():
        show.table(("NAME", "N"), [])

    assert CliRunner().invoke(command).output == "NAME  N\n"


def test_long_errors_are_cut_to_a_line():
    assert show.one_line("a\n  b") == "a b"
    assert show.one_line("x" * 200, 10) == "xxxxxxxxx…"
