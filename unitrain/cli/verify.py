"""`unitrain verify`: train a script on every backend, and compare the results numerically."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unitrain import launchers
from unitrain.bootstrap import environment
from unitrain.cli import FiniteRange, OutputPath, check_output_file, report_write_error
from unitrain.cli.available import find_available_backends, parse_backends
from unitrain.errors import ConfigError
from unitrain.processes import exit_on_termination_signals
from unitrain.supervisor.checks import check_not_launched, check_script, check_started_once, executed_script

if TYPE_CHECKING:
    from unitrain.verify.verdict import RequestedRun

_TRAIN_FUNCTION = Path(__file__).parent.parent / "verify" / "train_function.py"


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-np", "-n", "--num-processes", default="2", show_default=True, metavar="N,...", help="Numbers of ranks.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Number of optimizer steps.")
@click.option("--backends", metavar="NAME,...", help="Backends to compare. [default: all available]")
@click.option(
    "--tolerance",
    type=FiniteRange(min=0),
    help="Maximum difference: absolute for values up to 1, relative above 1. It is lower for tensors that "
    "change little during training. [default: 1e-6, with --float64 1e-8]",
)
@click.option("--float64", is_flag=True, help="Train in double precision, where rounding errors are negligible.")
@click.option(
    "--bits", is_flag=True, help="Compare all runs bit by bit. The script must set TrainConfig.logical_ranks."
)
@click.option("--cpu", is_flag=True, help="Train on the CPU, even if there are GPUs.")
@click.option(
    "--timeout-seconds",
    type=FiniteRange(min=0, min_open=True),
    default=600,
    show_default=True,
    help="Time limit per run.",
)
@click.option("--json", "json_file", type=OutputPath(dir_okay=False), help="Also write the report to this file.")
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def verify(
    num_processes: str,
    steps: int,
    backends: str | None,
    tolerance: float | None,
    float64: bool,
    bits: bool,
    cpu: bool,
    timeout_seconds: float,
    json_file: Path | None,
    target: str,
    args: tuple[str, ...],
) -> None:
    """Train TARGET on every backend and report whether the numerical results are the same.

    TARGET is an unmodified training script that uses unitrain.Trainer or unitrain.Pipeline, with its ARGS, a
    configuration file of `unitrain train`, or a function that returns the arguments of Trainer and fit as a dictionary.
    Each run stops after --steps steps without executing the rest of the script. UNITRAIN_BACKEND selects the backend of
    each run. Runs with unexplained differences are repeated in float64, to distinguish rounding errors from defects.
    The exit status is 0 if the results are the same, and 1 if they differ, if a run failed, or if a backend in
    --backends is not available.

    With --bits, every run must be bit-identical to the first one in the parameters, optimizer state, buffers and loss
    of every step, on every backend and number of ranks. The report names the first step and tensor that differ.

    \b
      unitrain verify train.py --epochs 3
      unitrain verify -np 2,3 --float64 train.py
      unitrain verify -np 1,2,3 --bits train.py
      unitrain verify config.yaml --batch_size 64
      unitrain verify package.module:function
      unitrain verify file.py:function
    """
    try:
        sizes = _parse_sizes(num_processes)
        if bits and (tolerance is not None or float64):
            raise ConfigError("--bits allows no difference. Leave out --tolerance and --float64.")
        names = parse_backends(backends)
        check_not_launched("Run unitrain verify without a launcher: it starts the ranks itself.")
        check_started_once()
        script, script_args = executed_script(target, args)
        is_function = script == target and not target.endswith(".py") and ":" in target
        if is_function:
            _check_function(target, args)
        else:
            check_script(Path(target))
    except (launchers.LaunchError, ConfigError) as error:
        raise click.UsageError(str(error)) from error

    check_output_file("--json", json_file)
    _warn_of_misplaced_options(target, args)
    from unitrain.verify import report
    from unitrain.verify.bits import compare_bits, is_bit_equal, show_bits, write_bits
    from unitrain.verify.runs import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, Verification
    from unitrain.verify.verdict import Verdict

    if tolerance is None:
        tolerance = FLOAT64_TOLERANCE if float64 else FLOAT32_TOLERANCE
    controllers, skipped = find_available_backends(names)
    exit_on_termination_signals()
    if is_function:
        script, script_args = str(_TRAIN_FUNCTION), (target,)
    with tempfile.TemporaryDirectory(prefix="unitrain-verify-") as folder:
        verification = Verification(
            script=script,
            steps=steps,
            tolerance=tolerance,
            float64=float64,
            timeout_seconds=timeout_seconds,
            folder=Path(folder),
            build_command=partial(_build_command, script=script, args=script_args, cpu=cpu, max_ranks=max(sizes)),
            report_progress=partial(click.echo, nl=False, err=True),
            bits=bits,
        )
        if bits:
            rows = compare_bits(verification.run_all(sizes, controllers, with_local="local" in names))
            show_bits(rows, f"{target}: {steps} steps, bit by bit", skipped)
            if json_file is not None:
                with report_write_error(json_file):
                    write_bits(rows, {"target": target, "args": args, "steps": steps}, json_file)
            sys.exit(0 if is_bit_equal(rows) and not _is_backend_missing(backends, names, controllers) else 1)
        groups = verification.run_groups(sizes, controllers, with_local="local" in names)
        verdict = Verdict(groups=groups, skipped=skipped)
        report.show(verdict, f"{target}: {steps} steps, tolerance {tolerance:g}{', float64' if float64 else ''}")
        if json_file is not None:
            settings = {"target": target, "args": args, "steps": steps, "tolerance": tolerance, "float64": float64}
            with report_write_error(json_file):
                report.write_json(verdict, settings, json_file)
    sys.exit(0 if verdict.is_same and not _is_backend_missing(backends, names, controllers) else 1)


def _is_backend_missing(
    backends: str | None, names: Sequence[str], controllers: Mapping[str, Sequence[str | None]]
) -> bool:
    """Return whether a backend that --backends names is not available. Other unavailable backends are skipped."""
    return backends is not None and not all(controllers.get(name) for name in names)


def _check_function(target: str, args: Sequence[str]) -> None:
    """Raise ConfigError if `target` lacks the module or the function name, or if arguments follow it."""
    module, _, name = target.rpartition(":")
    if not module or not name:
        raise ConfigError(
            f"{target!r} has no {'function name after' if module else 'module or file before'} the colon. Name a "
            f"function as in {module or 'train.py'}:{name or 'make_training'}, or a script as in train.py."
        )
    if args:
        raise ConfigError(f"{target!r} is a function, which takes no arguments: {' '.join(args)}. Remove them.")


def _warn_of_misplaced_options(target: str, args: Sequence[str]) -> None:
    """Print a warning if options of this command follow the script, because they are then passed to the script."""
    own = {name for parameter in verify.params for name in (*parameter.opts, *parameter.secondary_opts)}
    if misplaced := [word for word in args if word.startswith("-") and word.partition("=")[0] in own]:
        verb, pronoun = ("follows", "it is") if len(misplaced) == 1 else ("follow", "they are")
        click.echo(
            f"Warning: {', '.join(misplaced)} {verb} {target}, so {pronoun} passed to the script. Options of `unitrain "
            f"verify` precede the script: unitrain verify {misplaced[0]} ... {target}",
            err=True,
        )


def _parse_sizes(text: str) -> list[int]:
    """Parse a list of distinct numbers of ranks such as "1,2,3". Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise ConfigError(
                f"-np takes positive numbers of ranks, as in -np 1,2,3, got {part!r} in {text!r}. Use -np 2"
            )
    return list(dict.fromkeys(map(int, parts)))


def _build_command(
    run: RequestedRun, variables: Mapping[str, str], *, script: str, args: tuple[str, ...], cpu: bool, max_ranks: int
) -> launchers.Command:
    """Return the launch command of a run on this host. Raises ConfigError if the launcher is not available."""
    added = dict(variables)
    if environment.get_variable("OMP_NUM_THREADS") is None:
        # The number of threads per rank affects the rounding of sums, so all runs use the same number.
        added["OMP_NUM_THREADS"] = str(max(1, launchers.count_usable_cores() // max_ranks))
    if cpu:
        added["CUDA_VISIBLE_DEVICES"] = ""
    try:
        return launchers.build_local(
            None, script, run.processes, run.backend, args=args, controller=run.controller, environment=added
        )
    except launchers.LaunchError as error:
        raise ConfigError(str(error)) from error
