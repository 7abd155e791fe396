"""Measures ways of training in turns on the same ranks, so that system noise affects all of them equally."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from loops import pin_to_core
from rich.progress import track
from tables import Seconds

from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

Turn = Callable[[Backend, str, str, int], float]


def measure(
    backend: str, models: Sequence[str], ways: Sequence[str], turn: Turn, rounds: int, ranks: int
) -> dict[str, Seconds]:
    """For each model, return the seconds that `turn(backend, way, model, round)` returned on the slowest rank in each
    round. The ways run in a new order in every round."""
    results: dict[str, Seconds] = {}
    shuffled = random.Random(0)
    with RankGroup(backend, ranks, spawn=True) as group:
        group.run(pin_to_core)
        for model in models:
            seconds: Seconds = {way: [] for way in ways}
            for number in track(range(rounds + 1), f"{backend}, {model}"):  # the first round warms up
                for way in shuffled.sample(list(ways), len(ways)):
                    taken = max(group.run(turn, way, model, number, timeout_seconds=300))
                    if number:
                        seconds[way].append(taken)
            results[model] = seconds
    return results
