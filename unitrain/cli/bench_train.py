"""`unitrain bench train`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unitrain.bootstrap import environment
from unitrain.cli import FiniteRange
from unitrain.cli.bench_options import (
    backends_option,
    check_can_draw,
    check_output_files,
    device_option,
    json_option,
    list_rank_set_specs,
    output_option,
    parse_numbers,
    print_progress,
    report_errors,
    select_default_device,
    show_and_save,
)
from unitrain.errors import ConfigError, did_you_mean
from unitrain.supervisor.checks import check_config_packages, is_config_file

if TYPE_CHECKING:
    from unitrain.bench.rank_sets import RankSetSpec


@click.command()
@click.argument("target", default="25M")
@click.option(
    "--ranks", metavar="N,...", default="1,2", show_default=True, help="Numbers of ranks. One rank uses backend local."
)
@backends_option
@click.option(
    "--setting",
    "settings",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="Also benchmark with these TrainConfig settings, such as precision=bf16,compression=fp16. Repeatable.",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Batch size per rank. [default: batch size of TARGET]")
@click.option(
    "--steps", type=click.IntRange(min=2), help="Steps per round on each set of ranks. [default: depends on TARGET]"
)
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
def train(
    target: str,
    ranks: str,
    backends: str | None,
    settings: tuple[str, ...],
    batch_size: int | None,
    steps: int | None,
    seconds: float,
    device: str | None,
    json_file: Path | None,
    output: Path | None,
) -> None:
    """Train TARGET on every backend and transport, one at a time, and report throughput, time per phase and memory.

    TARGET is tiny, 25M (MLPs), gpt, resnet18, resnet50, a configuration file of `unitrain train`, or a function that
    returns the arguments of Trainer as a dictionary, as for unitrain verify. Each rank uses one thread, pinned to its
    own core if there are enough cores.

    \b
      unitrain bench train 25M --ranks 1,2 --json before.json --output before.html
      unitrain bench train gpt --setting precision=bf16 --setting compression=fp16
      unitrain bench train config.yaml
      unitrain bench train package.module:function
      unitrain bench train file.py:function
    """
    with report_errors():
        rank_info = environment.detect()
        if rank_info.size > 1:
            raise ConfigError(
                f"unitrain bench train starts ranks itself, but {rank_info.source} has started {rank_info.size}. "
                "Run it without a launcher."
            )
        from unitrain.bench.models import resolve_target

        function, default_steps = resolve_target(target)
        _check_target(target, function)
        selected: dict[str | None, dict[str, Any]] = {None: {}, **{text: _parse_setting(text) for text in settings}}
        if output is not None:
            check_can_draw(output)
        check_output_files(json_file, output)
        device = device or select_default_device()
        specs: list[RankSetSpec] = []
        skipped: list[tuple[str, str]] = []
        for size in parse_numbers("--ranks", ranks):
            if size == 1:
                from unitrain.bench.rank_sets import RankSetSpec

                specs.append(RankSetSpec("local", 1))
                continue
            rank_sets_of_size, skipped = list_rank_set_specs(backends, size, device)
            specs += rank_sets_of_size
        from unitrain.bench.rank_sets import start_rank_sets
        from unitrain.bench.rounds import measure_training

        with start_rank_sets(specs, device) as rank_sets:
            result = measure_training(
                rank_sets,
                function,
                selected,
                batch_size=batch_size,
                steps=steps or default_steps,
                seconds=seconds,
                report_progress=print_progress,
            )
    show_and_save({**result, "target": target, "skipped": skipped}, json_file, output)


def _check_target(target: str, function: str) -> None:
    """Raise ConfigError unless `target` names a built-in model, a configuration file, or a function.

    A file must exist; a module is not imported. Raises LaunchError if the package that reads configuration files is
    missing.
    """
    from unitrain.bench.models import BUILT_IN_MODELS

    if is_config_file(target):
        if not Path(target).is_file():
            raise ConfigError(f"There is no file {target!r}. Pass a configuration file: config.yaml")
        check_config_packages()
        return
    module, _, name = function.rpartition(":")
    if not module or not name:
        suggestion = did_you_mean(target, BUILT_IN_MODELS)
        raise ConfigError(
            f"Unknown model {target!r}. {suggestion}Available: {', '.join(BUILT_IN_MODELS)}, package.module:function, "
            "file.py:function."
        )
    if module.endswith(".py") and not Path(module).is_file():
        raise ConfigError(f"There is no file {module!r}. Pass the file and the function: file.py:function")


def _parse_setting(text: str) -> dict[str, Any]:
    """Parse settings such as "precision=bf16,max_grad_norm=1".

    Raises ConfigError for settings that TrainConfig does not have, for settings that the benchmark sets itself, and for
    invalid values.
    """
    from unitrain.bench.training import FIXED_SETTINGS
    from unitrain.config import TrainConfig

    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        known_names = [field.name for field in dataclasses.fields(TrainConfig)]
        if not equals or name not in known_names:
            suggestion = did_you_mean(name, known_names)
            raise ConfigError(
                f"--setting takes settings of TrainConfig as NAME=VALUE,..., got {part!r}. {suggestion}"
                "Use --setting precision=bf16"
            )
        if name == "max_steps" or name in FIXED_SETTINGS:
            raise ConfigError(
                f"--setting cannot change TrainConfig.{name}, which unitrain bench train sets itself, got {part!r}. "
                "Leave it out. --steps sets the number of steps"
            )
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = {"True": True, "False": False, "None": None}.get(value, value)
    TrainConfig(**{"max_epochs": 1, "batch_size": 1, **values})
    return values
