"""Detection of stragglers (slow ranks) from the times of all ranks and the earlier times of each rank.

This module does not import torch, because `unitrain report` also uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median_low
from typing import Any

from typing_extensions import Self

from unitrain.progress import slow_causes
from unitrain.progress.slow_causes import RankFigures

# The phases of a step, in order, and the phases in which the rank is busy. A rank is idle in `wait`.
TRAINING = ("data", "compute", "wait", "update")
WORK = ("data", "compute", "update")
_COMPUTE = TRAINING.index("compute")
# A straggler's busy time exceeds the median of the other ranks, or its own earlier time, by at least this fraction of a
# step.
_MIN_EXCESS = 0.2
# A rank that is slower than in its earlier steps, but not than the other ranks, is reported only if other ranks wait
# for it: if its `wait` exceeds the shortest `wait` of all ranks by at most this fraction of a step.
_MAX_SLACK = 0.1
# Without earlier times, the network time of a rank is compared with this multiple of the median of the other ranks.
_MIN_LINK_RATIO = 2.0
# Minimum duration of an observation. A rank is reported if it is slow in two consecutive observations, because a single
# observation may be an outlier.
_OBSERVATION_SECONDS = 1.0
_MIN_EARLIER_OBSERVATIONS, _MAX_EARLIER_OBSERVATIONS = 3, 30
# After this number of consecutive slow observations, the slow times replace the earlier times. A permanent change, such
# as larger batches, is then no longer reported.
_MAX_SLOW_OBSERVATIONS = 60
MAX_NAMED_RANKS = 2

Seconds = Sequence[Sequence[float]]


# The fields of RankFigures that are evidence of causes.
EVIDENCE = RankFigures._fields[len(TRAINING) :]


@dataclass(frozen=True)
class Straggler:
    """A slow rank. `phase` takes `seconds` seconds per step on this rank. `others` is the median of the other ranks
    (None if there are none), and `earlier` the median of earlier observations of this rank (None if unknown).

    `cause` is a key of `slow_causes.CAUSES`, or None without evidence. `figures` are all figures of the rank, or None
    without evidence. `host` and `evidence`, a text with figures, are set when the rank is reported.
    """

    rank: int
    phase: str
    seconds: float
    others: float | None = None
    earlier: float | None = None
    cause: str | None = None
    host: str | None = None
    evidence: str = ""
    figures: Mapping[str, float] | None = None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Return the straggler from an entry of "slow" in steps.jsonl, which another version may have written."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in row.items() if name in names})

    def to_row(self) -> dict[str, Any]:
        """Return the entry of "slow" in steps.jsonl, without unknown values."""
        row = {name: value for name, value in asdict(self).items() if value not in (None, "")}
        if self.figures is not None:
            row["figures"] = {name: round(value, 6) for name, value in self.figures.items()}
        return {**row, "suggestion": self.suggestion} if self.suggestion else row

    @property
    def suggestion(self) -> str:
        """A sentence that states how to remove the cause; empty if the cause is unknown."""
        return slow_causes.CAUSES[self.cause].suggestion if self.cause in slow_causes.CAUSES else ""

    @property
    def explanation(self) -> str:
        """Sentences that state the cause, the host, the evidence and a suggestion; empty if the cause is unknown."""
        if self.cause not in slow_causes.CAUSES:
            return ""
        where = "" if self.host is None else f" on host {self.host}"
        evidence = f" ({self.evidence})" if self.evidence else ""
        return f"Cause: {slow_causes.CAUSES[self.cause].text}{where}{evidence}. {self.suggestion}"

    def __str__(self) -> str:
        others = "" if self.others is None else f", others {slow_causes.format_milliseconds(self.others)} ms"
        earlier = "" if self.earlier is None else f", earlier {slow_causes.format_milliseconds(self.earlier)} ms"
        cause = f" ({slow_causes.CAUSES[self.cause].text})" if self.cause in slow_causes.CAUSES else ""
        return (
            f"rank {self.rank} is slow: {self.phase} {slow_causes.format_milliseconds(self.seconds)} ms a step"
            f"{others}{earlier}{cause}"
        )


def find_stragglers(seconds: Seconds, steps: int, evidence: Seconds = ()) -> list[Straggler]:
    """Return the slow ranks, given the `seconds` per rank and phase of TRAINING in `steps` steps: first those that are
    busy for longer, then those with slow connections, the slowest first in each group.

    `evidence` has a row per rank, the result of `pack_evidence`: the seconds of EVIDENCE in these steps, and the
    earlier figures of the rank (see RankBaseline). Without it, causes and slow connections are unknown, and a rank is
    only compared with the other ranks. A rank is busy for longer if its busy time exceeds one of two references by more
    than _MIN_EXCESS of a step: the median of the other ranks (true for at most half of the ranks, rounded up) or, while
    other ranks wait for it, its own earlier busy time. `Straggler.phase` is the phase with the largest excess, or
    "network".
    """
    unpacked = [_unpack_evidence(row) for row in evidence or [()] * len(seconds)]
    figures = [
        RankFigures(*(value / steps for value in (*phases, *evidence_seconds)))
        for phases, (evidence_seconds, _) in zip(seconds, unpacked, strict=True)
    ]
    earlier = [earlier_figures for _, earlier_figures in unpacked]
    stragglers = _find_busy_ranks(figures, earlier, has_evidence=bool(evidence))
    if evidence and not any(straggler.cause in slow_causes.CPU_CAUSES for straggler in stragglers):
        # A rank that is short of CPU time also sends and receives slowly.
        stragglers += _find_slow_links(figures, earlier)
    return stragglers


def pack_evidence(evidence: Mapping[str, float], earlier: RankFigures) -> list[float]:
    """Return the row of a rank for `find_stragglers`: the seconds of EVIDENCE, then the earlier figures of the rank."""
    return [*(evidence[name] for name in EVIDENCE), *earlier]


def _unpack_evidence(row: Sequence[float]) -> tuple[Sequence[float], RankFigures | None]:
    """Return the seconds of EVIDENCE, and the earlier figures or None if they are not known yet."""
    earlier = RankFigures(*row[len(EVIDENCE) :])
    # `compute` is zero only if the earlier figures are unknown.
    return row[: len(EVIDENCE)], earlier if earlier.compute else None


def is_observation_ending(seconds: float) -> bool:
    """Return whether an observation of `seconds` is complete or almost complete."""
    return seconds >= 0.9 * _OBSERVATION_SECONDS


def _find_busy_ranks(
    figures: Sequence[RankFigures], earlier: Sequence[RankFigures | None], *, has_evidence: bool
) -> list[Straggler]:
    work = [rank.work for rank in figures]
    step = max(rank.work + rank.wait for rank in figures)
    shortest_wait = min(rank.wait for rank in figures)
    others_work = _medians_of_others(work) if len(work) > 1 else work
    stragglers = []
    for rank, (rank_figures, earlier_figures) in enumerate(zip(figures, earlier, strict=True)):
        is_slower_than_others = rank_figures.work - others_work[rank] > _MIN_EXCESS * step
        has_risen = (
            earlier_figures is not None
            and rank_figures.work - earlier_figures.work > _MIN_EXCESS * step
            and rank_figures.wait - shortest_wait <= _MAX_SLACK * step
        )
        if not is_slower_than_others and not has_risen:
            continue
        others = _median_figures_of_others(figures, rank)
        # With two ranks, a comparison does not show which of them is abnormal. The reference is then the rank's own
        # earlier figures, if its time has risen.
        reference = earlier_figures if has_risen and (len(figures) <= 2 or not is_slower_than_others) else others
        assert reference is not None
        phase = max(WORK, key=lambda phase: getattr(rank_figures, phase) - getattr(reference, phase))
        straggler = Straggler(
            rank,
            phase,
            getattr(rank_figures, phase),
            getattr(others, phase) if len(figures) > 1 else None,
            earlier=None if earlier_figures is None else getattr(earlier_figures, phase),
            cause=slow_causes.find_cause(rank_figures, reference, phase) if has_evidence else None,
            figures=rank_figures._asdict() if has_evidence else None,
        )
        stragglers.append(straggler)
    return sorted(stragglers, key=lambda straggler: -work[straggler.rank])


def _find_slow_links(figures: Sequence[RankFigures], earlier: Sequence[RankFigures | None]) -> list[Straggler]:
    """Return the ranks whose connections delay the reduction of gradients, slowest first.

    The shortest `wait` of all ranks is the time of the reduction itself, because the last rank does not wait for
    others.
    """
    if len(figures) < 2:
        return []
    step = max(rank.work + rank.wait for rank in figures)
    known_earlier = [earlier_figures for earlier_figures in earlier if earlier_figures is not None]
    reduction = min(rank.wait for rank in figures)
    has_earlier = len(known_earlier) == len(figures)
    excess = reduction - (min(earlier_figures.wait for earlier_figures in known_earlier) if has_earlier else 0.0)
    if excess <= _MIN_EXCESS * step:
        return []
    others = _medians_of_others([rank.network for rank in figures])
    stragglers = []
    for rank, (rank_figures, earlier_figures) in enumerate(zip(figures, earlier, strict=True)):
        reference = (
            earlier_figures.network if has_earlier and earlier_figures is not None else _MIN_LINK_RATIO * others[rank]
        )
        if rank_figures.network - reference >= slow_causes.MIN_EXPLAINED_FRACTION * excess:
            straggler = Straggler(
                rank,
                "network",
                rank_figures.network,
                others[rank],
                earlier=None if earlier_figures is None else earlier_figures.network,
                cause="network",
                figures=rank_figures._asdict(),
            )
            stragglers.append(straggler)
    return sorted(stragglers, key=lambda straggler: -straggler.seconds)


class StragglerDetector:
    """Collects the times of all ranks. `stragglers` are the ranks that are slow in both of the last two observations,
    and `suspected_ranks` the ranks that are slow in the last one. All ranks compute the same values.
    """

    def __init__(self) -> None:
        self.stragglers: list[Straggler] = []
        self.suspected_ranks: set[int] = set()
        self._collected_seconds: Seconds = []
        self._steps = 0

    @property
    def is_empty(self) -> bool:
        """Whether no times have been added since the last complete observation."""
        return not self._collected_seconds

    def add(self, seconds: Seconds, steps: int, evidence: Seconds = ()) -> int:
        """Add the seconds per rank and phase of TRAINING in `steps` steps. `seconds` is empty if nothing was measured.

        `evidence` is the evidence since the last observation, see `find_stragglers`. Return the number of steps of the
        observation if this call completes it, otherwise 0.
        """
        if not seconds or not steps or not all(rank[_COMPUTE] for rank in seconds):
            return 0
        self._steps += steps
        if self._collected_seconds:
            seconds = [
                [a + b for a, b in zip(*rows, strict=True)]
                for rows in zip(self._collected_seconds, seconds, strict=True)
            ]
        self._collected_seconds = seconds
        if max(map(sum, seconds)) < _OBSERVATION_SECONDS:
            return 0
        stragglers = find_stragglers(seconds, self._steps, evidence)
        self.stragglers = [straggler for straggler in stragglers if straggler.rank in self.suspected_ranks]
        self.suspected_ranks = {straggler.rank for straggler in stragglers}
        observed_steps, self._collected_seconds, self._steps = self._steps, [], 0
        return observed_steps

    def set_details(self, straggler: Straggler, host: str, evidence: str) -> Straggler:
        """Set the host and the evidence of one of the `stragglers`, and return the changed Straggler."""
        changed = replace(straggler, host=host, evidence=evidence)
        self.stragglers = [changed if other is straggler else other for other in self.stragglers]
        return changed

    def __str__(self) -> str:
        named_stragglers = [str(straggler) for straggler in self.stragglers[:MAX_NAMED_RANKS]]
        more = len(self.stragglers) - len(named_stragglers)
        return "; ".join([*named_stragglers, f"{more} more slow ranks"] if more else named_stragglers)


class RankBaseline:
    """The figures of this rank in earlier observations in which no rank was slow.

    After _MAX_SLOW_OBSERVATIONS consecutive observations with a slow rank, the latest of them replace the earlier ones.
    """

    def __init__(self) -> None:
        self._observations: deque[RankFigures] = deque(maxlen=_MAX_EARLIER_OBSERVATIONS)
        self._slow_observations: list[RankFigures] = []
        self._median = RankFigures()

    def add(self, figures: RankFigures, *, is_any_rank_slow: bool) -> None:
        """Add an observation. `is_any_rank_slow` states whether any rank was slow in it."""
        if not is_any_rank_slow:
            self._slow_observations = []
            self._observations.append(figures)
        else:
            self._slow_observations.append(figures)
            if len(self._slow_observations) < _MAX_SLOW_OBSERVATIONS:
                return
            self._observations.clear()
            self._observations.extend(self._slow_observations[-_MAX_EARLIER_OBSERVATIONS:])
            self._slow_observations = []
        if len(self._observations) >= _MIN_EARLIER_OBSERVATIONS:
            self._median = RankFigures(*map(median_low, zip(*self._observations, strict=True)))

    def median(self) -> RankFigures:
        """Return the median of each figure; zeros until there are enough observations."""
        return self._median


def _median_figures_of_others(figures: Sequence[RankFigures], rank: int) -> RankFigures:
    """Return the median of each figure over the other ranks (the lower median if their number is even)."""
    others = [figures_of_rank for index, figures_of_rank in enumerate(figures) if index != rank]
    return RankFigures(*map(median_low, zip(*others, strict=True))) if others else figures[rank]


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Return, for each value, the median of all other values (the lower median if their number is even)."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 2) // 2
    medians = [0.0] * len(values)
    for sorted_position, index in enumerate(order):
        medians[index] = values[order[middle if middle < sorted_position else middle + 1]]
    return medians
