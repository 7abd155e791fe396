"""Training on every set of ranks in turn: rounds in a new order each, until the time is spent."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unitrain import __version__
from unitrain.bench.contestants import Budget, Contestant
from unitrain.bench.results import PARTS
from unitrain.bench.sweep import machine
from unitrain.bench.training import TrainTurn, take_turn

_LEAST_ROUNDS = 3


def train_in_turns(
    contestants: Sequence[Contestant],
    target: str,
    settings: Mapping[str | None, Mapping[str, Any]],
    *,
    batch_size: int | None,
    steps: int,
    seconds: float,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Train `target` with each of `settings` (None is the plain one) on every contestant, for `steps` a turn.

    The first round, which warms up, is not kept. The result is plain data: "rows" with, round by round, the seconds of
    a step of the slowest rank, and the mean over ranks of each part of it.
    """
    turns: dict[tuple[int, str | None], list[list[TrainTurn]]] = {}
    shuffled = random.Random(0)
    budget = Budget(seconds, _LEAST_ROUNDS)
    number = 0
    while budget.next_round():
        tell(f"round {number}" if number else "warming up")
        for index in shuffled.sample(range(len(contestants)), len(contestants)):
            with contestants[index].awake():
                for setting, values in settings.items():
                    ranks = contestants[index].run(take_turn, target, values, batch_size, steps)
                    budget.spend(max(turn.whole for turn in ranks))
                    if number:
                        turns.setdefault((index, setting), []).append(ranks)
        number += 1
    rows = []
    for (index, setting), rounds in sorted(turns.items(), key=lambda item: (item[0][0], item[0][1] or "")):
        place = contestants[index].place
        rows.append(
            {
                "backend": place.backend,
                "transport": place.transport,
                "setting": setting,
                "ranks": place.ranks,
                "seconds": [max(turn.seconds for turn in ranks) for ranks in rounds],
                "samples": sum(turn.samples for turn in rounds[-1]),
                "parts": {
                    part: [sum(turn.parts[part] for turn in ranks) / len(ranks) for ranks in rounds] for part in PARTS
                },
                "memory": max(turn.memory for ranks in rounds for turn in ranks),
            }
        )
    return {
        "kind": "train",
        "unitrain": __version__,
        "machine": machine(),
        "device": contestants[0].place.device,
        "parameters": next(iter(turns.values()))[0][0].parameters,
        "steps": steps,
        "rows": rows,
    }
