"""The partitions of one member, and the jobs in them that have not ended."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Any, Final

from taskq.backends.kafka import marks
from taskq.backends.kafka.marks import Mark, Marks
from taskq.backends.kafka.topics import Slot
from taskq.job import Job

#: Jobs of one partition that may be lent at once; more wait for these.
MOST_LENT: Final = 2000
#: Where the marks are longer than this, nothing more is lent before they are shorter. What is lent by then fits still.
_CROWDED: Final = 2000
#: Messages of one partition that are held before reading pauses, and how few are left when it goes on.
FULL: Final = 4000
LOW: Final = 1000


class Held:
    """A message that was read and has not ended."""

    __slots__ = ("job", "mark", "offset", "part", "rank", "session", "settling", "started", "token")

    def __init__(self, part: Part, offset: int, job: Job, stamp: int) -> None:
        self.part = part
        self.offset = offset
        self.job = job
        self.rank = (-job.priority, stamp, offset)  #: the smallest is lent first
        self.mark = Mark.OPEN
        self.token = 0
        self.session: Any = None  #: who has it
        self.started: float | None = None
        self.settling = False  #: its end is being written

    def __lt__(self, other: Held) -> bool:
        return self.rank < other.rank


class Part:
    """One partition that is assigned to this member."""

    def __init__(self, slot: Slot, queue: str, band: int, hop: float | None, base: int, text: str) -> None:
        self.slot = slot
        self.queue = queue
        self.band = band
        self.hop = hop  #: for the topic of delays: how long a job stays
        self.reached = base  #: everything before it was read; below 0 where that is not known yet
        self.open: OrderedDict[int, Held] = OrderedDict()  #: by offset: what has not ended
        self.prior = marks.read(base, text)  #: what is known of offsets that are not read yet
        self.ahead: dict[int, Held] = {}  #: lent, and moved to offsets that are not read yet
        self.heap: list[Held] = []  #: what waits to be lent
        self.lent = 0
        self.version = 0  #: grows with every change
        self.saved = 0  #: the version that was committed last
        self.base = base  #: everything before it has ended, and that is committed
        self.cut = base  #: what stands before it is deleted
        self.purged = 0  #: what stands before this offset and waits has ended
        self.crowded = False
        self.paused = False
        self.leaving = False  #: about to be another's
        self.live = True  #: assigned still

    @property
    def ready(self) -> int:
        """How many jobs may be lent now."""
        if self.crowded or self.leaving:
            return 0
        return min(len(self.heap), MOST_LENT - self.lent)

    def add(self, held: Held) -> None:
        self.open[held.offset] = held

    def wait(self, held: Held) -> None:
        """``held`` may be lent."""
        self.mark(held, Mark.OPEN)
        held.session, held.started = None, None
        heapq.heappush(self.heap, held)

    def expect(self, held: Held, offset: int) -> None:
        """``held`` has moved here; its message is still to be read."""
        held.part, held.offset = self, offset
        self.ahead[offset] = held
        self.prior[offset] = held.mark
        self.lent += 1
        self.version += 1

    def has(self, held: Held) -> bool:
        """Whether ``held`` stands here and has not ended."""
        return self.live and (self.open.get(held.offset) or self.ahead.get(held.offset)) is held

    def lent_jobs(self) -> list[Held]:
        return [held for held in (*self.open.values(), *self.ahead.values()) if held.session is not None]

    def mark(self, held: Held, mark: Mark) -> None:
        held.mark = mark
        if held.offset in self.ahead:
            self.prior[held.offset] = mark
        self.version += 1

    def end(self, held: Held) -> None:
        """``held`` has ended."""
        if self.ahead.pop(held.offset, None) is not None:
            self.prior[held.offset] = Mark.DONE
            self.version += 1
        elif self.open.pop(held.offset, None) is not None:
            self.version += 1

    def read_to(self, offset: int) -> None:
        """Everything before ``offset`` was read."""
        if offset > self.reached:
            self.reached = offset
            if self.prior and max(self.prior) < offset:
                self.prior.clear()
            if not self.open:
                self.version += 1  # nothing is left before it: that can be committed

    def marks(self, without: frozenset[Held] | set[Held] = frozenset()) -> Marks:
        """What to commit, as if those of ``without`` had ended."""
        unfinished = ((offset, held.mark) for offset, held in self.open.items() if held not in without)
        written = marks.write(self.reached, unfinished)
        if self.prior:
            written = self._with_prior(without)
        self.crowded = len(written.text) > _CROWDED
        return written

    def _with_prior(self, without: frozenset[Held] | set[Held]) -> Marks:
        """The same, with what is known of offsets that are not read yet."""
        last = max(self.prior)
        ended = {held.offset for held in self.ahead.values() if held in without}
        unfinished = [(offset, held.mark) for offset, held in self.open.items() if held not in without]
        for offset in range(max(self.reached, 0), last + 1):
            mark = self.prior.get(offset, Mark.OPEN)
            if mark is not Mark.DONE and offset not in ended:
                unfinished.append((offset, mark))
        return marks.write(max(last + 1, self.reached), unfinished)
