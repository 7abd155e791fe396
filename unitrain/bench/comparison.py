"""Compare two results of the same kind, and decide which differences are more than noise.

The decision is a two-sided Mann-Whitney test on the rounds of each row (Mann and Whitney 1947, exact distribution with
mid-ranks for ties), corrected for the number of rows by Holm's method (1979): if nothing differs, the probability that
any row is called faster or slower is at most 5 %. The test cannot separate a change of the program from a change of the
machine between the two measurements: measure both in the same session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, Literal

from unitrain.bench.results import middle, name_of
from unitrain.errors import ReportError

Verdict = Literal["faster", "slower", "the same within noise", "too few rounds"]

LEAST_ROUNDS = 8
_SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Difference:
    """One measurement in both results: lower quartile, median and upper quartile of the seconds in each, and the
    verdict."""

    what: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """The time before / the time after: above 1, the second result is faster."""
        return self.before[1] / self.after[1]


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[Difference], list[str]]:
    """Return what is in both, in the order of the first, and the names of what is in one only.

    A row with fewer than `LEAST_ROUNDS` rounds on either side has no verdict. Raises ReportError for results of two
    kinds, or with nothing in common.
    """
    if before["kind"] != after["kind"]:
        raise ReportError(
            f"The first is a result of bench {before['kind']} and the second of bench {after['kind']}, which cannot be "
            f"compared. Make the second with: unitrain bench {before['kind']} --json FILE"
        )
    first, second = ({_what(row, result): row for row in result["rows"]} for result in (before, after))
    shared = [what for what in first if what in second]
    if not shared:
        raise ReportError(
            f"The results have nothing in common: one has {next(iter(first), 'nothing')}, the other "
            f"{next(iter(second), 'nothing')}. Measure the same backends, ranks and sizes in both."
        )
    seconds = [(first[what]["seconds"], second[what]["seconds"]) for what in shared]
    differences = [
        Difference(what, middle(pair[0]), middle(pair[1]), verdict)
        for what, pair, verdict in zip(shared, seconds, _verdicts(seconds), strict=True)
    ]
    return differences, [what for what in (*first, *second) if (what in first) != (what in second)]


def probability_if_alike(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the two-sided p-value of the exact Mann-Whitney test: how likely ranks as unequal as those of `ones` and
    `others` are if both come from the same distribution."""
    values = Counter([*ones, *others])
    doubled: dict[float, int] = {}  # twice the mid-rank, a whole number
    below = 0
    for value in sorted(values):
        doubled[value] = 2 * below + values[value] + 1
        below += values[value]
    # How many ways there are to choose so many values with this sum of doubled ranks.
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in ones)]
    for rank in (doubled[value] for value in values.elements()):
        for count in range(len(ones), 0, -1):
            for total, number in ways[count - 1].items():
                ways[count][total + rank] += number
    mean = len(ones) * (len(ones) + len(others) + 1)
    distance = abs(sum(doubled[value] for value in ones) - mean)
    extreme = sum(number for total, number in ways[-1].items() if abs(total - mean) >= distance)
    return extreme / comb(len(ones) + len(others), len(ones))


def _verdicts(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[Verdict]:
    """Return the verdict of each (before, after), corrected for their number."""
    verdicts: list[Verdict] = [
        "the same within noise" if min(map(len, pair)) >= LEAST_ROUNDS else "too few rounds" for pair in pairs
    ]
    tested = [number for number, verdict in enumerate(verdicts) if verdict != "too few rounds"]
    found = sorted((probability_if_alike(*pairs[number]), number) for number in tested)
    for place, (probability, number) in enumerate(found):
        if probability > _SIGNIFICANCE / (len(found) - place):
            break
        (_, before, _), (_, after, _) = map(middle, pairs[number])
        if before != after:
            verdicts[number] = "faster" if after < before else "slower"
    return verdicts


def _what(row: dict[str, Any], result: dict[str, Any]) -> str:
    """Return what tells one row of a result from all others."""
    if result["kind"] == "train":
        ranks = "1 rank" if row["ranks"] == 1 else f"{row['ranks']} ranks"
        return f"{result['target']}, {name_of(row)}, {ranks}"
    return f"{row['operation']} of {row['bytes']:,} B, {name_of(row)}, {result['ranks']} ranks"
