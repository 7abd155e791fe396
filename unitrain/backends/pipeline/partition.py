"""Division of a sequence of blocks into stages that minimizes the maximum cost of a stage."""

from __future__ import annotations

import math
from collections.abc import Callable

# Cost of a stage, as a function of (stage, first block, last block + 1). A stage with infinite cost is not allowed.
StageCost = Callable[[int, int, int], float]


def partition(num_blocks: int, num_stages: int, cost: StageCost) -> list[int] | None:
    """Return the number of blocks of each stage, or None if every division has a stage with infinite cost.

    Stages are contiguous and not empty. The division minimizes the maximum cost and, secondarily, the sum of the
    squared costs. The result depends only on the arguments. `cost` is called O(num_stages * num_blocks ** 2) times.
    """
    costs = {
        (stage, start, stop): cost(stage, start, stop)
        for stage in range(num_stages)
        for start in range(stage, num_blocks)
        for stop in range(start + 1, num_blocks + 1)
    }
    maximum, _ = _best_division(num_blocks, num_stages, costs, max)
    if not math.isfinite(maximum):
        return None
    squares = {key: stage_cost * stage_cost if stage_cost <= maximum else math.inf for key, stage_cost in costs.items()}
    return _best_division(num_blocks, num_stages, squares, lambda left, right: left + right)[1]


def _best_division(
    num_blocks: int,
    num_stages: int,
    costs: dict[tuple[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Return the minimum, over all divisions, of the costs combined by `combine`, and the number of blocks of each
    stage."""
    # best[stop]: the minimum for the first `stop` blocks in the stages so far, and the number of blocks of each stage.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(num_stages):
        reached: dict[int, tuple[float, list[int]]] = {}
        for stop in range(stage + 1, num_blocks + 1):
            candidates = [
                (combine(value, costs[stage, start, stop]), [*counts, stop - start])
                for start, (value, counts) in best.items()
                if start < stop
            ]
            reached[stop] = min(candidates, key=lambda candidate: candidate[0])
        best = reached
    return best[num_blocks]
