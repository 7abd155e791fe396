"""Two results of the same kind side by side, and whether they differ by more than their rounds do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from unitrain.bench.results import middle, name_of
from unitrain.errors import ReportError

Verdict = Literal["faster", "slower", "the same within noise"]


@dataclass(frozen=True)
class Difference:
    """One measurement in both results: lower quartile, median and upper quartile of the seconds in each."""

    what: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]

    @property
    def ratio(self) -> float:
        """The time before / the time after: above 1, the second result is faster."""
        return self.before[1] / self.after[1]

    @property
    def verdict(self) -> Verdict:
        """Two medians differ where each lies outside of the middle half of the other's rounds."""
        (low, median, high), (low_after, median_after, high_after) = self.before, self.after
        if low <= median_after <= high or low_after <= median <= high_after:
            return "the same within noise"
        return "faster" if median_after < median else "slower"


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[Difference], list[str]]:
    """Return what is in both, in the order of the first, and the names of what is in one only.

    Raises ReportError for results of two kinds, or with nothing in common.
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
    differences = [Difference(what, middle(first[what]["seconds"]), middle(second[what]["seconds"])) for what in shared]
    return differences, [what for what in (*first, *second) if (what in first) != (what in second)]


def _what(row: dict[str, Any], result: dict[str, Any]) -> str:
    """Return what tells one row of a result from all others."""
    if result["kind"] == "train":
        ranks = "1 rank" if row["ranks"] == 1 else f"{row['ranks']} ranks"
        return f"{result['target']}, {name_of(row)}, {ranks}"
    return f"{row['operation']} of {row['bytes']:,} B, {name_of(row)}, {result['ranks']} ranks"
