"""Iterable datasets: each item is used once for any number of ranks and workers, and all ranks end an epoch together.

The parameters show which samples each step used: they are compared with a plain loop in one process over the expected
samples.
"""

from __future__ import annotations

import io
import itertools
import logging
import multiprocessing
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groups import GROUPS_ON_DDP
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from unitrain import Callback, TrainConfig, Trainer, UnitrainError
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.dummy_batches import NO_BATCH, plan_steps
from unitrain.data.evaluation_shard import EvaluationShard
from unitrain.data.sharding import open_training_data
from unitrain.data.training_data import ShardSettings
from unitrain.output import plain_console
from unitrain.progress import display
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
SAMPLES = 120
GENERATOR = torch.Generator().manual_seed(2)
INPUTS = torch.randn(SAMPLES, 6, generator=GENERATOR)
TARGETS = torch.randint(3, (SAMPLES,), generator=GENERATOR)
Steps = list[list[int]]


class Network(nn.Module):
    """A network whose inputs are indices of samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, numbers: Tensor) -> Tensor:
        result: Tensor = self.layers(INPUTS.to(numbers.device)[numbers])
        return result


class Shuffled(IterableDataset[tuple[int, Tensor]]):
    """Yields the same samples on every rank. The order depends on the epoch and on the global generators of
    torch and Python. Each item also advances the global generators of torch and NumPy."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 7 * self.length  # wrong, but must not be used

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        order = torch.randperm(self.length).tolist()
        random.shuffle(order)
        order = order[self.epoch :] + order[: self.epoch]
        # Like the example in the documentation of IterableDataset, each worker yields a different part.
        info = get_worker_info()
        for number in order if info is None else order[info.id :: info.num_workers]:
            yield number, TARGETS[number]
            np.random.rand()
            torch.rand(1)


class Episodes(IterableDataset[tuple[float, float, float]]):
    """Yields `length` tuples of random numbers of three generators on each rank and worker."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[float, float, float]]:
        for _ in range(self.length):
            yield torch.rand(()).item(), np.random.rand(), random.random()


class Listed(IterableDataset[tuple[int, Tensor]]):
    """Yields the given samples, divided among the workers."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        info = get_worker_info()
        for number in self.numbers if info is None else self.numbers[info.id :: info.num_workers]:
            yield number, TARGETS[number]


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields batches of the given sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in consecutive_batches(self.sizes):
            yield torch.tensor(batch, dtype=torch.int64), TARGETS[batch]


class Reusing(IterableDataset[tuple[Any, Any]]):
    """Yields batches that all use the same memory, so that each batch overwrites the previous one."""

    def __init__(self, batches: Steps, *, arrays: bool = False) -> None:
        self.batches, self.arrays = batches, arrays

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        numbers, targets = torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
        for batch in self.batches:
            numbers.copy_(torch.tensor(batch)), targets.copy_(TARGETS[batch])
            yield (numbers.numpy(), targets.numpy()) if self.arrays else (numbers, targets)


class Indexed(Dataset[tuple[Tensor, Tensor]]):
    """Map-style dataset of batches. Counts how often each batch is loaded in this process."""

    def __init__(self, sizes: list[int]) -> None:
        self.batches, self.loaded = consecutive_batches(sizes), Counter[int]()

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.loaded[index] += 1
        return torch.tensor(self.batches[index]), TARGETS[self.batches[index]]


def consecutive_batches(sizes: list[int]) -> Steps:
    ends = [0, *itertools.accumulate(sizes)]
    return [list(range(start, end)) for start, end in itertools.pairwise(ends)]


def own_numbers(rank: int, lengths: list[int]) -> list[int]:
    """Return the sample indices of a rank's own stream."""
    first = sum(lengths[:rank])
    return list(range(first, first + lengths[rank]))


def own_batches(numbers: list[int], batch_size: int, workers: int) -> Steps:
    """Return a rank's batches, which its workers yield in turn."""
    parts = [numbers[worker :: max(1, workers)] for worker in range(max(1, workers))]
    batches = [[part[at : at + batch_size] for at in range(0, len(part), batch_size)] for part in parts]
    return [batch for row in itertools.zip_longest(*batches) for batch in row if batch is not None]


def expected_steps(ranks: list[Steps], accumulate: int, uneven: str) -> Steps:
    """Return the samples of each step, given the batches of each rank."""
    most, fewest = max(map(len, ranks)), min(map(len, ranks))
    if uneven == "drop":
        most = fewest - fewest % accumulate
    if uneven == "pad":
        ranks = [[batch for _, batch in zip(range(most), itertools.cycle(rank), strict=False)] for rank in ranks]
    return [
        [number for rank in ranks for batch in rank[at : min(at + accumulate, most)] for number in batch]
        for at in range(0, most, accumulate)
    ]


def train_in_plain_loop(steps: Steps) -> list[Tensor]:
    """Return the parameters after training in a plain loop over the samples of each step."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        nn.functional.cross_entropy(model(torch.tensor(step)), TARGETS[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def train(backend: Backend, data: Any, settings: dict[str, Any], val_data: Any = None) -> tuple[list[Tensor], Any]:
    """Return the parameters, and a tuple of results, epoch and step."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = TrainConfig(**{"max_epochs": 2, "progress": "off", "seed": 3, **settings})
    trainer = Trainer(model, optimizer, nn.functional.cross_entropy, backend=backend, config=config)
    results = trainer.fit(data, val_data)
    progress = trainer.progress
    return [parameter.detach().clone() for parameter in model.parameters()], (results, progress.epoch, progress.step)


def assert_equal(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-6) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def read_steps(backend: Backend, data: Any, settings: dict[str, Any], epochs: tuple[int, ...]) -> list[list[Any]]:
    """For each epoch and step, return the sample indices of this rank and the number of samples on all ranks."""
    shard = open_training_data(data, backend, ShardSettings(seed=3, **settings))
    found = []
    for epoch in epochs:
        steps: list[Any] = [[]]
        for batch, micro_batch in shard.micro_batches(epoch):
            steps[-1] += batch[0].tolist() if micro_batch.samples else []
            assert micro_batch.samples in (0, len(batch[0]))
            if micro_batch.ends_step:
                steps[-1] = (steps[-1], micro_batch.step_samples)
                steps.append([])
        assert steps.pop() == []
        found.append(steps)
    return found


@pytest.fixture(scope="module", params=GROUPS_ON_DDP, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


# A shared stream.


def read_shared_steps(backend: Backend, workers: int, accumulate: int, persistent: bool) -> list[list[Any]]:
    batch_size = 12 // (backend.size * accumulate)
    data: Any = DataLoader(
        Shuffled(62), batch_size=batch_size, num_workers=workers, persistent_workers=persistent,
        collate_fn=collate_with_random_draws,
    )  # fmt: skip
    return read_steps(backend, data, {"gradient_accumulation_steps": accumulate}, (0, 1))


def collate_with_random_draws(items: list[tuple[int, Tensor]]) -> list[Tensor]:
    """Draws random numbers, which must not change the order of the stream."""
    torch.rand(len(items)), np.random.rand(), random.random()
    return [torch.tensor([number for number, _ in items]), torch.stack([target for _, target in items])]


@pytest.mark.parametrize(
    ("workers", "accumulate", "persistent"), [(0, 1, False), (0, 2, False), (2, 1, False), (2, 2, True)]
)
def test_each_item_of_a_shared_stream_is_used_once_in_the_same_step_as_in_one_process(
    group: RankGroup, workers: int, accumulate: int, persistent: bool
) -> None:
    alone = read_shared_steps(LOCAL, 0, 1, False)
    ranks = group.run(read_shared_steps, workers, accumulate, persistent)
    for epoch in (0, 1):
        expected = [step for step, _ in alone[epoch]]
        assert sorted(number for step in expected for number in step) == list(range(62))
        assert [len(step) for step in expected] == [12] * 5 + [2]
        for number, step in enumerate(expected):
            taken = [rank[epoch][number] for rank in ranks]
            assert sorted(one for mine, _ in taken for one in mine) == sorted(step)
            assert {total for _, total in taken} == {len(step)}
            assert max(len(mine) for mine, _ in taken) - min(len(mine) for mine, _ in taken) <= 1
    assert alone[0] != alone[1]


def train_shared(backend: Backend, workers: int, settings: dict[str, Any]) -> tuple[list[Tensor], Any]:
    accumulate = settings.get("gradient_accumulation_steps", 1)
    settings = {"batch_size": 12 // (backend.size * accumulate), "num_workers": workers, **settings}
    return train(backend, Shuffled(62), settings, Shuffled(25))


@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), (2, 2)])
def test_shared_stream_equals_one_process_in_training_and_evaluation(
    group: RankGroup, workers: int, accumulate: int
) -> None:
    settings = {"gradient_accumulation_steps": accumulate, "max_epochs": 4}
    steps = [step for epoch in read_steps(LOCAL, Shuffled(62), {"batch_size": 12}, range(4)) for step, _ in epoch]  # type: ignore[arg-type]
    expected = train_in_plain_loop(steps)
    model = Network()
    for parameter, value in zip(model.parameters(), expected, strict=True):
        parameter.data.copy_(value)
    val_loss = nn.functional.cross_entropy(model(torch.arange(25)), TARGETS[:25]).item()
    for parameters, (results, epoch, step) in group.run(train_shared, workers, settings):
        assert_equal(parameters, expected)
        assert (epoch, step) == (4, 24)
        assert results["val_loss"] == pytest.approx(val_loss, rel=1e-5)


def steps_with_drop_last(backend: Backend, uneven: str) -> list[list[Any]]:
    loader: Any = DataLoader(Shuffled(62), batch_size=12 // backend.size, drop_last=True, num_workers=2)
    return read_steps(backend, loader, {"uneven": uneven}, (0,))


def test_drop_last_of_a_shared_stream_drops_an_incomplete_global_batch(group: RankGroup) -> None:
    for (steps,) in group.run(steps_with_drop_last, "weight"):
        assert [total for _, total in steps] == [12] * 5


# A different stream on each rank.


def read_episodes(backend: Backend, workers: int, persistent: bool) -> list[list[Any]]:
    loader: Any = DataLoader(Episodes(6), batch_size=2, num_workers=workers, persistent_workers=persistent)
    shard = open_training_data(loader, backend, ShardSettings(seed=3, stream="own"))
    return [[row for batch, _ in shard.micro_batches(epoch) for row in zip(*batch, strict=True)] for epoch in (0, 1)]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_own_streams_have_different_random_numbers(group: RankGroup, workers: int, persistent: bool) -> None:
    first, again = (group.run(read_episodes, workers, persistent) for _ in range(2))
    assert first == again
    rows = [tuple(map(float, row)) for rank in first for epoch in rank for row in epoch]
    assert len(rows) == len(first) * 2 * 6 * max(1, workers), "every worker must yield all its items"
    for column in zip(*rows, strict=True):
        assert len(set(column)) == len(rows)


LENGTHS = {1: [9], 2: [13, 6], 3: [13, 6, 20]}
NONE_ON_SOME = {1: [5], 2: [0, 9], 3: [9, 0, 4]}
UNEVEN = ("weight", "drop", "pad")


def train_own(backend: Backend, lengths: list[int], batch_size: int, settings: dict[str, Any]) -> Any:
    settings = {"stream": "own", "batch_size": batch_size, **settings}
    return train(backend, Listed(own_numbers(backend.rank, lengths)), settings)


@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), (2, 1), (0, 3)])
def test_unequal_streams_equal_one_process_with_the_samples_of_each_step(
    group: RankGroup, uneven: str, workers: int, accumulate: int
) -> None:
    lengths = LENGTHS[group.size]
    ranks = [own_batches(own_numbers(rank, lengths), 2, workers) for rank in range(group.size)]
    steps = expected_steps(ranks, accumulate, uneven)
    settings = {"uneven": uneven, "num_workers": workers, "gradient_accumulation_steps": accumulate}
    results = group.run(train_own, lengths, 2, settings)
    expected = train_in_plain_loop(steps * 2)
    for parameters, (_, epoch, step) in results:
        assert_equal(parameters, expected)
        assert (epoch, step) == (2, 2 * len(steps))


def test_uneven_policies_give_different_runs() -> None:
    """The lengths must be such that the policies differ. Otherwise, the test above would compare identical runs."""
    for size in (2, 3):
        for workers, accumulate in ((0, 1), (2, 1), (0, 3)):
            ranks = [own_batches(own_numbers(rank, LENGTHS[size]), 2, workers) for rank in range(size)]
            weight, drop, pad = (expected_steps(ranks, accumulate, uneven) for uneven in UNEVEN)
            assert len(drop) < len(weight) == len(pad)
            assert sorted(number for step in weight for number in step) == list(range(sum(LENGTHS[size])))
            assert sum(map(len, pad)) > sum(map(len, weight))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("uneven", ["weight", "pad"])
def test_rank_without_any_batch_takes_the_same_steps(group: RankGroup, uneven: str, workers: int) -> None:
    lengths = NONE_ON_SOME[group.size]
    ranks = [own_batches(own_numbers(rank, lengths), 2, workers) for rank in range(group.size)]
    expected = train_in_plain_loop(expected_steps(ranks, 1, uneven) * 2)
    for parameters, _ in group.run(train_own, lengths, 2, {"uneven": uneven, "num_workers": workers}):
        assert_equal(parameters, expected)


def train_sizes(backend: Backend, source: str, sizes: list[list[int]], settings: dict[str, Any]) -> Any:
    """Train on batches that the dataset creates: a shared stream, one stream per rank, or a map-style dataset."""
    workers = settings.pop("workers")
    dataset: Any = {
        "shared": lambda: Batches(sizes[0]),
        "own": lambda: Batches(sizes[backend.rank]),
        "indexed": lambda: Indexed(sizes[0]),
    }[source]()
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=workers)
    parameters, _ = train(backend, loader, {"stream": "own" if source == "own" else "shared", **settings}, loader)
    return parameters, dict(dataset.loaded) if source == "indexed" and not workers else {}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", ["shared", "own", "indexed"])
def test_batches_made_by_the_dataset_are_weighted_by_their_samples(group: RankGroup, source: str, workers: int) -> None:
    sizes = [[3, 5, 1, 4, 2, 6, 3], [2, 7, 1], [5, 0, 4, 1]]
    if source == "own":
        # Each worker yields the complete stream of its rank.
        ranks = [
            [batch for batch in consecutive_batches(sizes[rank]) for _ in range(max(1, workers))]
            for rank in range(group.size)
        ]
    else:
        ranks = [consecutive_batches(sizes[0])[rank :: group.size] for rank in range(group.size)]
    expected = train_in_plain_loop(expected_steps(ranks, 1, "weight") * 2)
    results = group.run(train_sizes, source, sizes, {"workers": workers})
    for parameters, _ in results:
        assert_equal(parameters, expected)
    if source == "indexed" and not workers:
        loaded = sum((Counter(counted) for _, counted in results), Counter())
        assert loaded == Counter(dict.fromkeys(range(7), 4)), "each epoch and validation must load each batch once"


def last_item_as_batch(items: list[tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
    """Return a batch that shares the memory of the last item."""
    numbers, targets = items[-1]
    return torch.as_tensor(numbers), torch.as_tensor(targets)


def train_reused(backend: Backend, source: str, accumulate: int, arrays: bool) -> list[Tensor]:
    batches = consecutive_batches([3] * 9)
    yields_batches = source != "items"
    mine = batches[backend.rank :: backend.size] if source == "own" else batches
    loader: Any = DataLoader(
        Reusing(mine, arrays=arrays),
        batch_size=None if yields_batches else 1,
        collate_fn=None if yields_batches else last_item_as_batch,
    )
    settings = {"stream": "own" if source == "own" else "shared", "gradient_accumulation_steps": accumulate}
    return train(backend, loader, settings, loader)[0]


@pytest.mark.parametrize("source", ["shared", "own", "items"])
@pytest.mark.parametrize(("accumulate", "arrays"), [(1, False), (2, False), (2, True)])
def test_stream_may_reuse_the_memory_of_a_batch(group: RankGroup, source: str, accumulate: int, arrays: bool) -> None:
    batches = consecutive_batches([3] * 9)
    steps = expected_steps([batches[rank :: group.size] for rank in range(group.size)], accumulate, "weight")
    expected = train_in_plain_loop(steps * 2)
    for parameters in group.run(train_reused, source, accumulate, arrays):
        assert_equal(parameters, expected)


def evaluate_reused(backend: Backend) -> list[int]:
    loader: Any = DataLoader(Reusing(consecutive_batches([3] * 9)), batch_size=None)
    return [number for batch, _ in EvaluationShard(loader, backend) for number in batch[0].tolist()]


def test_evaluated_stream_may_reuse_the_memory_of_a_batch(group: RankGroup) -> None:
    taken = group.run(evaluate_reused)
    batches = consecutive_batches([3] * 9)
    for rank, numbers in enumerate(taken):
        assert numbers == [number for batch in batches[rank :: group.size] for number in batch]


# Resuming within an epoch.


def train_resumable(backend: Backend, folder: str, source: str, workers: int, settings: dict[str, Any]) -> list[Tensor]:
    """Train until `max_steps` steps are complete, resuming from the newest checkpoint in `folder`."""
    lengths = LENGTHS[backend.size]
    if source == "shared":
        data: Any = Shuffled(62)
    elif source == "own":
        data = Noisy(own_numbers(backend.rank, lengths))
    else:
        data = DataLoader(Batches([3, 5, 1, 4, 2, 6, 3, 3, 2, 8]), batch_size=None, num_workers=workers)
    more = {} if source == "batches" else {"batch_size": 2, "num_workers": workers}
    settings = {
        "max_epochs": None,
        "output_dir": folder,
        "resume": True,
        "checkpoint_every_epochs": 100,
        **more,
        **settings,
    }
    return train(backend, data, {"stream": "own" if source == "own" else "shared", **settings})[0]


class Noisy(Listed):
    """Yields random samples, so that a resumed stream with different random numbers has different samples."""

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for number, _ in super().__iter__():
            chosen = (number + int(torch.randint(SAMPLES, ())) + random.randrange(SAMPLES)) % SAMPLES
            yield chosen, TARGETS[chosen]


@pytest.mark.parametrize(
    ("source", "workers", "settings"),
    [
        ("shared", 0, {}),
        ("shared", 2, {"gradient_accumulation_steps": 2}),
        pytest.param("own", 0, {"uneven": "weight"}, marks=pytest.mark.nightly),
        ("own", 2, {"uneven": "weight"}),
        pytest.param("own", 0, {"uneven": "pad"}, marks=pytest.mark.nightly),
        ("own", 2, {"uneven": "pad", "gradient_accumulation_steps": 2}),
        ("own", 0, {"uneven": "drop"}),
        ("batches", 0, {}),
    ],
)
def test_run_resumes_within_an_epoch(
    group: RankGroup, source: str, workers: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    uninterrupted = group.run(train_resumable, str(tmp_path / "whole"), source, workers, {"max_steps": 6, **settings})
    for steps in (1, 4, 6):
        parts = group.run(train_resumable, str(tmp_path / "parts"), source, workers, {"max_steps": steps, **settings})
    for found, wanted in zip(parts, uninterrupted, strict=True):
        # A new DistributedDataParallel sums the gradients of three ranks in another order in its first step.
        assert_equal(found, wanted, tolerance=0.0 if group.size < 3 else 1e-6)


def noisy_collate(items: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return as many samples as there are items, chosen by all three global generators."""
    shift = random.randrange(SAMPLES) + np.random.randint(SAMPLES)
    numbers = (torch.tensor([number for number, _ in items]) + torch.randint(SAMPLES, (len(items),)) + shift) % SAMPLES
    return numbers, TARGETS[numbers]


class StopAfter(Callback):
    """Requests a stop after a number of steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.steps:
            trainer.stop("requested by the test")


def train_with_noisy_collate(
    backend: Backend, folder: str, source: str, accumulate: int, drop_last: bool, ends: list[int]
) -> Any:
    """Train in several runs that end at the steps `ends`. Each run resumes from the previous one."""
    data: Any = {
        "shared": Shuffled(62),
        "own": Listed(own_numbers(backend.rank, LENGTHS[backend.size])),
        "indices": MapStyle(),
    }[source]
    for end in ends:
        loader: Any = DataLoader(data, batch_size=2, collate_fn=noisy_collate, drop_last=drop_last)
        model = Network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        stops = end != ends[-1] and end % 2 == 0
        config = TrainConfig(
            max_steps=100 if stops else end, gradient_accumulation_steps=accumulate,
            stream="own" if source == "own" else "shared",
            output_dir=folder, resume=True, progress="off", seed=3, log_every_n_steps=1,
        )  # fmt: skip
        trainer = Trainer(
            model, optimizer, nn.functional.cross_entropy, backend=backend, config=config,
            callbacks=[StopAfter(end)] if stops else [],
        )  # fmt: skip
        trainer.fit(loader, loader)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("source", "accumulate", "drop_last"),
    [
        ("shared", 1, False),
        ("own", 2, True),
        ("indices", 1, False),
        pytest.param("shared", 2, True, marks=pytest.mark.nightly),
        pytest.param("own", 1, False, marks=pytest.mark.nightly),
        pytest.param("indices", 2, True, marks=pytest.mark.nightly),
    ],
)
def test_resume_restores_the_random_numbers_of_collate_fn(
    group: RankGroup, source: str, accumulate: int, drop_last: bool, tmp_path: Path
) -> None:
    """A run that ends within an epoch also validates, and the validation draws from the same generators."""
    arguments = source, accumulate, drop_last
    uninterrupted = group.run(train_with_noisy_collate, str(tmp_path / "whole"), *arguments, [9])
    parts = group.run(train_with_noisy_collate, str(tmp_path / "parts"), *arguments, [1, 2, 4, 7, 9])
    for found, wanted in zip(parts, uninterrupted, strict=True):
        assert_equal(found, wanted, tolerance=0.0 if group.size < 3 else 1e-6)


def train_shared_resumable(backend: Backend, folder: str, steps: int) -> list[Tensor]:
    settings = {
        "batch_size": 12 // backend.size,
        "num_workers": backend.size - 1,
        "max_epochs": None,
        "max_steps": steps,
    }
    return train(backend, Shuffled(62), {"output_dir": folder, "resume": True, **settings})[0]


def test_shared_stream_resumes_on_another_number_of_ranks_and_workers(group: RankGroup, tmp_path: Path) -> None:
    expected = train_shared_resumable(LOCAL, str(tmp_path / "alone"), 11)
    train_shared_resumable(LOCAL, str(tmp_path / "route"), 3)
    group.run(train_shared_resumable, str(tmp_path / "route"), 8)
    assert_equal(train_shared_resumable(LOCAL, str(tmp_path / "route"), 11), expected)


def train_steps_of_one_epoch(backend: Backend) -> tuple[int, int, int]:
    """Train for the number of steps of one epoch."""
    trainer_data = Listed(own_numbers(backend.rank, LENGTHS[backend.size]))
    steps = max(-(-length // 2) for length in LENGTHS[backend.size])
    settings = {"stream": "own", "batch_size": 2, "max_epochs": None, "max_steps": steps}
    _, (_, epoch, step) = train(backend, trainer_data, settings)
    return epoch, step, steps


def test_step_that_ends_with_the_data_ends_the_epoch(group: RankGroup) -> None:
    for epoch, step, steps in group.run(train_steps_of_one_epoch):
        assert (epoch, step) == (1, steps)


class WorkerCounter(Callback):
    """Records the number of running worker processes at the end of each epoch."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        self.numbers.append(len(multiprocessing.active_children()))


LIMITS = [{"limit_train_steps": 2}, {"limit_train_steps": 99}, {"max_steps": 3, "max_epochs": None}]


@pytest.mark.parametrize("settings", LIMITS)
def test_workers_end_with_the_epoch(settings: dict[str, Any]) -> None:
    children, model = WorkerCounter(), Network()
    config = TrainConfig(**{"max_epochs": 2, "batch_size": 4, "num_workers": 1, "progress": "off", **settings})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.functional.cross_entropy
    Trainer(model, optimizer, loss_fn, backend=LOCAL, config=config, callbacks=[children]).fit(Shuffled(30))
    assert children.numbers == [0] * (1 if "max_steps" in settings else 2)


# Evaluation.


def evaluate(backend: Backend, length: int, workers: int, batch_size: int) -> tuple[list[int], float]:
    loader: Any = DataLoader(Shuffled(length), batch_size=batch_size, num_workers=workers, drop_last=True)
    taken = [
        number for _ in range(2) for batch, info in EvaluationShard(loader, backend) for number in batch[0].tolist()
        if info.samples == len(batch[0])
    ]  # fmt: skip
    model = Network()
    config = TrainConfig(max_epochs=1, progress="off")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.functional.cross_entropy, backend=backend, config=config)
    return taken, trainer.evaluate(loader)["loss"]


@pytest.mark.parametrize(("length", "workers", "batch_size"), [(1, 0, 2), (17, 2, 2), (30, 0, 4), (2, 2, 1)])
def test_each_item_is_evaluated_once(group: RankGroup, length: int, workers: int, batch_size: int) -> None:
    results = group.run(evaluate, length, workers, batch_size)
    assert sorted(number for taken, _ in results for number in taken) == sorted([*range(length)] * 2)
    expected = nn.functional.cross_entropy(Network()(torch.arange(length)), TARGETS[:length]).item()
    for _, loss in results:
        assert loss == pytest.approx(expected, rel=1e-5)


def evaluate_own(backend: Backend, lengths: list[int], drop_last: bool) -> tuple[float, list[int]]:
    """Return the mean loss over all streams, and the sample indices of the predictions."""
    model = Network()
    config = TrainConfig(max_epochs=1, progress="off", stream="own", eval_batch_size=None if drop_last else 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data: Any = Listed(own_numbers(backend.rank, lengths))
    if drop_last:
        data = DataLoader(data, batch_size=2, drop_last=True)
    evaluating, predicting = (
        Trainer(model, optimizer, nn.functional.cross_entropy, backend=backend, config=config, forward=forward)
        for forward in (None, lambda _, batch: (batch[0].float(), batch[1]))
    )
    return evaluating.evaluate(data)["loss"], predicting.predict(data).int().tolist()


@pytest.mark.parametrize("drop_last", [False, True])
def test_own_streams_are_evaluated_completely(group: RankGroup, drop_last: bool) -> None:
    lengths = NONE_ON_SOME[group.size]
    everything = list(range(sum(lengths)))
    expected = nn.functional.cross_entropy(Network()(torch.tensor(everything)), TARGETS[everything]).item()
    for loss, predicted in group.run(evaluate_own, lengths, drop_last):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert predicted == everything


def predict(backend: Backend, source: str, workers: int) -> list[int]:
    """Return the sample indices in the order of the predictions."""
    data: Any = DataLoader(Listed([*range(19, 0, -1)]), batch_size=2, num_workers=workers)
    if source == "batches":
        data = DataLoader(Batches([3, 0, 5, 1, 4, 2, 4]), batch_size=None, num_workers=workers)
    model = Network()
    config = TrainConfig(max_epochs=1, progress="off")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model, optimizer, nn.functional.cross_entropy, backend=backend, config=config,
        forward=lambda _, batch: (batch[0].unsqueeze(1).float(), batch[1]),
    )  # fmt: skip
    return trainer.predict(data).flatten().int().tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_predictions_are_in_the_order_of_a_shared_stream(group: RankGroup, workers: int) -> None:
    assert group.run(predict, "items", workers) == [[*range(19, 0, -1)]] * group.size
    assert group.run(predict, "batches", workers) == [[*range(19)]] * group.size


def log_messages_of_stream(backend: Backend, is_same: bool, workers: int) -> list[str]:
    """Return the log messages for a stream that is the same on every rank or differs between ranks."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unitrain").addHandler(handler)
    try:
        numbers = list(range(12)) if is_same else list(range(backend.rank, 12, backend.size))
        train(backend, Listed(numbers), {"batch_size": 1, "num_workers": workers})
    finally:
        logging.getLogger("unitrain").removeHandler(handler)
    return messages


@pytest.mark.parametrize("workers", [0, 2])
def test_different_shared_streams_cause_a_warning(group: RankGroup, workers: int) -> None:
    assert group.run(log_messages_of_stream, True, workers) == [[]] * group.size
    first, *others = group.run(log_messages_of_stream, False, workers)
    assert others == [[]] * (group.size - 1)
    assert len(first) == (group.size > 1)
    for message in first:
        assert "Listed does not start with the same item on every rank" in message
        assert "TrainConfig(stream='own')" in message


# Errors.


class Failing(Listed):
    def __init__(self, after: int | None) -> None:
        super().__init__(list(range(12)))
        self.after = after

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for at, item in enumerate(super().__iter__()):
            if at == self.after:
                raise OSError("the file is gone")
            yield item


class OneShot(IterableDataset[tuple[int, Tensor]]):
    def __init__(self) -> None:
        self.items = iter(Listed(list(range(12))))

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return self.items


class MapStyle(Dataset[tuple[int, Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, TARGETS[index]


def fails_on_one_rank(rank: int) -> tuple[Any, dict[str, Any]]:
    return Failing(5 if rank == 1 else None), {"batch_size": 2, "stream": "own"}


def fails_in_a_worker(rank: int) -> tuple[Any, dict[str, Any]]:
    return Failing(3 if rank == 0 else None), {"batch_size": 2, "num_workers": 2, "stream": "own"}


def empty(rank: int) -> tuple[Any, dict[str, Any]]:
    return Listed([]), {"batch_size": 2}


def exhausted(rank: int) -> tuple[Any, dict[str, Any]]:
    return OneShot(), {"batch_size": 2}


def too_little_for_a_step(rank: int) -> tuple[Any, dict[str, Any]]:
    return Listed([1, 2] if rank == 0 else []), {"batch_size": 2, "stream": "own", "uneven": "drop"}


def indices_on_one_rank(rank: int) -> tuple[Any, dict[str, Any]]:
    return (MapStyle() if rank == 0 else Listed([1])), {"batch_size": 2}


def different_batch_sizes(rank: int) -> tuple[Any, dict[str, Any]]:
    return DataLoader(Listed(list(range(12))), batch_size=2 + rank), {}


def batch_without_tensor(rank: int) -> tuple[Any, dict[str, Any]]:
    return DataLoader([["a"], ["b"], ["c"]], batch_size=None), {}  # type: ignore[arg-type]


def missing_batch_size(rank: int) -> tuple[Any, dict[str, Any]]:
    return Listed([1, 2]), {}


def two_batch_sizes(rank: int) -> tuple[Any, dict[str, Any]]:
    return DataLoader(Listed([1, 2]), batch_size=1), {"batch_size": 2}


def global_batch_of_dataset_batches(rank: int) -> tuple[Any, dict[str, Any]]:
    return DataLoader(Batches([2, 2, 2]), batch_size=None), {"global_batch_size": 12}


def scaled_rates_of_dataset_batches(rank: int) -> tuple[Any, dict[str, Any]]:
    return DataLoader(Batches([2, 2, 2]), batch_size=None), {"lr_scaling": "linear", "reference_batch_size": 2}


ERRORS: list[tuple[Callable[[int], Any], str]] = [
    (fails_on_one_rank, r"^DataError: The training data failed on rank 1: OSError: the file is gone\. Fix the dataset"),
    (
        fails_in_a_worker,
        r"^DataError: The training data failed on rank 0: OSError: Caught OSError in DataLoader worker",
    ),
    (empty, r"^DataError: Listed ended before the first step of epoch 1: it yielded no item or, .* Its __iter__ must"),
    (exhausted, r"^DataError: OneShot ended before the first step of epoch 2"),
    (too_little_for_a_step, r"^DataError: Listed ended before the first step of epoch 1: .* fewer items than a global"),
    (
        indices_on_one_rank,
        r"^DataError: The training data has a length on some ranks, but is a stream on ranks \[1.*\]\.",
    ),
    (different_batch_sizes, r"^DataError: The training data differs between ranks in batch_size: \[2, 3.*Use batch_"),
    (
        batch_without_tensor,
        r"^DataError: The number of samples in this list is unknown, because it contains no tensor\. Yield",
    ),
    (missing_batch_size, r"^ConfigError: Listed was given without a batch size\. Use TrainConfig\(batch_size=32\)"),
    (two_batch_sizes, r"^ConfigError: A batch size of 2 was requested, but .* batch_size=1\. Leave one of them out"),
    (
        global_batch_of_dataset_batches,
        r"^ConfigError: TrainConfig.global_batch_size 12 is not possible, because Batches",
    ),
    (
        scaled_rates_of_dataset_batches,
        r"^ConfigError: TrainConfig.lr_scaling 'linear' needs the number of samples per step",
    ),
]
ONLY_BETWEEN_RANKS = (fails_on_one_rank, too_little_for_a_step, indices_on_one_rank, different_batch_sizes)


def train_and_return_error(backend: Backend, case: Callable[[int], Any]) -> str:
    data, settings = case(backend.rank)
    try:
        train(backend, data, settings)
    except UnitrainError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "accepted"
    assert backend.allreduce(torch.ones(1), "sum").item() == backend.size
    return text


@pytest.mark.parametrize(("case", "message"), ERRORS, ids=[case.__name__ for case, _ in ERRORS])
def test_errors_are_raised_on_every_rank(group: RankGroup, case: Callable[[int], Any], message: str) -> None:
    if group.size == 1 and case in ONLY_BETWEEN_RANKS:
        message = "^accepted$"
    texts = group.run(train_and_return_error, case)
    assert len(set(texts)) == 1
    assert re.search(message, texts[0], re.DOTALL), texts[0]


# Decisions based on the batch sizes of all ranks.


@pytest.mark.parametrize(
    ("table", "accumulate", "uneven", "full", "expected"),
    [
        ([[2, 2], [2, NO_BATCH]], 1, "weight", None, ([[0], [1]], False)),
        ([[2, NO_BATCH], [2, NO_BATCH]], 1, "weight", None, ([[0], []], True)),
        ([[2, NO_BATCH], [NO_BATCH, NO_BATCH]], 2, "weight", None, ([[0]], True)),
        ([[2, 2], [2, NO_BATCH]], 1, "drop", None, ([[0]], True)),
        ([[2, 2], [2, NO_BATCH]], 2, "drop", None, ([], True)),
        ([[2, 2], [2, NO_BATCH]], 1, "pad", None, ([[0], [1]], False)),
        ([[0, 3], [0, 1]], 2, "weight", None, ([[1]], False)),
        ([[0, 3], [0, 1]], 1, "weight", None, ([[], [1]], False)),
        ([[2, 2], [2, 1]], 1, "weight", 4, ([[0]], True)),
    ],
)
def test_plan_steps_groups_indices_into_steps(
    table: list[list[int]], accumulate: int, uneven: Any, full: int | None, expected: Any
) -> None:
    assert plan_steps(table, accumulate, uneven, full) == expected


class CountingBackend(LocalBackend):
    """Counts the calls of allgather."""

    gathered = 0

    def allgather(self, tensor: Tensor) -> Tensor:
        type(self).gathered += 1
        return super().allgather(tensor)


@pytest.mark.parametrize(("workers", "accumulate", "exchanges"), [(0, 1, 17), (0, 4, 5), (2, 1, 5), (2, 4, 5)])
def test_batch_sizes_are_exchanged_once_for_all_prefetched_batches(
    workers: int, accumulate: int, exchanges: int
) -> None:
    backend = CountingBackend(torch.device("cpu"))
    CountingBackend.gathered = 0
    shard = open_training_data(
        Listed(list(range(32))), backend,
        ShardSettings(batch_size=2, num_workers=workers, gradient_accumulation_steps=accumulate),
    )  # fmt: skip
    steps = sum(part.ends_step for _, part in shard.micro_batches(0))
    assert (steps, CountingBackend.gathered) == (16 // accumulate, exchanges)


@pytest.mark.parametrize("progress", ["lines", "bar"])
def test_run_of_unknown_length_shows_its_step_count(progress: str) -> None:
    console = plain_console(file=io.StringIO(), force_terminal=True, width=120)
    shown = display._Lines(console) if progress == "lines" else display._Bar(console)
    shown.interval_seconds = -1.0
    with shown:
        shown.start(None, 2)
        for _ in range(3):
            shown.count_step(1, 4)
        text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"epoch 1/2.* 3  ", text)
    assert "left" not in text
