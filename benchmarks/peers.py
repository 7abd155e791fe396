"""A training step in every library that people would use instead of unitrain, and in unitrain, side by side.

The same model, samples, optimizer and number of ranks. Each library has processes of its own, so that nothing another
one sets up helps or harms it; who does not have the turn is stopped; the order is new every round. Every way must come
to the same loss, but for the Trainer, whose order of samples is its own. Quoted is the time of a step / that of
unitrain's Trainer on the same backend in the same round: above 1, the Trainer is faster.

    pip install '.[peers]'
    python benchmarks/peers.py            # starts its own ranks; writes benchmarks/results/peers.*
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
from step_overhead import HOROVOD_DEFAULTS, Contestant
from tables import Results, Seconds, frame, keep, options, ratio

from unitrain.testing import RankGroup

TRAINER = "Trainer"
# Who brings each way on each backend: its package, or what it is run by. Ways of the same owner share their processes.
OWNERS: dict[str, dict[str, str]] = {
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
# Beyond rounding: another order of additions.
_TOLERANCE = 1e-3


def is_there(owner: str) -> bool:
    """Tell whether what brings a way is installed."""
    return owner == "by hand" or importlib.util.find_spec(owner) is not None


def measure(backend: str, models: Sequence[str], rounds: int, ranks: int) -> dict[str, Seconds]:
    """Return, for each model, the seconds per step of each way that is installed, round by round."""
    ways = {way: owner for way, owner in OWNERS[backend].items() if is_there(owner)}
    results: dict[str, Seconds] = {}
    shuffled = random.Random(0)
    with ExitStack() as stack:
        contestants: dict[str, Contestant] = {}
        for owner in dict.fromkeys(ways.values()):
            variables = {} if owner == "unitrain" else HOROVOD_DEFAULTS
            contestants[owner] = Contestant(
                stack.enter_context(RankGroup(backend, ranks, spawn=True, variables=variables))
            )
            stack.callback(contestants[owner].resume)
        for model in models:
            seconds: Seconds = {way: [] for way in ways}
            for number in track(range(rounds + 1), f"{backend}, {model}"):  # the first round warms up
                losses = {}
                for way in shuffled.sample(list(ways), len(ways)):
                    told = contestants[ways[way]].call(take_turn, way, model, number)
                    losses[way] = told[0][1]
                    if number:
                        seconds[way].append(max(taken for taken, _ in told))
                _check_alike(losses)
            results[model] = seconds
    return results


def _check_alike(losses: dict[str, float]) -> None:
    """Raise RuntimeError where a way comes to another loss than the others: it does not do the same. Only the Trainer
    takes the samples in an order of its own."""
    compared = {way: loss for way, loss in losses.items() if way != TRAINER}
    least, most = min(compared.values()), max(compared.values())
    if not math.isclose(least, most, rel_tol=_TOLERANCE):
        raise RuntimeError(f"Not all ways come to the same loss: {compared}.")


def table(results: Results, ranks: int) -> list[str]:
    """Return the table: a line for each way on each backend, also of those that are not installed."""
    models = list(next(iter(results.values())))
    quoted = "Time of a step / that of unitrain's Trainer on the same backend in the same round: above 1, it is faster."
    header = ["backend", "way", *(word for model in models for word in (f"{model}, ms per step", f"{model} / Trainer"))]
    lines = frame("A step in other libraries", quoted, "python benchmarks/peers.py", ranks, header)
    for backend, measured in results.items():
        for way, owner in OWNERS[backend].items():
            name = f"unitrain, {way}" if owner == "unitrain" else way
            cells = []
            for model in models:
                seconds = measured[model]
                if way not in seconds:
                    cells += ["not installed", ""]
                    continue
                against = "1" if way == TRAINER else ratio(seconds[way], seconds[TRAINER])
                cells += [f"{statistics.median(seconds[way]) * 1000:.2f}", against]
            lines.append(f"| {' | '.join([backend, name, *cells])} |")
    return lines


@click.command()
@options(rounds=20)
def main(backends: list[str], models: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the table and keep it."""
    # Ended as by Ctrl-C: ranks that are stopped would not notice that nobody is left to wake them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = {backend: measure(backend, models, rounds, ranks) for backend in backends}
    versions = {owner: _version(owner) for ways in OWNERS.values() for owner in ways.values() if owner != "by hand"}
    lines = table(results, ranks)
    lines += ["", ", ".join(f"{owner} {version}" for owner, version in versions.items()) + "."]
    keep(lines, "peers", output, ranks=ranks, versions=versions, seconds_per_step=results)


def _version(owner: str) -> str:
    if not is_there(owner):
        return "not installed"
    return str(importlib.import_module(owner).__version__)


if __name__ == "__main__":
    main()
