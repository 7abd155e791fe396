"""`unitrain bench train`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unitrain.bench.builtin import BUILT_IN, resolve
from unitrain.bootstrap import environment
from unitrain.cli.bench_options import (
    backends_option,
    check_can_draw,
    default_device,
    device_option,
    json_option,
    keep,
    numbers,
    output_option,
    starts_here,
    tell,
    told,
)
from unitrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from unitrain.bench.contestants import Start


@click.command()
@click.argument("target", default="25M")
@click.option("--ranks", metavar="N,...", default="1,2", show_default=True, help="One rank is trained on local.")
@backends_option
@click.option(
    "--setting",
    "settings",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="Of TrainConfig, beside the plain one, as in precision=bf16,compression=fp16. Repeatable.",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Of a rank. [default: what TARGET says]")
@click.option("--steps", type=click.IntRange(min=2), help="Of a turn. [default: by TARGET, else 20]")
@click.option(
    "--seconds", type=click.FloatRange(min=0), default=60, show_default=True, help="To spend; 3 rounds at least."
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
    """Train TARGET on every backend and transport, in turns: speed, where the time goes, memory.

    TARGET is tiny, 25M (perceptrons), gpt, resnet18, resnet50, or a function that returns the arguments of Trainer as a
    dictionary, as for unitrain verify. Each rank has one thread, and a core of its own where there are enough.

    \b
      unitrain bench train 25M --ranks 1,2 --json before.json --output before.html
      unitrain bench train gpt --setting precision=bf16 --setting compression=fp16
      unitrain bench train package.module:function
      unitrain bench train file.py:function
    """
    with told():
        rank_info = environment.detect()
        if rank_info.size > 1:
            raise ConfigError(
                f"unitrain bench train starts ranks itself, but {rank_info.source} has started {rank_info.size}. "
                "Type it without a launcher."
            )
        function, usual = resolve(target)
        _check_target(target, function)
        asked: dict[str | None, dict[str, Any]] = {None: {}, **{text: _setting(text) for text in settings}}
        if output is not None:
            check_can_draw(output)
        device = device or default_device()
        starts: list[Start] = []
        skipped: list[tuple[str, str]] = []
        for number in numbers("--ranks", ranks):
            if number == 1:
                from unitrain.bench.contestants import Start

                starts.append(Start("local", 1))
                continue
            found, skipped = starts_here(backends, number, device)
            starts += found
        from unitrain.bench.contestants import held
        from unitrain.bench.scaling import train_in_turns

        with held(starts, device) as contestants:
            result = train_in_turns(
                contestants,
                function,
                asked,
                batch_size=batch_size,
                steps=steps or usual,
                seconds=seconds,
                tell=tell,
            )
    keep({**result, "target": target, "skipped": skipped}, json_file, output)


def _check_target(target: str, function: str) -> None:
    """Raise ConfigError for what names no function."""
    module, _, name = function.rpartition(":")
    if not module or not name:
        near = did_you_mean(target, BUILT_IN)
        raise ConfigError(
            f"Unknown model {target!r}. {near}Available: {', '.join(BUILT_IN)}, package.module:function, "
            "file.py:function."
        )
    if module.endswith(".py") and not Path(module).is_file():
        raise ConfigError(f"There is no file {module!r}. Name the file of the function: file.py:function")


def _setting(text: str) -> dict[str, Any]:
    """Return the settings in "precision=bf16,channels_last=True". Raises ConfigError for an unknown setting."""
    from unitrain.config import TrainConfig

    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        known = [field.name for field in dataclasses.fields(TrainConfig)]
        if not equals or name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(
                f"--setting takes settings of TrainConfig as NAME=VALUE,..., got {part!r}. {near}"
                "Use --setting precision=bf16"
            )
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = {"True": True, "False": False, "None": None}.get(value, value)
    TrainConfig(**{"max_epochs": 1, "batch_size": 1, **values})
    return values
