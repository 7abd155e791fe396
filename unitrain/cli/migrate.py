"""`unitrain migrate`: convert a Horovod, DDP, Accelerate or Fabric script, and print the diff."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from unitrain.errors import ConfigError


@click.command()
@click.option("--write", is_flag=True, help="Write the converted script, and keep the original as SCRIPT.orig.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def migrate(script: Path, write: bool) -> None:
    """Convert SCRIPT, which trains with Horovod, DDP, Accelerate or Fabric, to unitrain.

    A unified diff is written to standard output, and the reason for each change, with its line in SCRIPT, to standard
    error. If SCRIPT contains calls that unitrain migrate does not know, the script is not converted, and the lines of
    these calls are written to standard error, each with a fix.

    \b
      unitrain migrate train.py
      unitrain migrate train.py > train.patch && patch < train.patch
      unitrain migrate train.py --write

    The exit status is 0 if the script was converted, 1 if it was not, and 2 for invalid arguments.
    """
    if not script.is_file():  # a read of a FIFO may block
        raise click.UsageError(f"{script} is not a regular file. Pass the path of the script.")
    try:
        from unitrain import migrate as migration
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"unitrain migrate needs a package that is missing: {error}. Install it, in the source folder of "
            'unitrain, with: pip install ".[migrate]"'
        ) from error

    try:
        source = script.read_bytes().decode()
        result = migration.migrate(source)
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{script} is not encoded in UTF-8: {error}. Convert it to UTF-8.") from error
    except ConfigError as error:
        raise click.UsageError(f"{script}: {error}") from error
    if result.source is None:
        for problem in result.problems:
            click.echo(f"{script}:{problem.line}: {problem.name}: {problem.fix}.", err=True)
        click.echo(f"{script} was not converted: {_format_count(len(result.problems), 'problem')}.", err=True)
        sys.exit(1)
    backup = script.with_name(f"{script.name}.orig")
    if write and backup.exists():
        raise click.UsageError(f"{backup} already exists. Move it away, so that the original is not lost.")
    click.echo(migration.unified_diff(source, result.source, str(script)), nl=False)
    for reason in result.reasons:
        click.echo(f"{script}:{reason.line}: {reason.text}.", err=True)
    lines = migration.num_changed_lines(source, result.source)
    click.echo(f"{_format_count(lines, 'line')} of code changed. Check the diff, then compare the results.", err=True)
    if write:
        try:
            backup.write_bytes(source.encode())
            script.write_bytes(result.source.encode())
        except OSError as error:
            raise click.ClickException(
                f"{script} or {backup} cannot be written: {error.strerror or error}. Apply the diff to a copy of the "
                "script."
            ) from error
        click.echo(f"Wrote {script}. The original is {backup}.", err=True)


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
