"""Loading and evaluation of each batch with its own random seed, for any number of processes and workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import Dataset

from unitrain.data.batch import BatchInfo
from unitrain.randomness import IsolatedGenerators, seed_evaluation_batch, seed_generators

ItemT = TypeVar("ItemT")


class SeededIndices(list[Any]):
    """The indices of the samples of a batch, and the random seed with which to load them."""

    def __init__(self, indices: list[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededIndices, (list(self), self.seed)


class SeededDataset(Dataset[Any]):
    """A dataset that seeds the global generators before it loads the samples of `SeededIndices`.

    The seed also applies to the `collate_fn` of the batch, which runs afterwards in the same process. Attributes that
    this class does not define are read from the user's dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        if isinstance(indices, SeededIndices):
            seed_generators(indices.seed)
        load = getattr(self.dataset, "__getitems__", None)
        samples: list[Any] = [self.dataset[index] for index in indices] if load is None else load(list(indices))
        return samples

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # not yet set while a worker unpickles this object
            raise AttributeError(name)
        return getattr(self.dataset, name)


def load_with_isolated_rng(batches: Iterator[ItemT]) -> Iterator[ItemT]:
    """Yield `batches`. They are loaded with a separate RNG state, so that loading does not change the global
    generators."""
    isolated = IsolatedGenerators(0)
    while True:
        with isolated:
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def seed_batches(batches: Iterable[tuple[ItemT, BatchInfo]]) -> Iterator[tuple[ItemT, BatchInfo]]:
    """Yield `batches` for evaluation, and seed the global generators for each batch with its position in the data."""
    for batch, info in batches:
        seed_evaluation_batch(info.position)
        yield batch, info
