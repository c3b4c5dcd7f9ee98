"""Whose turn it is: queues served by weight, no share left unused."""

from __future__ import annotations

from collections.abc import Mapping

from taskq.errors import InvalidArgumentError


class Turns:
    """Smooth weighted round robin over the queues of one consumer.

    Weights 3 and 1 give the order a a b a, a a b a, however small the steps: what one call leaves off, the next
    goes on with. A queue that has nothing loses its turns to the others and is owed none of them later.
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        if not weights:
            raise InvalidArgumentError("a consumer needs at least one queue")
        for queue, weight in weights.items():
            if weight < 1:
                raise InvalidArgumentError(f"the weight of queue {queue!r} must be at least 1, not {weight}")
        self.weights = dict(weights)
        self._standing = dict.fromkeys(weights, 0)

    def share(self, limit: int, available: Mapping[str, int]) -> list[str]:
        """The queues to take from, one entry per job and in order; at most ``limit``, none beyond ``available``."""
        left = {queue: available[queue] for queue in self.weights if available.get(queue, 0) > 0}
        for queue in self._standing.keys() - left.keys():
            self._standing[queue] = 0
        turns: list[str] = []
        while left and len(turns) < limit:
            queue = self._next(left)
            turns.append(queue)
            left[queue] -= 1
            if not left[queue]:
                del left[queue]
        return turns

    def _next(self, candidates: Mapping[str, int]) -> str:
        standing = self._standing
        total = 0
        for queue in candidates:
            standing[queue] += self.weights[queue]
            total += self.weights[queue]
        winner = max(candidates, key=standing.__getitem__)
        standing[winner] -= total
        return winner
