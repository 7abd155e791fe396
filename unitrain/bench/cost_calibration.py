"""alpha and beta of a network, from collectives that were measured on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from unitrain.bench.cost_model import Cost, Network
from unitrain.bench.results import middle, name_of
from unitrain.errors import ReportError


@dataclass(frozen=True)
class Point:
    """An allreduce that was measured, and how long the fitted model says that it takes."""

    size: int
    measured: float
    predicted: float

    @property
    def off(self) -> float:
        """How far the prediction is off, as a share of what was measured; above 0 it is too long."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Calibration:
    """A network as it fits what was measured, and the points that it was fitted to."""

    network: Network
    points: Sequence[Point]

    @property
    def typically_off(self) -> float:
        """The median of how far the points are off, whether too long or too short."""
        return median(abs(point.off) for point in self.points)

    @property
    def most_off(self) -> float:
        """How far the worst point is off."""
        return max(abs(point.off) for point in self.points)


def calibrate(result: dict[str, Any], name: str, cost: Cost) -> Calibration:
    """Fit alpha and beta of an allreduce's `cost` to the allreduces of `name` in a result of `bench collectives`.

    Least squares of the relative differences, or the few large arrays would decide alone; neither can be negative. What
    adding up costs is part of beta, as the two cannot be told apart. Raises ReportError for fewer than two sizes.
    """
    rows = [row for row in result["rows"] if name_of(row) == name and row["operation"] == "allreduce"]
    ranks = result["ranks"]
    sizes = [row["bytes"] for row in rows]
    if len(set(sizes)) < 2:
        raise ReportError(
            f"alpha and beta follow from allreduces of two sizes at least, and {name} has {len(set(sizes))}. "
            "Measure with: unitrain bench collectives --operations allreduce --json FILE"
        )
    measured = np.array([middle(row["seconds"])[1] for row in rows])
    # Costs are linear in alpha and beta, so that one of each tells the coefficients.
    unit = [Network(alpha=1, beta=0), Network(alpha=0, beta=1)]
    coefficients = np.array([[cost(ranks, size, one) for one in unit] for size in sizes])
    alpha, beta = _positive_least_squares(coefficients / measured[:, None])
    network = Network(alpha=alpha, beta=beta)
    points = [
        Point(size, float(taken), cost(ranks, size, network)) for size, taken in zip(sizes, measured, strict=True)
    ]
    return Calibration(network, points)


def _positive_least_squares(columns: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return x >= 0 of two elements for which columns x is nearest to ones."""
    ones = np.ones(len(columns))
    both = np.linalg.lstsq(columns, ones, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    candidates = []
    for index in (0, 1):
        only = columns[:, index]
        x = np.zeros(2)
        x[index] = max(0.0, only @ ones / (only @ only))
        candidates.append(x)
    best = min(candidates, key=lambda x: float(((columns @ x - ones) ** 2).sum()))
    return float(best[0]), float(best[1])
