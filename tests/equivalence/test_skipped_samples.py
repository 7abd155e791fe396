"""If `collate_fn` drops samples, training and evaluation weight each batch by the number of remaining samples.

The parameters show which samples each step used: they are compared with a plain loop in one process over the expected
samples.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groups import GROUPS_ON_HOROVOD
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, default_collate

from unitrain import TrainConfig, Trainer, UnitrainError
from unitrain.backends.base import Backend
from unitrain.data.batch import infer_sample_count
from unitrain.testing import RankGroup

LENGTH, GLOBAL_BATCH = 70, 12
GENERATOR = torch.Generator().manual_seed(2)
INPUTS = torch.randn(LENGTH, 6, generator=GENERATOR)
TARGETS = torch.randint(3, (LENGTH,), generator=GENERATOR)
# Dropped samples: every second sample of the first step, half of the second step (so that a rank may have no sample),
# all samples of a later step, and some at the end.
BAD = {1, 3, 5, 7, 9, 11, *range(18, 24), *range(36, 48), 49, 52, 69}
Steps = list[list[int]]


@pytest.fixture(scope="module", params=GROUPS_ON_HOROVOD, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


class Samples(Dataset[Any]):
    """A dataset in which some samples are None."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return None if index in BAD else (INPUTS[index], TARGETS[index])


class SampleStream(IterableDataset[Any]):
    """The same samples as a stream that starts at `first` and advances by `step`."""

    def __init__(self, first: int = 0, step: int = 1) -> None:
        self.indices = range(first, LENGTH, step)

    def __iter__(self) -> Iterator[Any]:
        return (Samples()[index] for index in self.indices)


def drop_none(items: list[Any]) -> Any:
    """Collate the samples that are not None. Return None if there are none."""
    kept = [item for item in items if item is not None]
    return default_collate(kept) if kept else None


def drop_in_place(items: list[Any]) -> tuple[Tensor, Tensor]:
    """Collate the samples that are not None. Return empty tensors if there are none."""
    items[:] = [item for item in items if item is not None]
    inputs = [item[0] for item in items]
    return torch.stack(inputs) if inputs else torch.empty(0, 6), torch.tensor([int(item[1]) for item in items])


COLLATE = {"none": drop_none, "empty": drop_in_place}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def remaining_indices(indices: Any) -> list[int]:
    return [index for index in indices if index not in BAD]


def train_in_plain_loop(steps: Steps) -> list[Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        nn.functional.cross_entropy(model(INPUTS[step]), TARGETS[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def global_steps(source: str, size: int) -> Steps:
    """Return the indices of the remaining samples of each step. The global batch size includes dropped samples."""
    if source == "batch_sampler":
        blocks = [range(at, min(at + 4 * size, LENGTH)) for at in range(0, LENGTH, 4 * size)]
    else:
        blocks = [range(at, min(at + GLOBAL_BATCH, LENGTH)) for at in range(0, LENGTH, GLOBAL_BATCH)]
    if source == "own":  # the ranks' streams may have different lengths, but each step uses one batch of each
        shards = [range(rank, LENGTH, size) for rank in range(size)]
        each = GLOBAL_BATCH // size
        blocks = [
            [index for shard in shards for index in shard[at : at + each]] for at in range(0, len(shards[0]), each)
        ]
    return [step for block in blocks if (step := remaining_indices(block))]


def make_loader(backend: Backend, source: str, collate: str, workers: int, accumulate: int) -> Any:
    batch_size = GLOBAL_BATCH // (backend.size * accumulate)
    settings: dict[str, Any] = {"collate_fn": COLLATE[collate], "num_workers": workers}
    if source == "batch_sampler":
        return DataLoader(Samples(), batch_sampler=BatchSampler(range(LENGTH), 4, drop_last=False), **settings)
    data: Any = {
        "map": Samples,
        "shared": SampleStream,
        "own": lambda: SampleStream(backend.rank, backend.size),
    }[source]()
    return DataLoader(data, batch_size=batch_size, **settings)


def make_trainer(backend: Backend, source: str, **settings: Any) -> Trainer:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"max_epochs": 2, "progress": "off", "stream": "own" if source == "own" else "shared", **settings}
    config = TrainConfig(**settings)
    return Trainer(model, optimizer, nn.functional.cross_entropy, backend=backend, config=config)


COLLATE_CASES = [("none", 0, 1), ("empty", 2, 1), ("empty", 0, 2), ("none", 2, 2)]


def train(backend: Backend, source: str, collate: str, workers: int, accumulate: int, settings: dict[str, Any]) -> Any:
    trainer = make_trainer(backend, source, gradient_accumulation_steps=accumulate, **settings)
    data = make_loader(backend, source, collate, workers, accumulate)
    results = trainer.fit(data, data)
    progress = trainer.progress
    parameters = [parameter.detach().clone() for parameter in trainer.backend.unwrap(trainer.model).parameters()]
    return parameters, results, (progress.epoch, progress.step, progress.sample)


def mean_loss(parameters: list[Tensor], indices: list[int]) -> float:
    model = network()
    for parameter, value in zip(model.parameters(), parameters, strict=True):
        parameter.data.copy_(value)
    return nn.functional.cross_entropy(model(INPUTS[indices]), TARGETS[indices]).item()


# Own streams are not tested with workers, because each worker would yield the complete stream of its rank. They are not
# tested with accumulation, because the steps would have different samples.
@pytest.mark.parametrize(
    ("source", "collate", "workers", "accumulate"),
    [
        *((source, *case) for source in ("map", "shared") for case in COLLATE_CASES),
        ("own", "none", 0, 1),
    ],
)
def test_gradient_is_the_mean_over_the_remaining_samples_of_a_step(
    group: RankGroup, source: str, collate: str, workers: int, accumulate: int
) -> None:
    steps = global_steps(source, group.size)
    expected = train_in_plain_loop(steps * 2)
    for parameters, results, progress in group.run(train, source, collate, workers, accumulate, {}):
        for found, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        assert progress == (2, 2 * len(steps), 0)
        assert results["val_loss"] == pytest.approx(mean_loss(expected, remaining_indices(range(LENGTH))), rel=1e-5)


def test_batches_made_by_the_dataset_are_weighted_by_their_samples(group: RankGroup) -> None:
    steps = global_steps("batch_sampler", group.size)
    expected = train_in_plain_loop(steps * 2)
    for uneven in ("weight", "drop"):
        if uneven == "drop" and -(-LENGTH // 4) % group.size:
            continue  # "drop" would leave out the last step
        for parameters, _, _ in group.run(train, "batch_sampler", "empty", 0, 1, {"uneven": uneven}):
            for found, wanted in zip(parameters, expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("source", ["map", "shared"])
@pytest.mark.parametrize("workers", [0, 2])
def test_run_resumes_within_an_epoch(group: RankGroup, source: str, workers: int, tmp_path: Path) -> None:
    arguments = source, "empty", workers, 1
    steps = (global_steps(source, group.size) * 2)[:9]
    expected = train_in_plain_loop(steps)
    for end in (1, 3, 9):
        settings = {"max_epochs": None, "max_steps": end, "output_dir": str(tmp_path), "resume": True}
        parts = group.run(train, *arguments, settings)
    for parameters, _, (_, step, sample) in parts:
        assert (step, sample) == (9, sum(map(len, steps[5:])))
        for found, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def predict_and_return_error(backend: Backend, source: str) -> str:
    trainer = make_trainer(backend, source)
    try:
        trainer.predict(make_loader(backend, source, "empty", 0, 1))
    except UnitrainError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize("source", ["map", "shared", "own"])
def test_predictions_with_skipped_samples_are_rejected(group: RankGroup, source: str) -> None:
    batch_size = GLOBAL_BATCH // group.size
    for text in group.run(predict_and_return_error, source):
        assert text.startswith("DataError: predict returns one output per sample, but on rank 0 the DataLoader's")
        assert f"from {batch_size} samples. Leave the dropped samples out of the dataset" in text


def keep_nothing(items: list[Any]) -> None:
    return None


def train_without_samples(backend: Backend, source: str) -> str:
    trainer = make_trainer(backend, source, max_epochs=None, max_steps=3)
    data: Any = Samples() if source == "map" else SampleStream()
    try:
        trainer.fit(DataLoader(data, batch_size=4, collate_fn=keep_nothing))
    except UnitrainError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize("source", ["map", "shared"])
def test_an_epoch_without_any_sample_is_an_error(group: RankGroup, source: str) -> None:
    texts = group.run(train_without_samples, source)
    assert len(set(texts)) == 1
    wanted = "The training data has no sample in an entire epoch: " if source == "map" else "SampleStream ended before"
    assert texts[0].startswith(f"DataError: {wanted}"), texts[0]


# Number of samples in a batch.

ITEMS = [(torch.zeros(5), 1) for _ in range(4)]
IMAGES = [(torch.zeros(3, 8, 8), {"boxes": torch.zeros(at, 4), "labels": torch.zeros(at)}) for at in (1, 2, 3, 2)]
SEQUENCES = [(torch.zeros(at), torch.zeros(at)) for at in (7, 5, 6, 2)]
RECORDS = [{"x": torch.zeros(5), "name": "a"} for _ in range(4)]
Pair = namedtuple("Pair", ["inputs", "targets"])
SAMPLE_COUNT_CASES: list[tuple[str, Any, list[Any], int]] = [
    ("all", default_collate(ITEMS), ITEMS, 4),
    ("fewer", default_collate(ITEMS[:3]), ITEMS, 3),
    ("one of two", default_collate(ITEMS[:1]), ITEMS[:2], 1),
    ("None", None, ITEMS, 0),
    ("nothing", [], ITEMS, 0),
    ("empty tensors", (torch.zeros(0, 5), torch.zeros(0)), ITEMS, 0),
    ("one tensor", torch.zeros(3, 5), [torch.zeros(5)] * 4, 3),
    ("as many features as items", (torch.zeros(4, 5), torch.zeros(4, 5)), [(torch.zeros(5), torch.zeros(5))] * 5, 4),
    ("named tuple", Pair(torch.zeros(3, 5), torch.zeros(3)), ITEMS, 3),
    ("mapping", {"x": torch.zeros(3, 5), "name": ["a"] * 3}, RECORDS, 3),
    ("nested", ({"x": torch.zeros(3, 5), "mask": torch.zeros(3)}, torch.zeros(3)), ITEMS, 3),
    ("arrays", (np.zeros((3, 5)), np.zeros(3)), ITEMS, 3),
    ("two views", (default_collate(RECORDS[:3]), default_collate(RECORDS[:3])), RECORDS, 3),
    ("the items themselves", ITEMS[:3], ITEMS, 3),
    ("records", [dict(record) for record in RECORDS[:3]], RECORDS, 3),
    ("lists of images", tuple(zip(*IMAGES, strict=True)), IMAGES, 4),
    ("lists of fewer images", tuple(zip(*IMAGES[:2], strict=True)), IMAGES, 2),
    ("lists of one image", tuple(zip(*IMAGES[:1], strict=True)), IMAGES[:2], 1),
    ("time first", (torch.zeros(7, 4), torch.zeros(7, 4)), SEQUENCES, 4),
    ("concatenated with offsets", (torch.zeros(20), torch.zeros(4), torch.zeros(4)), SEQUENCES, 4),
    ("vectors with offsets", (torch.zeros(20), torch.zeros(4)), [one for one, _ in SEQUENCES], 4),
    ("columns of vectors", [torch.zeros(4) for _ in range(5)], [torch.zeros(5)] * 4, 4),
    ("vectors", [torch.ones(5), torch.ones(5)], [torch.zeros(5)] * 4, 2),
    (
        "the vectors themselves",
        [one for one, _ in SEQUENCES[1:]],
        [one for one, _ in SEQUENCES[1:]] + [torch.zeros(5)],
        3,
    ),
    ("lists of text", (["a b", "c"], torch.zeros(2)), ITEMS, 2),
    ("an object", object(), ITEMS, 4),
    ("a number", torch.zeros(()), ITEMS, 4),
    ("different shapes", (torch.zeros(7), torch.zeros(2, 9)), SEQUENCES, 4),
    ("packed", (nn.utils.rnn.pack_sequence([one for one, _ in SEQUENCES], False), torch.zeros(4)), SEQUENCES, 4),
]


@pytest.mark.parametrize(
    ("batch", "items", "expected"),
    [case[1:] for case in SAMPLE_COUNT_CASES],
    ids=[case[0] for case in SAMPLE_COUNT_CASES],
)
def test_infer_sample_count_returns_the_number_of_samples(batch: Any, items: list[Any], expected: int) -> None:
    assert infer_sample_count(batch, items) == expected


def test_skipped_samples_occur_in_relevant_positions() -> None:
    """The dropped samples of the tests above must not be distributed evenly over batches."""
    for size in (2, 3):
        differences = 0
        for first in range(0, LENGTH, GLOBAL_BATCH):
            counts = {len(remaining_indices(range(first + rank, first + GLOBAL_BATCH, size))) for rank in range(size)}
            differences += len(counts) > 1
        assert differences
    assert not remaining_indices(range(36, 48))
