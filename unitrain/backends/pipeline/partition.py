"""Division of a sequence of blocks into stages so that the maximum cost of a stage is minimal."""

from __future__ import annotations

import math
from collections.abc import Callable

# Cost of a stage, by (stage, first block, last block + 1). An infinite cost excludes that stage.
StageCost = Callable[[int, int, int], float]


def partition(blocks: int, stages: int, cost: StageCost) -> list[int] | None:
    """Return the number of blocks of each stage, or None if every division has a stage of infinite cost.

    Stages are contiguous and not empty. The maximum cost is minimal; among such divisions, the sum of the squared costs
    is minimal. The result depends on the arguments only. It takes O(stages * blocks ** 2) calls of `cost`.
    """
    costs = {
        (stage, start, stop): cost(stage, start, stop)
        for stage in range(stages)
        for start in range(stage, blocks)
        for stop in range(start + 1, blocks + 1)
    }
    maximum, _ = _best(blocks, stages, costs, max)
    if not math.isfinite(maximum):
        return None
    squares = {key: found * found if found <= maximum else math.inf for key, found in costs.items()}
    return _best(blocks, stages, squares, lambda one, other: one + other)[1]


def _best(
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
