"""Division of a sequence of blocks into stages that minimizes the maximum cost of a stage."""

from __future__ import annotations

import math
from collections.abc import Callable

# Cost of a stage, as a function of (stage, first block, last block + 1). An infinite cost excludes the stage.
StageCost = Callable[[int, int, int], float]


def partition(blocks: int, stages: int, cost: StageCost) -> list[int] | None:
    """Return the number of blocks per stage, or None if every division has a stage with infinite cost.

    Stages are contiguous and not empty. The division minimizes the maximum cost and, secondarily, the sum of the
    squared costs. The result depends only on the arguments. `cost` is called O(stages * blocks ** 2) times.
    """
    costs = {
        (stage, start, stop): cost(stage, start, stop)
        for stage in range(stages)
        for start in range(stage, blocks)
        for stop in range(start + 1, blocks + 1)
    }
    maximum, _ = _best_division(blocks, stages, costs, max)
    if not math.isfinite(maximum):
        return None
    squares = {key: stage_cost * stage_cost if stage_cost <= maximum else math.inf for key, stage_cost in costs.items()}
    return _best_division(blocks, stages, squares, lambda left, right: left + right)[1]


def _best_division(
    blocks: int,
    stages: int,
    costs: dict[tuple[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Return the minimum, over all divisions, of the costs combined by `combine`, and the blocks of each stage."""
    # best[stop]: the minimum for the first `stop` blocks in the stages so far, and the blocks of each of these stages.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        reached: dict[int, tuple[float, list[int]]] = {}
        for stop in range(stage + 1, blocks + 1):
            candidates = [
                (combine(value, costs[stage, start, stop]), [*counts, stop - start])
                for start, (value, counts) in best.items()
                if start < stop
            ]
            reached[stop] = min(candidates, key=lambda candidate: candidate[0])
        best = reached
    return best[blocks]
