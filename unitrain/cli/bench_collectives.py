"""`unitrain bench collectives`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unitrain.bench.results import OPERATIONS
from unitrain.bootstrap import environment
from unitrain.cli import FiniteRange
from unitrain.cli.available import find_available_backends, parse_backends
from unitrain.cli.bench_options import (
    backends_option,
    check_any_available,
    check_can_draw,
    check_output_files,
    device_option,
    json_option,
    list_rank_set_specs,
    output_option,
    parse_bytes,
    print_progress,
    report_errors,
    select_default_device,
    show_and_save,
)
from unitrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from unitrain.bench.rank_sets import RankSet

_SIZES = "1KB,4KB,16KB,64KB,256KB,1MB,4MB,16MB,64MB,256MB"


@click.command()
@click.option(
    "-np", "-n", "--num-processes", type=click.IntRange(min=2), metavar="N", help="Number of ranks. [default: 2]"
)
@backends_option
@click.option(
    "--operations",
    metavar="NAME,...",
    default=",".join(OPERATIONS),
    show_default=True,
    help="Collectives to measure.",
)
@click.option(
    "--sizes", metavar="SIZE,...", default=_SIZES, show_default=True, help="Message (tensor) sizes; 1 KB = 1024 B."
)
@click.option("--max-bytes", metavar="SIZE", help="Maximum message size.")
@click.option(
    "--seconds",
    type=FiniteRange(min=0),
    default=60,
    show_default=True,
    help="Duration of the measurement; at least 3 rounds are run.",
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
    """Benchmark collectives on every backend and transport, one at a time.

    Without a launcher, the command starts a separate set of ranks on this host for each backend and transport. Under a
    launcher, on any number of hosts, it uses the launched ranks, and initializes one backend at a time. Backends that
    are not available on all hosts are skipped:

    \b
      unitrain bench collectives -np 2 --json here.json --output here.png
      unitrain launch -np 4 -H a:2,b:2 $(which unitrain) bench collectives --json both.json
      mpirun -np 4 unitrain bench collectives --backends ddp,horovod
    """
    with report_errors():
        selected_sizes = _parse_sizes(sizes, max_bytes)
        selected_operations = _parse_operations(operations)
        if output is not None:
            check_can_draw(output)
        if environment.detect().rank == 0:
            check_output_files(json_file, output)
        with _start_rank_sets(num_processes, backends, device) as (rank_sets, skipped, is_first_rank):
            from unitrain.bench.rounds import measure_collectives

            report_progress = print_progress if is_first_rank else lambda text: None
            measurements = measure_collectives(rank_sets, selected_operations, selected_sizes, seconds, report_progress)
            result = {**measurements, "skipped": skipped}
    if is_first_rank:
        show_and_save(result, json_file, output)


@contextmanager
def _start_rank_sets(
    num_processes: int | None, backends: str | None, device: str | None
) -> Iterator[tuple[list[RankSet], list[tuple[str, str]], bool]]:
    """Yield the rank sets, (name, reason) per skipped backend, and whether this process prints the result."""
    rank_info = environment.detect()
    if rank_info.size > 1:
        if num_processes not in (None, rank_info.size):
            raise ConfigError(
                f"-np {num_processes} differs from the {rank_info.size} ranks that {rank_info.source} has started. "
                "Omit -np."
            )
        from unitrain.bench.rank_sets import LaunchedRanks

        names = [
            name for name in parse_backends(backends or environment.get_variable("UNITRAIN_BACKEND")) if name != "local"
        ]
        available, skipped = find_available_backends(names)
        check_any_available(available, skipped)
        own, first_name = (list(available), skipped), next(iter(available))
        first = LaunchedRanks(first_name, device)
        # All ranks must start the same backends, even if some backends are not installed on all hosts.
        with first.activate():
            selected, skipped = select_common_backends(first.run(lambda backend: own))
        others = [LaunchedRanks(name, device) for name in selected if name != first_name]
        yield [first, *others], skipped, rank_info.rank == 0
        return
    from unitrain.bench.rank_sets import start_rank_sets

    device = device or select_default_device()
    ranks = num_processes or 2
    specs, skipped = list_rank_set_specs(backends, ranks, device)
    with start_rank_sets(specs, device) as rank_sets:
        yield rank_sets, skipped, True


def select_common_backends(
    backends_by_rank: Sequence[tuple[Sequence[str], Sequence[tuple[str, str]]]],
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the backends that are available on all ranks, and (name, reason) for the others.

    `backends_by_rank` contains for each rank the available backends, and (name, reason) for each skipped one. Rank 0
    determines the order.
    """
    available, skipped = backends_by_rank[0]
    reasons = dict(skipped)
    for rank, (available_on_rank, skipped_on_rank) in enumerate(backends_by_rank):
        for name in available:
            if name not in available_on_rank:
                reason = dict(skipped_on_rank).get(name, "It was not selected.")
                reasons.setdefault(name, f"On rank {rank}: {reason}")
    return [name for name in available if name not in reasons], list(reasons.items())


def _parse_sizes(text: str, max_bytes: str | None) -> list[int]:
    sizes = sorted({parse_bytes("--sizes", part) for part in text.split(",")})
    if max_bytes is not None:
        limit = parse_bytes("--max-bytes", max_bytes)
        sizes = [size for size in sizes if size <= limit]
        if not sizes:
            raise ConfigError(f"--max-bytes {max_bytes} excludes all sizes in {text}. Use --max-bytes 1MB")
    return sizes


def _parse_operations(text: str) -> list[str]:
    operations = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in operations:
        if name not in OPERATIONS:
            suggestion = did_you_mean(name, OPERATIONS)
            raise ConfigError(f"Unknown operation {name!r}. {suggestion}Available: {', '.join(OPERATIONS)}.")
    return operations
