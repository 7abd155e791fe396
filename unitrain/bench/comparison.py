"""Compare two results of the same kind, and test which differences are significant.

The test is a two-sided Mann-Whitney test on the rounds of each row (Mann and Whitney 1947, exact distribution with
mid-ranks for ties) with Holm's correction (1979) for the number of rows. If nothing differs, the probability of
reporting any row as faster or slower is at most 5%. The test cannot distinguish a change of the program from a change
of the machine between the measurements, so run both measurements in the same session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, Literal

from unitrain.bench.results import quartiles, row_name
from unitrain.errors import ReportError

Verdict = Literal["faster", "slower", "the same within noise", "too few rounds"]

MIN_ROUNDS = 8
_SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Difference:
    """A measurement that both results contain: quartiles of the seconds (lower, median, upper) per result, and the
    verdict."""

    name: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    verdict: Verdict

    @property
    def speedup(self) -> float:
        """The median before, divided by the median after."""
        return self.before[1] / self.after[1]


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[Difference], list[str]]:
    """Return the differences of the shared measurements, and the names of measurements in only one result.

    With fewer than `MIN_ROUNDS` rounds in either result, the verdict is "too few rounds". Raises ReportError if the
    results are of different kinds or share no measurement.
    """
    if before["kind"] != after["kind"]:
        raise ReportError(
            f"The first result is of bench {before['kind']} and the second of bench {after['kind']}. They cannot be "
            f"compared. Create the second with: unitrain bench {before['kind']} --json FILE"
        )
    first, second = ({_measurement_name(row, result): row for row in result["rows"]} for result in (before, after))
    shared = [name for name in first if name in second]
    if not shared:
        raise ReportError(
            f"The results share no measurement: one has {next(iter(first), 'nothing')}, the other "
            f"{next(iter(second), 'nothing')}. Measure the same backends, ranks and sizes in both."
        )
    seconds = [(first[name]["seconds"], second[name]["seconds"]) for name in shared]
    differences = [
        Difference(name, quartiles(pair[0]), quartiles(pair[1]), verdict)
        for name, pair, verdict in zip(shared, seconds, _verdicts(seconds), strict=True)
    ]
    return differences, [name for name in (*first, *second) if (name in first) != (name in second)]


def mann_whitney_p_value(first_values: Sequence[float], second_values: Sequence[float]) -> float:
    """Return the two-sided p-value of the exact Mann-Whitney test.

    The p-value is the probability of a difference at least as large if both samples have the same distribution.
    """
    occurrences = Counter([*first_values, *second_values])
    doubled: dict[float, int] = {}  # twice the mid-rank, which is an integer
    below = 0
    for value in sorted(occurrences):
        doubled[value] = 2 * below + occurrences[value] + 1
        below += occurrences[value]
    # ways[count][total]: the number of ways to choose `count` values with a sum of doubled ranks of `total`.
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in first_values)]
    for rank in (doubled[value] for value in occurrences.elements()):
        for count in range(len(first_values), 0, -1):
            for total, num_ways in ways[count - 1].items():
                ways[count][total + rank] += num_ways
    mean = len(first_values) * (len(first_values) + len(second_values) + 1)
    distance = abs(sum(doubled[value] for value in first_values) - mean)
    num_extreme = sum(num_ways for total, num_ways in ways[-1].items() if abs(total - mean) >= distance)
    return num_extreme / comb(len(first_values) + len(second_values), len(first_values))


def _verdicts(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[Verdict]:
    """Return one verdict per (before, after) pair, with Holm's correction for the number of pairs."""
    verdicts: list[Verdict] = [
        "the same within noise" if min(map(len, pair)) >= MIN_ROUNDS else "too few rounds" for pair in pairs
    ]
    tested = [index for index, verdict in enumerate(verdicts) if verdict != "too few rounds"]
    probabilities = sorted((mann_whitney_p_value(*pairs[index]), index) for index in tested)
    for position, (probability, index) in enumerate(probabilities):
        if probability > _SIGNIFICANCE / (len(probabilities) - position):
            break
        (_, before, _), (_, after, _) = map(quartiles, pairs[index])
        if before != after:
            verdicts[index] = "faster" if after < before else "slower"
    return verdicts


def _measurement_name(row: dict[str, Any], result: dict[str, Any]) -> str:
    """Return a unique name for a row of a result."""
    if result["kind"] == "train":
        ranks = "1 rank" if row["ranks"] == 1 else f"{row['ranks']} ranks"
        return f"{result.get('target', 'model')}, {row_name(row)}, {ranks}"
    return f"{row['operation']} of {row['bytes']:,} B, {row_name(row)}, {result['ranks']} ranks"
