"""What has become of the offsets of one partition, as text for the metadata of a commit.

All offsets below the committed one are finished. Beyond it, the text says run by run what the next offsets are:
``l3d12ol`` is three that are lent, twelve finished, one that waits, one that is lent. What follows waits.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

#: The most characters that a broker keeps (``offset.metadata.max.bytes``, by default).
MOST: Final = 4096
_VERSION: Final = "1:"
_RUN: Final = re.compile(r"([olds])(\d*)")


class Mark(enum.StrEnum):
    """What a reader of the marks must know of an offset."""

    OPEN = "o"  #: waits
    LENT = "l"  #: a worker has it
    STARTED = "s"  #: a worker has it, and has said that it runs
    DONE = "d"


class Marks(NamedTuple):
    """What one commit says."""

    base: int  #: everything below is finished
    text: str


def write(reached: int, unfinished: Iterable[tuple[int, Mark]]) -> Marks:
    """The marks of a partition that was read up to ``reached``, by its unfinished offsets in order.

    Where the text would be too long it is cut: what it no longer tells counts as waiting.
    """
    runs: list[tuple[Mark, int]] = []
    base = at = -1
    for offset, mark in unfinished:
        if base < 0:
            base = at = offset
        if offset > at:
            runs.append((Mark.DONE, offset - at))
        if runs and runs[-1][0] is mark:
            runs[-1] = (mark, runs[-1][1] + 1)
        else:
            runs.append((mark, 1))
        at = offset + 1
    if base < 0:
        return Marks(reached, "")
    if reached > at:
        runs.append((Mark.DONE, reached - at))
    while runs and runs[-1][0] is Mark.OPEN:
        runs.pop()
    text = _VERSION + "".join(f"{mark.value}{n if n > 1 else ''}" for mark, n in runs) if runs else ""
    return Marks(base, text if len(text) <= MOST else _cut(text))


def read(base: int, text: str | None) -> dict[int, Mark]:
    """What is known of the offsets from ``base`` on; those that are not named wait."""
    marks: dict[int, Mark] = {}
    at = base
    for mark, n in _runs(text):
        if mark is not Mark.OPEN:
            marks.update(dict.fromkeys(range(at, at + n), mark))
        at += n
    return marks


def tally(text: str | None) -> dict[Mark, int]:
    """How many offsets bear each mark."""
    counts = dict.fromkeys(Mark, 0)
    for mark, n in _runs(text):
        counts[mark] += n
    return counts


def _runs(text: str | None) -> Iterator[tuple[Mark, int]]:
    if text and text.startswith(_VERSION):
        for mark, n in _RUN.findall(text, len(_VERSION)):
            yield Mark(mark), int(n or 1)


def _cut(text: str) -> str:
    """As many whole runs as fit."""
    return text[: max(match.start() for match in _RUN.finditer(text, len(_VERSION)) if match.start() <= MOST)]
