"""`unitrain report`: create an HTML report of a run, or a comparison of several runs."""

from __future__ import annotations

from pathlib import Path

import click

from unitrain.cli import OutputPath
from unitrain.errors import ReportError


@click.command()
@click.argument("folders", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", type=OutputPath(), metavar="FILE", help="Output file. [default: report.html in RUN_DIR]")
@click.option("--png", is_flag=True, help="Write the charts to a single PNG instead, by default report.png.")
@click.option("--goodput", is_flag=True, help="Print the wall-clock time of the run by category, over all restarts.")
def report(folders: tuple[Path, ...], output: Path | None, png: bool, goodput: bool) -> None:
    """Create an HTML report with the metrics of a run and the time per phase of training.

    RUN_DIR is the output_dir of a finished or active run. With several folders, the report compares the runs.

    \b
      unitrain report runs/first
      unitrain report runs/ddp runs/horovod --output compared.html
      unitrain report --goodput runs/first
    """
    if goodput:
        _print_goodput(folders, output, png)
        return
    try:
        from unitrain.report.page import write_report
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"unitrain report needs a package that is missing: {error}. Install it, in the source folder of unitrain, "
            'with: pip install ".[report]"'
        ) from error

    output = output or folders[0] / ("report.png" if png else "report.html")
    try:
        write_report(folders, output, as_png=png)
    except ReportError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(
            f"Cannot write '{output}': {error}. Use another file: unitrain report --output report.html ..."
        ) from error
    click.echo(click.format_filename(output))


def _print_goodput(folders: tuple[Path, ...], output: Path | None, png: bool) -> None:
    from unitrain.report.goodput import describe_goodput
    from unitrain.report.record import read_records

    if png or output is not None:
        name = "--png" if png else "--output"
        raise click.UsageError(f"--goodput prints text and writes no file. Leave {name} out.")
    try:
        click.echo(describe_goodput(read_records(list(folders))))
    except (ReportError, OSError) as error:
        raise click.ClickException(str(error)) from error
