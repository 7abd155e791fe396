"""Fetching batches by index from what the user hands over: a Dataset, or a DataLoader whose settings are kept."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import tee
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
)

from unitrain import validation
from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import gather_if_different
from unitrain.data.batch import CountedBatch, CountingCollate
from unitrain.data.samplers import custom_sampler
from unitrain.data.workers import WorkerInit
from unitrain.errors import ConfigError, DataError

Data = Dataset[Any] | DataLoader[Any]


class Source:
    """A dataset that can be asked for any batch by its indices.

    Where it `counts`, a batch may hold fewer samples than it was asked for; `counted` then serves instead of `batches`.

    `batch_size` is per rank, `shuffle` and `drop_last` are what the user asked of the training order. `sampler` is what
    a DataLoader has to decide it, if that is not one of torch's plain ones; without a batch size it makes whole
    batches. Raises DataError for data that has no indices to share out, ConfigError for a batch size that is missing or
    not the DataLoader's; `setting` is where TrainConfig has it.
    """

    def __init__(
        self,
        data: Data,
        *,
        batch_size: int | None,
        shuffle: bool,
        drop_last: bool,
        num_workers: int,
        pin_memory: bool,
        setting: str,
        owner: str,
    ) -> None:
        self.batch_size = per_rank_batch_size(data, batch_size, setting, owner)
        dataset: Any = data.dataset if isinstance(data, DataLoader) else data
        self.sampler: Iterable[Any] | None = None
        if isinstance(data, DataLoader):
            self.sampler = custom_sampler(data)
            shuffle = self.sampler is None and isinstance(data.sampler, RandomSampler)
        self.shuffle = shuffle
        self.drop_last: bool = data.drop_last if isinstance(data, DataLoader) else drop_last
        self.length = _length(data)
        # Workers are seeded from it when they start, so that their augmentations repeat; the global one is spared.
        self._generator = torch.Generator()
        self._indices = _Indices()
        # A `collate_fn` of the user's own may leave samples out.
        self.counts = isinstance(data, DataLoader) and data.collate_fn is not default_collate
        self._loader = _loader(data, self._indices, num_workers, pin_memory, self._generator)
        self._tensors = _tensors(dataset) if self._is_plain() else None

    @property
    def prepared(self) -> int:
        """How many batches the workers have ready, or are about to."""
        return prefetched_batches(self._loader)

    @property
    def can_prefetch(self) -> bool:
        """Whether no code of the user's runs in this process to make a batch, which may then be made early.

        Early it would draw its random numbers before what the model draws in the step before, and leave generators
        ahead of the step that a checkpoint is of.
        """
        return self._tensors is not None or self._loader.num_workers > 0

    def set_epoch(self, epoch: int) -> None:
        """Tell a dataset that asks for it the epoch; workers that persist have a copy, which does not hear of it."""
        if hasattr(self._loader.dataset, "set_epoch"):
            self._loader.dataset.set_epoch(epoch)

    def batches(self, order: Tensor | list[Any], positions: Iterator[slice], worker_seed: int) -> Iterator[Any]:
        """Yield the batch of samples order[part] for each part of `positions`, none of which is empty.

        An order that is a list has keys that are no integers.

        Workers that start now, as all do that do not persist, are seeded with `worker_seed`; a loader's generator has
        no say. Persistent workers are those of the first call, and go on with the random numbers that they had.
        """
        if self._tensors is not None and isinstance(order, Tensor):
            return self._gather(*self._tensors, order, positions)
        assert not self.counts
        self._begin(order, positions, worker_seed)
        return iter(self._loader)

    def counted(
        self, order: Tensor | list[Any], positions: Iterator[slice], worker_seed: int
    ) -> Generator[CountedBatch]:
        """Yield what `batches` yields, with the number of samples in it. The workers end with the generator."""
        if self.counts:
            self._begin(order, positions, worker_seed)
            with closing(fetch(self._loader)) as made:
                yield from made
        else:
            positions, ahead = tee(positions)
            for part, batch in zip(positions, self.batches(order, ahead, worker_seed), strict=True):
                items = len(order[part])
                yield CountedBatch(items, items, batch)

    def _begin(self, order: Tensor | list[Any], positions: Iterator[slice], worker_seed: int) -> None:
        self._generator.manual_seed(worker_seed)
        taken = (order[part] for part in positions)
        self._indices.batches = (part.tolist() if isinstance(part, Tensor) else part for part in taken)

    def _is_plain(self) -> bool:
        """Whether nothing of the user's runs between the dataset and the batch."""
        return self._loader.num_workers == 0 and not self.counts

    def _gather(
        self, tensors: tuple[Tensor, ...], subset: Tensor | None, order: Tensor, positions: Iterator[slice]
    ) -> Iterator[Any]:
        """Index whole batches at once: stacking them sample by sample would cost more than a small model's step.

        Each batch is memory of its own. A view into a larger block would be cheaper still, but where it begins decides
        how some kernels round, and a resumed run would no longer repeat the uninterrupted one bit for bit.
        """
        if self.sampler is not None:  # which may count from the end
            order = _from_start(order, self.length)
        order = (order if subset is None else subset[order]).to(tensors[0].device)
        pin = self._loader.pin_memory and order.device.type == "cpu"
        for part in positions:
            chosen = order[part]
            batch = [tensor.index_select(0, chosen) for tensor in tensors]
            yield [tensor.pin_memory() for tensor in batch] if pin else batch


class _Indices(Sampler[list[int]]):
    """A batch sampler that passes on what it is given for the next epoch."""

    batches: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches


def _loader(
    data: Data, indices: _Indices, num_workers: int, pin_memory: bool, generator: torch.Generator
) -> DataLoader[Any]:
    if not isinstance(data, DataLoader):
        return DataLoader(
            data,
            batch_sampler=indices,
            num_workers=num_workers,
            pin_memory=pin_memory,
            worker_init_fn=WorkerInit(workers=num_workers),
            generator=generator,
        )
    collate = data.collate_fn
    return DataLoader(
        data.dataset,
        batch_sampler=indices,
        collate_fn=collate if collate is default_collate else CountingCollate(collate),
        generator=generator,
        **worker_settings(data),
    )


def fetch(loader: DataLoader[Any]) -> Generator[Any]:
    """Yield the batches of `loader`; its workers end with the generator, except persistent ones."""
    fetched = iter(loader)
    try:
        yield from fetched
    finally:
        # Left to the garbage collector, as an error's traceback leaves it, each worker would take five seconds.
        if loader.num_workers and not loader.persistent_workers:
            fetched._shutdown_workers()  # type: ignore[attr-defined]


def prefetched_batches(loader: DataLoader[Any]) -> int:
    """Return how many batches the workers of `loader` have ready, or are about to."""
    return loader.num_workers * (loader.prefetch_factor or 0)


def worker_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return how `loader` runs its workers and hands over their batches, as arguments of another DataLoader."""
    # in_order is left at its default: the batches must come in the order in which they were planned.
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": WorkerInit(loader.worker_init_fn, loader.num_workers),
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }


def _tensors(dataset: Any) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """Return the tensors behind a TensorDataset, or a Subset of one with its indices; None for anything else.

    Also None where only indexing sample by sample gives the result, or the error, of the Subset itself: for indices out
    of range, and for indices that are not integers, such as booleans.
    """
    if type(dataset) is Subset:
        inner = _tensors(dataset.dataset)
        if inner is None:
            return None
        tensors, subset = inner
        whole: Any = dataset.dataset
        indices = _subset_indices(dataset.indices, len(whole))
        return None if indices is None else (tensors, indices if subset is None else subset[indices])
    if type(dataset) is TensorDataset and len({tensor.device for tensor in dataset.tensors}) == 1:
        return dataset.tensors, None
    return None


def _subset_indices(indices: Any, length: int) -> Tensor | None:
    """Return the indices of a Subset of `length` samples, all from 0 on; None unless they are integers in range."""
    try:
        found = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError):
        return None
    # torch takes uint8 and bool for masks.
    if found.dim() != 1 or found.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
        return None
    found = found.to("cpu", torch.int64)
    return _from_start(found, length) if bool(((found >= -length) & (found < length)).all()) else None


def _from_start(indices: Tensor, length: int) -> Tensor:
    """Return `indices` with those that count from the end of `length` samples replaced by the same from the start."""
    return torch.where(indices < 0, indices + length, indices)


def per_rank_batch_size(data: Data, batch_size: int | None, setting: str, owner: str) -> int | None:
    """Return how many samples a batch of `data` has: those of a DataLoader, if it is one, else `batch_size`.

    None where the DataLoader's dataset or batch_sampler makes whole batches. Raises DataError for a DataLoader that
    cannot be taken apart; ConfigError for a size that is missing, or asked for beside a DataLoader's own.
    """
    if isinstance(data, DataLoader):
        if type(data).__iter__ is not DataLoader.__iter__:
            raise DataError(
                f"A DataLoader with an iteration of its own, in {type(data).__name__}.__iter__, cannot be shared out "
                "exactly. Use DataLoader(dataset, batch_size=32, shuffle=True), or move what it does into the dataset."
            )
        if batch_size not in (None, data.batch_size):
            found = (
                f"batch_size={data.batch_size}" if data.batch_sampler is None or data.batch_size else "a batch_sampler"
            )
            raise ConfigError(
                f"A batch size of {batch_size} was asked for, but the DataLoader was built with {found}. "
                f"Leave one of them out: with a DataLoader, {owner} does not need {setting}."
            )
        return data.batch_size
    if batch_size is None:
        raise ConfigError(
            f"A {type(data).__name__} was given without a batch size. Use {call_of(owner, f'{setting}=32')}, "
            "or give a DataLoader."
        )
    return batch_size


def call_of(owner: str, arguments: str) -> str:
    """Return the call in which the user passes `arguments` to `owner`, TrainConfig or ShardedLoader, for a message."""
    return f"{owner}({'' if owner == 'TrainConfig' else 'data, backend, '}{arguments})"


def is_stream(data: Any) -> bool:
    """Whether `data` has no indices that could be shared out, or those of batches whose sizes nobody knows before."""
    if isinstance(data, DataLoader):
        return is_stream(data.dataset) or (data.batch_size is None and data.batch_sampler is None)
    # Those of Hugging Face are no subclass of torch's. What is its own iterator can be passed over only once.
    alike = hasattr(data, "__iter__") and not hasattr(data, "__getitem__") and not hasattr(data, "__next__")
    return isinstance(data, IterableDataset) or alike


def _length(data: Data) -> int:
    dataset: Any = data.dataset if isinstance(data, DataLoader) else data
    if is_stream(data) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"Got data of type {type(dataset).__name__}, which has no __len__ and __getitem__ to share out. "
            "Give a Dataset, such as TensorDataset(inputs, targets), an IterableDataset, or a DataLoader."
        )
    return len(dataset)


def check_same_data(what: str, communicator: Communicator, length: int | None, settings: Mapping[str, Any]) -> None:
    """Raise DataError on every rank where `length` or one of `settings` is not the same on all, or length is 0.

    `what` is the subject of the sentence, and `length` None for data without one. All ranks call it.
    """
    own = (length, dict(settings))
    everywhere: list[tuple[int | None, dict[str, Any]]] = gather_if_different(communicator, own) or [own]
    lengths = [length for length, _ in everywhere]
    if None in lengths and any(length is not None for length in lengths):
        ranks = [rank for rank, length in enumerate(lengths) if length is None]
        raise DataError(
            f"{what} has a length on some ranks, but comes in turn on ranks {ranks}. Give every rank the same data."
        )
    if len(set(lengths)) > 1:
        raise DataError(
            f"{what} has not the same number of samples on every rank: {lengths}. "
            "Give every rank the whole dataset; it is shared out here."
        )
    for name, value in everywhere[0][1].items():
        values = [found[name] for _, found in everywhere]
        if any(other != value for other in values):
            raise DataError(
                f"{what} differs between ranks in {name}: {values}. Use {name}={value} on every rank, in the "
                "DataLoader if there is one."
            )
    if length == 0:
        raise DataError(f"{what} is empty. Give a dataset with at least one sample.")


def check_is_dataset(name: str, data: Any) -> None:
    """Raise DataError unless the argument `name` can be a dataset, and for a list of batches instead of samples."""
    fix = "Give a Dataset, such as TensorDataset(inputs, targets), an IterableDataset, or a DataLoader"
    if data is None or isinstance(data, type | str | bytes | Mapping | nn.Module | torch.optim.Optimizer):
        raise DataError(f"{name} must be a dataset or a DataLoader, got {validation.describe_value(data)}. {fix}.")
    if isinstance(data, list | tuple) and data and all(map(_is_batch, data[:8])):
        raise DataError(
            f"{name} is a {type(data).__name__} of {len(data)} pairs of tensors that look like whole batches: each "
            "would count as one sample. Give the samples, TensorDataset(inputs, targets); or, where each pair is one "
            "sample, DataLoader(data, batch_size=32)."
        )


def _is_batch(item: Any) -> bool:
    """Return whether `item` is several tensors with the same first dimension, larger than 1."""
    tensors = isinstance(item, list | tuple) and len(item) > 1 and all(isinstance(part, Tensor) for part in item)
    return bool(tensors and len({part.shape[:1] for part in item}) == 1 and item[0].dim() and item[0].shape[0] > 1)
