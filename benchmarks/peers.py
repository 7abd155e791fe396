"""Step time of unitrain and of comparable libraries.

All libraries train the same model on the same samples, with the same optimizer and number of ranks. Each library runs
in separate processes, to isolate its settings. The libraries take turns, in a new order in every round. During a turn,
all other processes are suspended. All libraries must reach the same loss, except the Trainer, which uses a different
sample order. The table shows the step time relative to unitrain's Trainer on the same backend in the same round. Above
1, the Trainer is faster.

    pip install '.[peers]'
    python benchmarks/peers.py            # starts the ranks; writes benchmarks/results/peers.*
"""

from __future__ import annotations

import importlib.util
import math
import random
import signal
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click
from peer_loops import take_turn
from rich.progress import track
from step_overhead import HOROVOD_DEFAULTS, SuspendedRanks
from tables import Results, Seconds, header_lines, options, ratio, save_results

from unitrain.testing import RankGroup

TRAINER = "Trainer"
# The package that provides each loop on each backend, or "by hand". Loops of the same package share their processes.
PACKAGES: dict[str, dict[str, str]] = {
    "ddp": {
        "DistributedDataParallel": "by hand",
        "Lightning Fabric": "lightning",
        "Lightning Trainer": "lightning",
        "Accelerate": "accelerate",
        "ignite": "ignite",
        "own loop": "unitrain",
        TRAINER: "unitrain",
    },
    "horovod": {
        "hvd.DistributedOptimizer": "by hand",
        "ignite": "ignite",
        "own loop": "unitrain",
        TRAINER: "unitrain",
    },
}
# The tolerance exceeds the rounding error of one operation, because the summation order differs.
_TOLERANCE = 1e-3


def is_installed(package: str) -> bool:
    """Return whether `package`, a value in PACKAGES, is installed."""
    return package == "by hand" or importlib.util.find_spec(package) is not None


def measure(backend: str, models: Sequence[str], rounds: int, ranks: int) -> dict[str, Seconds]:
    """For each model, return the seconds per step in each round, for each loop whose package is installed."""
    package_by_loop = {loop: package for loop, package in PACKAGES[backend].items() if is_installed(package)}
    results: dict[str, Seconds] = {}
    shuffled = random.Random(0)
    with ExitStack() as stack:
        contestants: dict[str, SuspendedRanks] = {}
        for package in dict.fromkeys(package_by_loop.values()):
            variables = {} if package == "unitrain" else HOROVOD_DEFAULTS
            contestants[package] = SuspendedRanks(
                stack.enter_context(RankGroup(backend, ranks, spawn=True, variables=variables))
            )
            stack.callback(contestants[package].resume)
        for model in models:
            seconds: Seconds = {loop: [] for loop in package_by_loop}
            for round_number in track(range(rounds + 1), f"{backend}, {model}"):  # the first round warms up
                losses = {}
                for loop in shuffled.sample(list(package_by_loop), len(package_by_loop)):
                    turn_results = contestants[package_by_loop[loop]].call(take_turn, loop, model, round_number)
                    losses[loop] = turn_results[0][1]
                    if round_number:
                        seconds[loop].append(max(taken for taken, _ in turn_results))
                _require_equal_losses(losses)
            results[model] = seconds
    return results


def _require_equal_losses(losses: dict[str, float]) -> None:
    """Raise RuntimeError if the losses of the loops differ, because then the computations differ. The Trainer is not
    compared, because it has a different sample order."""
    compared = {loop: loss for loop, loss in losses.items() if loop != TRAINER}
    least, most = min(compared.values()), max(compared.values())
    if not math.isclose(least, most, rel_tol=_TOLERANCE):
        raise RuntimeError(f"Not all loops have the same loss: {compared}.")


def table(results: Results, ranks: int) -> list[str]:
    """Return the table, which has a line for each loop on each backend, including libraries that are not installed."""
    models = list(next(iter(results.values())))
    quoted = (
        "Time of a step, divided by that of the Trainer on the same backend in the same round; above 1, the Trainer is "
        "faster."
    )
    header = [
        "backend",
        "library",
        *(word for model in models for word in (f"{model}, ms per step", f"{model} / Trainer")),
    ]
    lines = header_lines("Time of a step in other libraries", quoted, "python benchmarks/peers.py", ranks, header)
    for backend, measured in results.items():
        for loop, package in PACKAGES[backend].items():
            name = f"unitrain, {loop}" if package == "unitrain" else loop
            cells = []
            for model in models:
                seconds = measured[model]
                if loop not in seconds:
                    cells += ["not installed", ""]
                    continue
                against = "1" if loop == TRAINER else ratio(seconds[loop], seconds[TRAINER])
                cells += [f"{statistics.median(seconds[loop]) * 1000:.2f}", against]
            lines.append(f"| {' | '.join([backend, name, *cells])} |")
    return lines


@click.command()
@options(rounds=20)
def main(backends: list[str], models: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the table and save it."""
    # Handle SIGTERM like Ctrl-C: suspended ranks must be resumed before they can exit.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = {backend: measure(backend, models, rounds, ranks) for backend in backends}
    versions = {
        package: _version(package)
        for packages in PACKAGES.values()
        for package in packages.values()
        if package != "by hand"
    }
    lines = table(results, ranks)
    lines += ["", ", ".join(f"{package} {version}" for package, version in versions.items()) + "."]
    save_results(lines, "peers", output, ranks=ranks, versions=versions, seconds_per_step=results)


def _version(package: str) -> str:
    if not is_installed(package):
        return "not installed"
    return str(importlib.import_module(package).__version__)


if __name__ == "__main__":
    main()
