"""Jobs that may have killed a worker: each runs alone, so that the next loss, if there is one, is its own."""

from __future__ import annotations

import enum
from collections import deque
from typing import Final

from taskq.job import Reservation
from taskq.worker.portions import Running

#: A suspect has the worker to itself for this long; then it counts as marked, and others may run beside it.
SOLITUDE: Final = 5.0
#: After a suspect others have their turn, for as long as it took and no longer than this; in seconds.
_LONGEST_REST: Final = 1.0


class Turn(enum.Enum):
    """Whose turn it is."""

    OTHERS = enum.auto()
    CLEARING = enum.auto()  #: nothing new begins, what runs ends
    MARKING = enum.auto()  #: the suspect is being marked as started
    MARKED = enum.auto()  #: it can go to the first idle lane
    RUNNING = enum.auto()


class Suspects:
    """The line of suspects, and the turn of the one at its head."""

    def __init__(self) -> None:
        self.line: deque[Reservation] = deque()
        self.turn = Turn.OTHERS
        self.current: Reservation | None = None
        self._began = 0.0  #: when others had to stand back
        self._sent = 0.0
        self._rest_until = 0.0

    def __len__(self) -> int:
        """How many have not been handed to a lane."""
        return len(self.line) + (self.turn in {Turn.MARKING, Turn.MARKED})

    def begin(self, now: float, *, others: bool) -> bool:
        """Whether a suspect's turn has come or lasts; ``others`` says that other jobs are waiting."""
        if self.turn is Turn.RUNNING and now - self._sent > SOLITUDE:
            self._end(now)
        if self.turn is Turn.OTHERS and self.line and not (others and now < self._rest_until):
            self.turn, self._began = Turn.CLEARING, now
        if self.turn is Turn.CLEARING and not self.line:
            self.turn = Turn.OTHERS
        return self.turn is not Turn.OTHERS

    def mark(self) -> Reservation:
        """The way is clear: the next suspect, to be marked."""
        self.turn, self.current = Turn.MARKING, self.line.popleft()
        return self.current

    def marked(self, reservation: Reservation) -> bool:
        """Its mark is durable; whether it is still wanted."""
        if self.turn is not Turn.MARKING or self.current is not reservation:
            return False
        self.turn = Turn.MARKED
        return True

    def sent(self, now: float) -> None:
        """It has been handed to a lane."""
        self.turn, self._sent = Turn.RUNNING, now

    def gone(self, job_id: str, now: float) -> None:
        """A job has ended or is no longer this worker's."""
        if self.current is not None and self.current.job.id == job_id:
            self._end(now)

    def take_out(self, job_id: str, now: float) -> Reservation | None:
        """Remove a suspect that no lane has been handed; ``None`` if it is not here or just being marked."""
        current, turn = self.current, self.turn
        if turn in {Turn.MARKING, Turn.MARKED} and current is not None and current.job.id == job_id:
            self._end(now)
            return current if turn is Turn.MARKED else None
        for each in self.line:
            if each.job.id == job_id:
                self.line.remove(each)
                return each
        return None

    def put_back(self, reservation: Reservation) -> None:
        """Ahead of the others in the line."""
        if self.current is not None and self.current.job.id == reservation.job.id:
            self.turn, self.current = Turn.OTHERS, None
        self.line.appendleft(reservation)

    def drop(self, now: float) -> list[Reservation]:
        """Empty the line. One that is being marked is not in it; one that is marked is."""
        dropped = list(self.line)
        self.line.clear()
        if self.turn is Turn.MARKED and self.current is not None:
            dropped.insert(0, self.current)
            self._end(now)
        return dropped

    def _end(self, now: float) -> None:
        self.turn, self.current = Turn.OTHERS, None
        self._rest_until = now + min(_LONGEST_REST, max(0.0, now - self._began))


def in_the_way(running: Running | None, now: float) -> bool:
    """Whether what a lane runs could be taken for a culprit: what has run for long is marked as started."""
    return running is None or now - running.since < SOLITUDE
