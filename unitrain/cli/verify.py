"""`unitrain verify`: the same training on every backend, one after the other, and how far the numbers are apart."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unitrain import launchers
from unitrain.bootstrap import environment
from unitrain.cli.available import available_here, names_of
from unitrain.cli.launch import check_not_launched, check_script, check_started_once
from unitrain.errors import ConfigError

if TYPE_CHECKING:
    from unitrain.verify.record import Record
    from unitrain.verify.verdict import Group, Outcome, Run

_FLOAT64_TOLERANCE = 1e-8
_FACTORY = Path(__file__).parent.parent / "verify" / "factory.py"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What all runs have in common."""

    script: str
    args: tuple[str, ...]
    steps: int
    float64: bool
    limit_seconds: float
    threads: int
    cpu: bool
    folder: Path


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-np", "-n", "--num-processes", default="2", show_default=True, metavar="N,...", help="Ranks in all.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Optimizer steps to train.")
@click.option("--backends", metavar="NAME,...", help="What is compared. [default: all that are available]")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="Largest |difference|, relative to values above 1; the distance that training moved a tensor limits it too. "
    "[default: 1e-6, with --float64 1e-8]",
)
@click.option("--float64", is_flag=True, help="Train in double precision, where rounding is out of the question.")
@click.option("--cpu", is_flag=True, help="Hide the GPUs.")
@click.option(
    "--timeout-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=600,
    show_default=True,
    help="For each run.",
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the report there too."
)
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def verify(
    num_processes: str,
    steps: int,
    backends: str | None,
    tolerance: float | None,
    float64: bool,
    cpu: bool,
    timeout_seconds: float,
    json_file: Path | None,
    target: str,
    args: tuple[str, ...],
) -> None:
    """Train TARGET on every backend and report whether the numbers are the same.

    TARGET is a training script that uses unitrain.Trainer, run as it is with its ARGS, or a function that returns the
    arguments of Trainer and fit as a dictionary. Each run ends after --steps steps, and nothing of the script after
    `fit` is run. The backend is passed as UNITRAIN_BACKEND. Runs that differ for no known reason are repeated in
    float64, which tells rounding from a defect. Exit status 0 if the numbers are the same, 1 if they are not or a run
    failed.

    \b
      unitrain verify train.py --epochs 3
      unitrain verify -np 2,3 --float64 train.py
      unitrain verify package.module:function
      unitrain verify file.py:function
    """
    try:
        sizes = _sizes(num_processes)
        names = names_of(backends)
        check_not_launched("Type unitrain verify without a launcher: it starts its own.")
        check_started_once()
        is_function = not target.endswith(".py") and ":" in target
        if is_function and args:
            raise ConfigError(f"{target!r} is a function, which takes no arguments: {' '.join(args)}. Leave them out.")
        if not is_function:
            check_script(Path(target))
    except (launchers.LaunchError, ConfigError) as error:
        raise click.UsageError(str(error)) from error

    _warn_of_misplaced_options(target, args)
    from unitrain.verify import report
    from unitrain.verify.verdict import Verdict, judge

    if tolerance is None:
        tolerance = _FLOAT64_TOLERANCE if float64 else 1e-6
    controllers, skipped = available_here(names)
    # Without it SIGTERM would leave the ranks behind; this way the run at hand is ended first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="unitrain-verify-") as folder:
        job = _Job(
            script=str(_FACTORY) if is_function else target,
            args=(target,) if is_function else args,
            steps=steps,
            float64=float64,
            limit_seconds=timeout_seconds,
            # The same for one process as for several: by how many threads work is split decides how sums are rounded.
            threads=max(1, launchers.count_usable_cores() // max(sizes)),
            cpu=cpu,
            folder=Path(folder),
        )
        groups: list[Group] = []
        local: Outcome | None = None
        for size in sizes:
            outcomes = list(_runs_of(job, controllers, size))
            if "local" in names:
                if local is None or local.record is None or not local.record.first.fixed_batch:
                    local = _local(job, size, outcomes)
                outcomes.insert(0, local)
            group = judge(size, outcomes, tolerance, float64=float64)
            groups.append(_confirmed(job, group, _FLOAT64_TOLERANCE))
        verdict = Verdict(groups=groups, skipped=skipped)
        title = f"{target}: {steps} steps, tolerance {tolerance:g}{', float64' if float64 else ''}"
        report.show(verdict, title)
        if json_file is not None:
            settings = {"target": target, "args": args, "steps": steps, "tolerance": tolerance, "float64": float64}
            report.write_json(verdict, settings, json_file)
    # What was asked for by name and cannot run here is not verified; where nothing was named, what there is counts.
    missing = backends is not None and not all(controllers.get(name) for name in names)
    sys.exit(0 if verdict.same and not missing else 1)


def _warn_of_misplaced_options(target: str, args: Sequence[str]) -> None:
    """Print a warning if options of this command follow the script's name, where they are the script's."""
    own = {name for parameter in verify.params for name in (*parameter.opts, *parameter.secondary_opts)}
    if misplaced := [word for word in args if word.startswith("-") and word.partition("=")[0] in own]:
        click.echo(
            f"Warning: {', '.join(misplaced)} follows {target}, so it is passed to the script. Options of `unitrain "
            f"verify` precede the script: unitrain verify {misplaced[0]} ... {target}",
            err=True,
        )


def _sizes(text: str) -> list[int]:
    """Return the numbers of ranks in "1,2,3", each once."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise ConfigError(
                f"-np takes numbers of ranks from 1, as in -np 1,2,3, got {part!r} in {text!r}. Use -np 2"
            )
    return list(dict.fromkeys(map(int, parts)))


def _runs_of(job: _Job, controllers: dict[str, list[str | None]], size: int) -> Iterator[Outcome]:
    """Run every backend on `size` ranks; on GPUs ddp over each of its transports."""
    from unitrain.verify.verdict import Run

    for backend, choices in controllers.items():
        for controller in choices if backend != "local" else ():
            run = Run(backend=backend, as_ranks=size, processes=size, controller=controller)
            outcome = _outcome(job, run)
            yield outcome
            if backend == "ddp" and outcome.transport == "nccl":
                yield _outcome(job, replace(run, transport="gloo"))


def _local(job: _Job, size: int, others: Sequence[Outcome]) -> Outcome:
    """Run one process with the global batch of the others: so many times the script's own, or, where a script divides
    its batch by the number of ranks itself, that."""
    from unitrain.verify.verdict import Run

    outcome = _outcome(job, Run(backend="local", as_ranks=size, processes=1))
    batches = {
        one.record.global_batch()[0] for one in (outcome, *others) if one.record is not None and one.record.steps
    }
    if size > 1 and len(batches) > 1:
        again = _outcome(job, Run(backend="local", as_ranks=1, processes=1))
        if again.record is not None and again.record.steps and again.record.global_batch()[0] in batches:
            return again
    return outcome


def _confirmed(job: _Job, group: Group, tolerance: float) -> Group:
    """Repeat in double precision the runs whose differences may be rounding."""
    from unitrain.verify.verdict import confirm, judge

    unclear = [row for row in group.rows if row.needs_float64]
    if not unclear:
        return group
    click.echo(f"In float32 {len(unclear)} of {len(group.rows)} runs leave it open; float64 decides:", err=True)
    repeated = [*(row for row in group.rows if row.status == "reference"), *unclear]
    outcomes = [_outcome(replace(job, float64=True), row.outcome.run) for row in repeated]
    return confirm(group, judge(group.ranks, outcomes, tolerance, float64=True))


def _outcome(job: _Job, run: Run) -> Outcome:
    """Make one run, which ends within its limit."""
    from unitrain.verify import processes
    from unitrain.verify.record import FOLDER, Record, Request
    from unitrain.verify.verdict import Outcome

    folder = Path(tempfile.mkdtemp(prefix=f"{run.backend}-", dir=job.folder))
    Request(steps=job.steps, as_ranks=run.as_ranks, float64=job.float64).write(folder)
    try:
        command = launchers.build(launchers.DEFAULT_LAUNCHERS.get(run.backend, "torchrun"), _spec(job, run, folder))
    except launchers.LaunchError as error:
        return Outcome(run=run, seconds=0.0, problem=str(error))
    ranks = "1 process" if run.processes == 1 else f"{run.processes} ranks"
    name = f"{run.backend} over {chosen}" if (chosen := run.transport or run.controller) else run.backend
    click.echo(f"{name}, {ranks} ... ", nl=False, err=True)
    ended = processes.run(
        command.argv,
        environment.without_launcher() | dict(command.environment),
        mark=FOLDER,
        script=job.script,
        output=folder / "output.txt",
        limit_seconds=job.limit_seconds,
    )
    click.echo(f"{ended.seconds:.0f} s", err=True)
    record = Record.read(folder)
    problem = _problem(ended.code, job, run, record)
    if problem is None:
        return Outcome(run=run, seconds=ended.seconds, record=record)
    return Outcome(run=run, seconds=ended.seconds, problem=problem, words=processes.last_words(ended.output))


def _spec(job: _Job, run: Run, folder: Path) -> launchers.LaunchSpec:
    from unitrain.verify.record import FOLDER

    added = {FOLDER: str(folder)}
    if run.transport is not None:
        added["UNITRAIN_TRANSPORT"] = run.transport
    if environment.setting("OMP_NUM_THREADS") is None:
        added["OMP_NUM_THREADS"] = str(job.threads)
    if job.cpu:
        added["CUDA_VISIBLE_DEVICES"] = ""
    return launchers.LaunchSpec(
        script=job.script,
        args=job.args,
        num_processes=run.processes,
        # Named, because launchers would otherwise take the hosts of a Slurm allocation.
        hosts=(launchers.Host("localhost", run.processes),),
        backend=run.backend,
        controller=run.controller,
        environment=added,
    )


def _problem(code: int | None, job: _Job, run: Run, record: Record | None) -> str | None:
    """Return why nothing can be compared, None where it can."""
    if code is None:
        return f"it was not done after {job.limit_seconds:g} s, and was ended. Allow more with --timeout-seconds"
    if code != 0:
        return f"it ended with exit code {code}" if code > 0 else f"it was ended by signal {-code}"
    if record is None:
        return "it ended without training. Let the script train with unitrain.Trainer: its `fit` is what is compared"
    if record.first.backend != run.backend:
        used = record.first.backend
        return f"the script used backend {used!r} all the same. Let it call unitrain.init() without naming one"
    if not record.steps:
        return "it trained no step"
    return None
