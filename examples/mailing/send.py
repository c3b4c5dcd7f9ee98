"""Stores one job per subscriber, waits for all of them, and writes a report."""

from __future__ import annotations

import argparse
import csv
import pathlib
import time
from collections.abc import Sequence

from app import app, send_email

from taskq import AsyncResult, TaskFailedError

HERE = pathlib.Path(__file__).parent
SUBJECT = "The Gazette, 52nd week — été, Öl, 雪"


def main() -> None:
    """Send to everybody in the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", type=pathlib.Path, default=HERE / "subscribers.csv")
    parser.add_argument("--report", type=pathlib.Path, default=pathlib.Path("report.txt"))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for the workers")
    given = parser.parse_args()

    with given.list.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    began = time.monotonic()
    results = app.enqueue_many(send_email.s(row["name"], row["address"], SUBJECT) for row in rows)
    print(f"stored {len(results)} jobs in {time.monotonic() - began:.2f} s; waiting for a worker", flush=True)

    lines = report(rows, results, began + given.timeout)
    lines.append(f"time    {time.monotonic() - began:.1f} s")
    given.report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def report(rows: Sequence[dict[str, str]], results: Sequence[AsyncResult[str]], deadline: float) -> list[str]:
    """What became of each row; waits until ``deadline`` for those that have not ended."""
    failed: list[str] = []
    retried = 0
    for row, result in zip(rows, results, strict=True):
        try:
            result.get(timeout=max(0.0, deadline - time.monotonic()))
        except TaskFailedError as error:
            failed.append(f"  {row['name']} <{row['address']}>: {error.text or error}")
        retried += bool(result.attempts) and result.successful()
    return [
        f"rows    {len(rows)}",
        f"sent    {len(rows) - len(failed)}",
        f"retried {retried}",
        f"dead    {len(failed)}",
        *failed,
    ]


if __name__ == "__main__":
    main()
