"""`unitrain tune`: settings that make a script train faster on this machine, and by how much."""

from __future__ import annotations

import math
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click

import unitrain
from unitrain.backends import registry
from unitrain.bootstrap import environment
from unitrain.errors import ConfigError
from unitrain.supervisor.checks import check_not_launched, check_script, check_started_once
from unitrain.tune import tuned_settings
from unitrain.tune.candidates import shown, tunables
from unitrain.tune.search import PAIRS, Found, Gain, ratio_of_pair, search
from unitrain.tune.trial import VARIABLE, Request, Result
from unitrain.verify.commands import last_lines, run_command

_COMPRESSIONS = ("fp16", "bf16")


@dataclass
class _Trials:
    """Runs a script for a short time under given settings, by `unitrain launch` with the user's `options`."""

    options: tuple[str, ...]
    script: str
    args: tuple[str, ...]
    seconds: float
    limit_seconds: float
    folder: Path
    count: int = 0

    def run(self, variables: Mapping[str, str], compression: str | None = None) -> Result:
        """Make a run and return what it told. Raises ConfigError, with the run's last words, where it tells nothing."""
        self.count += 1
        name = f"{self.folder}/{self.count}"
        request = Request(name=name, warmup=10, seconds=self.seconds, compression=compression).text()
        settings = [word for one in {VARIABLE: request, **variables}.items() for word in ("-x", "=".join(one))]
        program = str(Path(unitrain.__file__).with_name("__main__.py"))
        command = [
            sys.executable, program, "launch", "--untuned", *self.options, *settings, self.script, *self.args
        ]  # fmt: skip
        ended = run_command(
            command,
            environment.without_launcher() | {VARIABLE: request},
            marker=VARIABLE,
            script=self.script,
            output=Path(f"{name}.txt"),
            limit_seconds=self.limit_seconds,
        )
        result = Result.find(ended.output)
        if result is None:
            how = f"ended with exit code {ended.code}" if ended.code is not None else "was not done in time"
            words = "\n".join(last_lines(ended.output))
            raise ConfigError(f"Under {shown(variables)!r} the run {how} and timed no step. Its last words:\n{words}")
        return result


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--launch", default="", metavar="OPTIONS", help='How it is launched: --launch "--backend horovod -np 4".')
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=10, show_default=True, help="How long to look."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=3,
    show_default=True,
    help="Steps that are timed in each run, in seconds.",
)
@click.option("--compression", is_flag=True, help="Time compressed gradients too, which change the numbers.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def tune(launch: str, minutes: float, seconds: float, compression: bool, script: Path, args: tuple[str, ...]) -> None:
    """Find settings under which SCRIPT, which uses unitrain.Trainer, takes less time for a step.

    Runs it again and again for some seconds, with and without a setting in turn. What is clearly faster, on pairs of
    runs that were not used to find it, is kept in unitrain-tuned.json. In this folder, `unitrain launch` uses it for a
    run with the same arguments on an equal machine, and says so.
    The settings change no number beyond rounding.

    \b
      unitrain tune train.py
      unitrain tune --minutes 20 --launch "--backend horovod -np 8 -H a:4,b:4" train.py --batch-size 64
    """
    try:
        check_not_launched("Type unitrain tune without a launcher: it starts its own.")
        check_started_once()
        check_script(script)
    except Exception as error:
        raise click.UsageError(str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run at hand is ended first
    with tempfile.TemporaryDirectory(prefix="unitrain-tune-") as folder:
        trials = _Trials(tuple(shlex.split(launch)), str(script), args, seconds, 120 + 20 * seconds, Path(folder))
        try:
            began = time.monotonic()
            first = trials.run({})
            took = time.monotonic() - began
            ranks = "1 rank" if first.size == 1 else f"{first.size} ranks"
            click.echo(
                f"{script} on {ranks} of {first.backend} over {first.transport}: "
                f"{first.seconds_per_step * 1e3:.2f} ms a step as it is"
            )
            found = _look(trials, first, minutes * 60, took)
            _tell(found, first, str(script), args)
            if compression:
                _compare_compressions(trials)
        except ConfigError as error:
            raise click.ClickException(str(error)) from error


def _look(trials: _Trials, first: Result, seconds: float, run_seconds: float) -> Found:
    from rich.console import Console

    console = Console(stderr=True, highlight=False)

    def measure(settings: Mapping[str, str]) -> float:
        result = trials.run(settings)
        console.print(f"  {result.seconds_per_step * 1e3:9.2f} ms  {shown(settings)}", markup=False)
        return result.seconds_per_step

    # What a backend lets be turned is about gradients that travel.
    of_backend = registry.load(first.backend).tunables if first.size > 1 else ()
    choices = tunables(of_backend, first.threads, first.cores_per_rank)
    return search(measure, choices, seconds, run_seconds=run_seconds)


def _tell(found: Found, first: Result, script: str, args: tuple[str, ...]) -> None:
    run = tuned_settings.Run.here(script, args, first.backend, first.size, first.num_nodes)
    gain = found.gain
    if gain is None or not gain.clear:
        seen = f" The best that was seen, {_interval(gain)}, is within the noise." if gain is not None else ""
        click.echo(f"Nothing is clearly faster than the settings as they are.{seen}{_left(found)}")
        tuned_settings.forget(run)
        return
    click.echo(f"Faster by {_interval(gain)}: {shown(found.settings)}.{_left(found)}")
    tuned_settings.Tuned(
        **asdict(run),
        variables=found.settings,
        gain=round(gain.median, 4),
        spread=(round(gain.spread[0], 4), round(gain.spread[1], 4)),
    ).keep()
    click.echo(
        f"Kept in {tuned_settings.FILE}. In this folder, unitrain launch uses it and says so, for the same arguments, "
        "hosts, torch and kind of machine. Leave it out with: --untuned"
    )


def _left(found: Found) -> str:
    if not found.left:
        return ""
    return f" There was no time for {found.left} other settings. Allow more: --minutes {math.ceil(found.seconds / 60)}"


def _compare_compressions(trials: _Trials) -> None:
    generator = random.Random()
    for name in _COMPRESSIONS:
        plain = partial(_seconds_per_step, trials, None)
        compressed = partial(_seconds_per_step, trials, name)
        gain = Gain([ratio_of_pair(plain, compressed, generator) for _ in range(PAIRS)])
        verdict = "Set it if the numbers may change" if gain.clear else "Within the noise"
        click.echo(f'TrainConfig(compression="{name}"): {_interval(gain)}. {verdict}.')


def _seconds_per_step(trials: _Trials, compression: str | None) -> float:
    return trials.run({}, compression=compression).seconds_per_step


def _interval(gain: Gain) -> str:
    low, high = gain.spread
    return f"a factor of {gain.median:.3f} (between {low:.3f} and {high:.3f} in {len(gain.ratios)} pairs)"
