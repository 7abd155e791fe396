"""Measure variants, such as training loops, in turns on the same ranks, so that system noise affects all equally."""

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
    backend: str, models: Sequence[str], variants: Sequence[str], turn: Turn, rounds: int, ranks: int
) -> dict[str, Seconds]:
    """For each model, return the seconds that `turn(backend, variant, model, round_number)` returned on the slowest
    rank in each round. The variants run in a new order in every round."""
    results: dict[str, Seconds] = {}
    shuffled = random.Random(0)
    with RankGroup(backend, ranks, spawn=True) as group:
        group.run(pin_to_core)
        for model in models:
            seconds: Seconds = {variant: [] for variant in variants}
            for round_number in track(range(rounds + 1), f"{backend}, {model}"):  # the first round warms up
                for variant in shuffled.sample(list(variants), len(variants)):
                    taken = max(group.run(turn, variant, model, round_number, timeout_seconds=300))
                    if round_number:
                        seconds[variant].append(taken)
            results[model] = seconds
    return results
