"""Local SGD and DiLoCo of unitrain, compared with LocalSGD of Accelerate and DiLoCo of torchft.

Two ranks on this machine train the GPT of `low_communication_training.py` from the same weights with the same texts.
The libraries take turns in the same processes. They should compute the same weights. Accelerate and torchft are
required:

    pip install accelerate torchft
    python benchmarks/low_communication_peers.py      # writes benchmarks/results/low_communication_peers.md
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from low_communication_training import BATCH, LENGTH, build
from slow_network import HERE
from tables import RESULTS, ratio, save_results

PARAMETERS = sum(parameter.numel() for parameter in build().parameters())
SCRIPT = str(HERE / "low_communication_peers_training.py")


def measure(rounds: int, local_steps: int) -> dict[str, Any]:
    """Return the results that `low_communication_peers_training.py` prints."""
    launch = [sys.executable, "-m", "unitrain", "launch", "-np", "2", SCRIPT, str(rounds), str(local_steps)]
    done = subprocess.run(
        launch,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
    )
    line = next(line for line in done.stdout.splitlines() if '{"libraries"' in line)
    figures: dict[str, Any] = json.loads(line[line.index("{") :])
    return figures


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--rounds", type=click.IntRange(min=2), default=8, show_default=True, help="Turns of each library.")
@click.option("--local-steps", type=click.IntRange(min=1), default=25, show_default=True, help="Steps of a turn.")
def main(output: Path, rounds: int, local_steps: int) -> None:
    """Measure, and write the table."""
    figures = measure(rounds, local_steps)
    lines = [
        "# Low-communication training in unitrain, Accelerate and torchft",
        "",
        f"Two ranks over Gloo on one machine, one thread per rank; a GPT of {PARAMETERS:,} parameters, {BATCH} texts "
        f"of {LENGTH} characters per rank and step, AdamW. Each library trains {rounds} turns of {local_steps} steps "
        "with a synchronization at the end. The difference is the largest difference of a weight from unitrain's "
        "after the last synchronization, divided by the largest change of a weight during training. The step time, "
        "which includes the synchronization, is the median over the turns, and the ratio is that to unitrain's step "
        "time in the same round, with the interquartile range. "
        f"torch {torch.__version__}, Accelerate {version('accelerate')}, torchft "
        f"{version('torchft')}, Python {platform.python_version()}, {os.cpu_count()} CPU cores. Command: `python "
        f"benchmarks/low_communication_peers.py --rounds {rounds} --local-steps {local_steps}`.",
        "",
        "| method | library | validation loss | difference | step | relative to unitrain |",
        "|---|---|---|---|---|---|",
    ]
    for row in figures["libraries"]:
        own = next(other for other in figures["libraries"] if other["method"] == row["method"])
        step = f"{1000 * statistics.median(row['seconds']):.1f} ms"
        difference, relative = "", "1"
        if row["library"] != "unitrain":
            difference, relative = f"{row['difference']:.1e}", ratio(row["seconds"], own["seconds"])
        lines.append(f"| {row['method']} | {row['library']} | {row['loss']:.5f} | {difference} | {step} | {relative} |")
    save_results(lines, "low_communication_peers", output, **figures)


if __name__ == "__main__":
    main()
