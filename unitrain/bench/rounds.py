"""Measure several sets of ranks in rounds. Each round runs every set once, in a new random order."""

from __future__ import annotations

import math
import platform
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from unitrain import __version__
from unitrain.bench import collectives, training
from unitrain.bench.collectives import (
    GRADIENT_ALLGATHER,
    GRADIENT_COLLECTIVES,
    LOWER_BOUNDS,
    MAX_GRADIENT_ALLGATHER_BYTES,
    round_up_bytes,
)
from unitrain.bench.rank_sets import RankSet
from unitrain.bench.results import PHASES
from unitrain.bench.training import TrainTurnResult

_MIN_ROUNDS = 3
# Target duration of a turn: small collectives are called several times per turn.
_TURN_SECONDS = 0.05
_MAX_CALLS = 200


def measure_collectives(
    rank_sets: Sequence[RankSet],
    operations: Sequence[str],
    sizes: Sequence[int],
    seconds: float,
    report_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Time every operation with every message size (bytes) on every set of ranks, for about `seconds`.

    The warm-up round is not recorded; it determines the number of calls per turn. The result is plain data: "rows" with
    the slowest rank's seconds per call in each round, and the same for the lower bounds ("floors"), measured on the
    first set. If `operations` contains "allreduce", the collectives with which gradients are reduced are also measured
    ("gradients").
    """
    ranks = rank_sets[0].info.ranks
    cases = [(operation, size) for operation in operations for size in sizes]
    gradient_cases = [
        (operation, size)
        for operation in GRADIENT_COLLECTIVES
        for size in sizes
        if "allreduce" in operations and (operation != GRADIENT_ALLGATHER or size <= MAX_GRADIENT_ALLGATHER_BYTES)
    ]
    lower_bounds = [(name, size) for name in LOWER_BOUNDS for size in sizes]
    seconds_by_case: dict[tuple[int, str, int], list[float]] = {}
    calls_by_case: dict[tuple[int, str, int], int] = {}
    rounds = _Rounds(len(rank_sets), seconds, report_progress)
    # A single set of launched ranks keeps its backend. With several sets, each turn starts its own.
    with rank_sets[0].activate() if len(rank_sets) == 1 else nullcontext():
        for round_index, index in rounds:
            rank_set = rank_sets[index]
            with rank_set.activate():
                for operation, size in [*cases, *gradient_cases, *(lower_bounds if index == 0 else ())]:
                    key = (index, operation, size)
                    turns = rank_set.run(collectives.take_turn, operation, size, calls_by_case.get(key, 1))
                    rounds.subtract_turn(max(turn.turn_seconds for turn in turns))
                    if any(turn.seconds is None for turn in turns):
                        continue
                    slowest = max(turn.seconds for turn in turns)
                    if round_index:
                        seconds_by_case.setdefault(key, []).append(slowest)
                    else:
                        calls_by_case[key] = max(1, min(_MAX_CALLS, math.ceil(_TURN_SECONDS / slowest)))

    def find_rows(cases: list[tuple[str, int]]) -> list[dict[str, Any]]:
        return [
            {
                "backend": rank_set.info.backend,
                "transport": rank_set.info.transport,
                "max_in_flight": rank_set.info.max_in_flight,
                "operation": GRADIENT_COLLECTIVES.get(operation, operation),
                "bytes": round_up_bytes(size, ranks),
                "seconds": round_seconds,
            }
            for index, rank_set in enumerate(rank_sets)
            for operation, size in cases
            if (round_seconds := seconds_by_case.get((index, operation, size)))
        ]

    return {
        "kind": "collectives",
        "unitrain": __version__,
        "machine": describe_machine(),
        "ranks": ranks,
        "num_nodes": rank_sets[0].info.num_nodes,
        "device": rank_sets[0].info.device,
        "rows": find_rows(cases),
        "gradients": find_rows(gradient_cases),
        "floors": [
            {"name": name, "bytes": round_up_bytes(size, ranks), "seconds": round_seconds}
            for name, size in lower_bounds
            if (round_seconds := seconds_by_case.get((0, name, size)))
        ],
    }


def measure_training(
    rank_sets: Sequence[RankSet],
    target: str,
    settings: Mapping[str | None, Mapping[str, Any]],
    *,
    batch_size: int | None,
    steps: int,
    seconds: float,
    report_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Train `target` with each of `settings` on every set of ranks, `steps` steps per turn, for about `seconds`.

    In `settings`, the key None stands for the unchanged configuration. The warm-up round is not recorded. The result is
    plain data: "rows" with the slowest rank's seconds per step in each round, and the mean over ranks for each phase.
    """
    rounds_by_case: dict[tuple[int, str | None], list[list[TrainTurnResult]]] = {}  # one turn per rank in each round
    rounds = _Rounds(len(rank_sets), seconds, report_progress)
    for round_index, index in rounds:
        with rank_sets[index].activate():
            for setting, values in settings.items():
                turns = rank_sets[index].run(training.take_turn, target, values, batch_size, steps)
                rounds.subtract_turn(max(turn.turn_seconds for turn in turns))
                if round_index:
                    rounds_by_case.setdefault((index, setting), []).append(turns)
    rows = []
    for (index, setting), turns_by_round in sorted(
        rounds_by_case.items(), key=lambda item: (item[0][0], item[0][1] or "")
    ):
        info = rank_sets[index].info
        rows.append(
            {
                "backend": info.backend,
                "transport": info.transport,
                "setting": setting,
                "ranks": info.ranks,
                "seconds": [max(turn.seconds for turn in turns) for turns in turns_by_round],
                "samples": sum(turn.samples for turn in turns_by_round[-1]),
                "phases": {
                    phase: [sum(turn.phases[phase] for turn in turns) / len(turns) for turns in turns_by_round]
                    for phase in PHASES
                },
                "memory": max(turn.memory_bytes for turns in turns_by_round for turn in turns),
            }
        )
    return {
        "kind": "train",
        "unitrain": __version__,
        "machine": describe_machine(),
        "device": rank_sets[0].info.device,
        "parameters": next(iter(rounds_by_case.values()))[0][0].parameters,
        "steps": steps,
        "rows": rows,
    }


def describe_machine() -> dict[str, Any]:
    """Return the software versions and hardware of this host."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": torch.multiprocessing.cpu_count(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


class _Rounds:
    """Iterates over (round, index of a rank set) for a warm-up round 0 and at least three further rounds.

    It adds rounds until the total duration of the turns reaches `seconds`. `subtract_turn` subtracts the duration of a
    turn from the remaining time. With `LaunchedRanks`, every rank executes this loop. All ranks make the same
    decisions, because the durations are gathered from all ranks and the random order is seeded.
    """

    def __init__(self, num_rank_sets: int, seconds: float, report_progress: Callable[[str], None]) -> None:
        self._num_rank_sets, self._remaining_seconds, self._report = num_rank_sets, seconds, report_progress
        self._random = random.Random(0)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        round_index = 0
        while round_index <= _MIN_ROUNDS or self._remaining_seconds > 0:
            self._report(f"round {round_index}" if round_index else "warm-up")
            for index in self._random.sample(range(self._num_rank_sets), self._num_rank_sets):
                yield round_index, index
            round_index += 1

    def subtract_turn(self, seconds: float) -> None:
        """Subtract the duration of a turn from the remaining time."""
        self._remaining_seconds -= seconds
