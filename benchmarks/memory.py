"""``python -m benchmarks.memory``: the memory of one worker while it runs many jobs. Prints a line per tenth."""

from __future__ import annotations

import argparse
import threading

from benchmarks import tally
from benchmarks.contestants import ALL
from benchmarks.measures import family, pss, push, worker


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--jobs", type=int, default=5_000_000)
    parser.add_argument("--contestant", default=ALL[0].name)
    given = parser.parse_args()
    (contestant,) = (each for each in ALL if each.name == given.contestant)
    with contestant.place() as place, worker(place, 1) as process:
        for tenth in range(1, 11):
            push(place, "many", given.jobs // 10)
            while tally.read(place.tally)[0] < given.jobs // 10 * tenth:
                threading.Event().wait(0.2)
            sizes = ", ".join(f"{pss(pid):.1f}" for pid in family(process.pid))
            print(f"{given.jobs // 10 * tenth:>12,} jobs: {sizes} MiB, by process", flush=True)


if __name__ == "__main__":
    main()
