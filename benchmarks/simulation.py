"""``python -m benchmarks.simulation``: how many workers, queues and servers a rate of jobs needs.

A discrete-event model of a worker, fed with the service times that ``python -m benchmarks`` measured. A supervisor
exchanges batches with the store and hands chunks to its children; the store does one exchange at a time per shard; all
of it competes for the cores of its machine. Checked against what was measured: see ``docs/scaling.md``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

#: Jobs of one exchange and of one chunk at the most, as in the worker.
BATCH = 512
CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Service times in microseconds: what one job costs whom."""

    name: str
    call: float  #: one exchange with the store, whatever its size
    store: float  #: the store's own time per job: one exchange after the other, per shard
    supervisor: float  #: of a worker's supervisor, the store's client included, per job
    child: float  #: of a child, per job, besides the body
    embedded: bool = False  #: the store's time is spent in the supervisor's process
    network: float = 0.0  #: a round trip


#: Measured on two cores of the machine that ``docs/scaling.md`` names.
MEASURED = {
    "sqlite": Costs(name="sqlite", call=150, store=9, supervisor=10, child=12, embedded=True),
}


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What runs: ``machines`` of ``cores``, each with ``workers`` of ``children``; the store has its own machines."""

    machines: int = 1
    cores: int = 2
    workers: int = 1
    children: int = 1
    shards: int = 1  #: files, databases or queues that share nothing
    shared: bool = True  #: the store's server runs on the first machine


class Simulation:
    """One run: a backlog of ``jobs`` whose bodies take ``cpu`` and ``wait`` microseconds each."""

    def __init__(self, costs: Costs, fleet: Fleet, jobs: int, *, cpu: float = 0.0, wait: float = 0.0) -> None:
        self._costs, self._fleet = costs, fleet
        self._cpu, self._wait = cpu, wait
        self._env = simpy.Environment()
        self._cores = [simpy.Resource(self._env, fleet.cores) for _ in range(fleet.machines)]
        self._stores = [simpy.Resource(self._env, 1) for _ in range(fleet.shards)]
        self._server = self._cores[0] if fleet.shared else simpy.Resource(self._env, 10**6)
        self._left = [jobs // fleet.shards] * fleet.shards
        self._done = 0

    def rate(self) -> float:
        """Jobs a second, from the first to the last."""
        fleet, number = self._fleet, 0
        for machine in self._cores:
            for _ in range(fleet.workers):
                self._start_worker(machine, number % fleet.shards)
                number += 1
        self._env.run()
        return self._done / self._env.now * 1e6

    def _start_worker(self, machine: simpy.Resource, shard: int) -> None:
        chunks, results = simpy.Store(self._env), simpy.Store(self._env)
        children = self._fleet.children
        for _ in range(children):
            self._env.process(self._child(machine, chunks, results))
        self._env.process(self._supervisor(machine, shard, chunks, results, children))

    def _spend(self, machine: simpy.Resource, time: float) -> Generator[Any, Any, None]:
        with machine.request() as core:
            yield core
            yield self._env.timeout(time)

    def _supervisor(
        self, machine: simpy.Resource, shard: int, chunks: simpy.Store, results: simpy.Store, children: int
    ) -> Generator[Any, Any, None]:
        costs, held, finished = self._costs, 0, 0
        target = 2 * CHUNK * children
        while True:
            while results.items:
                finished += yield results.get()
            taken = min(self._left[shard], max(0, target - held + finished), BATCH)
            self._left[shard] -= taken
            if taken or finished:
                yield from self._exchange(machine, shard, (taken + finished) / 2)
                held += taken - finished
                self._done += finished
                finished = 0
                yield from self._spend(machine, costs.supervisor * taken)
                for size in _chunks(taken, children):
                    chunks.put(size)
            if held == 0 and not self._left[shard]:
                return
            finished += yield results.get()

    def _exchange(self, machine: simpy.Resource, shard: int, jobs: float) -> Generator[Any, Any, None]:
        """``jobs`` are halves of a job's way: it is taken once and settled once."""
        costs = self._costs
        time = costs.call + costs.store * jobs
        with self._stores[shard].request() as turn:
            yield turn
            yield from self._spend(machine if costs.embedded else self._server, time)
        if costs.network:
            yield self._env.timeout(costs.network)

    def _child(
        self, machine: simpy.Resource, chunks: simpy.Store, results: simpy.Store
    ) -> Generator[Any, Any, None]:
        while True:
            size = yield chunks.get()
            yield from self._spend(machine, (self._costs.child + self._cpu) * size)
            if self._wait:
                yield self._env.timeout(self._wait * size)
            results.put(size)


def _chunks(jobs: int, children: int) -> list[int]:
    size = max(1, min(CHUNK, math.ceil(jobs / children)))
    return [min(size, jobs - at) for at in range(0, jobs, size)]


def ceiling(costs: Costs) -> float:
    """What one shard of the store can do at the most, in jobs a second."""
    return 1e6 / (costs.store + costs.call / BATCH)


def needed(costs: Costs, rate: float, *, cpu: float = 0.0) -> dict[str, float]:
    """What ``rate`` jobs a second need, at 70 % of what each part can do."""
    usable = 0.7
    per_job = costs.supervisor + costs.child + cpu + (costs.store if costs.embedded else 0.0)
    shards = math.ceil(rate / (usable * ceiling(costs)))
    supervisors = math.ceil(
        rate * (costs.supervisor + (costs.store if costs.embedded else 0.0)) / 1e6 / usable
    )
    children = math.ceil(rate * (costs.child + cpu) / 1e6 / usable)
    return {
        "shards": shards,
        "supervisors": max(supervisors, shards),
        "children": max(children, 1),
        "cores": math.ceil(rate * per_job / 1e6 / usable)
        + (0 if costs.embedded else math.ceil(rate * costs.store / 1e6 / usable)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--backend", choices=sorted(MEASURED), action="append")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument(
        "--body", type=float, default=0.0, help="processor time of each body, in microseconds"
    )
    given = parser.parse_args()
    for name in given.backend or sorted(MEASURED):
        costs = MEASURED[name]
        print(f"\n{name}: one shard does {ceiling(costs):,.0f} jobs/s at the most")
        print("children of one worker:     " + "".join(f"{n:>11}" for n in (1, 2, 4, 8)))
        for cores in sorted({given.cores, 8, 64}):
            rates = [
                Simulation(costs, Fleet(cores=cores, children=n), 50_000, cpu=given.body).rate()
                for n in (1, 2, 4, 8)
            ]
            print(f"  jobs/s on {cores:>3} cores:       " + "".join(f"{rate:>11,.0f}" for rate in rates))
        print(f"{'for jobs/s':>14}{'shards':>10}{'supervisors':>14}{'children':>12}{'cores':>10}")
        for exponent in range(3, 8):
            row = needed(costs, 10.0**exponent, cpu=given.body)
            print(
                f"{10**exponent:>14,}{row['shards']:>10,}{row['supervisors']:>14,}{row['children']:>12,}{row['cores']:>10,}"
            )


if __name__ == "__main__":
    main()
