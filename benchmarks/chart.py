"""The chart of ``python -m benchmarks``."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt


def draw(table: Mapping[str, Mapping[str, Sequence[float]]], title: str, path: pathlib.Path) -> None:
    """One panel per measure: a bar per contestant, as long as its median, with a line from lowest to highest."""
    names = sorted(
        {name for row in table.values() for name in row}, key=lambda name: (name[:5] != "taskq", name)
    )
    colours = {name: f"C{number % 10}" for number, name in enumerate(names)}
    figure, panels = plt.subplots(
        len(table), 1, figsize=(9, sum(0.55 + 0.28 * len(row) for row in table.values())), squeeze=False,
        gridspec_kw={"height_ratios": [1 + len(row) for row in table.values()]}, layout="constrained",
    )  # fmt: skip
    figure.suptitle(title, fontsize=9)
    for (measure, row), (panel,) in zip(table.items(), panels, strict=True):
        medians = [statistics.median(values) for values in row.values()]
        spread = [
            [median - min(values) for median, values in zip(medians, row.values(), strict=True)],
            [max(values) - median for median, values in zip(medians, row.values(), strict=True)],
        ]
        bars = panel.barh(list(row), medians, xerr=spread, color=[colours[name] for name in row])
        panel.bar_label(bars, [f" {median:,.6g}" for median in medians], fontsize=7)
        panel.set_title(measure, fontsize=9, loc="left")
        panel.tick_params(labelsize=7)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
