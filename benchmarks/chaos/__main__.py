"""Fault injection: runs that are killed and resume with another backend and number of ranks, and corrupt checkpoints.

In the first part, one rank or all ranks of small runs are killed with SIGKILL, at random times or while a checkpoint is
written. The runs are resumed with another backend and number of ranks until they are complete. Each epoch must have
used every sample exactly once, and the weights must equal those of an uninterrupted run. In the second part, copies of
a run are damaged. Each copy must resume from the newest valid checkpoint, or be rejected.

    python benchmarks/chaos                # writes benchmarks/results/chaos.*
    python benchmarks/chaos --runs 1000

The random choices depend only on the seed. The progress of a run that is killed after some time is not reproducible.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import click
import torch
from corruptions import DAMAGE_NAMES, OUTCOMES, Corruptions
from kills import BACKENDS_AND_SIZES, Chaos, Tally

RESULTS = Path(__file__).parent.parent / "results"


def kill(folder: Path, runs: int, seed: int) -> Tally:
    """Kill and resume `runs` runs, and return the results."""
    chaos = Chaos(folder, seed)
    # Other threads must not run during a fork, so the progress bar must not use a thread.
    with click.progressbar(range(runs), label="kills", file=sys.stderr) as numbers:
        for number in numbers:
            chaos.run(number)
    return chaos.tally


def corrupt(folder: Path, count: int, seed: int) -> Corruptions:
    """Damage and resume `count` copies of a run, and return the results."""
    corruptions = Corruptions(folder, seed)
    with click.progressbar(range(count), label="corruptions", file=sys.stderr) as numbers:
        for number in numbers:
            corruptions.run(number)
    return corruptions


def heading(runs: int, copies: int, seed: int) -> list[str]:
    return [
        "# Training that is killed, and checkpoints that are damaged",
        "",
        f"Seed {seed}; torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores. "
        f"Command: `python benchmarks/chaos --runs {runs} --corruptions {copies} --seed {seed}`.",
    ]


def table_of_kills(tally: Tally, seconds: float) -> list[str]:
    kills = sum(tally.kills.values())
    lines = [
        "",
        f"{tally.runs} runs were killed with SIGKILL a total of {kills} times and finished, in {seconds:.0f} s. They "
        f"resumed {tally.resumed} times from a checkpoint, otherwise from the beginning. "
        f"**{tally.lost} samples lost, {tally.repeated} repeated.** The final weights differ by at most "
        f"**{tally.difference:.1e}** from those of an uninterrupted run. {len(tally.failures)} failures.",
        "",
        "| backend | ranks | starts | killed |",
        "|---|---|---|---|",
    ]
    for backend, size in BACKENDS_AND_SIZES:
        name = f"{backend} {size}"
        lines.append(f"| {backend} | {size} | {tally.starts.get(name, 0)} | {tally.kills.get(name, 0)} |")
    lines += ["", "| killed during a step, at a file operation, or after a random time | kills |", "|---|---|"]
    lines += [f"| {trigger} | {count} |" for trigger, count in sorted(tally.ways.items())]
    return lines


def table_of_corruptions(corruptions: Corruptions, seconds: float) -> list[str]:
    total = sum(sum(counts.values()) for counts in corruptions.outcomes.values())
    lines = [
        "",
        f"{total} damaged copies of a run with a dozen checkpoints were resumed in {seconds:.0f} s. The damage affects "
        "some or all checkpoints, the history, or writes to the folder. A copy that is not rejected must resume with "
        "the state of the saved step and end with the weights of the undamaged run.",
        "",
        f"| damage | {' | '.join(OUTCOMES)} |",
        "|---|" + "---|" * len(OUTCOMES),
    ]
    for damage in DAMAGE_NAMES:
        counts = corruptions.outcomes.get(damage, {})
        lines.append(f"| {damage} | {' | '.join(str(counts.get(outcome, 0)) for outcome in OUTCOMES)} |")
    return lines


@click.command()
@click.option("--runs", type=click.IntRange(min=0), default=200, show_default=True)
@click.option("--corruptions", "copies", type=click.IntRange(min=0), default=200, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(runs: int, copies: int, seed: int, output: Path) -> None:
    """Kill and damage runs, and print and save the tables. Exit with status 1 if there are failures."""
    torch.set_num_threads(1)
    text, kept, failures = heading(runs, copies, seed), {"seed": seed}, []
    # Use a folder in memory if possible. Writes that the kernel has accepted survive SIGKILL, and a disk would be much
    # slower.
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="unitrain-chaos-", dir=memory if os.access(memory, os.W_OK) else None))
    folder.chmod(0o755)  # so that the user nobody can access the folder
    click.echo(f"seed {seed}, in {folder}", err=True)
    if runs:
        began = time.monotonic()
        tally = kill(folder, runs, seed)
        text += table_of_kills(tally, time.monotonic() - began)
        failures += tally.failures
        kept |= {"kills": asdict(tally)}
    if copies:
        began = time.monotonic()
        corruptions = corrupt(folder, copies, seed)
        text += table_of_corruptions(corruptions, time.monotonic() - began)
        failures += corruptions.failures
        kept |= {"corruptions": corruptions.outcomes}
    shown = "\n".join(text) + "\n"
    click.echo(shown)
    output.mkdir(parents=True, exist_ok=True)
    (output / "chaos.md").write_text(shown)
    (output / "chaos.json").write_text(json.dumps(kept))
    if failures:
        click.echo("\n".join(failures), err=True)
        click.echo(f"The folders of the failed runs and copies are in {folder}.", err=True)
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
