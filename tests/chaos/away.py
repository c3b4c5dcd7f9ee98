"""``python -m tests.chaos.away --seconds S``: a backend that refuses while producers go on; how the worker grows."""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import threading
import time

from taskq.job import State
from tests.workers import eventually, set_up


def resident(pid: int) -> int:
    """Resident memory in KiB."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.away", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="taskq-away-") as folder, set_up(pathlib.Path(folder)) as bench:
        refuse = pathlib.Path(folder) / "refuse"
        arguments = ("--concurrency", "2", "--log-level", "warning")
        with bench.working(*arguments, faults={"REFUSE": str(refuse)}) as worker:
            count = bench.app.tasks["count"]
            for _ in range(20):
                bench.app.enqueue_many(count.s(number) for number in range(1_000))
            eventually(lambda: not bench.app.backend.size("tasks"), within=60)
            # Nobody can renew a lease meanwhile: theirs must outlast the refusal.
            lease = 2 * given.seconds + 60
            held = [bench.send("act", ["chatter", given.seconds], visibility_timeout=lease) for _ in range(2)]
            eventually(lambda: all(bench.ledger.starts()[result.id] for result in held))
            refuse.touch()
            sizes, pushed, until = [resident(worker.pid)], 0, time.monotonic() + given.seconds
            while time.monotonic() < until:
                pushed += len(bench.app.enqueue_many(count.s(number) for number in range(100)))
                sizes.append(resident(worker.pid))
                threading.Event().wait(0.1)
            refuse.unlink()
            began = time.monotonic()
            for result in held:
                result.get(60 + given.seconds)
            waits = (State.PENDING, State.RESERVED)
            eventually(
                lambda: not any(bench.app.backend.size("tasks", state) for state in waits),
                within=120 + given.seconds,
            )
            resumed = time.monotonic() - began
            status = worker.stop()
        ended = {state: bench.app.backend.size("tasks", state) for state in State}
    print(
        f"{given.seconds:.0f} s of refusal, {pushed:,} jobs pushed meanwhile: resident {sizes[0]:,} KiB at its"
        f" beginning, at most {max(sizes):,}, {sizes[-1]:,} at its end; all done {resumed:.1f} s after it;"
        f" exit status {status}; left: { {str(state): n for state, n in ended.items() if n} }"
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
