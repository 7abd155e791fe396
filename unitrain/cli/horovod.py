"""`unitrain horovod build` and `unitrain horovod check`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unitrain.cli import OutputPath
from unitrain.errors import UnitrainError
from unitrain.processes import exit_on_termination_signals

if TYPE_CHECKING:
    from unitrain.horovod_wheel.check import Report
    from unitrain.horovod_wheel.plan import BuildPlan, BuildStep


@click.group()
def horovod() -> None:
    """Build Horovod for the installed torch, and check the installed Horovod."""


@horovod.command()
@click.option(
    "--with-mpi/--without-mpi", "mpi", default=None, help="Build the MPI controller. [default: if mpicxx is found]"
)
@click.option(
    "--with-cuda/--without-cuda", "cuda", default=None, help="Build NCCL operations. [default: if a GPU is visible]"
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Number of parallel compile jobs. [default: limited by cores and memory]"
)
@click.option("--cache-dir", type=OutputPath(file_okay=False), help="Wheel cache directory.")
@click.option("--no-install", is_flag=True, help="Only build the wheel and print its path.")
@click.option("--force", is_flag=True, help="Rebuild even if the wheel is cached.")
@click.option("--dry-run", is_flag=True, help="Print the build steps without running them.")
def build(
    mpi: bool | None,
    cuda: bool | None,
    jobs: int | None,
    cache_dir: Path | None,
    no_install: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Build a wheel of Horovod 0.28.1 for the installed torch, and install it.

    A cached wheel is reused if it was built for the same torch, Python, compiler and flags.
    """
    from unitrain.bootstrap import environment
    from unitrain.horovod_wheel import build as builder
    from unitrain.horovod_wheel import machine, plan

    inherited = environment.copy()
    cache = (cache_dir or plan.cache_folder(inherited)).absolute()
    try:
        request = plan.BuildRequest(cache=cache, mpi=mpi, cuda=cuda, jobs=jobs, install=not no_install)
        build_plan = plan.create_plan(machine.detect(inherited), request)
        is_cached = builder.find_cached(build_plan) is not None and not force
        _print_plan(build_plan, is_cached)
        if dry_run:
            _print_build_steps(build_plan, inherited, is_cached)
            return
        if is_cached and not no_install and builder.is_installed(build_plan):
            click.echo("This Horovod is already installed. To build it again: unitrain horovod build --force")
            return
        start_time = time.monotonic()
        exit_on_termination_signals()
        with _Progress(build_plan) as progress:
            wheel = builder.run(build_plan, inherited, progress, force=force)
    except UnitrainError as error:
        raise click.ClickException(str(error)) from error
    click.echo(
        f"{'Installed' if not no_install else 'Built'} {wheel} in {_format_duration(time.monotonic() - start_time)}"
    )
    if not no_install:
        click.echo("Check it with: unitrain horovod check")


@horovod.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def check(as_json: bool) -> None:
    """Report the features and problems of the installed Horovod. The exit status is 1 if Horovod is not usable."""
    from unitrain.horovod_wheel import check as checker

    report = checker.inspect()
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _print_report(report)
    if not report.is_usable:
        raise click.exceptions.Exit(1)


def _print_plan(plan: BuildPlan, is_cached: bool) -> None:
    facts = plan.facts
    parts = [*facts["controllers"], *([f"nccl {facts['nccl']} (CUDA {facts['cuda']})"] if facts["nccl"] else [])]
    click.echo(f"Horovod {facts['horovod']} for torch {facts['torch']}, {facts['python']}, with {', '.join(parts)}")
    for note in plan.notes:
        click.echo(f"  {note}")
    if is_cached:
        click.echo(f"  From the cache: {plan.wheel}")
    else:
        jobs = plan.settings["MAKEFLAGS"].removeprefix("-j")
        click.echo(f"  Usually takes about {_format_duration(plan.typical_seconds)} with {jobs} jobs. Log: {plan.log}")


def _print_build_steps(plan: BuildPlan, inherited: Mapping[str, str], is_cached: bool) -> None:
    """Print the build steps as shell commands."""
    import shlex
    import textwrap

    from unitrain.horovod_wheel.patches import PATCHES

    click.echo("\nEnvironment:")
    for name, value in sorted(plan.environment(inherited).items()):
        before = inherited.get(name)
        if before and value.endswith(f"{os.pathsep}{before}"):
            click.echo(f'  export {name}={shlex.quote(value[: -len(before)])}"${name}"')
        elif value != before:
            click.echo(f"  export {name}={shlex.quote(value)}")
    for name in sorted(set(inherited) - set(plan.environment(inherited))):
        click.echo(f"  unset {name}")
    steps = [*([] if is_cached else plan.build_steps), *plan.install_steps]
    for number, step in enumerate(steps, 1):
        note = " (not needed: it exists)" if step.completion_marker and Path(step.completion_marker).exists() else ""
        click.echo(f"\n{number}. {step.name}: {step.description}{note}")
        if step.argv:
            click.echo(f"   $ {shlex.join(step.argv)}")
        if step.name == "patch":
            for patch in PATCHES:
                click.echo(f"   {patch.name} ({patch.kind}): {patch.reason}")
                click.echo(textwrap.indent(patch.diff, "     "))
    click.echo("\nDry run: nothing was built or installed.")


def _format_duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


class _Progress:
    """Prints one line per build step, and shows the compilation as a progress bar (terminal) or as one line per 10%."""

    def __init__(self, plan: BuildPlan) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from unitrain.output import plain_console

        columns = (
            TextColumn("  {task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
        )
        self._terminal = plain_console().is_terminal
        self._bar: Any = Progress(*columns, TimeElapsedColumn(), TextColumn("(usually {task.fields[usual]})"))
        self._typical_duration = _format_duration(plan.typical_seconds)
        self._task: Any = None
        self._reported_tenths = 0
        self._start_time = time.monotonic()

    def __enter__(self) -> _Progress:
        if self._terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._bar.stop()

    def report_step(self, step: BuildStep, *, is_skipped: bool) -> None:
        line = f"  {step.name:<12} {step.description}{' (not needed)' if is_skipped else ''}"
        if self._terminal:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            click.echo(line)
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        if self._terminal and step.name == "wheel":
            self._task = self._bar.add_task("compiling", total=100, usual=self._typical_duration)

    def report_percent(self, percent: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=percent)
        elif percent // 10 > self._reported_tenths:
            self._reported_tenths = percent // 10
            click.echo(
                f"  {percent:>3} % after {_format_duration(time.monotonic() - self._start_time)}, "
                f"usually {self._typical_duration}"
            )


def _print_report(report: Report) -> None:
    if report.folder is not None:
        click.echo(f"Horovod {report.version} in {report.folder}")
        runtime_fixes = "not known" if report.runtime_fixes is None else ", ".join(report.runtime_fixes)
        rows = {
            "torch": f"built for {report.built_for_torch}, installed {report.torch}",
            "controllers": ", ".join(report.controllers) or "none",
            "CPU tensors": ", ".join(report.cpu_operations) or "none",
            "GPU tensors": ", ".join(report.gpu_operations) or "none",
            "fixes": runtime_fixes,
        }
        for name, value in rows.items():
            click.echo(f"  {name:<12} {value}")
    for problem in report.problems:
        click.echo(f"{'PROBLEM' if problem.fatal else 'note'}: {problem.what}\n  {problem.fix}")
    click.echo(f"Usable: {'yes' if report.is_usable else 'no'}")
