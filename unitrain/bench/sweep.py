"""The sweep over collectives and sizes: rounds in which every set of ranks has its turn, in a new order each."""

from __future__ import annotations

import math
import platform
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unitrain import __version__
from unitrain.bench.collectives import FLOORS, actual_bytes, take_turn
from unitrain.bench.contestants import Budget, Contestant

# The turns of a round take about so long each, so that small collectives are called often enough to be timed.
_TURN_SECONDS = 0.05
_MOST_CALLS = 200
_LEAST_ROUNDS = 3


def sweep(
    contestants: Sequence[Contestant],
    operations: Sequence[str],
    sizes: Sequence[int],
    seconds: float,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Measure every operation at every size on every contestant, in rounds until about `seconds` are spent.

    The first round, which is not kept, finds out how often a call fits into a turn. The result is plain data: "rows"
    with the seconds per call of the slowest rank, round by round, and "floors" alike, which the first contestant takes.
    """
    ranks = contestants[0].place.ranks
    found: dict[tuple[int, str, int], list[float]] = {}
    calls: dict[tuple[int, str, int], int] = {}
    shuffled = random.Random(0)  # alike on all ranks
    budget = Budget(seconds, _LEAST_ROUNDS)
    number = 0
    while budget.next_round():
        tell(f"round {number}" if number else "warming up")
        for index in shuffled.sample(range(len(contestants)), len(contestants)):
            contestant = contestants[index]
            with contestant.awake():
                for operation in (*operations, *(FLOORS if index == 0 else ())):
                    for size in sizes:
                        key = (index, operation, size)
                        turns = contestant.run(take_turn, operation, size, calls.get(key, 1))
                        budget.spend(max(turn.whole for turn in turns))
                        if any(turn.seconds is None for turn in turns):
                            continue
                        taken = max(turn.seconds for turn in turns)
                        if number:
                            found.setdefault(key, []).append(taken)
                        else:
                            calls[key] = max(1, min(_MOST_CALLS, math.ceil(_TURN_SECONDS / taken)))
        number += 1
    return {
        "kind": "collectives",
        "unitrain": __version__,
        "machine": machine(),
        "ranks": ranks,
        "num_nodes": contestants[0].place.num_nodes,
        "device": contestants[0].place.device,
        "rows": [
            {
                "backend": contestants[index].place.backend,
                "transport": contestants[index].place.transport,
                "operation": operation,
                "bytes": actual_bytes(size, ranks),
                "seconds": taken,
            }
            for index in range(len(contestants))
            for operation in operations
            for size in sizes
            if (taken := found.get((index, operation, size)))
        ],
        "floors": [
            {"name": name, "bytes": actual_bytes(size, ranks), "seconds": taken}
            for name in FLOORS
            for size in sizes
            if (taken := found.get((0, name, size)))
        ],
    }


def machine() -> dict[str, Any]:
    """Return what a reader must know of this host to judge its figures."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": torch.multiprocessing.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }
