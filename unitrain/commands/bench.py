"""`unitrain bench`: how fast collectives and training are here, and what to expect of more ranks."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import launchers
from unitrain import environment
from unitrain.bench.bandwidth import OPERATIONS
from unitrain.commands.available import available_here, names_of
from unitrain.errors import ConfigError, MissingDependencyError, UnitrainError, did_you_mean

if TYPE_CHECKING:
    from unitrain.bench.contestants import Contestant, Start

_SIZES = "1KB,4KB,16KB,64KB,256KB,1MB,4MB,16MB,64MB,256MB"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_json = click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Keep the result there."
)
_output = click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw it: a .png or .html file."
)
_device = click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is a GPU]")
_backends = click.option("--backends", metavar="NAME,...", help="[default: all that are available]")


@click.group()
def bench() -> None:
    """Measure collectives and training on every backend in turn, and predict more ranks."""


@contextmanager
def told() -> Iterator[None]:
    """Turn what is wrong with a command line or a file into its one sentence."""
    try:
        yield
    except (launchers.LaunchError, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    except UnitrainError as error:
        raise click.ClickException(str(error)) from error


@bench.command()
@click.option("-np", "-n", "--num-processes", type=click.IntRange(min=2), metavar="N", help="Ranks. [default: 2]")
@_backends
@click.option("--operations", metavar="NAME,...", default=",".join(OPERATIONS), show_default=True)
@click.option("--sizes", metavar="SIZE,...", default=_SIZES, show_default=True, help="Of the whole array, KB of 1024.")
@click.option("--max-bytes", metavar="SIZE", help="Leave larger sizes out.")
@click.option(
    "--seconds", type=click.FloatRange(min=0), default=60, show_default=True, help="To spend; 3 rounds at least."
)
@_device
@_json
@_output
def collectives(
    num_processes: int | None,
    backends: str | None,
    operations: str,
    sizes: str,
    max_bytes: str | None,
    seconds: float,
    device: str | None,
    json_file: Path | None,
    output: Path | None,
) -> None:
    """Time collectives on every backend and transport, in turns.

    Typed as it is, it starts a set of ranks on this machine for each of them. Under a launcher, on any number of hosts,
    it uses the ranks that there are, and starts its backends one after the other:

    \b
      unitrain bench collectives -np 2 --json here.json --output here.png
      unitrain launch -np 4 -H a:2,b:2 $(which unitrain) bench collectives --json both.json
      mpirun -np 4 unitrain bench collectives --backends ddp,horovod
    """
    with told():
        wanted = _sizes(sizes, max_bytes)
        asked = _operations(operations)
        if output is not None:
            _check_can_draw(output)
        with _contestants(num_processes, backends, device) as (contestants, skipped, first):
            from unitrain.bench.sweep import sweep

            tell = _tell if first else _say_nothing
            result = {**sweep(contestants, asked, wanted, seconds, tell), "skipped": skipped}
    if first:
        _keep(result, json_file, output)


@bench.command()
@click.argument("measured", required=False, type=click.Path(path_type=Path))
@click.option("--train", type=click.Path(path_type=Path), metavar="FILE", help="A result of bench train: the model.")
@click.option("--parameters", type=click.FloatRange(min=1), help="Of the model, as in 25.6e6.")
@click.option("--step-seconds", type=click.FloatRange(min=0, min_open=True), help="Of one rank alone.")
@click.option(
    "--backward-share", type=click.FloatRange(0, 1), default=2 / 3, show_default="two thirds", help="Of the step."
)
@click.option("--bytes-per-parameter", type=click.FloatRange(min=0, min_open=True), default=4, show_default=True)
@click.option(
    "--bucket-bytes", metavar="SIZE", default="25MB", show_default=True, help="Gradients that travel at once."
)
@click.option("--latency", type=click.FloatRange(min=0), metavar="SECONDS", help="Of a message, instead of MEASURED.")
@click.option(
    "--bandwidth", type=click.FloatRange(min=0, min_open=True), metavar="GB/S", help="Of a rank, instead of MEASURED."
)
@click.option("--algorithms", metavar="NAME,...", help="[default: ring; with --latency, all that are known]")
@click.option("--ranks", metavar="N,...", default="1,2,4,8,16,32,64,128,256,512,1024", show_default=True)
@click.option("--ranks-per-host", type=click.IntRange(min=1), metavar="N", help="For the hierarchical algorithm.")
@click.option("--host-latency", type=click.FloatRange(min=0), metavar="SECONDS", help="Inside a host.")
@click.option("--host-bandwidth", type=click.FloatRange(min=0, min_open=True), metavar="GB/S", help="Inside a host.")
@click.option("--servers", type=click.IntRange(min=1), default=1, show_default=True, help="Parameter servers.")
@_json
@_output
def predict(
    measured: Path | None,
    train: Path | None,
    parameters: float | None,
    step_seconds: float | None,
    backward_share: float,
    bytes_per_parameter: float,
    bucket_bytes: str,
    latency: float | None,
    bandwidth: float | None,
    algorithms: str | None,
    ranks: str,
    ranks_per_host: int | None,
    host_latency: float | None,
    host_bandwidth: float | None,
    servers: int,
    json_file: Path | None,
    output: Path | None,
) -> None:
    """Predict training steps and efficiency on up to 1,024 ranks.

    By the alpha-beta model (unitrain/bench/cost_model.py), fitted to MEASURED, a result of bench collectives, or of a
    network with this latency and bandwidth. Communication of one bucket overlaps with the backward of the next. Slower
    ranks and input are left out, so what is predicted is the best to hope for.

    \b
      unitrain bench predict here.json --train trained.json
      unitrain bench predict here.json --parameters 25.6e6 --step-seconds 0.3
      unitrain bench predict --latency 10e-6 --bandwidth 2.5 --parameters 138e6 --step-seconds 0.42
    """
    with told():
        from unitrain.bench import cost_model, cost_prediction, results

        if (measured is None) == (latency is None or bandwidth is None):
            raise ConfigError(
                "What to predict from is either a result of bench collectives, or --latency and --bandwidth. "
                "Use --latency 10e-6 --bandwidth 3"
            )
        if (train is None) == (parameters is None or step_seconds is None):
            raise ConfigError(
                "What is trained is either --train with a result of bench train, or --parameters and --step-seconds. "
                "Use --parameters 25.6e6 --step-seconds 0.3"
            )
        if (ranks_per_host is None) != (host_latency is None or host_bandwidth is None):
            raise ConfigError(
                "--ranks-per-host, --host-latency and --host-bandwidth go together. "
                "Use --ranks-per-host 8 --host-latency 5e-6 --host-bandwidth 20"
            )
        if output is not None:
            _check_can_draw(output)
        hosts = None
        if ranks_per_host is not None and host_latency is not None and host_bandwidth is not None:
            inside = cost_model.Network(alpha=host_latency, beta=1e-9 / host_bandwidth)
            hosts = cost_prediction.Hosts(ranks=ranks_per_host, network=inside)
        known = [*cost_model.ALGORITHMS, *([cost_model.HIERARCHICAL] if hosts is not None else [])]
        asked = algorithms.split(",") if algorithms else known if measured is None else ["ring"]
        cost_model.check_algorithms(asked)
        if cost_model.HIERARCHICAL in asked and hosts is None:
            raise ConfigError(
                "The hierarchical algorithm needs to know the hosts. "
                "Use --ranks-per-host 8 --host-latency 5e-6 --host-bandwidth 20"
            )
        wanted = cost_prediction.costs(asked, hosts, servers)
        given = None
        if latency is not None and bandwidth is not None:
            given = cost_model.Network(alpha=latency, beta=1e-9 / bandwidth)
        result = None if measured is None else results.read(measured, "collectives")
        networks = cost_prediction.networks_of(result, given, wanted)
        trained = None if train is None else results.read(train, "train")
        if trained is not None:
            model = cost_prediction.model_of(trained, bytes_per_parameter)
        else:
            assert parameters is not None
            assert step_seconds is not None
            model = cost_prediction.Model(
                parameters=parameters,
                bytes_per_parameter=bytes_per_parameter,
                step_seconds=step_seconds,
                backward_share=backward_share,
            )
        sizes = numbers("--ranks", ranks)
        predicted = cost_prediction.predict(model, networks, wanted, sizes, _bytes("--bucket-bytes", bucket_bytes))
        if trained is not None:
            predicted["measured"] = cost_prediction.measured_beside(model, trained, networks, wanted)
    _keep(predicted, json_file, output)


def numbers(option: str, text: str) -> list[int]:
    """Return the numbers in "1,2,4", each once. Raises ConfigError for what is none."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise ConfigError(f"{option} takes numbers from 1, as in 1,2,4, got {part!r} in {text!r}. Use {option} 1,2")
    return list(dict.fromkeys(map(int, parts)))


@contextmanager
def _contestants(
    num_processes: int | None, backends: str | None, device: str | None
) -> Iterator[tuple[list[Contestant], list[tuple[str, str]], bool]]:
    """Start the ranks, or take part as one; and say what cannot run, and whether this process is the one to tell."""
    placement = environment.detect()
    if placement.size > 1:
        if num_processes not in (None, placement.size):
            raise ConfigError(
                f"-np {num_processes} asks for other ranks than the {placement.size} that {placement.source} has "
                "started. Leave it out."
            )
        from unitrain.bench.contestants import LaunchedRanks

        names = [one for one in names_of(backends or environment.setting("UNITRAIN_BACKEND")) if one != "local"]
        found, skipped = available_here(names)
        launched: list[Contestant] = [LaunchedRanks(name, device) for name in found]
        yield launched, skipped, placement.rank == 0
        return
    from unitrain.bench.contestants import held

    device = device or _default_device()
    ranks = num_processes or 2
    starts, skipped = starts_here(backends, ranks, device)
    with held(starts, ranks, device) as contestants:
        yield contestants, skipped, True


def starts_here(backends: str | None, ranks: int, device: str) -> tuple[list[Start], list[tuple[str, str]]]:
    """Return how every backend and transport but `local` is started here, and what cannot be, with the reason."""
    from unitrain.bench.contestants import Start

    names = [name for name in names_of(backends) if name != "local"]
    controllers, skipped = available_here(names)
    starts = []
    for name, choices in controllers.items():
        if name == "ddp" and device == "cuda":
            starts += [Start(name, variables={"UNITRAIN_TRANSPORT": transport}) for transport in ("nccl", "gloo")]
            continue
        for controller in choices:
            if controller != "mpi":
                starts.append(Start(name))
                continue
            spec = launchers.LaunchSpec(script="-", num_processes=ranks, backend=name, controller=controller)
            command = launchers.build("horovodrun", spec)
            prefix = command.argv[: command.argv.index(sys.executable)]
            starts.append(Start(name, command=prefix, variables=command.environment))
    if not starts:
        reasons = " ".join(f"{what}: {why}" for what, why in skipped)
        raise ConfigError(f"No backend with several ranks can run here. {reasons or 'Use --backends ddp'}")
    return starts, skipped


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _sizes(text: str, most: str | None) -> list[int]:
    sizes = sorted({_bytes("--sizes", part) for part in text.split(",")})
    if most is not None:
        limit = _bytes("--max-bytes", most)
        sizes = [size for size in sizes if size <= limit]
        if not sizes:
            raise ConfigError(f"--max-bytes {most} leaves none of the sizes {text}. Use --max-bytes 1MB")
    return sizes


def _bytes(option: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]?B?)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"{option} takes sizes such as 1KB, 64MB or 4096, got {text!r}. Use {option} 1MB")
    return int(match[1]) * _UNITS[match[2].removesuffix("B")]


def _operations(text: str) -> list[str]:
    asked = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in asked:
        if name not in OPERATIONS:
            near = did_you_mean(name, OPERATIONS)
            raise ConfigError(f"Unknown operation {name!r}. {near}Available: {', '.join(OPERATIONS)}.")
    return asked


def _tell(text: str) -> None:
    click.echo(text, err=True)


def _say_nothing(text: str) -> None:
    """Rank 0 speaks for all."""


def _check_can_draw(output: Path) -> None:
    """Raise what would keep a picture from being drawn, before anything is measured."""
    if output.suffix not in (".png", ".html"):
        raise ConfigError(f"--output draws a .png or an .html file, got '{output}'. Use --output {output}.png")
    for package in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"--output draws with {package}, which is not installed. Install it with: "
                "pip install 'unitrain[report]'"
            )


def _keep(result: dict[str, Any], json_file: Path | None, output: Path | None) -> None:
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
