"""Search for faster settings under system noise: paired runs, medians, and a final check with new pairs.

The two runs of a pair are executed in random order. Order-dependent, periodic or drifting noise therefore favors either
side with equal probability, so the final check has a known false-positive rate.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unitrain.backends.capabilities import Tunable

Settings = Mapping[str, str]
# Measures the seconds per step with the given settings in a separate run.
Measure = Callable[[Settings], float]
# If the settings have no effect, either side of a pair is faster with probability 1/2. Then 7 or 8 of 8 pairs favor the
# settings in 3.5% of all checks.
PAIRS, _MAX_DISAGREEING_PAIRS = 8, 1
# `_PROMISING_RATIO`: the gain in a single pair above which a setting is measured again, and the median gain that the
# final check requires. `_MIN_RATIO_TO_COMBINE`: the median gain above which a setting is combined with others.
_PROMISING_RATIO, _MIN_RATIO_TO_COMBINE = 1.01, 1.02
_REPETITIONS = 2
_TYPICAL_PROMISING = 4  # expected number of promising settings, to estimate the duration of a search


@dataclass(frozen=True)
class Gain:
    """The speedup that settings cause: the step time without the settings divided by the step time with them, per pair
    of runs."""

    ratios: Sequence[float]

    @property
    def median(self) -> float:
        """The median speedup."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The minimum and the maximum speedup."""
        return min(self.ratios), max(self.ratios)

    @property
    def is_significant(self) -> bool:
        """Whether the gain is significant: of at least 8 pairs, at most one disagrees, and the median exceeds 1.01."""
        disagreeing = sum(ratio <= 1 for ratio in self.ratios)
        return len(self.ratios) >= PAIRS and disagreeing <= _MAX_DISAGREEING_PAIRS and self.median > _PROMISING_RATIO


@dataclass
class SearchResult:
    """The fastest `settings`, and the `gain` of the best settings in new pairs of runs.

    `settings` is empty if the gain is not significant, and `gain` is None if no settings were promising. `ratios`
    contains the ratios of all measured settings, without the final check. `skipped` is the number of values that were
    not measured within the time limit; if it is nonzero, `seconds_needed` estimates the time to measure all values.
    """

    settings: Settings = field(default_factory=dict)
    gain: Gain | None = None
    ratios: dict[str, list[float]] = field(default_factory=dict)
    skipped: int = 0
    seconds_needed: float = 0.0


def list_tunables(
    backend_tunables: Sequence[Tunable], threads: int | None, cores_per_rank: int, *, shares_hosts: bool = False
) -> list[Tunable]:
    """Return the backend's tunables that have an effect and, if ranks compute on the CPU, a tunable for the number of
    threads per rank.

    `threads` is the default number of threads per rank, or None on a GPU. `shares_hosts` is True if the job runs on
    several hosts, with several ranks on one of them.
    """
    has_host_tunables = shares_hosts and threads is not None
    tunables = [
        tunable for tunable in backend_tunables if has_host_tunables or not tunable.needs_ranks_on_several_hosts
    ]
    if threads is not None:
        counts = {count for count in (1, cores_per_rank // 2, cores_per_rank, 2 * cores_per_rank) if count > 0}
        alternatives = tuple(str(count) for count in sorted(counts - {threads}))
        if alternatives:
            tunables.append(Tunable("OMP_NUM_THREADS", "threads per rank", str(threads), alternatives))
    return tunables


def measure_ratio(
    without_settings: Callable[[], float], with_settings: Callable[[], float], generator: random.Random
) -> float:
    """Return the seconds of `without_settings` divided by the seconds of `with_settings`, measured in random order."""
    if generator.random() < 0.5:
        seconds = without_settings()
        return seconds / with_settings()
    seconds = with_settings()
    return without_settings() / seconds


def search(
    measure: Measure,
    tunables: Sequence[Tunable],
    budget_seconds: float,
    *,
    run_seconds: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    seed: int | None = None,
) -> SearchResult:
    """Search for the fastest settings for about `budget_seconds`. The result has no settings if no gain is significant.

    The search first measures each value separately, and measures promising values again. It then combines the best
    values one at a time. The final check of the best settings takes a large fraction of the budget, and may exceed it.
    `run_seconds` is the estimated duration of one measurement. `seed` makes the random order of the pairs reproducible.
    """
    start_time = clock()
    generator = random.Random(seed)
    pair_seconds = 2 * run_seconds
    result = SearchResult()

    def measure_pair(settings: Settings) -> float:
        nonlocal pair_seconds
        before = clock()
        ratio = measure_ratio(lambda: measure({}), lambda: measure(settings), generator)
        pair_seconds = max(pair_seconds, clock() - before)
        return ratio

    def has_time_for(num_pairs: int) -> bool:
        return clock() - start_time + (num_pairs + PAIRS) * pair_seconds <= budget_seconds

    def ratios_of(settings: Settings) -> list[float]:
        name = " ".join(f"{name}={value}" for name, value in sorted(settings.items()))
        return result.ratios.setdefault(name, [])

    candidates: list[Settings] = [{tunable.variable: value} for tunable in tunables for value in tunable.alternatives]
    for index, settings in enumerate(candidates):
        if not has_time_for(1):
            result.skipped = len(candidates) - index
            pairs = result.skipped + _REPETITIONS * _TYPICAL_PROMISING + PAIRS
            result.seconds_needed = clock() - start_time + pairs * pair_seconds
            break
        ratios_of(settings).append(measure_pair(settings))
    promising = sorted(
        (
            settings
            for settings in candidates[: len(candidates) - result.skipped]
            if ratios_of(settings)[0] > _PROMISING_RATIO
        ),
        key=lambda settings: -ratios_of(settings)[0],
    )
    for settings in promising:
        for _ in range(_REPETITIONS):
            if has_time_for(1):
                ratios_of(settings).append(measure_pair(settings))
    combinable = sorted(
        (
            settings
            for settings in promising
            if len(ratios_of(settings)) > 1 and statistics.median(ratios_of(settings)) > _MIN_RATIO_TO_COMBINE
        ),
        key=lambda settings: -statistics.median(ratios_of(settings)),
    )
    best: Settings = (combinable or promising or [{}])[0]
    for settings in combinable[1:]:
        combined = {**settings, **best}
        if combined == best or not has_time_for(_REPETITIONS):  # equal if `best` has another value of the tunable
            continue
        ratios_of(combined).extend(measure_pair(combined) for _ in range(_REPETITIONS))
        if statistics.median(ratios_of(combined)) > statistics.median(ratios_of(best)):
            best = combined
    if best:
        result.gain = Gain([measure_pair(best) for _ in range(PAIRS)])
        if result.gain.is_significant:
            result.settings = best
    return result
