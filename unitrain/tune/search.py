"""Find faster settings on a noisy machine: pairs of runs, medians, and a final check with new pairs.

The two runs of a pair are made in random order. A disturbance that favors the first or the second run of a pair, that
is periodic or that drifts then favors either side with equal probability, so the final check has a known rate of false
gains.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unitrain.backends.capabilities import Tunable

Settings = Mapping[str, str]
# Returns the seconds per step under some settings, measured in a separate run.
Measure = Callable[[Settings], float]
# If the settings make no difference, either side of a pair is faster with probability 1/2. Then 7 or 8 of 8 pairs agree
# in 3.5 % of all checks.
PAIRS, _MAX_DISAGREEING_PAIRS = 8, 1
# Smallest gain in a single pair for which settings are measured again, and smallest gain for which they are combined.
_PROMISING_RATIO, _COMBINED_RATIO = 1.01, 1.02
_REPETITIONS = 2
_TYPICAL_PROMISING = 4  # expected number of promising settings, to estimate the duration of a search


@dataclass(frozen=True)
class Gain:
    """The speedup by some settings: the step time without them divided by that with them, for each pair of runs."""

    ratios: Sequence[float]

    @property
    def median(self) -> float:
        """The median ratio. Above 1, the settings are faster."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest ratio."""
        return min(self.ratios), max(self.ratios)

    @property
    def is_significant(self) -> bool:
        """Whether the gain exceeds noise: at most one pair disagrees."""
        disagreeing = sum(ratio <= 1 for ratio in self.ratios)
        return len(self.ratios) >= PAIRS and disagreeing <= _MAX_DISAGREEING_PAIRS and self.median > _PROMISING_RATIO


@dataclass
class SearchResult:
    """The fastest `settings`, and their `gain` in new pairs of runs.

    `ratios` has the ratios of all settings that were tried. `skipped` is the number of values that were not tried for
    lack of time; if it is not zero, `seconds_needed` estimates the time for all of them.
    """

    settings: Settings = field(default_factory=dict)
    gain: Gain | None = None
    ratios: dict[str, list[float]] = field(default_factory=dict)
    skipped: int = 0
    seconds_needed: float = 0.0


def list_tunables(backend_tunables: Sequence[Tunable], threads: int | None, cores_per_rank: int) -> list[Tunable]:
    """Return the tunables of the backend, and that of the threads per rank.

    `threads` is the default number of threads per rank, None on a GPU.
    """
    found = list(backend_tunables)
    if threads is not None:
        counts = {count for count in (1, cores_per_rank // 2, cores_per_rank, 2 * cores_per_rank) if count > 0}
        alternatives = tuple(str(count) for count in sorted(counts - {threads}))
        if alternatives:
            found.append(Tunable("OMP_NUM_THREADS", "threads per rank", str(threads), alternatives))
    return found


def measure_ratio(
    without_settings: Callable[[], float], with_settings: Callable[[], float], generator: random.Random
) -> float:
    """Return the seconds of `without_settings` divided by those of `with_settings`, measured in random order."""
    if generator.random() < 0.5:
        seconds = without_settings()
        return seconds / with_settings()
    seconds = with_settings()
    return without_settings() / seconds


def search(
    measure: Measure,
    tunables: Sequence[Tunable],
    limit_seconds: float,
    *,
    run_seconds: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    seed: int | None = None,
) -> SearchResult:
    """Return the fastest settings that are found within about `limit_seconds`, or none if no gain is significant.

    Each value is first tried alone, and promising values are measured again. Then the best values are combined one by
    one. The final check takes a large part of the time. `run_seconds` is an estimate of the duration of one
    measurement. `seed` makes the random order of the pairs reproducible.
    """
    began = clock()
    generator = random.Random(seed)
    pair_seconds = 2 * run_seconds
    result = SearchResult()

    def measure_pair(settings: Settings) -> float:
        nonlocal pair_seconds
        before = clock()
        ratio = measure_ratio(lambda: measure({}), lambda: measure(settings), generator)
        pair_seconds = max(pair_seconds, clock() - before)
        return ratio

    def has_time_for(pairs: int) -> bool:
        return clock() - began + (pairs + PAIRS) * pair_seconds <= limit_seconds

    def ratios_of(settings: Settings) -> list[float]:
        name = " ".join(f"{name}={value}" for name, value in sorted(settings.items()))
        return result.ratios.setdefault(name, [])

    candidates: list[Settings] = [{tunable.variable: value} for tunable in tunables for value in tunable.alternatives]
    for number, settings in enumerate(candidates):
        if not has_time_for(1):
            result.skipped = len(candidates) - number
            pairs = result.skipped + _REPETITIONS * _TYPICAL_PROMISING + PAIRS
            result.seconds_needed = clock() - began + pairs * pair_seconds
            break
        ratios_of(settings).append(measure_pair(settings))
    promising = sorted(
        (one for one in candidates[: len(candidates) - result.skipped] if ratios_of(one)[0] > _PROMISING_RATIO),
        key=lambda one: -ratios_of(one)[0],
    )
    for settings in promising:
        for _ in range(_REPETITIONS):
            if has_time_for(1):
                ratios_of(settings).append(measure_pair(settings))
    combinable = sorted(
        (one for one in promising if len(ratios_of(one)) > 1 and statistics.median(ratios_of(one)) > _COMBINED_RATIO),
        key=lambda one: -statistics.median(ratios_of(one)),
    )
    best: Settings = (combinable or promising or [{}])[0]
    for settings in combinable[1:]:
        combined = {**settings, **best}
        if combined == best or not has_time_for(_REPETITIONS):  # equal if it is another value of the same tunable
            continue
        ratios_of(combined).extend(measure_pair(combined) for _ in range(_REPETITIONS))
        if statistics.median(ratios_of(combined)) > statistics.median(ratios_of(best)):
            best = combined
    if best:
        result.gain = Gain([measure_pair(best) for _ in range(PAIRS)])
        if result.gain.is_significant:
            result.settings = best
    return result
