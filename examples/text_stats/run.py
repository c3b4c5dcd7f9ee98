"""Stores a job per text, waits for a worker to do them all, and prints a table."""

from __future__ import annotations

import argparse
import pathlib

from app import Stats, app, measure

HERE = pathlib.Path(__file__).parent


def main() -> None:
    """Measure the files named, or the texts beside this program and the pages of taskq's own documents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for the workers")
    given = parser.parse_args()
    files = given.files or sorted([*HERE.glob("texts/*.txt"), *HERE.glob("../../docs/*.md")])

    results = app.enqueue_many(measure.s(str(file.resolve())) for file in files)
    print(f"stored {len(results)} jobs; waiting for a worker", flush=True)
    print(f"{'text':<24}{'words':>8}{'distinct':>10}{'sentence':>10}{'entropy':>9}{'richness':>10}  common")
    for result in results:
        print(line(result.get(timeout=given.timeout)), flush=True)


def line(stats: Stats) -> str:
    """One row of the table."""
    common = ", ".join(f"{word} {count}" for word, count in stats.common)
    return (
        f"{stats.name:<24}{stats.words:>8,}{stats.distinct:>10,}{stats.mean_sentence:>10.1f}"
        f"{stats.entropy:>9.2f}{stats.richness:>10.1f}  {common}"
    )


if __name__ == "__main__":
    main()
