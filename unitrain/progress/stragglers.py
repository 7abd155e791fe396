"""Detection of stragglers (slow ranks). `unitrain report` also uses this module, so it does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The phases of a step, in order, and those in which the rank is busy. A rank is idle in `wait`.
TRAINING = ("data", "compute", "wait", "update")
WORK = ("data", "compute", "update")
_COMPUTE = TRAINING.index("compute")
# A straggler's busy time exceeds the median of the other ranks by at least this fraction of a step.
_MIN_EXCESS = 0.2
# Minimum duration of an observation. A rank is reported if it is slow in two consecutive observations, because a single
# observation may be an outlier.
_OBSERVATION_SECONDS = 1.0
_MAX_NAMED_RANKS = 2

Seconds = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Straggler:
    """A slow rank. `phase` takes `seconds` per step on this rank; the median over the other ranks is `others`
    seconds."""

    rank: int
    phase: str
    seconds: float
    others: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: {self.phase} {_milliseconds(self.seconds)} ms a step, "
            f"others {_milliseconds(self.others)} ms"
        )


def find_stragglers(seconds: Seconds, steps: int) -> list[Straggler]:
    """Return the slow ranks, slowest first, given the `seconds` per rank and phase of TRAINING in `steps` steps.

    `Straggler.phase` is the phase with the largest excess. At most half of the ranks can be detected as slow.
    """
    if len(seconds) < 2:
        return []
    mine = {phase: [rank[TRAINING.index(phase)] for rank in seconds] for phase in WORK}
    others = {phase: _medians_of_others(mine[phase]) for phase in WORK}
    work = list(map(sum, zip(*mine.values(), strict=True)))
    min_excess = _MIN_EXCESS * max(map(sum, seconds))
    found = []
    for rank, typical in enumerate(_medians_of_others(work)):
        if work[rank] - typical > min_excess:
            phase = max(WORK, key=lambda phase: mine[phase][rank] - others[phase][rank])
            straggler = Straggler(rank, phase, mine[phase][rank] / steps, others[phase][rank] / steps)
            found.append((work[rank], straggler))
    return [straggler for _, straggler in sorted(found, key=lambda pair: -pair[0])]


class StragglerDetector:
    """Collects the times of all ranks. `slow` lists the ranks that are slow in the last two observations."""

    def __init__(self) -> None:
        self.slow: list[Straggler] = []
        self._previously_slow: set[int] = set()
        self._collected: Seconds = []
        self._steps = 0

    def add(self, seconds: Seconds, steps: int) -> None:
        """Add the seconds per rank and phase of TRAINING in `steps` steps; empty if nothing was measured."""
        if not seconds or not all(rank[_COMPUTE] for rank in seconds):
            return
        self._steps += steps
        if self._collected:
            seconds = [
                [a + b for a, b in zip(*ranks, strict=True)] for ranks in zip(self._collected, seconds, strict=True)
            ]
        self._collected = seconds
        if max(map(sum, seconds)) >= _OBSERVATION_SECONDS:
            found = find_stragglers(seconds, self._steps)
            self.slow = [straggler for straggler in found if straggler.rank in self._previously_slow]
            self._previously_slow = {straggler.rank for straggler in found}
            self._collected, self._steps = [], 0

    def __str__(self) -> str:
        named = [str(straggler) for straggler in self.slow[:_MAX_NAMED_RANKS]]
        more = len(self.slow) - len(named)
        return "; ".join([*named, f"{more} more slow ranks"] if more else named)


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Return the median of all other values for each value (the lower median if their number is even)."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 2) // 2
    medians = [0.0] * len(values)
    for place, index in enumerate(order):
        medians[index] = values[order[middle if middle < place else middle + 1]]
    return medians


def _milliseconds(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 10 else f"{milliseconds:.2g}"
