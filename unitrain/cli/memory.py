"""`unitrain memory`: break down the memory usage of a script, and predict the savings of each setting."""

from __future__ import annotations

from pathlib import Path

import click

from unitrain.cli import FiniteRange, OutputPath, check_output_file, report_write_error
from unitrain.errors import ConfigError, UnsupportedError
from unitrain.processes import exit_on_termination_signals
from unitrain.supervisor.checks import check_not_launched, check_script, check_started_once, executed_script

_DEFAULT_RANKS = 8
_WARMUP_STEPS = 3


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-np",
    "-n",
    "--num-processes",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Number of ranks. A single rank has no gradient buckets.",
)
@click.option("--backend", metavar="NAME", help="ddp, horovod, local, or a plug-in. [default: ddp]")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of ranks for which sharding is predicted. [default: -np, or 8 with -np 1]",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Number of measured steps, after three warm-up steps.",
)
@click.option(
    "--timeout-seconds",
    type=FiniteRange(min=0, min_open=True),
    default=600,
    show_default=True,
    help="Time limit of the run.",
)
@click.option("--json", "json_file", type=OutputPath(dir_okay=False), help="Also write the report to this file.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def memory(
    num_processes: int,
    backend: str | None,
    ranks: int | None,
    steps: int,
    timeout_seconds: float,
    json_file: Path | None,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Break down the memory usage of SCRIPT per rank, and predict the savings of each setting.

    Runs the unmodified SCRIPT with its ARGS for a few training steps. The script must use unitrain.Trainer or a torch
    optimizer. On CPUs, the command measures the resident memory of the process, which requires Linux; on GPUs, the
    memory of torch tensors.

    \b
      unitrain memory train.py
      unitrain memory config.yaml
      unitrain memory -np 4 --backend horovod train.py --batch-size 64
      unitrain memory --ranks 64 --json memory.json train.py
    """
    try:
        check_not_launched("Run unitrain memory without a launcher: it starts the ranks itself.")
        check_started_once()
        check_script(script)
    except Exception as error:
        raise click.UsageError(str(error)) from error
    check_output_file("--json", json_file)
    from unitrain.memory import report
    from unitrain.memory.measurement import measure
    from unitrain.memory.process_memory import check_host_memory
    from unitrain.memory.record import MemoryRequest

    exit_on_termination_signals()
    # The host is named explicitly, because launchers otherwise use the hosts of a Slurm allocation.
    this_host = ["-np", str(num_processes), "-H", f"localhost:{num_processes}"]
    options = [*this_host, *(["--backend", backend] if backend else [])]
    try:
        check_host_memory()
        records = measure(
            *executed_script(str(script), args),
            launch_options=options,
            request=MemoryRequest(warmup_steps=_WARMUP_STEPS, steps=steps),
            timeout_seconds=timeout_seconds,
        )
    except (ConfigError, UnsupportedError) as error:
        raise click.ClickException(str(error)) from error
    predicted_ranks = ranks or (num_processes if num_processes > 1 else _DEFAULT_RANKS)
    report.show(records, predicted_ranks)
    if json_file is not None:
        settings = {"script": str(script), "args": args, "predicted_ranks": predicted_ranks}
        with report_write_error(json_file):
            report.write_json(records, predicted_ranks, settings, json_file)
