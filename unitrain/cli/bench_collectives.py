"""`unitrain bench collectives`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unitrain.bench.bandwidth import OPERATIONS
from unitrain.bootstrap import environment
from unitrain.cli.available import find_available, parse_backends
from unitrain.cli.bench_options import (
    backends_option,
    check_can_draw,
    default_device,
    device_option,
    json_option,
    keep,
    number_of_bytes,
    output_option,
    starts_here,
    tell,
    told,
)
from unitrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from unitrain.bench.contestants import Contestant

_SIZES = "1KB,4KB,16KB,64KB,256KB,1MB,4MB,16MB,64MB,256MB"


@click.command()
@click.option("-np", "-n", "--num-processes", type=click.IntRange(min=2), metavar="N", help="Ranks. [default: 2]")
@backends_option
@click.option("--operations", metavar="NAME,...", default=",".join(OPERATIONS), show_default=True)
@click.option("--sizes", metavar="SIZE,...", default=_SIZES, show_default=True, help="Of the whole array, KB of 1024.")
@click.option("--max-bytes", metavar="SIZE", help="Leave larger sizes out.")
@click.option(
    "--seconds", type=click.FloatRange(min=0), default=60, show_default=True, help="To spend; 3 rounds at least."
)
@device_option
@json_option
@output_option
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
            check_can_draw(output)
        with _contestants(num_processes, backends, device) as (contestants, skipped, first):
            from unitrain.bench.sweep import sweep

            progress = tell if first else _say_nothing
            result = {**sweep(contestants, asked, wanted, seconds, progress), "skipped": skipped}
    if first:
        keep(result, json_file, output)


@contextmanager
def _contestants(
    num_processes: int | None, backends: str | None, device: str | None
) -> Iterator[tuple[list[Contestant], list[tuple[str, str]], bool]]:
    """Start the ranks, or take part as one; and say what cannot run, and whether this process is the one to tell."""
    rank_info = environment.detect()
    if rank_info.size > 1:
        if num_processes not in (None, rank_info.size):
            raise ConfigError(
                f"-np {num_processes} asks for other ranks than the {rank_info.size} that {rank_info.source} has "
                "started. Leave it out."
            )
        from unitrain.bench.contestants import LaunchedRanks

        names = [one for one in parse_backends(backends or environment.setting("UNITRAIN_BACKEND")) if one != "local"]
        found, skipped = find_available(names)
        launched: list[Contestant] = [LaunchedRanks(name, device) for name in found]
        yield launched, skipped, rank_info.rank == 0
        return
    from unitrain.bench.contestants import held

    device = device or default_device()
    ranks = num_processes or 2
    starts, skipped = starts_here(backends, ranks, device)
    with held(starts, device) as contestants:
        yield contestants, skipped, True


def _sizes(text: str, most: str | None) -> list[int]:
    sizes = sorted({number_of_bytes("--sizes", part) for part in text.split(",")})
    if most is not None:
        limit = number_of_bytes("--max-bytes", most)
        sizes = [size for size in sizes if size <= limit]
        if not sizes:
            raise ConfigError(f"--max-bytes {most} leaves none of the sizes {text}. Use --max-bytes 1MB")
    return sizes


def _operations(text: str) -> list[str]:
    asked = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in asked:
        if name not in OPERATIONS:
            near = did_you_mean(name, OPERATIONS)
            raise ConfigError(f"Unknown operation {name!r}. {near}Available: {', '.join(OPERATIONS)}.")
    return asked


def _say_nothing(text: str) -> None:
    """Rank 0 speaks for all."""
