"""What the commands of `unitrain bench` share: options, the ranks that are started, and how results are told."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unitrain import errors, launchers
from unitrain.cli.available import find_available, parse_backends
from unitrain.errors import ConfigError, MissingDependencyError, UnitrainError

if TYPE_CHECKING:
    from unitrain.bench.contestants import Start

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

json_option = click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Keep the result there."
)
output_option = click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw it: a .png or .html file."
)
device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is a GPU]"
)
backends_option = click.option("--backends", metavar="NAME,...", help="[default: all that are available]")


@contextmanager
def told() -> Iterator[None]:
    """Turn what is wrong with a command line or a file into its one sentence."""
    try:
        yield
    except (launchers.LaunchError, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    except UnitrainError as error:
        raise click.ClickException(str(error)) from error
    except AssertionError as error:
        from unitrain.bench.contestants import RankError

        if not isinstance(error, RankError):
            raise
        # What unitrain says of a mistake, or the traceback of anything else.
        ours = hasattr(errors, error.kind) and error.errors
        raise click.ClickException(error.errors[min(error.errors)] if ours else str(error)) from error


def starts_here(backends: str | None, ranks: int, device: str) -> tuple[list[Start], list[tuple[str, str]]]:
    """Return how every backend and transport but `local` is started here, and what cannot be, with the reason."""
    from unitrain.bench.contestants import Start

    names = [name for name in parse_backends(backends) if name != "local"]
    controllers, skipped = find_available(names)
    starts = []
    for name, choices in controllers.items():
        if name == "ddp" and device == "cuda":
            starts += [Start(name, ranks, variables={"UNITRAIN_TRANSPORT": one}) for one in ("nccl", "gloo")]
            continue
        for controller in choices:
            if controller != "mpi":
                starts.append(Start(name, ranks))
                continue
            here = (launchers.Host("localhost", ranks),)
            spec = launchers.LaunchSpec(
                script="-", num_processes=ranks, hosts=here, backend=name, controller=controller
            )
            command = launchers.build("horovodrun", spec)
            prefix = command.argv[:-2]  # without the Python and the script
            starts.append(Start(name, ranks, command=prefix, variables=command.environment))
    if not starts:
        reasons = " ".join(f"{what}: {why}" for what, why in skipped)
        raise ConfigError(f"No backend with several ranks can run here. {reasons or 'Use --backends ddp'}")
    return starts, skipped


def default_device() -> str:
    """Return "cuda" where torch sees a GPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def numbers(option: str, text: str) -> list[int]:
    """Return the numbers in "1,2,4", each once. Raises ConfigError for what is none."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise ConfigError(f"{option} takes numbers from 1, as in 1,2,4, got {part!r} in {text!r}. Use {option} 1,2")
    return list(dict.fromkeys(map(int, parts)))


def number_of_bytes(option: str, text: str) -> int:
    """Return the bytes in "64MB", with units of 1024. Raises ConfigError for what is no size."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?B?)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"{option} takes sizes such as 1KB, 64MB or 4096, got {text!r}. Use {option} 1MB")
    return int(match[1]) * _UNITS[match[2].removesuffix("B")]


def tell(text: str) -> None:
    """Tell on the terminal how far it has come, beside what is printed."""
    click.echo(text, err=True)


def check_can_draw(output: Path) -> None:
    """Raise what would keep a picture from being drawn, before anything is measured."""
    if output.suffix not in (".png", ".html"):
        raise ConfigError(f"--output draws a .png or an .html file, got '{output}'. Use --output {output}.png")
    for package in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"--output draws with {package}, which is not installed. Install it with: pip install jinja2 matplotlib"
            )


def keep(result: dict[str, Any], json_file: Path | None, output: Path | None) -> None:
    """Print the result, and write what was asked for."""
    from unitrain.bench import results, tables

    console = tables.console()
    table = getattr(tables, result["kind"])(result)
    console.print(table)
    for note in tables.notes(result):
        console.print(note, markup=False)
    for what, why in result.get("skipped", ()):
        console.print(f"[bold]skipped[/bold] {what}: ", end="")
        console.print(why, markup=False)
    if json_file is not None:
        results.write(result, json_file)
    if output is not None:
        from unitrain.report.bench_charts import draw

        draw(result, output, *tables.texts(table))
