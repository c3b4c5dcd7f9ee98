"""``python -m benchmarks.pusher MODULE ACT COUNT``: one contestant's producer; prints seconds or milliseconds."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import threading
import time
from typing import Any

from benchmarks import tally

TEXT = "x" * 100


def one(module: Any, count: int) -> list[float]:
    """One job after the other, from one thread."""
    module.one(0, TEXT)
    began = time.perf_counter()
    for number in range(count - 1):
        module.one(number, TEXT)
    return [time.perf_counter() - began]


def threads(module: Any, count: int) -> list[float]:
    """The same from eight threads."""
    module.one(0, TEXT)
    crew = [
        threading.Thread(target=lambda: [module.one(number, TEXT) for number in range(count // 8)])
        for _ in range(8)
    ]
    began = time.perf_counter()
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return [time.perf_counter() - began]


def _bulk(act: str) -> Any:
    def push(module: Any, count: int) -> list[float]:
        began = time.perf_counter()
        getattr(module, act)(count, TEXT)
        return [time.perf_counter() - began]

    return push


def late(module: Any, count: int) -> list[float]:
    """From a call to the body of its job, in milliseconds, while the worker has nothing else to do."""
    path, pause = pathlib.Path(os.environ[tally.FILE]), threading.Event()
    waits = []
    for number in range(count):
        before, _ = tally.read(path)
        module.late(time.time_ns())
        while tally.read(path)[0] == before:
            pause.wait(0.0005)
        if number >= count // 10:
            waits.append(tally.read(path)[1] / 1e6)
        pause.wait(0.02)
    return waits


def answer(module: Any, count: int) -> list[float]:
    """From a call to its result, in milliseconds."""
    times = []
    for number in range(count):
        began = time.perf_counter()
        module.answer(number)
        if number >= count // 10:
            times.append((time.perf_counter() - began) * 1e3)
    return times


ACTS = {
    "one": one,
    "threads": threads,
    "late": late,
    "answer": answer,
    **{name: _bulk(name) for name in ("many", "many_kept", "many_async")},
}


def main() -> None:
    name, act, count = sys.argv[1:]
    module = importlib.import_module(name)
    needed = "one" if act == "threads" else act
    figures = ACTS[act](module, int(count)) if hasattr(module, needed) else []
    print("FIGURES", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
    # A peer's threads are nobody's business here.
    os._exit(0)
