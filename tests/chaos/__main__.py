"""``python -m tests.chaos --jobs N --kills K --seconds S``: a soak, and what is true afterwards."""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import tempfile

from tests.chaos.audit import audit, report
from tests.chaos.soak import Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=200.0, help="over which the kills are spread")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--folder", type=pathlib.Path, help="where to leave everything; default: nowhere")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="taskq-chaos-") as temporary:
        folder = given.folder or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(
            folder,
            jobs=given.jobs,
            kills=given.kills,
            seconds=given.seconds,
            seed=given.seed,
            workers=given.workers,
        )
        soak.run()
        result = audit(folder, soak.events)
    print(report(result, soak.events))
    return 1 if result.faults or set(soak.events.statuses) - {0} else 0


if __name__ == "__main__":
    sys.exit(main())
