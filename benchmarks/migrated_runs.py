"""Run scripts that `unitrain migrate` converted, on CPUs and without a network, and compare the runs."""

from __future__ import annotations

import importlib.util
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import click
import torch
from public_scripts import DURATION, Edit, PublicScript
from torch import Tensor

from unitrain.bootstrap.environment import without_launcher_variables
from unitrain.migrate import migrate, num_changed_lines
from unitrain.verify.commands import last_lines, run_command

RANKS = 2
TOLERANCE = 1e-6
TIMEOUT_SECONDS = 600
HEADER = ("script", "edited lines", "result", "steps", "difference from Horovod", "difference from the original")
_RECORDER = Path(__file__).with_name("recorded_script.py")
_MARKER = "MIGRATED_RUN"  # environment variable of the processes of a run
_BACKENDS = {"Horovod": "horovod"}  # original scripts for Horovod; the other scripts use DDP


class RunError(Exception):
    """A script cannot be run, or its run failed."""


@dataclass(frozen=True)
class Record:
    """The records of one run, written by `recorded_script.py`: losses by rank, gradient norms by step, and the final
    parameters of each rank."""

    losses: list[list[float]]
    norms: list[float]
    parameters: list[list[Tensor]]

    @classmethod
    def read(cls, folder: Path, ranks: int) -> Record:
        """Return the record in `folder`. Raise RunError if the run did not train or if the replicas differ."""
        files = [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]
        record = cls([file["losses"] for file in files], files[0]["norms"], [file["parameters"] for file in files])
        if not any(record.norms) or not all(map(math.isfinite, [*record.norms, *chain(*record.losses)])):
            raise RunError(f"its gradient norms are {record.norms}, and its losses {record.losses}")
        for parameters in record.parameters[1:]:
            if not all(map(torch.equal, record.parameters[0], parameters)):
                raise RunError("the parameters of its ranks differ")
        return record

    def difference(self, other: Record) -> float:
        """Return the largest relative difference of a loss, a gradient norm or a parameter. It is infinite if the runs
        cannot be compared."""
        own_values, other_values = ([*chain(*record.losses), *record.norms] for record in (self, other))
        if len(own_values) != len(other_values) or len(self.parameters[0]) != len(other.parameters[0]):
            return math.inf
        differences = [
            abs(value - other_value) / max(abs(other_value), 1e-12)
            for value, other_value in zip(own_values, other_values, strict=True)
        ]
        for parameter, other_parameter in zip(self.parameters[0], other.parameters[0], strict=True):
            largest = other_parameter.abs().max().clamp(min=1e-12)
            differences.append(((parameter - other_parameter).abs().max() / largest).item())
        return max(differences)


@dataclass(frozen=True)
class Result:
    """The row of a script in the table, whether it needs edits, and whether its runs were correct."""

    row: str
    needs_edits: bool
    is_correct: bool


def run_script(script: PublicScript, folder: Path | None, work: Path) -> Result:
    """Run `script` from `folder` or GitHub, in new folders in `work`."""
    source = script.read(folder)
    edited = apply_edits(script.edits, source)
    lines = num_changed_lines(source, edited)
    reasons = ", ".join(dict.fromkeys(edit.reason for edit in script.edits))
    steps, to_horovod, to_original, is_correct = "", "", "", False
    try:
        with_horovod, with_ddp, original = _run_all(script, edited, folder, work)
        steps = str(len(with_ddp.norms))
        differences = with_ddp.difference(with_horovod), with_ddp.difference(original)
        to_horovod, to_original = (f"{value:.1e}" if value else "0" for value in differences)
        is_correct = differences[0] <= TOLERANCE and (differences[1] <= TOLERANCE or bool(script.difference))
        outcome = "the same results" if is_correct else "different results"
        if is_correct and differences[1] > TOLERANCE:
            outcome = f"the same results on both backends; {script.difference}"
    except RunError as error:
        outcome = f"failed: {error}"
    edits = f"{lines} ({reasons})" if lines else "0"
    cells = (f"{script.repository}, `{script.path}`", edits, outcome, steps, to_horovod, to_original)
    needs_edits = any(edit.reason != DURATION for edit in script.edits)
    return Result(f"| {' | '.join(cells)} |", needs_edits, is_correct)


def apply_edits(edits: Sequence[Edit], source: str) -> str:
    """Return `source` with all replacements. Raise ValueError if a replacement does not apply."""
    for edit in edits:
        if edit.old not in source:
            raise ValueError(f"The script does not contain {edit.old!r}.")
        source = source.replace(edit.old, edit.new)
    return source


def _run_all(script: PublicScript, edited: str, folder: Path | None, work: Path) -> tuple[Record, Record, Record]:
    """Run the converted script on one rank and on RANKS ranks of both backends, and the original script on RANKS ranks.
    Return the records of the converted script on Horovod and on DDP, and of the original script."""
    missing = [name for name in script.packages if importlib.util.find_spec(name) is None]
    if missing:
        raise RunError(f"not installed: {', '.join(missing)}")
    converted = migrate(edited).source
    if converted is None:
        raise RunError("`unitrain migrate` refuses it")
    files = work / "files"
    for file in script.other_files():
        _write(files / file.path, file.read(folder))
    if script.write_data is not None:
        script.write_data(files)
    original = apply_edits(script.original_edits, edited)
    _run(script, converted, "ddp", 1, work, "converted, 1 rank")
    with_horovod = _run(script, converted, "horovod", RANKS, work, "converted, Horovod")
    with_ddp = _run(script, converted, "ddp", RANKS, work, "converted, DDP")
    return with_horovod, with_ddp, _run(script, original, _BACKENDS.get(script.library, "ddp"), RANKS, work, "original")


def _run(script: PublicScript, source: str, backend: str, ranks: int, work: Path, name: str) -> Record:
    """Run `source` in a copy of the folder with the data. Raise RunError if the run fails."""
    folder = work / name
    shutil.copytree(work / "files", folder)
    _write(folder / script.path, source)
    variables = {key: value.format(ranks=ranks, folder=folder) for key, value in script.environment.items()}
    launcher = ["--launcher", "torchrun"] if script.library in ("Accelerate", "Fabric") else []
    command = ["env", "-C", str(folder), sys.executable, "-m", "unitrain", "launch", "--backend", backend, *launcher]
    command += ["-np", str(ranks), str(_RECORDER), str(folder), script.path, *script.arguments.split()]
    click.echo(f"{script.repository}, {script.path}: {name} ... ", nl=False, err=True)
    result = run_command(
        command,
        without_launcher_variables() | {"OMP_NUM_THREADS": "1", "HOME": str(folder), _MARKER: str(folder)} | variables,
        marker_variable=_MARKER,
        script=str(_RECORDER),
        output=folder / "output.txt",
        timeout_seconds=TIMEOUT_SECONDS,
    )
    click.echo(f"{result.seconds:.0f} s", err=True)
    if result.exit_code != 0:
        click.echo("\n".join(last_lines(result.output)), err=True)
        raise RunError(f"{name}: exit status {result.exit_code}")
    return Record.read(folder, ranks)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
