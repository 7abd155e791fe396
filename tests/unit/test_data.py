"""Exact sharding of data, in an order that depends only on seed and epoch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_rank import simulate_rank
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from unitrain.data.evaluation_shard import EvaluationShard
from unitrain.data.order import MicroBatch, epoch_order, micro_batches_of_samples
from unitrain.data.sharding import TrainingShard
from unitrain.data.training_data import ShardSettings
from unitrain.errors import ConfigError, DataError

CASES = [(size, batch, accumulate) for size in (1, 2, 3, 4) for batch in (1, 2, 3) for accumulate in (1, 2, 3)]


class Numbers(Dataset[tuple[Tensor, int]]):
    """Dataset whose samples equal their index. Its class is not a TensorDataset, so samples are read one by one."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.tensor([float(index)]), index


class Noisy(Numbers):
    """Samples with a random augmentation."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(1), index


def create_tensor_dataset(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length).float().unsqueeze(1), torch.arange(length))


def dataset_sizes(size: int, batch: int, accumulate: int) -> range:
    """Return all dataset sizes from 0 to one sample above three global batches, or above 3 * size if that is larger."""
    return range(3 * max(size, size * batch * accumulate) + 2)


def indices_in_epoch(shard: TrainingShard, epoch: int = 0, start: int = 0) -> list[int]:
    return [int(i) for batch, part in shard.micro_batches(epoch, start) if part.samples for i in batch[1]]


def positions_of(micro_batch: MicroBatch) -> range:
    positions = micro_batch.positions
    return range(positions.start, positions.stop, positions.step or 1) if micro_batch.samples else range(0)


@pytest.mark.parametrize(("size", "batch", "accumulate"), CASES)
def test_each_global_batch_is_one_step_and_each_sample_is_on_one_rank(size: int, batch: int, accumulate: int) -> None:
    block = size * batch * accumulate
    for length in dataset_sizes(size, batch, accumulate):
        parts = [
            list(
                micro_batches_of_samples(
                    0, length, batch_size=batch, gradient_accumulation_steps=accumulate, rank=rank, size=size
                )
            )
            for rank in range(size)
        ]
        assert len({len(mine) for mine in parts}) == 1, "ranks have different numbers of micro-batches"
        steps: dict[int, list[int]] = {}
        for micro_batch in zip(*parts, strict=True):
            assert len({(part.step_samples, part.step_end, part.ends_step) for part in micro_batch}) == 1
            assert max(part.samples for part in micro_batch) - min(part.samples for part in micro_batch) <= 1
            assert max(part.samples for part in micro_batch) <= batch
            for part in micro_batch:
                steps.setdefault(part.step_end, []).extend(positions_of(part))
        taken = [sorted(positions) for positions in steps.values()]
        assert taken == [list(range(first, min(first + block, length))) for first in range(0, length, block)]
        assert sum(part.ends_step for part in parts[0]) == len(taken)
        for end, positions in steps.items():
            assert {part.step_samples for part in parts[0] if part.step_end == end} == {len(positions)}


@pytest.mark.parametrize(("size", "batch", "accumulate"), CASES)
def test_rank_0_always_has_samples_and_other_ranks_have_none_only_if_a_step_has_too_few(
    size: int, batch: int, accumulate: int
) -> None:
    for length in dataset_sizes(size, batch, accumulate):
        for rank in range(size):
            totals: dict[int, int] = {}
            for part in micro_batches_of_samples(
                0, length, batch_size=batch, gradient_accumulation_steps=accumulate, rank=rank, size=size
            ):
                totals[part.step_end] = totals.get(part.step_end, 0) + part.samples
                if part.samples == 0:
                    assert rank > 0
                    # The step has fewer samples than ranks, or its last micro-batch does, if batches have one sample.
                    assert part.step_samples < size or (batch == 1 and part.step_samples % size)
                if part.step_samples >= size:
                    assert totals[part.step_end] or not part.ends_step


def test_samples_of_a_step_depend_on_the_global_batch_only() -> None:
    def steps(size: int, batch: int, accumulate: int) -> list[set[int]]:
        taken: dict[int, set[int]] = {}
        for rank in range(size):
            for part in micro_batches_of_samples(
                0, 50, batch_size=batch, gradient_accumulation_steps=accumulate, rank=rank, size=size
            ):
                taken.setdefault(part.step_end, set()).update(positions_of(part))
        return list(taken.values())

    assert steps(1, 12, 1) == steps(2, 6, 1) == steps(2, 2, 3) == steps(4, 3, 1) == steps(3, 2, 2)


@pytest.mark.parametrize(("size", "batch", "accumulate"), [(3, 3, 1), (3, 1, 3), (2, 3, 2), (5, 2, 1), (1, 3, 3)])
def test_indivisible_steps_are_sharded_evenly(size: int, batch: int, accumulate: int) -> None:
    taken: dict[int, list[list[int]]] = {}
    for rank in range(size):
        for part in micro_batches_of_samples(
            0, 50, batch_size=batch, gradient_accumulation_steps=accumulate, rank=rank, size=size, global_batch_size=8
        ):
            assert len(positions_of(part)) <= batch
            taken.setdefault(part.step_end, []).append(list(positions_of(part)))
    assert [sorted(chain.from_iterable(parts)) for _, parts in sorted(taken.items())] == [
        list(range(first, min(first + 8, 50))) for first in range(0, 50, 8)
    ]
    assert all(max(map(len, parts)) - min(map(len, parts)) <= 1 for parts in taken.values())


def test_epoch_resumes_at_any_step_on_another_number_of_ranks() -> None:
    first = [
        index
        for rank in range(2)
        for batch, part in TrainingShard(
            create_tensor_dataset(23), simulate_rank(rank, 2), ShardSettings(batch_size=3)
        ).micro_batches(1)
        if part.step_end <= 12
        for index in batch[1].tolist()
    ]
    rest = [
        i
        for r in range(3)
        for i in indices_in_epoch(
            TrainingShard(create_tensor_dataset(23), simulate_rank(r, 3), ShardSettings(batch_size=2)), 1, 12
        )
    ]
    assert len(first) == 12
    assert sorted(first + rest) == list(range(23))


def test_epoch_order_depends_only_on_seed_and_epoch() -> None:
    one = epoch_order(100, seed=1, epoch=2, shuffle=True)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    assert torch.equal(one, epoch_order(100, seed=1, epoch=2, shuffle=True))
    assert torch.equal(before, torch.get_rng_state())
    assert sorted(one.tolist()) == list(range(100))
    others = [epoch_order(100, seed=seed, epoch=epoch, shuffle=True) for seed, epoch in ((1, 3), (2, 2), (0, 2))]
    assert not any(torch.equal(one, other) for other in others)
    assert epoch_order(4, seed=1, epoch=2, shuffle=False).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_of_each_rank_equal_those_of_distributed_sampler(size: int, shuffle: bool, accumulate: int) -> None:
    dataset = create_tensor_dataset(3 * size * 2 * accumulate)
    for rank in range(size):
        shard = TrainingShard(
            dataset,
            simulate_rank(rank, size),
            ShardSettings(batch_size=3, gradient_accumulation_steps=accumulate, seed=5, shuffle=shuffle),
        )
        sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=shuffle, seed=5)
        for epoch in (0, 1, 4):
            sampler.set_epoch(epoch)
            expected = [batch[1].tolist() for batch in DataLoader(dataset, batch_size=3, sampler=sampler)]
            assert [batch[1].tolist() for batch, _ in shard.micro_batches(epoch)] == expected


def test_epoch_order_accepts_any_integer_seed() -> None:
    assert len(epoch_order(4, seed=2**70, epoch=3, shuffle=True)) == 4


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("source", ["tensors", "dataset", "loader"])
def test_every_sample_is_used_once_per_epoch(size: int, source: str) -> None:
    for length in range(size, 3 * size + 2):
        data: Any = {
            "tensors": create_tensor_dataset(length),
            "dataset": Numbers(length),
            "loader": DataLoader(Numbers(length), batch_size=2, shuffle=True),
        }[source]
        batch_size = None if source == "loader" else 2
        shards = [
            TrainingShard(data, simulate_rank(rank, size), ShardSettings(batch_size=batch_size, seed=3))
            for rank in range(size)
        ]
        epochs = [[index for shard in shards for index in indices_in_epoch(shard, epoch)] for epoch in (0, 1)]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(length))
        steps = [sum(part.ends_step for _, part in shard.micro_batches(0)) for shard in shards]
        assert steps == [shard.steps_in_epoch() for shard in shards]
        assert len(set(steps)) == 1


def test_empty_shard_gets_a_dummy_batch_of_the_first_sample_of_the_step() -> None:
    shard = TrainingShard(create_tensor_dataset(5), simulate_rank(2, 4), ShardSettings(batch_size=1, seed=0))
    *_, (batch, part) = shard.micro_batches(0)
    assert (part.samples, part.step_samples) == (0, 1)
    assert batch[1].tolist() == [epoch_order(5, seed=0, epoch=0, shuffle=True)[4].item()]


def test_tensor_datasets_give_the_same_batches_as_a_dataloader() -> None:
    dataset = create_tensor_dataset(40)
    for data in (dataset, Subset(dataset, range(3, 30, 2)), Subset(Subset(dataset, range(30)), [5, 1, 7, 8, 9])):
        fast = list(TrainingShard(data, simulate_rank(1, 2), ShardSettings(batch_size=3, seed=4)).micro_batches(2))
        opaque = DataLoader(
            data, batch_size=3, shuffle=True, collate_fn=lambda items: torch.stack([i[1] for i in items])
        )
        slow = list(TrainingShard(opaque, simulate_rank(1, 2), ShardSettings(seed=4)).micro_batches(2))
        assert [batch[1].tolist() for batch, _ in fast] == [batch.tolist() for batch, _ in slow]
        assert isinstance(fast[0][0], list)
        assert fast[0][0][0].shape == (len(fast[0][0][1]), 1)


SUBSETS: dict[str, Any] = {
    "negative": [-1, 3, -39, -40],
    "tensor": torch.tensor([-1, 3, 3]),
    "int32 array": np.array([4, -2], dtype=np.int32),
    "uint8 array": np.array([7, 8], dtype=np.uint8),
    "list of tensors": [torch.tensor(1), torch.tensor(-1)],
    "list of numpy integers": [np.int64(3), np.int64(-3)],
    "range": range(3, -4, -1),
    "duplicates": [1, 1, 2, 1],
    "mask": [True, False, True],
    "uint8 tensor": torch.tensor([1, 0], dtype=torch.uint8),
    "rows": np.array([[1, 2], [3, 4]]),
    "too large": [0, 40],
    "too small": [0, -41],
    "fractions": [1.5, 2.0],
}


@pytest.mark.parametrize("indices", SUBSETS.values(), ids=list(SUBSETS))
@pytest.mark.parametrize("nested", [False, True])
def test_subset_of_tensors_is_indexed_like_torch(indices: Any, nested: bool) -> None:
    """If indices raise an IndexError in torch, the same error is raised."""
    dataset: Any = Subset(create_tensor_dataset(40), indices)
    if nested:
        dataset = Subset(dataset, [-1, 0, -len(indices), len(indices) - 1])

    def batches(iterate: Callable[[], Any]) -> Any:
        try:
            return [[column.tolist() for column in batch] for batch in iterate()]
        except IndexError as error:
            return str(error)

    loader = DataLoader(dataset, batch_size=1)
    expected = batches(lambda: loader)
    assert batches(lambda: (batch for batch, _ in EvaluationShard(loader, simulate_rank(0, 1)))) == expected
    shard = TrainingShard(dataset, simulate_rank(0, 1), ShardSettings(batch_size=1, shuffle=False))
    assert batches(lambda: (batch for batch, _ in shard.micro_batches(0))) == expected


def test_sampler_may_yield_negative_indices() -> None:
    loader = DataLoader(create_tensor_dataset(40), batch_size=2, sampler=[-1, -40, 7])
    expected = [batch[1].tolist() for batch in loader]
    assert (
        [batch[1].tolist() for batch, _ in EvaluationShard(loader, simulate_rank(0, 1))] == expected == [[39, 0], [7]]
    )
    assert [batch[1].tolist() for batch, _ in TrainingShard(loader, simulate_rank(0, 1)).micro_batches(0)] == expected


def test_dataloader_keeps_its_settings_if_its_order_is_replaced() -> None:
    def collate(items: list[tuple[Tensor, int]]) -> tuple[list[int], int]:
        info = get_worker_info()
        assert info is not None
        return [index for _, index in items], int(info.dataset.length)  # type: ignore[attr-defined]

    def change_length(worker: int) -> None:
        get_worker_info().dataset.length = 1000 + worker  # type: ignore[union-attr]

    loader = DataLoader(
        Numbers(11), batch_size=4, shuffle=True, num_workers=2, collate_fn=collate, worker_init_fn=change_length,
        generator=torch.Generator().manual_seed(77),
    )  # fmt: skip
    batches = [batch for batch, _ in TrainingShard(loader, simulate_rank(0, 1), ShardSettings(seed=5)).micro_batches(1)]
    order = epoch_order(11, seed=5, epoch=1, shuffle=True).tolist()
    assert [indices for indices, _ in batches] == [order[:4], order[4:8], order[8:]]
    assert [length for _, length in batches] == [1000, 1001, 1000]
    plain = TrainingShard(DataLoader(Numbers(5), batch_size=4), simulate_rank(0, 1))
    assert indices_in_epoch(plain) == [0, 1, 2, 3, 4]


def samples_in_epoch(shard: TrainingShard, epoch: int) -> list[float]:
    return [float(value) for batch, _ in shard.micro_batches(epoch) for value in batch[0]]


@pytest.mark.parametrize("source", ["dataset", "loader", "loader with a generator"])
def test_worker_augmentation_repeats_in_a_rerun_and_differs_between_epochs(source: str) -> None:
    def create_shard(rank: int) -> TrainingShard:
        if source == "dataset":
            return TrainingShard(Noisy(8), simulate_rank(rank, 2), ShardSettings(batch_size=2, num_workers=1, seed=1))
        generator = torch.Generator().manual_seed(3) if source.endswith("generator") else None
        loader = DataLoader(Noisy(8), batch_size=2, num_workers=1, generator=generator)
        return TrainingShard(loader, simulate_rank(rank, 2), ShardSettings(seed=1))

    before = torch.get_rng_state()
    one = create_shard(0)
    first, second = samples_in_epoch(one, 0), samples_in_epoch(one, 1)
    assert first == samples_in_epoch(create_shard(0), 0)
    assert second == samples_in_epoch(create_shard(0), 1)  # also if a run starts in epoch 1
    assert set(first).isdisjoint(second)
    assert set(first).isdisjoint(samples_in_epoch(create_shard(1), 0))
    assert torch.equal(before, torch.get_rng_state())


UNFINISHED_ITERATORS = """
import torch
import unitrain
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Stream(IterableDataset):
    def __iter__(self):
        yield from TensorDataset(torch.randn(40, 4), torch.ones(40).long())


class Failing(unitrain.Callback):
    def on_step_end(self, *args, **kwargs):
        raise ValueError("item 31 is broken")


if __name__ == "__main__":
    backend = unitrain.init("local", device="cpu")
    streams = [DataLoader(Stream(), batch_size=4, num_workers=workers) for workers in (0, 1)]
    loaders = [
        unitrain.ShardedLoader(data, backend, **arguments)
        for data in (DataLoader(list(Stream()), batch_size=4), *streams)
        for arguments in ({}, {"shuffle": False})
    ]
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        next(iterator)
    model = nn.Linear(4, 2)
    trainer = unitrain.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, backend=backend,
        config=unitrain.TrainConfig(max_epochs=1, progress="off"), callbacks=[Failing()],
    )
    try:
        trainer.fit(streams[1])
    except unitrain.CallbackError as error:
        failure = error  # its traceback contains the iterators of the Trainer
    print("complete", type(failure).__name__)
"""


def test_iterators_that_are_not_exhausted_print_nothing_at_exit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNFINISHED_ITERATORS)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "complete CallbackError\n", "")


def test_persistent_workers_are_seeded_when_they_start() -> None:
    def create_shard(rank: int) -> TrainingShard:
        loader = DataLoader(Noisy(8), batch_size=2, num_workers=1, persistent_workers=True)
        return TrainingShard(loader, simulate_rank(rank, 2), ShardSettings(seed=1))

    one, again = create_shard(0), create_shard(0)
    first, second = samples_in_epoch(one, 0), samples_in_epoch(one, 1)
    assert (first, second) == (samples_in_epoch(again, 0), samples_in_epoch(again, 1))
    assert set(first).isdisjoint(second)
    assert set(first).isdisjoint(samples_in_epoch(create_shard(1), 0))
    assert second != samples_in_epoch(create_shard(0), 1)  # as documented, a run that starts in epoch 1 differs


def test_drop_last_drops_an_incomplete_global_batch_in_training_only() -> None:
    loader = DataLoader(Numbers(11), batch_size=2, drop_last=True)
    taken = [i for rank in range(2) for i in indices_in_epoch(TrainingShard(loader, simulate_rank(rank, 2)))]
    assert sorted(taken) == list(range(8))
    evaluated = [
        int(i) for rank in range(2) for batch, _ in EvaluationShard(loader, simulate_rank(rank, 2)) for i in batch[1]
    ]
    assert evaluated == list(range(11))
    with pytest.raises(
        DataError, match=r"3 samples, fewer than one global batch of 4 \(2 ranks x batch_size 2 x gradient"
    ):
        TrainingShard(DataLoader(Numbers(3), batch_size=2, drop_last=True), simulate_rank(0, 2))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("create_dataset", [create_tensor_dataset, Numbers])
def test_every_sample_is_evaluated_once(size: int, create_dataset: Callable[[int], Dataset[Any]]) -> None:
    for length in range(1, 3 * size + 2):
        shards = [
            list(EvaluationShard(create_dataset(length), simulate_rank(rank, size), batch_size=2))
            for rank in range(size)
        ]
        assert [int(i) for shard in shards for batch, _ in shard for i in batch[1]] == list(range(length))
        counts = [sum(info.samples for _, info in shard) for shard in shards]
        assert max(counts) - min(counts) <= 1
        assert all(len(batch[1]) == info.samples for shard in shards for batch, info in shard)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class CustomIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Stream(), r"^Got data of type Stream, which does not have __len__ and __getitem__\."),
        (DataLoader(Stream(), batch_size=2), r"^Got data of type Stream"),
        (iter([1]), r"^Got data of type list_iterator, which does not have __len__ and __getitem__\."),
        (CustomIteration(Numbers(5), batch_size=2), r"^CustomIteration is a DataLoader with a custom __iter__"),
        (Numbers(0), r"^The training data is empty\. Pass a dataset with at least one sample\.$"),
        (
            Numbers(3),
            r"^The training data has 3 samples, fewer than the 4 ranks\. Start at most 3 ranks",
        ),
    ],
)
def test_data_that_cannot_be_sharded_is_rejected(data: Any, message: str) -> None:
    batch_size = None if isinstance(data, DataLoader) else 2
    for rank in range(4):
        with pytest.raises(DataError, match=message):
            TrainingShard(data, simulate_rank(rank, 4), ShardSettings(batch_size=batch_size))


def test_data_with_fewer_samples_than_logical_ranks_is_rejected() -> None:
    with pytest.raises(
        DataError, match=r"has 3 samples, fewer than the 4 logical ranks\. Use logical_ranks=3, or use more data"
    ):
        TrainingShard(Numbers(3), simulate_rank(0, 2), ShardSettings(batch_size=2, logical_ranks=4))
    with pytest.raises(
        DataError, match=r"fewer than one global batch of 8 \(4 logical ranks x batch_size 2 x gradient"
    ):
        TrainingShard(Numbers(5), simulate_rank(0, 2), ShardSettings(batch_size=2, logical_ranks=4, drop_last=True))


def test_global_batch_that_is_not_divisible_by_the_logical_ranks_is_rejected() -> None:
    settings = ShardSettings(batch_size=2, global_batch_size=10, logical_ranks=4)
    with pytest.raises(ConfigError, match=r"10 is not divisible by 4 logical ranks x batch_size 2 = 8\."):
        TrainingShard(Numbers(30), simulate_rank(0, 2), settings)


def test_missing_or_contradicting_batch_size_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"^TensorDataset was given without a batch size\. Use TrainConfig\(batch_size="
    ):
        TrainingShard(create_tensor_dataset(4), simulate_rank(0, 1))
    loader = DataLoader(create_tensor_dataset(4), batch_size=2)
    with pytest.raises(
        ConfigError, match=r"^A batch size of 3 was requested, but the DataLoader was built with batch_size=2"
    ):
        TrainingShard(loader, simulate_rank(0, 1), ShardSettings(batch_size=3))
    assert TrainingShard(loader, simulate_rank(0, 1), ShardSettings(batch_size=2)).global_batch_size == 2


def test_different_data_on_ranks_is_reported() -> None:
    with pytest.raises(DataError, match=r"does not have the same number of samples on every rank: \[10, 12\]\."):
        TrainingShard(
            create_tensor_dataset(10), simulate_rank(0, 2, gathered=[(10, {}), (12, {})]), ShardSettings(batch_size=2)
        )
    with pytest.raises(DataError, match=r"^The evaluation data does not have the same number"):
        EvaluationShard(create_tensor_dataset(10), simulate_rank(0, 2, gathered=[(10, {}), (12, {})]), batch_size=2)


def test_different_batch_sizes_are_reported_only_if_they_change_the_evaluated_samples() -> None:
    rank = simulate_rank(0, 2, gathered=[])

    def gather(own: Any) -> list[Any]:
        peer = None if own is None else (own[0], {**own[1], **{name: 4 for name in own[1] if name == "batch_size"}})
        return [own, peer]

    rank.allgather_object = gather  # type: ignore[method-assign]
    loader = DataLoader(create_tensor_dataset(10), batch_size=2)
    assert EvaluationShard(loader, rank).batch_size == 2
    with pytest.raises(DataError, match=r"^The evaluation data differs between ranks in batch_size: \[2, 4\]"):
        EvaluationShard(loader, rank, limit_batches=2)


class NumberStream(IterableDataset[tuple[Tensor, int]]):
    """Iterable dataset with the samples of `Numbers`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter(Numbers(self.length)[index] for index in range(self.length))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_limited_evaluation_has_the_same_samples_for_any_number_of_ranks(size: int) -> None:
    buckets = DataLoader(Numbers(20), batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7]])
    batches = DataLoader(NumberStream(20), batch_size=4)
    for data, settings in (
        (create_tensor_dataset(20), {"batch_size": 4}),
        (create_tensor_dataset(20), {"batch_size": -(-4 // size), "items_per_limited_batch": 4}),
        (DataLoader(Numbers(20), batch_size=4), {}),
        *([(buckets, {})] if size == 1 else []),  # on several ranks, rank 0 sends the indices
        (NumberStream(20), {"batch_size": 4}),
        (batches, {}),
    ):
        evaluated = [
            int(index)
            for rank in range(size)
            for batch, _ in EvaluationShard(data, simulate_rank(rank, size), limit_batches=2, **settings)  # type: ignore[arg-type]
            for index in batch[1]
        ]
        assert sorted(evaluated) == list(range(4 if data is buckets else 8))
