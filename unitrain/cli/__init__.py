"""The `unitrain` command, with one module per subcommand.

Subcommands are imported lazily, so that --help does not import torch. Each module defines the options and output of a
command; the logic is in other packages, such as `unitrain.verify` and, for launch, submit and follow,
`unitrain.supervisor`. `bench_*` contain the subcommands of bench and their shared options, and `available` detects
backends.
"""

from __future__ import annotations

import importlib
import math
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from unitrain import __version__
from unitrain.errors import ConfigError, did_you_mean
from unitrain.validation import check_path

_COMMANDS = {
    "bench": ("unitrain.cli.bench", "Benchmark collectives and training on every backend, and predict scaling."),
    "ckpt": ("unitrain.cli.ckpt", "List, verify, show, convert and consolidate checkpoints."),
    "doctor": ("unitrain.cli.doctor", "Diagnose problems on this machine, or in the ranks of a job."),
    "follow": ("unitrain.cli.follow", "Show the state and the log of a Slurm or Kubernetes job."),
    "horovod": ("unitrain.cli.horovod", "Build Horovod for the installed torch, and check the installed Horovod."),
    "launch": ("unitrain.cli.launch", "Run a training script on several ranks."),
    "memory": (
        "unitrain.cli.memory",
        "Break down the memory usage of a script, and predict the savings of each setting.",
    ),
    "migrate": ("unitrain.cli.migrate", "Convert a Horovod, DDP, Accelerate or Fabric script."),
    "report": ("unitrain.cli.report", "Create a report of the metrics and timings of a run."),
    "submit": ("unitrain.cli.submit", "Submit a training script to Slurm or Kubernetes."),
    "train": ("unitrain.cli.train", "Train as described by configuration files."),
    "translate": ("unitrain.cli.translate", "Convert the command line of one launcher to another launcher."),
    "tune": ("unitrain.cli.tune", "Find settings that make a script train faster on this machine."),
    "verify": ("unitrain.cli.verify", "Train on every backend, and compare the results numerically."),
}


def split_words(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Callback of an option whose value contains options: split the value like a shell. Raises BadParameter."""
    if value is None:
        return None
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise click.BadParameter(
            f"{value!r} cannot be split into words: {error}. Quote it as for a shell, as in \"-np 2 -H 'a:1,b:1'\""
        ) from error


class FiniteRange(click.FloatRange):
    """Type of an option whose value is a number in a range: click's FloatRange without nan and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class OutputPath(click.Path):
    """Type of an option whose value is the path of a file or folder to write: not empty, and not a URL."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(path_type=Path, **settings)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(check_path("The path", value, "Use a path such as runs/first"), param, ctx)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def check_output_file(option: str, path: Path | None, *, creates_folder: bool = False) -> None:
    """Raise UsageError if the file `path` of `option` cannot be written. Called before a run, so that its result is not
    lost.

    With `creates_folder`, the command creates the folder of the file.
    """
    if path is None:
        return
    folder = path.parent
    while creates_folder and not os.access(folder, os.F_OK) and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.F_OK):
        raise click.UsageError(f"The folder '{folder}' of {option} does not exist. Create it before the run.")
    if not folder.is_dir() or not os.access(path if os.access(path, os.F_OK) else folder, os.W_OK):
        raise click.UsageError(f"{option} '{path}' is not writable. Use another file: {option} /tmp/{path.name}")


@contextmanager
def report_write_error(path: Path) -> Iterator[None]:
    """Raise ClickException instead of an OSError that is raised while the file `path` is written."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(
            f"'{path}' cannot be written: {error.strerror or error}. Use another file."
        ) from error


class LazyGroup(click.Group):
    """A click group that imports commands lazily, and lists their names and help lines without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(_COMMANDS[cmd_name][0]), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            suggestion = did_you_mean(args[0], _COMMANDS)
            ctx.fail(f"Unknown command {args[0]!r}. {suggestion}Available: {', '.join(sorted(_COMMANDS))}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Ctrl-C exits with code 130 as in a shell; click would exit with code 1."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nunitrain: interrupted", err=True)
            raise click.exceptions.Exit(128 + signal.SIGINT) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(_COMMANDS.items())])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="unitrain %(version)s")
def unitrain() -> None:
    """Run one PyTorch training script on DDP or Horovod, under any launcher, with the same numerical results."""
