"""GPU checks of each backend with one rank, compared with plain torch.

The checks are collectives in every dtype, prefetched batches, a run with and without prefetching, and 20 steps in fp32,
bf16 and fp16 (GradScaler, clipping). The throughput of a torchvision model with the Trainer is compared with that of a
hand-written loop in the same process, in turns. The loop uses DistributedDataParallel, Horovod's DistributedOptimizer
or, for the backend `local`, neither.

    python benchmarks/gpu_check.py                # writes benchmarks/results/gpu_check.md
    python benchmarks/gpu_check.py --device cpu   # the same steps, to test the check itself
"""

from __future__ import annotations

import platform
import statistics
from pathlib import Path

import click
import torch
from device_steps import (
    PRECISIONS,
    check_collectives,
    check_prefetched_batches,
    compare_prefetching,
    compare_training,
    describe,
    measure_throughput,
)

from unitrain.testing import RankGroup

RESULTS = Path(__file__).parent / "results"
# The backend and plain torch run the same kernels on the same inputs, so results differ only by the summation order.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}


def check(backend: str, device: str, model: str, batch_size: int, steps: int, rounds: int) -> tuple[list[str], bool]:
    """Return the backend's lines of the table, and whether all checks passed."""
    with RankGroup(backend, 1, device=device) as group:
        (about,) = group.run(describe)
        lines = [f"| {backend} | device, transport | {about['device']}, {about['transport']} | |"]
        (count,) = group.run(check_collectives)
        lines.append(f"| {backend} | collectives equal to their definition | {count} | ok |")
        (count,) = group.run(check_prefetched_batches)
        lines.append(f"| {backend} | prefetched batches equal to the loader's | {count} | ok |")
        (difference,) = group.run(compare_prefetching)
        has_passed = difference == 0.0
        verdict = "ok" if has_passed else "**not equal**"
        lines.append(f"| {backend} | with and without prefetch, largest difference | {difference:.1e} | {verdict} |")
        for precision in PRECISIONS:
            (difference,) = group.run(compare_training, precision)
            is_within_tolerance = difference <= TOLERANCE[precision]
            has_passed &= is_within_tolerance
            verdict = "ok" if is_within_tolerance else f"**above {TOLERANCE[precision]:g}**"
            lines.append(f"| {backend} | {precision}, 20 steps, largest difference | {difference:.1e} | {verdict} |")
        measured: dict[str, list[dict[str, float]]] = {"by hand": [], "Trainer": []}
        for _ in range(rounds):
            for loop, rows in measured.items():
                rows += group.run(measure_throughput, loop, model, batch_size, steps, timeout_seconds=300)
    ratios = [
        ours["speed"] / hand["speed"] for ours, hand in zip(measured["Trainer"], measured["by hand"], strict=True)
    ]
    speed = statistics.median(row["speed"] for row in measured["Trainer"])
    memory = max(row["mebibytes"] for row in measured["Trainer"])
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    lines.append(f"| {backend} | {model}, batch {batch_size}: samples/s | {speed:.0f} | |")
    lines.append(f"| {backend} | {model}: Trainer / loop by hand | {statistics.median(ratios):.3f} | {spread} |")
    lines.append(f"| {backend} | {model}: peak memory, MiB | {memory:.0f} | |")
    return lines, has_passed


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--backend", "backends", multiple=True, default=["local", "ddp", "horovod"], show_default=True)
@click.option("--model", default="resnet50", show_default=True, help="A torchvision model.")
@click.option("--batch-size", default=64, show_default=True)
@click.option("--steps", default=20, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(device: str, backends: list[str], model: str, batch_size: int, steps: int, rounds: int, output: Path) -> None:
    """Check, print the table and save it. Exit with status 1 if a check failed."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("torch does not find a GPU. To test the check itself, use: --device cpu")
    lines = [
        "# GPU check",
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}, device {device}, one rank. "
        f"Command: `make gpu-check`. Throughput: the Trainer and the loop by hand take turns for {rounds} rounds.",
        "",
        "| backend | check | result | verdict |",
        "|---|---|---|---|",
    ]
    all_passed = True
    for backend in backends:
        found, has_passed = check(backend, device, model, batch_size, steps, rounds)
        lines += found
        all_passed &= has_passed
    text = "\n".join(lines) + "\n"
    click.echo(text)
    output.mkdir(parents=True, exist_ok=True)
    (output / "gpu_check.md").write_text(text)
    if not all_passed:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main()
