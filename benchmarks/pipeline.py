"""Peak memory and step time of pipeline stages, compared with plain torch in one process.

The memory is the growth of the resident memory of a process above that before the model is built, measured in new
processes. Step times are measured on ranks that stay alive, on which the ways take turns in a new order every round.
Each measurement replaces its part of benchmarks/results/pipeline.*.

    python benchmarks/pipeline.py                        # both measurements
    python benchmarks/pipeline.py --measure memory
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from tables import RESULTS, keep, ratio
from torch import Tensor, nn

import unitrain
from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

MEGABYTE = 10**6
SAMPLES = {"ResNet": 16, "MLP": 16384}


@dataclass(frozen=True)
class Way:
    """A way of training; `stages` is 0 for plain torch in one process."""

    stages: int = 0
    micro_batches: int = 1
    schedule: str = "1f1b"
    checkpointed: bool = False
    balance: str = "memory"


ONE_PROCESS = "one process"
WAYS = {
    ONE_PROCESS: Way(),
    "one process, 4 micro-batches": Way(micro_batches=4),
    "one process, checkpointing": Way(checkpointed=True),
    "2 stages, 1F1B": Way(2, 4),
    "2 stages, 1F1B, checkpointing": Way(2, 4, checkpointed=True),
    "2 stages, GPipe, checkpointing": Way(2, 4, "gpipe", checkpointed=True),
    "2 stages, 1F1B, 8 micro-batches, checkpointing": Way(2, 8, checkpointed=True),
    "2 stages, 1F1B, balanced by time": Way(2, 4, balance="time"),
}


class ResidualBlock(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = (nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        more = (nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.layers = nn.Sequential(*layers, nn.ReLU(), *more)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs + self.layers(inputs)).relu()


class HiddenLayer(nn.Sequential):
    """A hidden layer of an MLP."""


def build(model: str) -> tuple[nn.Sequential, str, Tensor, Tensor]:
    """Return a model, the class of its blocks, a batch and its targets. Activations need most of the memory."""
    torch.manual_seed(0)
    samples = SAMPLES[model]
    targets = torch.randint(10, (samples,))
    if model == "ResNet":
        blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), *(ResidualBlock(16) for _ in range(8))]
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
        return nn.Sequential(*blocks, *head), "ResidualBlock", torch.randn(samples, 3, 96, 96), targets
    layers = [HiddenLayer(nn.Linear(128, 128), nn.LayerNorm(128), nn.Tanh()) for _ in range(16)]
    return nn.Sequential(*layers, nn.Linear(128, 10)), "HiddenLayer", torch.randn(samples, 128), targets


def prepare(backend: Backend, model_name: str, way: Way) -> tuple[Callable[[], Any], list[int]]:
    """Return a function that runs one training step, and the number of blocks per stage."""
    model, block, inputs, targets = build(model_name)
    if way.checkpointed:
        unitrain.checkpoint_activations(model, block)
    loss_fn = nn.CrossEntropyLoss()
    if not way.stages:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step_of_one_process() -> None:
            parts = zip(inputs.chunk(way.micro_batches), targets.chunk(way.micro_batches), strict=True)
            for values, labels in parts:
                (loss_fn(model(values), labels) * (len(labels) / len(targets))).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step_of_one_process, [len(model)]
    pipeline = unitrain.Pipeline(
        model, backend, loss_fn, stages=way.stages, micro_batches=way.micro_batches, schedule=way.schedule,
        balance=way.balance, example_inputs=inputs,
    )  # fmt: skip
    stage_optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)

    def step() -> None:
        pipeline.forward_backward(inputs, targets)
        stage_optimizer.step()
        stage_optimizer.zero_grad()

    return step, pipeline.blocks_per_stage


def resident_bytes(key: str) -> int:
    """Return the current ("VmRSS") or highest ("VmHWM") resident memory of this process."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_bytes(backend: Backend, model: str, way: Way) -> tuple[int, list[int]]:
    """Return the growth of the resident memory in two training steps, and the number of blocks per stage."""
    if way.stages:
        import torch.distributed.pipelining  # its modules take memory that does not depend on the model
    nn.Conv2d(3, 16, 3)(torch.randn(2, 3, 8, 8)).sum().backward()
    backend.barrier()
    before = resident_bytes("VmRSS")
    step, blocks = prepare(backend, model, way)
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM, without the measurement of the blocks
    for _ in range(2):
        step()
    return resident_bytes("VmHWM") - before, blocks


def measure_memory() -> dict[str, dict[str, Any]]:
    """Return, by model and way, the peak memory of each stage in bytes and the blocks per stage."""
    results: dict[str, dict[str, Any]] = {}
    for model in SAMPLES:
        results[model] = {}
        for name, way in WAYS.items():
            with RankGroup("ddp" if way.stages else "local", way.stages or 1, spawn=True) as group:
                found = group.run(peak_bytes, model, way, timeout_seconds=400)
            results[model][name] = {"bytes": [peak for peak, _ in found], "blocks": found[0][1]}
            click.echo(f"{model}, {name}: {[round(peak / MEGABYTE) for peak, _ in found]} MB, {found[0][1]} blocks")
    return results


_steps: dict[tuple[str, Way], Callable[[], Any]] = {}


def step_seconds(backend: Backend, model: str, way: Way) -> float:
    """Return the seconds of one training step. One process trains on rank 0, while the other rank waits."""
    if (model, way) not in _steps:
        _steps[model, way], _ = prepare(backend, model, way)
        if way.stages or backend.rank == 0:
            _steps[model, way]()
    backend.barrier()
    started = time.perf_counter()
    if way.stages or backend.rank == 0:
        _steps[model, way]()
    backend.barrier()
    return time.perf_counter() - started


def measure_time(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return, by model and way, the seconds of a step on the slowest rank in each round."""
    results: dict[str, dict[str, list[float]]] = {}
    shuffled = random.Random(0)
    with RankGroup("ddp", 2, spawn=True) as group:
        for model in SAMPLES:
            results[model] = {name: [] for name in WAYS}
            for _ in range(rounds):
                for name in shuffled.sample(list(WAYS), len(WAYS)):
                    seconds = max(group.run(step_seconds, model, WAYS[name], timeout_seconds=400))
                    results[model][name].append(seconds)
    return results


def table(memory: dict[str, dict[str, Any]], seconds: dict[str, dict[str, list[float]]]) -> list[str]:
    lines = [
        "# Pipeline parallelism",
        "",
        f"2 stages on one host, one core and one thread each, without a GPU; AdamW; torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores. Peak memory of each stage, and of the larger stage "
        "relative to plain torch in one process on the same batch. Time of a step relative to one process in the same "
        "round: the median, and in brackets the interquartile range. Command: `python benchmarks/pipeline.py`.",
    ]
    for model, by_way in memory.items():
        lines += ["", f"## {model}, {SAMPLES[model]} samples per batch", ""]
        lines += [
            "| | memory of each stage, MB | larger stage / one process | blocks | time / one process |",
            "|---" * 5 + "|",
        ]
        whole = max(by_way[ONE_PROCESS]["bytes"])
        for name, found in by_way.items():
            peaks = ", ".join(f"{peak / MEGABYTE:.0f}" for peak in found["bytes"])
            blocks = " + ".join(map(str, found["blocks"]))
            times = seconds.get(model, {})
            if not times:
                shown = "not measured"
            elif name == ONE_PROCESS:
                shown = f"{statistics.median(times[name]):.3f} s"
            else:
                shown = ratio(times[name], times[ONE_PROCESS])
            lines.append(f"| {name} | {peaks} | {max(found['bytes']) / whole:.0%} | {blocks} | {shown} |")
    return lines


@click.command()
@click.option("--measure", type=click.Choice(["memory", "time"]), multiple=True, default=["memory", "time"])
@click.option("--rounds", type=click.IntRange(min=2), default=7, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(measure: list[str], rounds: int, output: Path) -> None:
    """Measure, print the table and save it."""
    saved = output / "pipeline.json"
    figures = json.loads(saved.read_text()) if saved.exists() else {"memory": {}, "seconds": {}}
    if "memory" in measure:
        figures["memory"] = measure_memory()
    if "time" in measure:
        figures["seconds"] = measure_time(rounds)
    keep(table(figures["memory"], figures["seconds"]), "pipeline", output, **figures)


if __name__ == "__main__":
    main()
