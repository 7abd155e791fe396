"""DataLoaders with a custom sampler or batch_sampler: rank 0 draws the order once per epoch, and all ranks shard it.

The parameters show which samples each step used: they are compared with a plain loop in one process over the indices
that the sampler yields with the seed of the epoch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groups import GROUPS_ON_DDP
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from unitrain import TrainConfig, Trainer, UnitrainError
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data import samplers
from unitrain.data.evaluation_shard import EvaluationShard
from unitrain.data.order import micro_batches_of_batch_sampler
from unitrain.data.sharding import TrainingShard
from unitrain.data.training_data import ShardSettings
from unitrain.errors import DataError
from unitrain.randomness import IsolatedGenerators, SeedPurpose, derive_seed
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
LENGTH, SEED, EPOCHS = 50, 3, 3
GENERATOR = torch.Generator().manual_seed(2)
INPUTS = torch.randn(LENGTH, 6, generator=GENERATOR)
TARGETS = torch.randint(3, (LENGTH,), generator=GENERATOR)
Steps = list[list[int]]


class Opaque(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of a class that torch cannot inspect."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index], TARGETS[index]


class Buckets(Sampler[list[int]]):
    """A batch sampler without a length. Yields batches of consecutive indices in a random order, with unequal sizes and
    some empty batches."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        ends = sorted(random.sample(range(1, LENGTH), 10 + self.epoch))
        batches = [list(range(*pair)) for pair in itertools.pairwise([0, *ends, LENGTH])]
        return iter([batches[i] for i in np.random.permutation(len(batches))] + [[]])


class Curriculum(Sampler[int]):
    """A sampler that yields more samples in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(20 + 7 * self.epoch))


def weighted() -> Any:
    return WeightedRandomSampler(torch.arange(1.0, LENGTH + 1).tolist(), 37)


def subset() -> Any:
    return SubsetRandomSampler(range(5, 45), generator=torch.Generator().manual_seed(99))


def replaced() -> Any:
    return RandomSampler(Opaque(), replacement=True, num_samples=40)


def fewer() -> Any:
    return RandomSampler(range(20))


def fewer_drawn() -> Any:
    return RandomSampler(Opaque(), num_samples=20)


def first() -> Any:
    return SequentialSampler(range(30))


def curriculum() -> Any:
    return Curriculum()


def buckets() -> Any:
    return Buckets()


def wrapped() -> Any:
    return BatchSampler(SubsetRandomSampler(range(26)), 4, drop_last=False)


SAMPLERS = (weighted, subset, replaced, fewer, fewer_drawn, first, curriculum)
BATCH_SAMPLERS = (buckets, wrapped)


def draw_order(sampler: Any, epoch: int) -> list[Any]:
    """Return the indices that `sampler` yields in an epoch with the seed that the run derives."""
    seed = derive_seed(SEED, SeedPurpose.SAMPLER, epoch)
    with IsolatedGenerators(seed):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if getattr(sampler, "generator", None) is not None:
            sampler.generator.manual_seed(seed)
        return list(sampler)


def make_loader(
    make_sampler: Callable[[], Any], size: int, workers: int = 0, dataset: Any = None, **settings: Any
) -> Any:
    argument = "batch_sampler" if make_sampler in BATCH_SAMPLERS else "sampler"
    batch_size = {} if argument == "batch_sampler" else {"batch_size": 12 // size}
    dataset = Opaque() if dataset is None else dataset
    return DataLoader(dataset, num_workers=workers, **{argument: make_sampler()}, **batch_size, **settings)


def expected_steps(make_sampler: Callable[[], Any], size: int, accumulate: int, uneven: str) -> Steps:
    steps: Steps = []
    for epoch in range(EPOCHS):
        order = draw_order(make_sampler(), epoch)
        if make_sampler in SAMPLERS:
            steps += [order[at : at + 12 * accumulate] for at in range(0, len(order), 12 * accumulate)]
            continue
        batches, per_step = [batch for batch in order if batch], size * accumulate
        for at in range(0, len(batches), per_step):
            step = batches[at : at + per_step]
            if uneven == "drop" and len(step) < per_step:
                break
            if uneven == "pad" and len(step) % size:
                step += batches[: size - len(step) % size]
            steps.append([index for batch in step for index in batch])
    return steps


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def train_in_plain_loop(steps: Steps) -> list[Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        nn.functional.cross_entropy(model(INPUTS[step]), TARGETS[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def train(backend: Backend, data: Any, **settings: Any) -> tuple[list[Tensor], int]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    length = {} if "max_steps" in settings else {"max_epochs": EPOCHS}
    config = TrainConfig(**{"progress": "off", "seed": SEED, **length, **settings})
    trainer = Trainer(model, optimizer, nn.functional.cross_entropy, backend=backend, config=config)
    trainer.fit(data)
    return [parameter.detach().clone() for parameter in model.parameters()], trainer.progress.step


def train_sampled(backend: Backend, make_sampler: Callable[[], Any], workers: int, settings: dict[str, Any]) -> Any:
    # Samplers of other ranks than 0 would draw a different order, and must not be used.
    random.seed(backend.rank), np.random.seed(backend.rank), torch.manual_seed(backend.rank)
    return train(backend, make_loader(make_sampler, backend.size, workers), **settings)


@pytest.fixture(scope="module", params=GROUPS_ON_DDP, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("make_sampler", [*SAMPLERS, *BATCH_SAMPLERS])
@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), (2, 2)])
def test_training_equals_one_process_with_the_sampler(
    group: RankGroup, make_sampler: Callable[[], Any], workers: int, accumulate: int
) -> None:
    steps = expected_steps(make_sampler, group.size, accumulate, "weight")
    expected = train_in_plain_loop(steps)
    for parameters, step in group.run(
        train_sampled, make_sampler, workers, {"gradient_accumulation_steps": accumulate}
    ):
        assert step == len(steps)
        for found, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make_sampler", BATCH_SAMPLERS)
@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_uneven_determines_the_last_step_of_a_batch_sampler(
    group: RankGroup, make_sampler: Callable[[], Any], uneven: str
) -> None:
    steps = expected_steps(make_sampler, group.size, 1, uneven)
    if group.size > 1:
        assert steps != expected_steps(make_sampler, group.size, 1, "weight")
    expected = train_in_plain_loop(steps)
    for parameters, step in group.run(train_sampled, make_sampler, 0, {"uneven": uneven}):
        assert step == len(steps)
        for found, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make_sampler", [weighted, subset, buckets])
def test_run_resumes_within_an_epoch(group: RankGroup, make_sampler: Callable[[], Any], tmp_path: Path) -> None:
    uninterrupted = group.run(train_sampled, make_sampler, 0, {"max_steps": 9})
    for steps in (2, 5, 9):
        settings = {"max_steps": steps, "output_dir": str(tmp_path), "resume": True}
        parts = group.run(train_sampled, make_sampler, 0, settings)
    for (found, _), (wanted, _) in zip(parts, uninterrupted, strict=True):
        for one, other in zip(found, wanted, strict=True):
            # A new DistributedDataParallel sums the gradients of three ranks in another order in its first step.
            torch.testing.assert_close(one, other, rtol=0, atol=0.0 if group.size < 3 else 1e-6)


def read_evaluation_indices(backend: Backend, make_sampler: Callable[[], Any], workers: int) -> list[list[int]]:
    data = make_loader(make_sampler, backend.size, workers, TensorDataset(torch.arange(LENGTH), TARGETS))
    shard = EvaluationShard(data, backend)
    return [[int(i) for batch, info in shard for i in batch[0] if info.samples == len(batch[0])] for _ in range(2)]


@pytest.mark.parametrize("make_sampler", [weighted, subset, replaced, fewer, fewer_drawn, first, buckets, wrapped])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_of_the_sampler_is_evaluated_once(
    group: RankGroup, make_sampler: Callable[[], Any], workers: int
) -> None:
    sampler, seed = make_sampler(), derive_seed(0, SeedPurpose.SAMPLER, 0)
    with IsolatedGenerators(seed):
        if getattr(sampler, "generator", None) is not None:
            sampler.generator.manual_seed(seed)
        expected = list(sampler)
    if make_sampler in BATCH_SAMPLERS:
        expected = [index for batch in expected for index in batch]
    ranks = group.run(read_evaluation_indices, make_sampler, workers)
    for evaluation in zip(*ranks, strict=True):
        assert [index for mine in evaluation for index in mine] == expected


def predict_indices(backend: Backend, make_sampler: Callable[[], Any]) -> list[int]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model, optimizer, nn.functional.cross_entropy, backend=backend,
        config=TrainConfig(max_epochs=1, progress="off"),
        forward=lambda _, batch: (batch[0], batch[0]),
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.arange(LENGTH)), batch_size=4, sampler=make_sampler())
    return [int(index) for index in trainer.predict(data)]


@pytest.mark.parametrize("make_sampler", [fewer, first])
def test_predictions_follow_the_order_of_the_sampler(group: RankGroup, make_sampler: Callable[[], Any]) -> None:
    with IsolatedGenerators(derive_seed(0, SeedPurpose.SAMPLER, 0)):
        expected = list(make_sampler())
    assert group.run(predict_indices, make_sampler) == [expected] * group.size


# In one process.


def epoch_indices(shard: TrainingShard, epoch: int, start: int = 0) -> list[int]:
    return [int(i) for batch, part in shard.micro_batches(epoch, start) for i in batch[0]]


def test_subset_sampler_is_used_once_in_a_new_order_every_epoch() -> None:
    data = DataLoader(TensorDataset(torch.arange(LENGTH)), batch_size=4, sampler=SubsetRandomSampler(range(9)))
    shard = TrainingShard(data, LOCAL, ShardSettings(seed=1))
    first, second = epoch_indices(shard, 0), epoch_indices(shard, 1)
    assert sorted(first) == sorted(second) == list(range(9))
    assert first != second
    assert epoch_indices(TrainingShard(data, LOCAL, ShardSettings(seed=1)), 1) == second
    assert epoch_indices(TrainingShard(data, LOCAL, ShardSettings(seed=2)), 1) != second


def test_drawing_an_order_does_not_change_the_generators() -> None:
    shard = TrainingShard(make_loader(buckets, 1), LOCAL)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    list(shard.micro_batches(0))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("make_sampler", [RandomSampler, SequentialSampler])
def test_torch_samplers_of_the_complete_dataset_are_treated_as_default(make_sampler: Any) -> None:
    for dataset, source in ((Opaque(), None), (Opaque(), range(LENGTH))):
        data = DataLoader(dataset, batch_size=4, sampler=make_sampler(dataset if source is None else source))
        shard = TrainingShard(data, LOCAL)
        assert shard.order_settings["sampler"] is None
        assert shard.order_settings["shuffle"] == (make_sampler is RandomSampler)


def test_sampler_keys_may_have_any_type() -> None:
    words = {"a": 1, "b": 2, "c": 3}
    shard = TrainingShard(DataLoader(words, batch_size=2, sampler=["c", "a", "b"]), LOCAL)  # type: ignore[arg-type]
    assert [batch.tolist() for batch, _ in shard.micro_batches(0)] == [[3, 1], [2]]
    hashes = {2**64 - 1: 1, 2: 2}
    shard = TrainingShard(DataLoader(hashes, batch_size=2, sampler=[2, 2**64 - 1]), LOCAL)  # type: ignore[arg-type]
    assert [batch.tolist() for batch, _ in shard.micro_batches(0)] == [[2, 1]]


def test_drop_last_of_a_sampler_drops_an_incomplete_global_batch() -> None:
    data = DataLoader(TensorDataset(torch.arange(LENGTH)), batch_size=4, sampler=range(10), drop_last=True)
    assert epoch_indices(TrainingShard(data, LOCAL), 0) == list(range(8))


class WrongLength(Sampler[int]):
    """A sampler of the indices 0 to 9 with a wrong length."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_a_sampler_with_too_few_samples_for_a_global_batch_raises_if_the_drawn_order_is_short() -> None:
    """The length may be wrong on one rank only. If that rank raised an error, the other ranks would wait for it."""
    dataset = TensorDataset(torch.arange(LENGTH))
    shard = TrainingShard(DataLoader(dataset, batch_size=4, sampler=WrongLength(), drop_last=True), LOCAL)
    assert (shard.steps_in_epoch(), shard.samples_in_epoch(), shard.count_batches()) == (None, None, None)
    assert epoch_indices(shard, 0) == list(range(8))
    with pytest.raises(DataError, match=r"3 samples, fewer than one global batch of 4"):
        TrainingShard(DataLoader(dataset, batch_size=4, sampler=range(3), drop_last=True), LOCAL).micro_batches(0)


def test_number_of_steps_follows_the_length_of_the_sampler() -> None:
    assert TrainingShard(make_loader(weighted, 1), LOCAL).steps_in_epoch() == 4
    assert TrainingShard(make_loader(weighted, 1), LOCAL).steps_in_epoch(12) == 3
    assert (
        TrainingShard(make_loader(wrapped, 1), LOCAL, ShardSettings(gradient_accumulation_steps=3)).steps_in_epoch()
        == 3
    )
    assert (
        TrainingShard(
            make_loader(wrapped, 1), LOCAL, ShardSettings(gradient_accumulation_steps=3, uneven="drop")
        ).steps_in_epoch()
        == 2
    )
    assert TrainingShard(make_loader(buckets, 1), LOCAL).steps_in_epoch() is None


@pytest.mark.parametrize("uneven", ["weight", "drop", "pad"])
def test_batches_of_a_batch_sampler_are_assigned_to_ranks_in_turn(uneven: Any) -> None:
    for size, accumulate, count in itertools.product((1, 2, 3), (1, 2, 3), range(1, 14)):
        bounds = [0, *itertools.accumulate(range(1, count + 1))]
        parts = [
            list(
                micro_batches_of_batch_sampler(
                    bounds, 0, gradient_accumulation_steps=accumulate, rank=rank, size=size, uneven=uneven
                )
            )
            for rank in range(size)
        ]
        assert len({len(mine) for mine in parts}) == 1
        taken: list[int] = []
        for micro_step in zip(*parts, strict=True):
            assert len({(part.step_samples, part.step_end, part.ends_step) for part in micro_step}) == 1
            taken += [
                i for part in micro_step if part.samples for i in range(part.positions.start, part.positions.stop)
            ]
        last = bounds[count - count % (size * accumulate)] if uneven == "drop" else bounds[-1]
        assert taken[:last] == list(range(last))
        assert bool(taken[last:]) == (uneven == "pad" and bool(count % size))
        steps = [part for part in parts[0] if part.ends_step]
        assert sum(part.step_samples for part in steps) == len(taken)
        if len(steps) > 1:
            rest = list(
                micro_batches_of_batch_sampler(
                    bounds, steps[0].step_end, gradient_accumulation_steps=accumulate, rank=0, size=size, uneven=uneven
                )
            )
            assert [part[1:4] for part in rest if uneven != "pad"] == [
                part[1:4] for part in parts[0][accumulate:] if uneven != "pad"
            ]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(LENGTH))


class Broken(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        raise KeyError("weights")


class OnceOnly(Sampler[int]):
    def __init__(self) -> None:
        self.indices = iter(range(10))

    def __iter__(self) -> Iterator[int]:
        return self.indices


def distributed() -> Any:
    return {"sampler": DistributedSampler(Opaque(), num_replicas=2, rank=0)}


def distributed_within() -> Any:
    sampler = DistributedSampler(Opaque(), num_replicas=2, rank=0)
    return {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)}


def broken() -> Any:
    return {"sampler": Broken()}


def empty() -> Any:
    return {"batch_sampler": [[]]}


def once_only() -> Any:
    return {"sampler": OnceOnly()}


def too_few_batches() -> Any:
    return {"batch_sampler": BatchSampler(SequentialSampler(range(2)), 4, drop_last=False)}


ERRORS: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (
        distributed,
        {},
        "DataError: DistributedSampler shards the data by rank, but unitrain shards every DataLoader itself. "
        "Leave the sampler out: DataLoader(dataset, batch_size=32, shuffle=True).",
    ),
    (distributed_within, {}, "DataError: DistributedSampler shards the data by rank, but"),
    (broken, {}, "DataError: Broken failed in epoch 1: KeyError: 'weights'. Fix the DataLoader's sampler."),
    (empty, {}, "DataError: list yields nothing in epoch 1. It must yield at least one sample each time"),
    (once_only, {}, "DataError: OnceOnly yields nothing in epoch 2. It must yield"),
    (
        too_few_batches,
        {"uneven": "drop", "gradient_accumulation_steps": 2},
        "DataError: BatchSampler yields 1 batches, but a step takes ",
    ),
    (too_few_batches, {"batch_size": 2}, "ConfigError: A batch size of 2 was requested, but the DataLoader was built"),
    (too_few_batches, {"global_batch_size": 12}, "ConfigError: TrainConfig.global_batch_size 12 is not possible, beca"),
]


def train_and_return_error(backend: Backend, case: Callable[[], Any], settings: dict[str, Any]) -> str:
    try:
        train(backend, DataLoader(Opaque(), **case()), **settings)
    except UnitrainError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "accepted"
    assert backend.allreduce(torch.ones(1), "sum").item() == backend.size
    return text


@pytest.mark.parametrize(("case", "settings", "message"), ERRORS)
def test_errors_are_raised_on_every_rank(
    group: RankGroup, case: Callable[[], Any], settings: dict[str, Any], message: str
) -> None:
    texts = group.run(train_and_return_error, case, settings)
    assert len(set(texts)) == 1
    assert texts[0].startswith(message), texts[0]


def test_endless_sampler_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "MAX_DRAWN_KEYS", 1000)
    shard = TrainingShard(DataLoader(Opaque(), batch_size=4, sampler=Endless()), LOCAL)
    with pytest.raises(DataError, match=r"^Endless has not ended after 1,000 elements, .* Its __iter__ must end"):
        shard.micro_batches(0)
