"""What is true after a soak: the store, the ledger of the bodies and the database's own witness, held together."""

from __future__ import annotations

import itertools
import pathlib
import sqlite3
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.chaos.soak import Events

_COMPLETED = 5


class Start(NamedTuple):
    """A body that began."""

    at: float
    attempt: int
    pid: int
    worker: int


@dataclass
class Audit:
    """The figures, and what is wrong with them."""

    confirmed: int = 0
    stored: int = 0
    states: Counter[int] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)  #: confirmed, and not stored
    unended: list[str] = field(default_factory=list)
    ended_twice: list[str] = field(default_factory=list)
    starts: int = 0
    counted: Counter[str] = field(default_factory=Counter)  #: attempts that ended badly, by their error
    repeated: int = 0  #: starts of an attempt that had started before: a crash undid or hid the first
    unexplained: list[str] = field(default_factory=list)  #: such starts without a crash that explains them
    miscounted: list[str] = field(default_factory=list)
    integrity: str = ""

    @property
    def faults(self) -> dict[str, object]:
        """What must be empty."""
        found = {
            "lost": self.lost,
            "not ended": self.unended,
            "ended twice": self.ended_twice,
            "started again without a crash": self.unexplained,
            "miscounted": self.miscounted,
            "not completed": [] if set(self.states) <= {_COMPLETED} else self.states,
            "integrity": [] if self.integrity == "ok" else self.integrity,
        }
        return {name: value for name, value in found.items() if value}


def audit(folder: pathlib.Path, events: Events) -> Audit:
    """Look at everything that the soak in ``folder`` left."""
    result = Audit()
    confirmed = (folder / "confirmed").read_text(encoding="ascii").split()
    db = sqlite3.connect(folder / "jobs.db")
    try:
        result.integrity = db.execute("PRAGMA integrity_check").fetchone()[0]
        rows = db.execute("SELECT id, state, attempts, deliveries, tries, seq FROM job").fetchall()
        errors: dict[int, list[str]] = defaultdict(list)
        for seq, error in db.execute("SELECT seq, error_type FROM attempt ORDER BY seq, n"):
            errors[seq].append(error)
        ends = Counter(job_id for (job_id,) in db.execute("SELECT id FROM soak_end"))
    finally:
        db.close()
    starts = read_ledger(folder / "ledger")
    stored = {row[0] for row in rows}
    result.confirmed, result.stored = len(confirmed), len(stored)
    result.lost = [job_id for job_id in confirmed if job_id not in stored]
    result.states = Counter(row[1] for row in rows)
    result.unended = [row[0] for row in rows if not ends[row[0]]]
    result.ended_twice = [job_id for job_id, n in ends.items() if n > 1]
    for job_id, _, attempts, deliveries, tries, seq in rows:
        bad_ends = errors[seq]
        result.counted.update(bad_ends)
        runs = starts[job_id]
        if not (attempts == tries == len(bad_ends) and 1 <= len(runs) <= deliveries and len(runs) > 0):
            result.miscounted.append(
                f"{job_id}: {attempts=} {tries=} {deliveries=} {len(runs)} starts {bad_ends}"
            )
        _compare(job_id, runs, events, result)
    return result


def _compare(job_id: str, runs: list[Start], events: Events, result: Audit) -> None:
    result.starts += len(runs)
    for run, again in itertools.pairwise(runs):
        if again.attempt == run.attempt:
            result.repeated += 1
            if not {run.pid, run.worker} & events.victims:
                result.unexplained.append(f"{job_id}: {run} and {again}")


def read_ledger(path: pathlib.Path) -> dict[str, list[Start]]:
    """Every start, in order, by job."""
    starts: dict[str, list[Start]] = defaultdict(list)
    with path.open(encoding="ascii") as lines:
        for line in lines:
            job_id, attempt, pid, worker, at = line.split()
            starts[job_id].append(Start(float(at), int(attempt), int(pid), int(worker)))
    for runs in starts.values():
        runs.sort()
    return starts


def report(result: Audit, events: Events) -> str:
    """The figures, for people."""
    actions = ", ".join(f"{n} x {action}" for action, n in events.actions.most_common())
    statuses = ", ".join(f"{n} x {status}" for status, n in sorted(events.statuses.items()))
    counted = ", ".join(f"{n} {error}" for error, n in result.counted.most_common()) or "none"
    lines = [
        f"{result.confirmed:,} jobs confirmed, {result.stored:,} stored, in {events.seconds:.0f} s",
        f"{events.kills} kills among: {actions}",
        f"exit statuses of workers that were asked to end: {statuses}",
        f"{len(result.lost)} lost, {len(result.unended)} not ended, {len(result.ended_twice)} ended twice",
        (
            f"{result.starts:,} starts: {counted} counted, {result.repeated:,} repeated because of a crash, "
            f"{len(result.unexplained)} without one"
        ),
        f"{len(result.miscounted)} miscounted; integrity_check: {result.integrity}",
    ]
    for name, value in result.faults.items():
        lines.append(f"FAULT {name}: {str(value)[:2000]}")
    return "\n".join(lines)
