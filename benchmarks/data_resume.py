"""Measure the time from the start of a resumed epoch to its first batch, near the start and near the end of a dataset.

    python benchmarks/data_resume.py --pairs 20

Each pair measures both positions, in alternating order. A Hugging Face dataset is resumed from its saved state
(`--pairs`) and, for comparison, by skipping samples (`--skipping-pairs`).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import click
import torch
from datasets import Dataset

from unitrain.backends.local import LocalBackend
from unitrain.data.sharding import open_training_data
from unitrain.data.training_data import ShardSettings, TrainingData

SAMPLES, SHARDS, BATCH_SIZE = 200_000, 400, 20
STEPS = SAMPLES // BATCH_SIZE
POSITIONS = {"early": STEPS // 100, "late": STEPS - STEPS // 100}


def open_data(workers: int) -> TrainingData:
    dataset = Dataset.from_dict({"number": list(range(SAMPLES))}).to_iterable_dataset(num_shards=SHARDS)
    settings = ShardSettings(batch_size=BATCH_SIZE, num_workers=workers)
    return open_training_data(dataset, LocalBackend(torch.device("cpu")), settings)  # type: ignore[arg-type]


def save_states(workers: int) -> dict[str, Any]:
    data, states = open_data(workers), {}
    wanted = {step: name for name, step in POSITIONS.items()}
    for step, (_, micro_batch) in enumerate(data.micro_batches(0), 1):
        if (name := wanted.get(step)) is not None:
            states[name] = data.gather_state(micro_batch.data_state, 0, micro_batch.step_end)
    return states


def resume(state: dict[str, Any], workers: int, *, with_state: bool) -> float:
    """Return the seconds until the first batch. Assert that the batch is correct."""
    data = open_data(workers)
    if with_state:
        data.resume_from(state)
    begin = time.perf_counter()
    batch, _ = next(iter(data.micro_batches(0, state["position"])))
    seconds = time.perf_counter() - begin
    assert batch["number"].tolist() == list(range(state["position"], state["position"] + BATCH_SIZE))
    data.end_epoch()
    return seconds


@click.command()
@click.option("--pairs", default=20, show_default=True)
@click.option("--skipping-pairs", default=3, show_default=True)
def main(pairs: int, skipping_pairs: int) -> None:
    """Print the median times, and the median ratio of the pairs."""
    torch.set_num_threads(1)
    for workers in (0, 2):
        states = save_states(workers)
        for with_state, count in ((True, pairs), (False, skipping_pairs)):
            seconds: dict[str, list[float]] = {name: [] for name in POSITIONS}
            for number in range(count + 1):  # the first pair warms up
                for name in sorted(POSITIONS, reverse=number % 2 == 1):
                    taken = resume(states[name], workers, with_state=with_state)
                    if number:
                        seconds[name].append(taken)
            ratios = sorted(late / early for early, late in zip(seconds["early"], seconds["late"], strict=True))
            medians = {name: f"{statistics.median(values) * 1000:.2f} ms" for name, values in seconds.items()}
            spread = f"{ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f}"
            print(
                f"{workers} workers, {'from the state' if with_state else 'by skipping'}: {medians}, late/early "
                f"{statistics.median(ratios):.3f} (quartiles {spread}, {count} pairs)"
            )


if __name__ == "__main__":
    main()
