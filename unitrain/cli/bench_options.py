"""Shared options, error handling and output of the `unitrain bench` commands."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unitrain import errors, launchers
from unitrain.backends import registry
from unitrain.cli import OutputPath, check_output_file, report_write_error
from unitrain.cli.available import find_available_backends, parse_backends
from unitrain.errors import ConfigError, MissingDependencyError, UnitrainError

if TYPE_CHECKING:
    from unitrain.bench.rank_sets import RankSetSpec

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

json_option = click.option(
    "--json", "json_file", type=OutputPath(dir_okay=False), help="Write the result to this file."
)
output_option = click.option(
    "--output",
    type=OutputPath(dir_okay=False),
    metavar="FILE",
    help="Write charts to this .png or .html file.",
)
device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Device of the ranks. [default: cuda if a GPU is available]"
)
backends_option = click.option("--backends", metavar="NAME,...", help="Backends to benchmark. [default: all available]")


@contextmanager
def report_errors() -> Iterator[None]:
    """Print LaunchError, UnitrainError and errors raised by ranks without a traceback of this process.

    For an error of a rank that is not a unitrain error, the traceback of the rank is printed.
    """
    try:
        yield
    except (launchers.LaunchError, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    except UnitrainError as error:
        raise click.ClickException(str(error)) from error
    except AssertionError as error:
        from unitrain.bench.rank_sets import RankError

        if not isinstance(error, RankError):
            raise
        # Print only the message of unitrain errors, and the traceback of any other error.
        is_unitrain_error = hasattr(errors, error.kind) and error.errors
        message = error.errors[min(error.errors)] if is_unitrain_error else str(error)
        raise click.ClickException(message) from error


def list_rank_set_specs(
    backends: str | None, ranks: int, device: str
) -> tuple[list[RankSetSpec], list[tuple[str, str]]]:
    """Return a spec for each backend except `local` and each of its transports (on GPUs) or Horovod controllers (on
    CPUs), and (name, reason) for each skipped backend or controller.

    Raises ConfigError if no backend is available.
    """
    from unitrain.bench.rank_sets import RankSetSpec

    names = [name for name in parse_backends(backends) if name != "local"]
    controllers, skipped = find_available_backends(names)
    specs = []
    for name, choices in controllers.items():
        transports = getattr(registry.load(name), "transports", ()) if device == "cuda" else ()
        if transports:
            specs += [RankSetSpec(name, ranks, variables={"UNITRAIN_TRANSPORT": transport}) for transport in transports]
            continue
        for controller in choices:
            if controller != "mpi":
                specs.append(RankSetSpec(name, ranks))
                continue
            command = launchers.build_local("horovodrun", "-", ranks, name, controller=controller)
            prefix = command.argv[:-2]  # without the Python interpreter and the script
            specs.append(RankSetSpec(name, ranks, command=prefix, variables=command.environment))
    check_any_available(specs, skipped)
    return specs, skipped


def check_any_available(available: Collection[object], skipped: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError with the reason for each skipped backend if there are no `available` backends."""
    if not available:
        reasons = " ".join(f"{name}: {reason}" for name, reason in skipped)
        raise ConfigError(
            f"No backend that supports several ranks is available on this host. {reasons or 'Use --backends ddp'}"
        )


def select_default_device() -> str:
    """Return "cuda" if torch finds a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def parse_numbers(option: str, text: str) -> list[int]:
    """Parse a list of positive integers such as "1,2,4", and remove duplicates. Raises ConfigError for invalid text."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise ConfigError(
                f"{option} takes positive integers separated by commas, got {part!r} in {text!r}. Use {option} 1,2"
            )
    return list(dict.fromkeys(map(int, parts)))


def parse_bytes(option: str, text: str) -> int:
    """Parse a size such as "64MB" (units of 1024) into bytes. Raises ConfigError for invalid text."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?B?)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"{option} takes sizes such as 1KB, 64MB or 4096, got {text!r}. Use {option} 1MB")
    return int(match[1]) * _UNITS[match[2].removesuffix("B")]


def print_progress(text: str) -> None:
    """Print a progress message to standard error."""
    click.echo(text, err=True)


def check_can_draw(output: Path) -> None:
    """Raise ConfigError or MissingDependencyError if charts cannot be drawn to `output`.

    Called before the measurement.
    """
    if output.suffix not in (".png", ".html"):
        raise ConfigError(f"--output takes a .png or .html file, got '{output}'. Use --output {output}.png")
    for package in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"--output needs the package {package}, which is not installed. Install it, in the source folder of "
                'unitrain, with: pip install ".[report]"'
            )


def check_output_files(json_file: Path | None, output: Path | None) -> None:
    """Raise UsageError if a file given on the command line cannot be written. Called before the measurement, on rank
    0."""
    check_output_file("--json", json_file, creates_folder=True)
    check_output_file("--output", output, creates_folder=True)


def show_and_save(result: dict[str, Any], json_file: Path | None, output: Path | None) -> None:
    """Print the result, and write it to the files given on the command line."""
    from rich.text import Text

    from unitrain.bench import results, tables

    console = tables.create_console()
    table = getattr(tables, result["kind"])(result)
    console.print(table)
    for note in tables.table_notes(result):
        console.print(note)
    for name, reason in result.get("skipped", ()):
        console.print(Text.assemble(("skipped", "bold"), f" {name}: {reason}"))
    if json_file is not None:
        with report_write_error(json_file):
            results.write(result, json_file)
    if output is not None:
        from unitrain.report.bench_charts import draw

        with report_write_error(output):
            draw(result, output, *tables.table_texts(table))
