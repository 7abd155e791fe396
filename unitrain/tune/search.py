"""Find the faster settings on a noisy machine: pairs of runs, medians, and a final check on fresh pairs.

Each pair runs in a random order. Whatever the machine does to the first or the second run of a pair, or periodically,
or as a drift, then favors either side with equal probability, so the final check has a known rate of false gains.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unitrain.backends.capabilities import Tunable

Settings = Mapping[str, str]
# Seconds of a step under some settings, in a run of its own.
Measure = Callable[[Settings], float]
# If nothing differs, either side of a pair wins with probability 1/2: 7 or 8 of 8 pairs agree in 3.5 % of all checks.
PAIRS, _MAY_DISAGREE = 8, 1
# What is looked for at first, by single pairs, and what is worth to be combined.
_PROMISING, _WORTH = 1.01, 1.02
_AGAIN = 2
_LIKELY = 4  # so many look promising on a machine that disturbs


@dataclass(frozen=True)
class Gain:
    """How much faster settings are than none: `ratios` of the seconds without them to those with them, pair by pair."""

    ratios: Sequence[float]

    @property
    def median(self) -> float:
        """The middle ratio: above 1, the settings are faster."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest ratio."""
        return min(self.ratios), max(self.ratios)

    @property
    def clear(self) -> bool:
        """Whether it is more than noise: all pairs but one agree."""
        against = sum(ratio <= 1 for ratio in self.ratios)
        return len(self.ratios) >= PAIRS and against <= _MAY_DISAGREE and self.median > _PROMISING


@dataclass
class Found:
    """What a search has found: the `settings`, their `gain` on fresh pairs, all that was tried, with its ratios, and
    how many values were `left` for lack of time; if any, `seconds` is about what it takes to try all of them."""

    settings: Settings = field(default_factory=dict)
    gain: Gain | None = None
    tried: dict[str, list[float]] = field(default_factory=dict)
    left: int = 0
    seconds: float = 0.0


def ratio_of_pair(without: Callable[[], float], within: Callable[[], float], generator: random.Random) -> float:
    """Return the seconds of `without` / those of `within`, measured in a random order."""
    if generator.random() < 0.5:
        seconds = without()
        return seconds / within()
    seconds = within()
    return without() / seconds


def search(
    measure: Measure,
    tunables: Sequence[Tunable],
    seconds: float,
    *,
    run_seconds: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    seed: int | None = None,
) -> Found:
    """Return the fastest settings that can be found within about `seconds`, of which a good part goes to the last
    check; none where no gain is clear. `run_seconds` is how long a measurement takes, as far as that is known.

    Each value is tried alone first; those that look promising again; then the best are combined, one by one. `seed`
    makes the random order of each pair repeatable.
    """
    began = clock()
    generator = random.Random(seed)
    pair_seconds = 2 * run_seconds
    found = Found()

    def pair(settings: Settings) -> float:
        nonlocal pair_seconds
        before = clock()
        ratio = ratio_of_pair(lambda: measure({}), lambda: measure(settings), generator)
        pair_seconds = max(pair_seconds, clock() - before)
        return ratio

    def time_for(pairs: int) -> bool:
        return clock() - began + (pairs + PAIRS) * pair_seconds <= seconds

    def tried(settings: Settings) -> list[float]:
        return found.tried.setdefault(" ".join(f"{name}={value}" for name, value in sorted(settings.items())), [])

    candidates: list[Settings] = [{tunable.variable: value} for tunable in tunables for value in tunable.alternatives]
    for number, settings in enumerate(candidates):
        if not time_for(1):
            found.left = len(candidates) - number
            found.seconds = clock() - began + (found.left + _AGAIN * _LIKELY + PAIRS) * pair_seconds
            break
        tried(settings).append(pair(settings))
    promising = sorted(
        (one for one in candidates[: len(candidates) - found.left] if tried(one)[0] > _PROMISING),
        key=lambda one: -tried(one)[0],
    )
    for settings in promising:
        for _ in range(_AGAIN):
            if time_for(1):
                tried(settings).append(pair(settings))
    worth = sorted(
        (one for one in promising if len(tried(one)) > 1 and statistics.median(tried(one)) > _WORTH),
        key=lambda one: -statistics.median(tried(one)),
    )
    best: Settings = (worth or promising or [{}])[0]
    for settings in worth[1:]:
        together = {**settings, **best}
        if together == best or not time_for(_AGAIN):  # another value of the same knob
            continue
        tried(together).extend(pair(together) for _ in range(_AGAIN))
        if statistics.median(tried(together)) > statistics.median(tried(best)):
            best = together
    if best:
        gain = Gain([pair(best) for _ in range(PAIRS)])
        found.gain = gain
        if gain.clear:
            found.settings = best
    return found
