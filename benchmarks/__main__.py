"""``python -m benchmarks``: taskq on every backend, and its peers, side by side. Prints a table; asserts nothing.

Each figure is the median of ``--rounds`` rounds, with the lowest and the highest; rounds go through all contestants in
turn, so that a machine that is busy for a while is so for everybody. Servers are those of ``python -m tests.servers up``;
peers those that are installed (``pip install '.[peers]'``). Differences below half as much again are noise.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import sqlite3
import statistics
import sys

from benchmarks.contestants import ALL, Contestant
from benchmarks.measures import MEASURES

#: Figures by measure and contestant, in the order in which they came.
Table = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--measures", default="", help="only those whose names contain this")
    parser.add_argument(
        "--contestants", default="", help="only those whose names contain one of these, by commas"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write every figure here")
    parser.add_argument("--chart", type=pathlib.Path, help="draw the medians here (needs matplotlib)")
    given = parser.parse_args()
    table = measured(chosen(given.contestants), given.measures, given.rounds, given.jobs)
    show(table)
    if given.json:
        given.json.write_text(
            json.dumps({"machine": machine(), "figures": table}, indent=1), encoding="utf-8"
        )
    if given.chart:
        from benchmarks.chart import draw

        draw(table, machine(), given.chart)


def chosen(names: str) -> list[Contestant]:
    """Those that are named and can be measured here; says why others cannot."""
    found = []
    for contestant in ALL:
        if any(name.strip().lower() in contestant.name.lower() for name in names.split(",")):
            why = contestant.missing()
            if why is None:
                found.append(contestant)
            else:
                print(f"without {contestant.name}: {why}", file=sys.stderr)
    return found


def measured(contestants: list[Contestant], names: str, rounds: int, jobs: int) -> Table:
    """All figures of all rounds."""
    table: Table = {}
    for number in range(1, rounds + 1):
        for name, measure in MEASURES.items():
            if names not in name:
                continue
            for contestant in contestants:
                try:
                    with contestant.place() as place:
                        figures = measure(place, jobs)
                except Exception as error:  # noqa: BLE001 - the others are measured all the same
                    print(f"{contestant.name}, {name}: {error}", file=sys.stderr)
                    continue
                for suffix, figure in figures.items():
                    table.setdefault(f"{name}{suffix}", {}).setdefault(contestant.name, []).append(figure)
                    print(
                        f"  round {number}: {contestant.name}, {name}{suffix}: {figure:,.2f}", file=sys.stderr
                    )
    return table


def machine() -> str:
    return f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {os.cpu_count()} processors"


def show(table: Table) -> None:
    """Medians, ranges, and how the first contestant compares with each."""
    print(machine())
    for name, row in table.items():
        print(f"\n{name}")
        base = statistics.median(next(iter(row.values())))
        for contestant, values in row.items():
            median = statistics.median(values)
            ratio = f"{median / base:>8.2f} x" if base else ""
            print(
                f"  {contestant:34}{median:>14,.2f}{ratio:>12}    ({min(values):,.2f} to {max(values):,.2f})"
            )


if __name__ == "__main__":
    main()
