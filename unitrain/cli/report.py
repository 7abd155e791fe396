"""`unitrain report`: a page about a run, or comparing several."""

from __future__ import annotations

from pathlib import Path

import click

from unitrain.errors import MissingDependencyError, ReportError


@click.command()
@click.argument("folders", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="[default: report.html in RUN_DIR]")
@click.option("--png", is_flag=True, help="Write the charts to one PNG instead, by default report.png.")
def report(folders: tuple[Path, ...], output: Path | None, png: bool) -> None:
    """Show what became of a run, and where its time went, in one HTML file.

    RUN_DIR is the output_dir of a run, which may still be going. Several of them are compared.

    \b
      unitrain report runs/first
      unitrain report runs/ddp runs/horovod --output compared.html
    """
    output = output or folders[0] / ("report.png" if png else "report.html")
    try:
        write(folders, output, png)
    except (ReportError, MissingDependencyError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(
            f"Cannot write '{output}': {error}. Name another file: unitrain report --output report.html ..."
        ) from error
    click.echo(output)


def write(folders: tuple[Path, ...], output: Path, png: bool) -> None:
    """Read the runs and write the report. Raises ReportError, MissingDependencyError or OSError."""
    from unitrain.report.record import read_records

    records = read_records(list(folders))
    try:
        from unitrain.report.charts import to_png
        from unitrain.report.contents import all_charts
        from unitrain.report.page import render
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"unitrain report draws with {error.name}, which is not installed. Install it with: "
            "pip install jinja2 matplotlib"
        ) from error
    if png:
        to_png(all_charts(records), [record.name for record in records], output)
    else:
        output.write_text(render(records), encoding="utf-8")
