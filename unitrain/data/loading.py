"""Loading of batches by index from a Dataset or a DataLoader (with the DataLoader's settings)."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, nullcontext
from itertools import tee
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
)

from unitrain import validation
from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks, gather_if_different
from unitrain.data.batch import CountedBatch, CountingCollate
from unitrain.data.samplers import find_custom_sampler, is_random_sampler
from unitrain.data.seeded_batches import SeededDataset, SeededIndices, load_with_isolated_rng
from unitrain.data.stream_state import has_custom_iter, is_stateful_loader
from unitrain.data.workers import WorkerInit, close_at_exit
from unitrain.errors import ConfigError, DataError
from unitrain.torch_compat import stop_workers

Data = Dataset[Any] | DataLoader[Any]


class IndexedSource:
    """Loads batches by index from a Dataset or DataLoader.

    `batch_size` is per rank; `shuffle` and `drop_last` are the user's settings for the training order. A DataLoader's
    own settings replace `shuffle`, `drop_last`, `num_workers` and `pin_memory`. `sampler` is the custom sampler of a
    DataLoader or, if the batch size is None, its batch_sampler. If `may_drop_samples` is True, batches can have fewer
    samples than indices: use `counted_batches` instead of `batches`. Error messages contain `class_name`, the name of
    the public class, and `batch_size_name`, the name of its batch size parameter. With `needs_batch_seeds`, pass
    `seeds` to `counted_batches`.

    Raises DataError for data without `__getitem__` or a valid `__len__`, and for a DataLoader that cannot be sharded;
    ConfigError for a batch size that is missing or differs from that of the DataLoader.
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
        batch_size_name: str,
        class_name: str,
        needs_batch_seeds: bool = False,
    ) -> None:
        self.batch_size = determine_batch_size(data, batch_size, batch_size_name, class_name)
        dataset: Any = data.dataset if isinstance(data, DataLoader) else data
        self.sampler: Iterable[Any] | None = None
        if isinstance(data, DataLoader):
            self.sampler = find_custom_sampler(data)
            shuffle = self.sampler is None and is_random_sampler(data.sampler)
        self.shuffle = shuffle
        self.drop_last: bool = data.drop_last if isinstance(data, DataLoader) else drop_last
        self._data = data
        self.length = _read_length(data)
        # Seeds new workers, so that augmentations are reproducible and the global generator does not advance.
        self._generator = torch.Generator()
        self._indices = _Indices()
        # A custom collate_fn may drop samples.
        self.may_drop_samples = isinstance(data, DataLoader) and data.collate_fn is not default_collate
        self._dataset = dataset
        self._indexes_tensors = self._may_index_tensors(data, num_workers) and _has_tensors(dataset)
        self._needs_batch_seeds = needs_batch_seeds and not self._indexes_tensors
        self._loader = _create_loader(
            data, self._indices, num_workers, pin_memory, self._generator, needs_batch_seeds=self._needs_batch_seeds
        )

    @property
    def prefetch_count(self) -> int:
        """The number of batches that the workers prefetch."""
        return count_prefetched_batches(self._loader)

    @property
    def can_prefetch(self) -> bool:
        """Whether loading a batch runs no user code in this process, so that batches may be prefetched.

        Prefetching with user code would advance the RNG before the preceding step has used it, so checkpoints would
        store a wrong RNG state.
        """
        return self._indexes_tensors or self._loader.num_workers > 0

    def read_length(self, communicator: Communicator, subject: str) -> None:
        """Read the length of the dataset again, because a callback may have changed it. All ranks must call this
        method. Raises the errors of `check_same_data`."""
        self.length = call_on_all_ranks(communicator, lambda: _read_length(self._data))
        check_same_data(subject, communicator, self.length, {})

    def has_current_length(self) -> bool:
        """Return whether the dataset still has the length that was read last."""
        return self.length == _read_length(self._data)

    def set_epoch(self, epoch: int) -> None:
        """Call the dataset's `set_epoch` method, if it has one. Persistent workers that are already running have their
        own copies of the dataset, on which it is not called."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def batches(self, order: Tensor | list[Any], positions: Iterator[slice], worker_seed: int) -> Iterator[Any]:
        """Yield the batch of the samples order[slice] for each slice in `positions`. The slices must not be empty.

        `order` is a tensor of indices, or a list of keys that are not all integers. New workers are seeded with
        `worker_seed`; the generator of the user's DataLoader has no effect. Persistent workers start in the first call
        and keep their RNG state in later calls.
        """
        if self._indexes_tensors and isinstance(order, Tensor):
            return self._index_tensors(order, positions)
        assert not self.may_drop_samples
        self._set_order(order, positions, worker_seed)
        return _CheckedBatches(_start_iteration(self._loader), self._indices, self._dataset)

    def counted_batches(
        self,
        order: Tensor | list[Any],
        positions: Iterator[slice],
        worker_seed: int,
        seeds: Iterator[int] | None = None,
    ) -> Generator[CountedBatch]:
        """Yield the same batches as `batches`, as `CountedBatch`. Closing the generator terminates the workers, unless
        they are persistent.

        With `seeds`, the random number generators are seeded with the next seed before each batch is loaded, in this
        process or in a worker; the RNG state of this process is restored afterwards. For a dataset of tensors, which
        are indexed without random numbers, `seeds` has no effect.
        """
        if seeds is not None and self._needs_batch_seeds:
            positions, ahead = tee(positions)
            self._set_order(order, ahead, worker_seed, seeds)
            with closing(iterate_loader(self._loader)) as loaded_batches:
                checked_batches = _CheckedBatches(loaded_batches, self._indices, self._dataset)
                for part, batch in zip(positions, load_with_isolated_rng(checked_batches), strict=True):
                    items = len(order[part])
                    yield batch if self.may_drop_samples else CountedBatch(items, items, batch)
        elif self.may_drop_samples:
            self._set_order(order, positions, worker_seed)
            with closing(iterate_loader(self._loader)) as loaded_batches:
                yield from _CheckedBatches(loaded_batches, self._indices, self._dataset)
        else:
            positions, ahead = tee(positions)
            for part, batch in zip(positions, self.batches(order, ahead, worker_seed), strict=True):
                items = len(order[part])
                yield CountedBatch(items, items, batch)

    def _set_order(
        self,
        order: Tensor | list[Any],
        positions: Iterator[slice],
        worker_seed: int,
        seeds: Iterator[int] | None = None,
    ) -> None:
        self._generator.manual_seed(worker_seed)
        reordered_parts = (order[part] for part in positions)
        batches = (part.tolist() if isinstance(part, Tensor) else part for part in reordered_parts)
        if seeds is not None:
            batches = (SeededIndices(batch, seed) for batch, seed in zip(batches, seeds, strict=False))
        self._indices.batches = batches
        self._indices.loading.clear()

    def _may_index_tensors(self, data: Data, num_workers: int) -> bool:
        """Return whether tensors may be indexed directly, because batches are collated in this process with torch's
        default `collate_fn`."""
        workers = data.num_workers if isinstance(data, DataLoader) else num_workers
        return workers == 0 and not self.may_drop_samples

    def _index_tensors(self, order: Tensor, positions: Iterator[slice]) -> Iterator[Any]:
        """Yield each batch by indexing each tensor once, which is much faster than stacking single samples.

        Each batch is a copy. A view of a larger tensor would be cheaper, but memory alignment affects the rounding of
        some kernels, so a resumed run might not be bit-identical to an uninterrupted run.
        """
        if self.sampler is not None:  # it may yield negative indices
            order = _normalize_negative_indices(order, self.length)
        for part in positions:
            batch = _index_dataset(self._dataset, order[part])
            yield [_pin(tensor) for tensor in batch] if self._loader.pin_memory else batch


class _Indices(Sampler[list[int]]):
    """Batch sampler that yields the lists of indices in `batches`, which is set before each epoch. `loading` contains
    the lists whose batches have not been loaded yet."""

    batches: Iterator[list[int]] = iter(())

    def __init__(self) -> None:
        self.loading: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.batches:
            self.loading.append(indices)
            yield indices


class _CheckedBatches(Iterator[Any]):
    """Iterator over the `batches` that a DataLoader loads for `indices`. Raises DataError if an item raises
    StopIteration, which would otherwise end the epoch early."""

    def __init__(self, batches: Iterator[Any], indices: _Indices, dataset: Any) -> None:
        self._batches, self._indices, self._dataset_name = batches, indices, type(dataset).__name__

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration as error:
            if not self._indices.loading:
                raise
            items = self._indices.loading.popleft()
            shown = ", ".join(map(str, items[:8])) + ", ..." * (len(items) > 8)
            raise DataError(
                f"StopIteration was raised while a batch of {self._dataset_name} was loaded, of the items {shown}; it "
                "would end the epoch early. Fix __getitem__ or collate_fn, which probably calls next() on an iterator "
                "that has ended, for example with next(iterator, None)."
            ) from error
        self._indices.loading.popleft()
        return batch


def _create_loader(
    data: Data,
    indices: _Indices,
    num_workers: int,
    pin_memory: bool,
    generator: torch.Generator,
    *,
    needs_batch_seeds: bool,
) -> DataLoader[Any]:
    dataset: Any = data.dataset if isinstance(data, DataLoader) else data
    if needs_batch_seeds:
        dataset = SeededDataset(dataset)
    if not isinstance(data, DataLoader):
        return DataLoader(
            dataset,
            batch_sampler=indices,
            num_workers=num_workers,
            pin_memory=pin_memory,
            worker_init_fn=WorkerInit(num_workers=num_workers),
            generator=generator,
        )
    collate = data.collate_fn
    return DataLoader(
        dataset,
        batch_sampler=indices,
        collate_fn=collate if collate is default_collate else CountingCollate(collate),
        generator=generator,
        **worker_settings(data),
    )


def iterate_loader(loader: DataLoader[Any]) -> Generator[Any]:
    """Yield the batches of `loader`. Closing the generator terminates its workers, unless they are persistent. The
    generator is also closed when the interpreter exits."""
    return close_at_exit(_iterate_loader(loader))


def _iterate_loader(loader: DataLoader[Any]) -> Generator[Any]:
    fetched = _start_iteration(loader)
    try:
        yield from fetched
    finally:
        # Stop the workers now: if a traceback keeps the iterator alive, its later garbage collection takes five seconds
        # per worker.
        if loader.num_workers and not loader.persistent_workers:
            stop_workers(fetched)


def _start_iteration(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator over `loader`, for any default device of the program. New workers have the default device CPU,
    because a forked process cannot use the GPU."""
    # The DataLoader draws a number with its CPU generator, for which torch requires that the default device is the CPU.
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        return iter(loader)


def count_prefetched_batches(loader: DataLoader[Any]) -> int:
    """Return the number of batches that the workers of `loader` prefetch."""
    return loader.num_workers * (loader.prefetch_factor or 0)


def worker_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the worker and memory settings of `loader`, as arguments of another DataLoader."""
    # in_order is not copied, because batches must be yielded in the planned order.
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": WorkerInit(loader.worker_init_fn, loader.num_workers),
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }


def _has_tensors(dataset: Any) -> bool:
    """Return whether `dataset` is a TensorDataset, or a Subset of one."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset


def _index_dataset(dataset: Any, indices: Tensor) -> list[Tensor]:
    """Return the batch of the samples `indices`, int64, of a TensorDataset or a Subset of one.

    The tensors and the indices of a Subset are read for each batch, because callbacks may replace them. Samples are
    loaded one by one if the tensors are on different devices, or if the indices of a Subset are out of range or not
    integers; the dataset then handles or rejects the indices.
    """
    chosen: Tensor | None = indices
    inner: Any = dataset
    while type(inner) is Subset and chosen is not None:
        subset: Any = inner
        chosen, inner = _select(subset.indices, chosen), subset.dataset
        if chosen is not None:
            length, (lowest, highest) = len(inner), (int(bound) for bound in chosen.aminmax())
            chosen = None if lowest < -length or highest >= length else chosen
            chosen = _normalize_negative_indices(chosen, length) if chosen is not None and lowest < 0 else chosen
    if chosen is None or len({tensor.device for tensor in inner.tensors}) != 1:
        batch: list[Tensor] = default_collate([dataset[index] for index in indices.tolist()])
        return batch
    chosen = chosen.to(inner.tensors[0].device)
    return [tensor.index_select(0, chosen) for tensor in inner.tensors]


def _select(subset_indices: Any, chosen: Tensor) -> Tensor | None:
    """Return the elements `chosen` of the indices of a Subset, as int64; None unless they are integers."""
    try:
        if isinstance(subset_indices, Tensor | np.ndarray):
            selected = torch.as_tensor(subset_indices, device="cpu")[chosen]
        else:
            # NumPy converts lists several times faster than torch.
            selected = torch.from_numpy(np.array([subset_indices[index] for index in chosen.tolist()]))
    except (TypeError, ValueError, RuntimeError, LookupError):
        return None
    # torch interprets uint8 and bool as masks.
    if selected.dim() != 1 or selected.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
        return None
    return selected.to(torch.int64)


def _pin(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def _normalize_negative_indices(indices: Tensor, length: int) -> Tensor:
    """Return `indices` with negative indices replaced by the equivalent non-negative indices."""
    return torch.where(indices < 0, indices + length, indices)


def determine_batch_size(data: Data, batch_size: int | None, batch_size_name: str, class_name: str) -> int | None:
    """Return the batch size of a DataLoader, otherwise `batch_size`.

    Return None if a stateful loader, or the DataLoader's dataset or batch_sampler, creates the batches. Raises
    DataError for any other DataLoader with a custom `__iter__`, and ConfigError if the batch size is missing, or
    differs from that of the DataLoader.
    """
    if is_stateful_loader(data):
        if batch_size is not None:
            raise ConfigError(
                f"A batch size of {batch_size} was requested, but {type(data).__name__} creates the batches itself. "
                f"Leave one of them out: with a loader, {class_name} does not need {batch_size_name}."
            )
        return None
    if isinstance(data, DataLoader):
        if has_custom_iter(data):
            raise DataError(
                f"{type(data).__name__} is a DataLoader with a custom __iter__, which cannot be sharded exactly. "
                "Use DataLoader(dataset, batch_size=32, shuffle=True), and move the code of __iter__ into the dataset."
            )
        if batch_size not in (None, data.batch_size):
            description = (
                f"batch_size={data.batch_size}" if data.batch_sampler is None or data.batch_size else "a batch_sampler"
            )
            raise ConfigError(
                f"A batch size of {batch_size} was requested, but the DataLoader was built with {description}. "
                f"Leave one of them out: with a DataLoader, {class_name} does not need {batch_size_name}."
            )
        return data.batch_size
    if batch_size is None:
        call = format_call(class_name, f"{batch_size_name}=32")
        raise ConfigError(f"{type(data).__name__} was given without a batch size. Use {call}, or pass a DataLoader.")
    return batch_size


def format_call(class_name: str, arguments: str) -> str:
    """Format a call of `class_name` (TrainConfig or ShardedLoader) with `arguments`, for error messages."""
    return f"{class_name}({'' if class_name == 'TrainConfig' else 'data, backend, '}{arguments})"


def is_stream(data: Any) -> bool:
    """Return whether `data` is an iterable dataset, a stateful loader, or a DataLoader whose dataset returns a batch of
    unknown size per index."""
    if isinstance(data, DataLoader):
        if is_stateful_loader(data):
            return True
        return is_stream(data.dataset) or (data.batch_size is None and data.batch_sampler is None)
    # Iterable datasets of Hugging Face are not subclasses of torch's. Iterators are excluded, because they can be
    # iterated only once.
    is_iterable = hasattr(data, "__iter__") and not hasattr(data, "__getitem__") and not hasattr(data, "__next__")
    return isinstance(data, IterableDataset) or is_iterable


def _read_length(data: Data) -> int:
    dataset: Any = data.dataset if isinstance(data, DataLoader) else data
    if is_stream(data) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"Got data of type {type(dataset).__name__}, which does not have __len__ and __getitem__. "
            "Pass a Dataset, such as TensorDataset(inputs, targets), an IterableDataset, or a DataLoader."
        )
    try:
        return len(dataset)
    except Exception as error:  # not every rank would raise it; a DataError is raised on every rank
        raise DataError(
            f"len() of an object of class {type(dataset).__name__} failed: {type(error).__name__}: {error}. Return "
            "a whole number of at least 0 from __len__, or pass an IterableDataset."
        ) from error


def check_same_data(subject: str, communicator: Communicator, length: int | None, settings: Mapping[str, Any]) -> None:
    """Raise DataError, on every rank, if `length` or one of `settings` differs between ranks, or if `length` is 0.

    `subject` is the grammatical subject of the message. `length` is None for data without a length. All ranks must call
    this function.
    """
    local = (length, dict(settings))
    properties_by_rank: list[tuple[int | None, dict[str, Any]]] = gather_if_different(communicator, local) or [local]
    lengths = [length for length, _ in properties_by_rank]
    if None in lengths and any(length is not None for length in lengths):
        ranks = [rank for rank, length in enumerate(lengths) if length is None]
        raise DataError(
            f"{subject} has a length on some ranks, but is a stream on ranks {ranks}. Give every rank the same data."
        )
    if len(set(lengths)) > 1:
        raise DataError(
            f"{subject} does not have the same number of samples on every rank: {lengths}. "
            "Give every rank the complete dataset; unitrain shards it."
        )
    for name, value in properties_by_rank[0][1].items():
        values = [settings_of_rank[name] for _, settings_of_rank in properties_by_rank]
        if any(other_value != value for other_value in values):
            raise DataError(
                f"{subject} differs between ranks in {name}: {values}. Use {name}={value} on every rank, in the "
                "DataLoader if there is one."
            )
    if length == 0:
        raise DataError(f"{subject} is empty. Pass a dataset with at least one sample.")


def check_is_dataset(argument: str, data: Any) -> None:
    """Raise DataError if `data` is not a dataset, or is a list of batches instead of samples."""
    fix = "Pass a Dataset, such as TensorDataset(inputs, targets), an IterableDataset, or a DataLoader"
    if data is None or isinstance(data, type | str | bytes | Mapping | nn.Module | torch.optim.Optimizer):
        raise DataError(f"{argument} must be a dataset or a DataLoader, got {validation.describe_value(data)}. {fix}.")
    if isinstance(data, list | tuple) and data and all(map(_looks_like_batch, data[:8])):
        raise DataError(
            f"{argument} is a {type(data).__name__} of {len(data)} sequences of tensors that are probably batches, "
            "but each sequence counts as one sample. Use TensorDataset(inputs, targets), which has samples, or, if "
            "each sequence is one sample, DataLoader(data, batch_size=32)."
        )


def _looks_like_batch(item: Any) -> bool:
    """Return whether `item` consists of several tensors with the same first dimension, larger than 1."""
    tensors = isinstance(item, list | tuple) and len(item) > 1 and all(isinstance(part, Tensor) for part in item)
    return bool(tensors and len({part.shape[:1] for part in item}) == 1 and item[0].dim() and item[0].shape[0] > 1)


def open_source(data: Data, communicator: Communicator, **settings: Any) -> IndexedSource:
    """Return an IndexedSource of `data` with these settings. All ranks must call this function. An error of one rank is
    raised on every rank."""
    pin_memory = communicator.device.type == "cuda"
    return call_on_all_ranks(communicator, lambda: IndexedSource(data, pin_memory=pin_memory, **settings))


def check_is_indexed(data: Data) -> None:
    """Raise DataError for an iterable dataset, which logical ranks do not support."""
    if is_stream(data):
        raise DataError(
            "An iterable dataset is not supported with logical_ranks. Use a dataset with __getitem__ and __len__, or "
            "leave logical_ranks out."
        )
