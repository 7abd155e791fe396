"""Samplers with random number generators of their own: a run that continues within an epoch uses each sample once, or
raises an error on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groups import GROUPS_ON_HOROVOD
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SubsetRandomSampler, TensorDataset

from unitrain import Callback, CheckpointError, ShardedLoader, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.samplers import draw_order
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
LENGTH, GLOBAL_BATCH = 40, 12
Keys = list[list[int]]


class Shuffled(Sampler[int]):
    """Shuffles with a generator that it keeps in an attribute."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        order = list(range(LENGTH))
        self.generator.shuffle(order)
        return iter(order)


class InTurn(Sampler[int]):
    """Yields from several samplers in turn."""

    def __init__(self, *samplers: Sampler[int]) -> None:
        self.samplers = samplers

    def __iter__(self) -> Iterator[int]:
        return (key for keys in zip(*self.samplers, strict=True) for key in keys)


class Hidden:
    """A class without a base class, whose generator is not in an attribute of the sampler."""

    def __init__(self) -> None:
        self.state = {"inner": {"generator": random.Random(0)}}

    def __iter__(self) -> Iterator[int]:
        order = list(range(LENGTH))
        self.state["inner"]["generator"].shuffle(order)
        return iter(order)


class Counted:
    """A sampler that counts its iterations, and yields a different order in each."""

    count = 0

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        return iter(random.Random(self.count).sample(range(LENGTH), LENGTH))


def halves() -> Any:
    return InTurn(
        SubsetRandomSampler(range(20), generator=torch.Generator().manual_seed(1)),
        SubsetRandomSampler(range(20, LENGTH), generator=torch.Generator().manual_seed(2)),
    )


REPRODUCIBLE: dict[str, Callable[[], Any]] = {
    "random.Random": lambda: Shuffled(random.Random(0)),
    "numpy PCG64": lambda: Shuffled(np.random.default_rng(0)),
    "numpy Philox": lambda: Shuffled(np.random.Generator(np.random.Philox(1))),
    "RandomState": lambda: Shuffled(np.random.RandomState(0)),
    "several samplers": halves,
}
NOT_REPRODUCIBLE: dict[str, Callable[[], Any]] = {"hidden generator": Hidden, "counted iterations": Counted}


class Recorder(Callback):
    """Records the samples of each step on this rank, and stops `fit` after a step."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at, self.samples = stop_at, list[list[int]]()

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, micro_batch: Any, loss: Any) -> None:
        self.samples.append(batch[0][: micro_batch.samples].flatten().int().tolist())

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.stop_at:
            trainer.stop("within an epoch")


def make_loader(backend: Backend, make_sampler: Callable[[], Any], is_batch_sampler: bool) -> Any:
    dataset = TensorDataset(torch.arange(float(LENGTH))[:, None], torch.zeros(LENGTH, 1))
    sampler, batch_size = make_sampler(), GLOBAL_BATCH // backend.size
    if is_batch_sampler:
        return DataLoader(dataset, batch_sampler=BatchSampler(sampler, batch_size, drop_last=False))
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def train(backend: Backend, names: tuple[str, bool], folder: str | None, stops: tuple[int | None, ...]) -> Keys:
    """Train three epochs in as many `fit` calls as there are `stops`, and return the samples of each step on this
    rank."""
    model = nn.Linear(1, 1)
    recorder = Recorder(None)
    config = TrainConfig(
        max_epochs=3, progress="off", log_every_n_steps=1, output_dir=folder, resume=folder is not None
    )
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.0), nn.MSELoss(), backend=backend, config=config,
        callbacks=[recorder],
    )  # fmt: skip
    name, is_batch_sampler = names
    data = make_loader(backend, (REPRODUCIBLE | NOT_REPRODUCIBLE)[name], is_batch_sampler)
    for recorder.stop_at in stops:
        trainer.fit(data)
    return recorder.samples


def error_of(backend: Backend, function: Callable[..., Any], *arguments: Any) -> str:
    try:
        function(backend, *arguments)
    except CheckpointError as error:
        return str(error)
    finally:
        assert backend.allreduce(torch.ones(1), "sum").item() == backend.size
    return "accepted"


def merge(keys_by_rank: list[Keys]) -> list[list[int]]:
    """Return the sorted samples of each step over all ranks."""
    return [sorted(key for keys in step for key in keys) for step in zip(*keys_by_rank, strict=True)]


@pytest.fixture(scope="module", params=GROUPS_ON_HOROVOD, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("is_batch_sampler", [False, True])
@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_run_continues_within_an_epoch_with_the_remaining_samples(
    group: RankGroup, name: str, is_batch_sampler: bool, tmp_path: Path
) -> None:
    names = name, is_batch_sampler
    uninterrupted = merge(group.run(train, names, None, (None,)))
    epochs = [uninterrupted[start : start + 4] for start in (0, 4, 8)]
    assert [sorted(key for step in epoch for key in step) for epoch in epochs] == [list(range(LENGTH))] * 3
    assert epochs[0] != epochs[1]
    assert merge(group.run(train, names, None, (2, 7, None))) == uninterrupted
    # Start on one rank, and resume on all.
    first = merge([train(LOCAL, names, str(tmp_path), (6,))])
    assert first + merge(group.run(train, names, str(tmp_path), (None,))) == uninterrupted


@pytest.mark.parametrize("is_batch_sampler", [False, True])
@pytest.mark.parametrize("name", NOT_REPRODUCIBLE)
def test_a_different_order_of_a_continued_epoch_raises_on_every_rank(
    group: RankGroup, name: str, is_batch_sampler: bool, tmp_path: Path
) -> None:
    names = name, is_batch_sampler
    train(LOCAL, names, str(tmp_path), (6,))
    texts = [
        *group.run(error_of, train, names, str(tmp_path), (None,)),
        *group.run(error_of, train, names, None, (6, None)),
    ]
    for text in texts:
        assert "samples into epoch 2, but" in text, text
        assert "now yields a different order of this epoch" in text


@pytest.mark.parametrize("name", NOT_REPRODUCIBLE)
def test_such_a_sampler_may_continue_at_the_start_of_an_epoch(group: RankGroup, name: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    found = merge(group.run(train, (name, False), folder, (4,))) + merge(
        group.run(train, (name, False), folder, (None,))
    )
    assert sorted(key for step in found for key in step) == sorted([*range(LENGTH)] * 3)


def load_loader(backend: Backend, name: str, state: Any) -> tuple[Keys, Any]:
    """Continue an epoch of a ShardedLoader from `state`, or begin one and stop after two batches."""
    loader = ShardedLoader(make_loader(backend, (REPRODUCIBLE | NOT_REPRODUCIBLE)[name], False), backend)
    if state is not None:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
    keys = list[list[int]]()
    for batch in loader:
        keys.append(batch[0][: loader.num_samples].flatten().int().tolist())
        if state is None and len(keys) == 2:
            break
    return keys, loader.state_dict()


def test_sharded_loader_checks_the_order(group: RankGroup) -> None:
    for name in REPRODUCIBLE:
        begun = group.run(load_loader, name, None)
        state = begun[0][1]
        found = merge([keys for keys, _ in begun]) + merge([keys for keys, _ in group.run(load_loader, name, state)])
        assert sorted(key for step in found for key in step) == list(range(LENGTH))
    # The loader of `Counted` is in its second iteration.
    loader = ShardedLoader(make_loader(LOCAL, Counted, False), LOCAL)
    for _ in zip(range(2), loader, strict=False):
        state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"Counted now yields a different order"):
        next(iter(loader))


# In one process.


class Pairs(Sampler[tuple[int, int]]):
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.first, self.second, strict=True)


class ByMapping(Sampler[tuple[int, int]]):
    def __init__(self, *samplers: Sampler[int]) -> None:
        self.samplers = dict(enumerate(samplers))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(*self.samplers.values(), strict=True)  # type: ignore[arg-type]


def seeded(kind: str) -> Any:
    if kind == "torch":
        return RandomSampler(range(LENGTH), generator=torch.Generator())
    return Shuffled(random.Random(0) if kind == "python" else np.random.default_rng(0))


@pytest.mark.parametrize("pair_class", [Pairs, ByMapping])
@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_generators_of_one_sampler_are_independent(kind: str, pair_class: Any) -> None:
    pairs: Any = draw_order(
        pair_class(seeded(kind), seeded(kind)), LOCAL, lambda drawn: drawn, yields_batches=False, seed=0, epoch=0
    ).order
    assert sum(first == second for first, second in pairs) < LENGTH / 4
    assert (
        pairs
        != draw_order(
            pair_class(seeded(kind), seeded(kind)), LOCAL, lambda drawn: drawn, yields_batches=False, seed=0, epoch=1
        ).order
    )


def test_a_shared_generator_is_seeded_once() -> None:
    generator = torch.Generator()
    shared = Pairs(*(RandomSampler(range(LENGTH), generator=generator) for _ in range(2)))
    one = RandomSampler(range(LENGTH), generator=torch.Generator())
    pairs: Any = draw_order(shared, LOCAL, lambda drawn: drawn, yields_batches=False, seed=0, epoch=0).order
    single: Tensor | list[Any] = draw_order(
        one, LOCAL, lambda drawn: drawn, yields_batches=False, seed=0, epoch=0
    ).order
    assert isinstance(single, Tensor)
    assert [first for first, _ in pairs] == single.tolist()
    assert [second for _, second in pairs] != single.tolist()


def test_digest_depends_on_the_order() -> None:
    orders: list[Any] = [
        [0, 1, 2, 3],
        [0, 1, 3, 2],
        [("a", 1), ("b", 23)],
        [("a", 12), ("b", 3)],
        [("b", 23), ("a", 1)],
    ]
    digests = {
        draw_order(order, LOCAL, lambda drawn: drawn, yields_batches=False, seed=0, epoch=0).digest()
        for order in orders
    }
    assert len(digests) == len(orders)


def test_batches_that_do_not_start_at_the_position_of_the_run_are_rejected() -> None:
    def loader(batch_size: int) -> ShardedLoader:
        dataset = TensorDataset(torch.arange(LENGTH))
        batches = BatchSampler(Shuffled(random.Random(0)), batch_size, drop_last=False)
        return ShardedLoader(DataLoader(dataset, batch_sampler=batches), LOCAL)

    begun = loader(4)
    first = next(iter(begun))[0].tolist()
    for batch_size in (2, 4):
        continued = loader(batch_size)
        continued.load_state_dict(begun.state_dict())
        remaining = [int(key) for batch in continued for key in batch[0]]
        assert sorted(first + remaining) == list(range(LENGTH))
    continued = loader(3)
    continued.load_state_dict(begun.state_dict())
    with pytest.raises(CheckpointError, match=r"4 samples into epoch 1, but BatchSampler now yields batches of which"):
        next(iter(continued))
