"""The app of the test of schedules: one task, every second."""

from __future__ import annotations

from taskq import TaskQ
from taskq.schedule import run_all

app = TaskQ()


@app.task(name="tick", every=1, misfire=run_all(1000), visibility_timeout=2)
def tick() -> None:
    """Nothing: that it was stored is what counts."""
