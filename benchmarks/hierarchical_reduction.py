"""Step time with the hierarchical allreduce of gradients, compared with an allreduce over all ranks.

The ranks run on two hosts with a slow network, which are simulated as in slow_network.py. Both reductions take turns
in the same processes. The benchmark requires root.

    python benchmarks/hierarchical_reduction.py      # writes benchmarks/results/hierarchical_reduction.md
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from hierarchical_reduction_steps import HIERARCHICAL, PLAIN
from slow_network import HERE, hosts, slow_down
from slow_network_training import PARAMETERS
from tables import BACKENDS, RESULTS, ratio, save_results


def measure(rate: str, backend: str, ranks: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return the seconds and megabytes per step at the bandwidth `rate`, by reduction and round."""
    with tempfile.TemporaryDirectory() as folder, hosts(2, Path(folder)) as both:
        for host in both:
            slow_down(host, rate)
        slots = f"h1:{ranks // 2},h2:{ranks // 2}"
        launch = [sys.executable, "-m", "unitrain", "launch", "--backend", backend, "-H", slots]
        script = str(HERE / "hierarchical_reduction_steps.py")
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        done = both[0].run([*launch, script, str(rounds), str(steps)], variables, 1000, fresh=True)
    if done.returncode:
        raise click.ClickException(done.stdout)
    (line,) = [line for line in done.stdout.splitlines() if '{"seconds"' in line]  # the launcher may prefix lines
    measured: dict[str, Any] = json.loads(line[line.index("{") :])
    return measured


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--rate", "rates", multiple=True, default=["1gbit", "200mbit"], show_default=True)
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
@click.option("--ranks", type=int, default=4, show_default=True, help="Ranks on both hosts together.")
@click.option("--rounds", type=click.IntRange(min=2), default=10, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Steps per round.")
def main(output: Path, rates: list[str], backends: list[str], ranks: int, rounds: int, steps: int) -> None:
    """Measure at each bandwidth and on each backend, and save the table."""
    found = {
        f"{rate}, {backend}": measure(rate, backend, ranks, rounds, steps) for rate in rates for backend in backends
    }
    lines = [
        "# Hierarchical allreduce of gradients on two hosts with a slow network",
        "",
        f"{ranks // 2} ranks on each of two hosts, over Gloo, one thread per rank, without a GPU; a model of "
        f"{PARAMETERS:,} parameters ({4 * PARAMETERS / 1e6:.1f} MB of gradients); torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores for all ranks. The two reductions alternate. Medians "
        f"of {rounds} rounds of {steps} steps; in brackets the interquartile range of all rounds. Command: "
        f"`python benchmarks/hierarchical_reduction.py --rounds {rounds} --steps {steps}`.",
        "",
        "| bandwidth per host | backend | way | MB sent per host and step | step | time relative to the first way |",
        "|---|---|---|---|---|---|",
    ]
    for key, measured in found.items():
        rate, backend = key.split(", ")
        seconds, megabytes = measured["seconds"], measured["megabytes"]
        for reduction in (PLAIN, HIERARCHICAL):
            relative = "1" if reduction == PLAIN else ratio(seconds[reduction], seconds[PLAIN])
            step = f"{statistics.median(seconds[reduction]) * 1000:.1f} ms"
            sent = f"{statistics.median(megabytes[reduction]):.1f}"
            lines.append(f"| {rate} | {backend} | {reduction} | {sent} | {step} | {relative} |")
    save_results(lines, "hierarchical_reduction", output, **found)


if __name__ == "__main__":
    main()
