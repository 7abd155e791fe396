"""`unitrain tune`: search for settings that reduce the step time of a script on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from unitrain.cli import FiniteRange, split_words
from unitrain.errors import ConfigError
from unitrain.output import plain_console
from unitrain.processes import exit_on_termination_signals
from unitrain.supervisor.checks import check_not_launched, check_script, check_started_once

_STARTUP_SECONDS = 120.0


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--launch",
    "launch_options",
    callback=split_words,
    default="",
    metavar="OPTIONS",
    help='Options passed to unitrain launch: --launch "--backend horovod -np 4".',
)
@click.option(
    "--minutes",
    type=FiniteRange(min=0, min_open=True),
    default=10,
    show_default=True,
    help="Duration of the search.",
)
@click.option(
    "--seconds",
    type=FiniteRange(min=0, min_open=True),
    default=3,
    show_default=True,
    help="Duration of the timed steps per run.",
)
@click.option(
    "--compression", is_flag=True, help="Also time gradient compression, which changes the numerical results."
)
@click.option(
    "--local-sgd",
    is_flag=True,
    help="Also time low-communication training (TrainConfig.local_sgd), which changes the numerical results.",
)
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def tune(
    launch_options: tuple[str, ...],
    minutes: float,
    seconds: float,
    compression: bool,
    local_sgd: bool,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Search for settings that reduce the step time of SCRIPT, which must use unitrain.Trainer, or be a configuration
    file of `unitrain train`.

    Runs the script repeatedly for a few seconds, with and without each setting. Settings with a significant speedup in
    additional pairs of runs are saved to unitrain-tuned.json. In the folder of this file, `unitrain launch` applies and
    prints these settings for runs with the same arguments on the same hardware. Without --compression and --local-sgd,
    the settings change results only by rounding errors.

    \b
      unitrain tune train.py
      unitrain tune config.yaml --batch_size 64
      unitrain tune --minutes 20 --launch "--backend horovod -np 8 -H a:4,b:4" train.py --batch-size 64
    """
    try:
        check_not_launched("Run unitrain tune without a launcher: it starts the ranks itself.")
        check_started_once()
        check_script(script)
    except Exception as error:
        raise click.UsageError(str(error)) from error

    from unitrain.tune.tuning import Tuner

    exit_on_termination_signals()
    with tempfile.TemporaryDirectory(prefix="unitrain-tune-") as folder:
        tuner = Tuner(
            launch_options=launch_options,
            script=str(script),
            args=args,
            step_seconds=seconds,
            timeout_seconds=_STARTUP_SECONDS + 20 * seconds,
            folder=Path(folder),
        )
        try:
            tuner.tune(
                minutes * 60,
                with_compression=compression,
                with_local_sgd=local_sgd,
                report=click.echo,
                report_run=plain_console(stderr=True).print,
            )
        except ConfigError as error:
            raise click.ClickException(str(error)) from error
