"""A short soak with every run of the suite; the long one is ``python -m tests.chaos``."""

from __future__ import annotations

import pathlib
import random

import pytest

from tests.chaos.audit import audit, report
from tests.chaos.soak import Soak


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_ends_twice(tmp_path: pathlib.Path) -> None:
    seed = random.randrange(1 << 30)
    soak = Soak(tmp_path, jobs=6_000, kills=15, seconds=12, seed=seed, workers=2)
    soak.run()
    result = audit(tmp_path, soak.events)
    print(f"seed {seed}", report(result, soak.events), sep="\n")

    assert result.faults == {}
    assert set(soak.events.statuses) == {0}
    assert soak.events.kills == 15
    assert result.confirmed >= 6_000
