"""Step time with unitrain, compared with a hand-written loop on the same library.

Three loops take turns, in a new order in every round: a hand-written loop with a library (torch's
DistributedDataParallel or Horovod's DistributedOptimizer, with default settings), a hand-written loop on unitrain's
backend, and the Trainer. The loop without unitrain runs in separate processes, to isolate it from unitrain's settings.
During a turn, the ranks that do not take part in it are suspended. All loops index the same tensors in the same way, so
they differ only by unitrain's overhead and savings. The table shows the ratio of the step times without and with
unitrain in the same round. Above 1, unitrain is faster.

    python benchmarks/step_overhead.py            # starts its own ranks; writes benchmarks/results/step_overhead.*
"""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from loops import pin_to_core, take_turn
from rich.progress import track
from tables import Results, Seconds, header_lines, options, ratio, save_results

from unitrain.testing import RankGroup

BY_HAND = {"ddp": "DistributedDataParallel", "horovod": "hvd.DistributedOptimizer"}
OURS = ("own loop", "Trainer")
# Horovod's defaults for the settings that unitrain changes.
HOROVOD_DEFAULTS = {
    "HOROVOD_CYCLE_TIME": "1",
    "HOROVOD_IDLE_CYCLE_TIME": "0",
    "HOROVOD_FUSION_THRESHOLD": str(128 << 20),
}


@dataclass
class SuspendedRanks:
    """Ranks that are suspended except during their turn, because idle ranks of Horovod use CPU time."""

    group: RankGroup

    def __post_init__(self) -> None:
        self._pids = self.group.run(pin_to_core)
        self._signal(signal.SIGSTOP)

    def take_turn(self, loop: str, model: str, round_number: int) -> float:
        """Return the seconds per step of the slowest rank."""
        return max(self.call(take_turn, loop, model, round_number))

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(backend, *args)` on every rank during a turn of these ranks, and return the results."""
        self._signal(signal.SIGCONT)
        try:
            return self.group.run(function, *args, timeout_seconds=300)
        finally:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, signum: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, signum)


def measure(backend: str, models: Sequence[str], rounds: int, ranks: int) -> dict[str, Seconds]:
    """For each model, return the seconds per step of each loop in each round."""
    results: dict[str, Seconds] = {}
    with (
        RankGroup(backend, ranks, spawn=True, variables=HOROVOD_DEFAULTS) as plain,
        RankGroup(backend, ranks, spawn=True) as own,
    ):
        by_hand, ours = SuspendedRanks(plain), SuspendedRanks(own)
        loops = [(BY_HAND[backend], by_hand), *((loop, ours) for loop in OURS)]
        for model in models:
            seconds: Seconds = {loop: [] for loop, _ in loops}
            # The first round warms up.
            for round_number in track(range(rounds + 1), f"{backend}, {model}"):
                for loop, contestant in loops[round_number % 3 :] + loops[: round_number % 3]:
                    taken = contestant.take_turn(loop, model, round_number)
                    if round_number:
                        seconds[loop].append(taken)
            results[model] = seconds
        by_hand.resume()
        ours.resume()
    return results


def table(results: Results, ranks: int) -> list[str]:
    header = ["backend", "model", "against", *OURS, "by hand, ms per step", "rounds"]
    quoted = (
        "Time of the hand-written loop, divided by that of unitrain in the same round; above 1, unitrain is faster."
    )
    lines = header_lines(
        "Time of a training step, compared with a hand-written loop", quoted, "make bench", ranks, header
    )
    for backend, models in results.items():
        for model, seconds in models.items():
            hand = seconds[BY_HAND[backend]]
            shown = [ratio(hand, seconds[loop]) for loop in OURS]
            lines.append(
                f"| {backend} | {model} | {BY_HAND[backend]} | {' | '.join(shown)} "
                f"| {statistics.median(hand) * 1000:.2f} | {len(hand)} |"
            )
    return lines


@click.command()
@options(rounds=40)
def main(backends: list[str], models: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the table and save it."""
    # Handle SIGTERM like Ctrl-C: suspended ranks must be resumed before they can exit.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = {backend: measure(backend, models, rounds, ranks) for backend in backends}
    save_results(table(results, ranks), "step_overhead", output, ranks=ranks, seconds_per_step=results)


if __name__ == "__main__":
    main()
