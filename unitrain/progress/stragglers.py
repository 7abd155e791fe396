"""Ranks that the others wait for, found from what each rank's own work takes. No torch here: reports use it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What a step is made of, in order, and which of it is a rank's own work: in `wait` it is idle.
TRAINING = ("data", "compute", "wait", "update")
WORK = ("data", "compute", "update")
_COMPUTE = TRAINING.index("compute")
# A straggler's work takes longer than the others' by this share of a step, which would be that much shorter without.
_CLEARLY = 0.2
# So much training is judged at a time; two times in succession, because one may have been disturbed once.
_SECONDS = 1.0
_MOST_NAMED = 2

Seconds = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for. `part` of its work takes `seconds` a step, and the `others` in the median so."""

    rank: int
    part: str
    seconds: float
    others: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: {self.part} {_milliseconds(self.seconds)} ms a step, "
            f"others {_milliseconds(self.others)} ms"
        )


def find_stragglers(seconds: Seconds, steps: int) -> list[Straggler]:
    """Return the ranks that the others wait for, the slowest first, from each one's `seconds` by part in `steps` steps.

    `part` is where one loses the most. Half of the ranks may be slow together: the others are then the fast half.
    """
    if len(seconds) < 2:
        return []
    mine = {part: [rank[TRAINING.index(part)] for rank in seconds] for part in WORK}
    others = {part: _medians_of_others(mine[part]) for part in WORK}
    work = list(map(sum, zip(*mine.values(), strict=True)))
    clearly = _CLEARLY * max(map(sum, seconds))
    found = []
    for rank, typical in enumerate(_medians_of_others(work)):
        if work[rank] - typical > clearly:
            part = max(WORK, key=lambda part: mine[part][rank] - others[part][rank])
            straggler = Straggler(rank, part, mine[part][rank] / steps, others[part][rank] / steps)
            found.append((work[rank], straggler))
    return [straggler for _, straggler in sorted(found, key=lambda one: -one[0])]


class Stragglers:
    """Hears now and then what every rank's time went into, and says who is slow, as long as that lasts."""

    def __init__(self) -> None:
        self.slow: list[Straggler] = []
        self._suspects: set[int] = set()
        self._heard: Seconds = []
        self._steps = 0

    def hear(self, seconds: Seconds, steps: int) -> None:
        """Each rank's seconds by part of TRAINING, in the last `steps` steps; empty if nothing was measured."""
        if not seconds or not all(rank[_COMPUTE] for rank in seconds):
            return
        self._steps += steps
        if self._heard:
            seconds = [[a + b for a, b in zip(*ranks, strict=True)] for ranks in zip(self._heard, seconds, strict=True)]
        self._heard = seconds
        if max(map(sum, seconds)) >= _SECONDS:
            found = find_stragglers(seconds, self._steps)
            self.slow = [one for one in found if one.rank in self._suspects]
            self._suspects = {one.rank for one in found}
            self._heard, self._steps = [], 0

    def __str__(self) -> str:
        named = [str(straggler) for straggler in self.slow[:_MOST_NAMED]]
        more = len(self.slow) - len(named)
        return "; ".join([*named, f"{more} more slow ranks"] if more else named)


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each of the values the median of all the others, the lower one of two."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 2) // 2
    medians = [0.0] * len(values)
    for place, index in enumerate(order):
        medians[index] = values[order[middle if middle < place else middle + 1]]
    return medians


def _milliseconds(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 10 else f"{milliseconds:.2g}"
