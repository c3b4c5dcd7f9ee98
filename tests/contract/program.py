"""Processes for the contract suite, run as ``python -m tests.contract.program COMMAND URL …``."""

from __future__ import annotations

import sys
import threading
from functools import partial

from taskq.job import Outcome, Verdict
from tests.contract.acts import ids, job, jobs
from tests.contract.backends import at


def produce_and_consume(url, name, count):
    """Two threads push ``count`` jobs each, two consume; at the end of input, print what was completed here."""
    backend = at(url)
    done = threading.Event()
    errors = []
    consumers = [backend.consume({"tasks": 1}, f"{name}-{n}") for n in range(2)]
    settled = []
    calls = [partial(_produce, backend, int(count)) for _ in range(2)]
    calls += [partial(_consume, consumer, done, settled) for consumer in consumers]
    threads = [threading.Thread(target=_guarded, args=(call, errors)) for call in calls]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    done.set()
    for consumer in consumers:
        consumer.wake()
    for thread in threads:
        thread.join()
    backend.close()
    for line in settled + errors:
        print(*line)


def _guarded(call, errors):
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test shall show it
        errors.append(("error", repr(error)))


def _produce(backend, count):
    for n in range(0, count, 5):
        batch = jobs(5)
        for part in [batch] if n % 2 else [[one] for one in batch]:
            backend.push(part)


def _consume(consumer, done, settled):
    reservations = []
    while not done.is_set() or reservations:
        outcomes = [Outcome(reservation=r, verdict=Verdict.COMPLETE) for r in reservations]
        settlements, taken = consumer.exchange(outcomes, 16)
        settled.extend((r.job.id, s.name) for r, s in zip(reservations, settlements, strict=True))
        reservations = taken.reservations or consumer.take(16, 1.0).reservations


def push_for_ever(url):
    """Print the id of each job once it is stored."""
    backend = at(url)
    while True:
        batch = jobs(3, keep=0.0)
        backend.push(batch[:1])
        print(batch[0].id, flush=True)
        backend.push(batch[1:])
        print("\n".join(ids(batch[1:])), flush=True)


def work_for_ever(url, worker):
    """Push and complete; print nothing: whoever kills this looks at what is left."""
    backend = at(url)
    consumer = backend.consume({"tasks": 1}, worker)
    print("ready", flush=True)
    reservations = []
    while True:
        backend.push([job(), job(keep=0.0), job(lease=0.0)])
        outcomes = [Outcome(reservation=r, verdict=Verdict.COMPLETE) for r in reservations]
        reservations = consumer.exchange(outcomes, 4)[1].reservations or consumer.take(4).reservations


def hold(url, worker):
    """Take what is there and hold it."""
    backend = at(url)
    consumer = backend.consume({"tasks": 1}, worker)
    print(len(consumer.take(100, 10.0).reservations), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _, command, *arguments = sys.argv
    globals()[command](*arguments)
