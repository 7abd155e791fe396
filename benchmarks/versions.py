"""Step time of this checkout, compared with another checkout, for example a git worktree of an earlier commit.

The same loops run in turns with both versions, in separate processes on the same cores. During a turn, the
processes of the other version are suspended. The table shows the ratio of the step times of the two versions in the
same round. Below 1, this checkout is faster. A hand-written loop without unitrain, which is identical for both
checkouts, shows the noise.

    git worktree add /tmp/before COMMIT
    python benchmarks/versions.py /tmp/before     # starts its own ranks; writes benchmarks/results/versions.*
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import click
from rich.progress import track
from step_overhead import BY_HAND
from tables import Results, Seconds, header_lines, options, ratio, save_results
from typing_extensions import Self

from unitrain.bootstrap import environment
from unitrain.bootstrap.network import find_free_port

OWN_LOOP = "own loop"
REPOSITORY = Path(__file__).resolve().parents[1]


class CheckoutRanks:
    """Ranks that run the loops with unitrain from `checkout`. They are suspended except during their turns."""

    def __init__(self, checkout: Path, backend: str, ranks: int) -> None:
        variables = environment.without_launcher_variables() | {
            "PYTHONPATH": str(checkout),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_port()),
        }
        self._processes = [
            subprocess.Popen(
                [sys.executable, Path(__file__).with_name("version_turns.py"), backend],
                env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        for _, module in (answer.split(maxsplit=1) for answer in self._read_results()):
            assert Path(module).is_relative_to(checkout), f"the ranks import {module}, not {checkout}"
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._signal(signal.SIGCONT)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # ranks exit at the end of input, and shut down together
            if error is not None:
                process.kill()
        for process in self._processes:
            process.wait(60)

    def take_turn(self, loop: str, model: str, round_number: int) -> float:
        """Return the seconds per step of the slowest rank."""
        self._signal(signal.SIGCONT)
        for process in self._processes:
            assert process.stdin is not None
            print(f"{loop}|{model}|{round_number}", file=process.stdin, flush=True)
        seconds = max(map(float, self._read_results()))
        self._signal(signal.SIGSTOP)
        return seconds

    def _read_results(self) -> list[str]:
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(answers):
            raise click.ClickException("A rank ended before its turn. Its error is above.")
        return answers

    def _signal(self, signum: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process.pid, signum)


def measure(other: Path, backend: str, models: list[str], rounds: int, ranks: int) -> dict[str, Seconds]:
    """For each model, return the seconds per step of each loop with each version in each round."""
    results: dict[str, Seconds] = {}
    with CheckoutRanks(REPOSITORY, backend, ranks) as own, CheckoutRanks(other, backend, ranks) as others:
        versions = {"this": own, "other": others}
        for model in models:
            turns = [(version, loop) for loop in (OWN_LOOP, BY_HAND[backend]) for version in versions]
            seconds: Seconds = {f"{version}, {loop}": [] for version, loop in turns}
            for round_number in track(range(rounds + 1), f"{backend}, {model}"):  # the first round warms up
                for version, loop in turns if round_number % 2 else reversed(turns):
                    taken = versions[version].take_turn(loop, model, round_number)
                    if round_number:
                        seconds[f"{version}, {loop}"].append(taken)
            results[model] = seconds
    return results


def table(results: Results, versions: list[str], ranks: int) -> list[str]:
    quoted = (
        f"Step time with unitrain at {versions[0]}, divided by that at {versions[1]} in the same round; below 1, "
        f"{versions[0]} is faster. The loop without unitrain shows the noise."
    )
    header = ["backend", "model", "own loop", "loop without unitrain", "own loop, ms per step", "rounds"]
    command = "python benchmarks/versions.py OTHER_CHECKOUT"
    lines = header_lines("Time of a training step in two versions", quoted, command, ranks, header)
    for backend, models in results.items():
        for model, seconds in models.items():
            shown = [
                ratio(seconds[f"this, {loop}"], seconds[f"other, {loop}"]) for loop in (OWN_LOOP, BY_HAND[backend])
            ]
            own = seconds[f"this, {OWN_LOOP}"]
            lines.append(
                f"| {backend} | {model} | {' | '.join(shown)} | {statistics.median(own) * 1000:.2f} | {len(own)} |"
            )
    return lines


def describe_commit(checkout: Path) -> str:
    """Return the abbreviated commit of a checkout."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@click.command()
@click.argument("other", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path))
@options(rounds=20, models=("tiny",))
def main(other: Path, backends: list[str], models: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, and print and save the table. OTHER is the folder of the other checkout."""
    results = {backend: measure(other, backend, models, rounds, ranks) for backend in backends}
    versions = [describe_commit(REPOSITORY), describe_commit(other)]
    save_results(table(results, versions, ranks), "versions", output, ranks=ranks, versions=versions, seconds=results)


if __name__ == "__main__":
    main()
