"""`unitrain doctor`: diagnose this host, or the ranks and hosts of a job, and suggest fixes."""

from __future__ import annotations

import json
import sys

import click

from unitrain.cli import FiniteRange, split_words
from unitrain.errors import UnitrainError
from unitrain.processes import exit_on_termination_signals


@click.command()
@click.option(
    "--launch",
    "launch_options",
    callback=split_words,
    metavar="OPTIONS",
    help='Launch ranks with these options and check all of them: --launch "-np 4 -H a:2,b:2".',
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--timeout-seconds",
    type=FiniteRange(min=1),
    default=120.0,
    show_default=True,
    help="Time limit for the ranks to connect.",
)
@click.option("--marked-json", is_flag=True, hidden=True)
def doctor(launch_options: tuple[str, ...] | None, as_json: bool, timeout_seconds: float, marked_json: bool) -> None:
    """Diagnose problems on this host, or in all ranks of a job, and suggest fixes.

    Under a launcher, the command checks every rank, and rank 0 prints the result. The exit status is 1 if an error is
    found.

    \b
      unitrain doctor
      unitrain doctor --launch "-np 4 -H node1:2,node2:2 --launcher mpirun"
      srun unitrain doctor
    """
    from unitrain.doctor.examination import MARKER, examine, examine_launch

    try:
        if launch_options is not None:
            exit_on_termination_signals()
            click.echo("Checking all ranks. This takes a few seconds.", err=True)
            report = examine_launch(launch_options, timeout_seconds)
        else:
            examined = examine(timeout_seconds)
            if examined is None:
                return  # rank 0 prints the result
            report = examined
    except UnitrainError as error:
        raise click.ClickException(str(error)) from error
    if marked_json:
        click.echo(MARKER + json.dumps(report))
    elif as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        from unitrain.doctor.display import show

        show(report)
    if not (report["ok"] or marked_json):
        sys.exit(1)
