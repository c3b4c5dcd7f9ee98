"""``python -m benchmarks.window``: for how long a job that has finished may still run again.

A worker that dies between a job's end and its settle leaves it to be repeated. This prints how long that is, from the return
of the body to the answer of the backend: for no-ops without a break, and for jobs that come alone. In one process with a
thread to run them, so that one clock sees both ends; a child process adds the way through its pipe.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Sequence

from benchmarks.contestants import ALL, Contestant
from taskq import Context, TaskQ
from taskq.events import Event


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.window", description=__doc__)
    parser.add_argument("--contestants", default="taskq", help="only those whose names contain this")
    parser.add_argument("--jobs", type=int, default=10_000)
    given = parser.parse_args()
    for contestant in ALL:
        if contestant.package == "taskq" and given.contestants.lower() in contestant.name.lower():
            why = contestant.missing()
            if why is None:
                measure(contestant, given.jobs)
            else:
                print(f"without {contestant.name}: {why}")


def measure(contestant: Contestant, jobs: int) -> None:
    with contestant.place() as place:
        os.environ.pop("TASKQ_STORE_URL", None)
        os.environ.update(place.environ)
        app = TaskQ()
        ended: dict[str, float] = {}
        windows: list[float] = []

        @app.task(name="noop", ignore_result=True, bind=True)
        def noop(ctx: Context) -> None:
            ended[ctx.id] = time.perf_counter()

        def settled(event: Event) -> None:
            windows.append(time.perf_counter() - ended.pop(event.fields["job"].id))

        app.events.subscribe(settled, "job.completed")
        with app.worker(pool="thread", concurrency=1):
            app.enqueue_many(noop.s() for _ in range(jobs))
            _wait(windows, jobs)
            busy, windows[:] = sorted(windows), []
            for number in range(1, 201):
                noop.delay()
                _wait(windows, number)
            alone = sorted(windows)
        app.close()
    print(f"{contestant.name}: {shown(busy)} without a break; {shown(alone)} alone", flush=True)


def _wait(windows: Sequence[float], count: int) -> None:
    pause = threading.Event()
    while len(windows) < count:
        pause.wait(0.001)


def shown(times: Sequence[float]) -> str:
    p50, p99 = statistics.median(times), times[int(len(times) * 0.99)]
    return f"p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms, longest {times[-1] * 1e3:.2f} ms"


if __name__ == "__main__":
    main()
