"""Iterable datasets (streams): selection of the items per rank and worker, and loading of batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.config import StreamKind
from unitrain.data.batch import CountedBatch, CountingCollate, copy_batch, count_batch_samples, fingerprint
from unitrain.data.loading import (
    Data,
    check_same_data,
    count_prefetched_batches,
    determine_batch_size,
    is_stream,
    iterate_loader,
    worker_settings,
)
from unitrain.data.samplers import find_custom_sampler, seed_epoch
from unitrain.data.stream_state import (
    END_OF_STREAM,
    StreamState,
    begin_iteration,
    is_stateful,
    is_stateful_loader,
    load_snapshot,
    take_snapshot,
)
from unitrain.data.workers import WorkerInit
from unitrain.randomness import IsolatedGenerators, SeedPurpose, derive_seed
from unitrain.torch_compat import hide_worker_info


class StreamSource:
    """Loads this rank's batches of an iterable dataset (stream), for any number of epochs.

    The items of a shared stream are sharded round-robin: item i belongs to rank i % size, and the workers of a rank
    collate its batches in turn. With the same global batch size, a step therefore contains the same items
    for any number of ranks and workers, and the number of items in a micro-batch differs by at most 1 between ranks.
    Every rank and worker iterates over the entire stream. If `batch_size` is None, each item is a batch; if the dataset
    loads batches by index, each rank loads only its own batches. With `yields_every_item`, `drop_last` is ignored.

    If the dataset is stateful, each training batch contains the state of the dataset after the batch, from which an
    iteration can resume. The states of a shared stream are at positions that are common to all ranks and workers. A
    stateful loader is a stream of batches, which it loads with its own workers.

    Raises DataError and ConfigError like `IndexedSource`.
    """

    def __init__(
        self,
        data: Data,
        *,
        rank: int,
        size: int,
        stream_kind: StreamKind,
        batch_size: int | None,
        num_workers: int,
        pin_memory: bool,
        seed: int,
        batch_size_name: str,
        class_name: str,
        drop_last: bool,
        yields_every_item: bool,
        limit_batches: int | None,
        items_per_limited_batch: int | None,
    ) -> None:
        self.batch_size = determine_batch_size(data, batch_size, batch_size_name, class_name)
        yields_batches = is_stateful_loader(data)
        loader = data if isinstance(data, DataLoader) and not yields_batches else None
        self.drop_last = (drop_last if loader is None else loader.drop_last) and not yields_every_item
        dataset: Any = data if loader is None else loader.dataset
        self.name = type(dataset).__name__
        items, load_item = dataset, None
        if loader is not None and not is_stream(dataset):
            # The dataset returns a batch per index, so the stream consists of indices.
            items, load_item, stream_kind = find_custom_sampler(loader), dataset.__getitem__, "shared"
        # Evaluation always starts at the beginning of the stream, so it needs no states.
        self.is_stateful = load_item is None and not yields_every_item and is_stateful(items)
        self.stream_kind: StreamKind = stream_kind
        self._rank, self._seed = rank, seed
        self._generator = torch.Generator()
        collate = _identity if yields_batches else default_collate if loader is None else loader.collate_fn
        # For a shared stream, the limit counts batches of all ranks, otherwise batches of this rank.
        self._limit_batches = limit_batches if stream_kind == "own" else None
        max_items = None
        if limit_batches is not None and stream_kind == "shared":
            max_items = limit_batches * (1 if self.batch_size is None else items_per_limited_batch or self.batch_size)
        self._batches = _Batches(
            items,
            load_item,
            collate,
            self.batch_size,
            self.drop_last,
            rank=rank,
            size=size,
            stream_kind=stream_kind,
            seed=seed,
            max_items=max_items,
            is_stateful=self.is_stateful,
        )
        self._settings = _loader_settings(loader, 0 if yields_batches else num_workers, pin_memory)
        self._loader = self._create_loader()
        # Fingerprint of the first item of a shared stream in the worker that loaded the last batch.
        self.first_item_fingerprint: int | None = None
        # Number of positions per micro-batch: items of all ranks for a shared stream, otherwise 1.
        self.stride = size * (self.batch_size or 1) if stream_kind == "shared" else 1

    @property
    def num_workers(self) -> int:
        """The number of worker processes that load batches; 0 if this process or a stateful loader loads them."""
        return self._loader.num_workers

    @property
    def can_prefetch(self) -> bool:
        """Whether loading a batch runs no user code in this process, so that batches may be prefetched."""
        return self.num_workers > 0

    @property
    def may_reuse_memory(self) -> bool:
        """Whether a batch may overwrite the memory of the preceding batch. True if the dataset or a custom `collate_fn`
        creates the batches in this process.

        Batches from workers, and batches that torch collates from items, do not share memory.
        """
        return self.num_workers == 0 and (self.batch_size is None or self._batches.collate is not default_collate)

    @property
    def prefetch_count(self) -> int:
        """The number of batches that the workers prefetch."""
        return count_prefetched_batches(self._loader)

    def batches(
        self, epoch: int, start: int = 0, state: StreamState | None = None, *, is_repeating: bool = False
    ) -> Generator[CountedBatch]:
        """Yield the batches of an epoch.

        With `state`, only the batches after this state are yielded, and `start` is the position of the state in a
        shared stream. Without `state`, the first `start` items of a shared stream are skipped. `is_repeating`
        (whether the batches are repeated, with uneven="pad") is stored in the states of the yielded batches.
        """
        if state is not None and self._loader.persistent_workers:
            self._loader = self._create_loader()  # running workers would not receive the state
        self._batches.set_start(epoch, start, state)
        self._generator.manual_seed(derive_seed(self._seed, SeedPurpose.WORKERS, epoch, self._rank))
        snapshots = {} if state is None else dict(state.snapshots)
        position = start
        with closing(iterate_loader(self._loader)) as batches_of_workers:
            for loaded in islice(batches_of_workers, self._limit_batches):
                if loaded is None:  # a placeholder, see `_Batches`
                    continue
                self.first_item_fingerprint, position = loaded.first_item_fingerprint, position + self.stride
                batch: CountedBatch = loaded.batch
                if loaded.snapshot is not None:
                    is_shared = self.stream_kind == "shared"
                    snapshots = {**snapshots, 0 if is_shared else loaded.worker: loaded.snapshot}
                    after = position if is_shared else None
                    batch = batch._replace(state=StreamState(snapshots, loaded.worker, after, is_repeating))
                yield batch

    def _create_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._batches, batch_size=None, collate_fn=_identity, generator=self._generator, **self._settings
        )


def open_stream(
    data: Data,
    communicator: Communicator,
    *,
    batch_size: int | None,
    num_workers: int,
    stream_kind: StreamKind,
    seed: int,
    batch_size_name: str,
    class_name: str,
    subject: str,
    drop_last: bool = False,
    yields_every_item: bool = False,
    limit_batches: int | None = None,
    items_per_limited_batch: int | None = None,
) -> StreamSource:
    """Return this rank's `StreamSource`. Raises DataError, on all ranks, if the settings differ between ranks.

    `subject` is the grammatical subject of error messages. All ranks must call this function.
    """
    source = call_on_all_ranks(
        communicator,
        lambda: StreamSource(
            data,
            rank=communicator.rank,
            size=communicator.size,
            stream_kind=stream_kind,
            batch_size=batch_size,
            num_workers=num_workers,
            pin_memory=communicator.device.type == "cuda",
            seed=seed,
            batch_size_name=batch_size_name,
            class_name=class_name,
            drop_last=drop_last,
            yields_every_item=yields_every_item,
            limit_batches=limit_batches,
            items_per_limited_batch=items_per_limited_batch,
        ),
    )
    settings: dict[str, Any] = {"stream": source.stream_kind, "seed": seed}
    if source.stream_kind == "shared":
        # These settings determine the items per rank.
        settings |= {"batch_size": source.batch_size, "drop_last": source.drop_last}
    check_same_data(subject, communicator, None, settings)
    return source


class _LoadedBatch(NamedTuple):
    """A batch, the fingerprint of the first item of a shared stream, the worker that loaded the batch, and a snapshot
    of the state of a stateful dataset after the batch.
    """

    batch: CountedBatch
    first_item_fingerprint: int | None
    worker: int
    snapshot: bytes | None


class _Batches(IterableDataset[_LoadedBatch | None]):
    """Iterable over the batches that the current worker (or, without workers, this process) collates for one rank.

    A DataLoader takes the first batch from worker 0. If an iteration over a stream of kind "own" resumes after a batch
    of worker w, and w is not the last worker, workers 0 to w first yield None, so that the order of the workers is the
    same as in the interrupted iteration.
    """

    def __init__(
        self,
        items: Iterable[Any],
        load_item: Callable[[Any], Any] | None,
        collate: Callable[[Any], Any],
        batch_size: int | None,
        drop_last: bool,
        *,
        rank: int,
        size: int,
        stream_kind: StreamKind,
        seed: int,
        max_items: int | None,
        is_stateful: bool,
    ) -> None:
        self._max_items, self._is_stateful = max_items, is_stateful
        self._state: StreamState | None = None
        self._has_ended = False  # whether the stream has ended in this iteration
        self._items, self._load, self.collate = items, load_item, collate
        self._batch_size, self._drop_last = batch_size, drop_last
        self._rank, self._size, self._stream_kind, self._seed = rank, size, stream_kind, seed
        self._first_item_fingerprint: int | None = None
        # Epoch, start position, and whether a state is set, in shared memory, because persistent workers have copies of
        # this object.
        self._start = torch.zeros(3, dtype=torch.int64, device="cpu").share_memory_()

    def set_start(self, epoch: int, start: int, state: StreamState | None) -> None:
        """Set the epoch, the start and the state of the next iteration. Running workers receive the epoch and the
        start, but not the state."""
        self._state = state
        self._start.copy_(torch.tensor([epoch, start, state is not None], device="cpu"))

    def __iter__(self) -> Iterator[_LoadedBatch | None]:
        epoch, start, has_state = map(int, self._start.tolist())
        state = self._state if has_state else None
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self._stream_kind == "shared":
            seed = derive_seed(self._seed, SeedPurpose.SHARED, epoch)
        else:
            seed = derive_seed(self._seed, SeedPurpose.WORKERS, epoch, self._rank, worker)
        stream: Any = self._items
        with IsolatedGenerators(seed):  # separate, so that random numbers drawn here do not change those of the stream
            self._finish_iteration = begin_iteration(stream)
        generators = IsolatedGenerators(seed)
        with generators:
            seed_epoch(stream, seed=seed, epoch=epoch)
            if state is not None:
                snapshot = state.snapshots.get(0 if self._stream_kind == "shared" else worker)
                stream = stream if snapshot is None else load_snapshot(stream, snapshot)
        self._has_ended = False
        if self._stream_kind == "shared":
            batches = self._batches_of_shared_stream(stream, 0 if state is not None else start, worker, num_workers)
        else:
            batches = self._batches_of_own_stream(stream)
            if state is not None and worker <= state.last_worker < num_workers - 1:
                yield None
        while True:
            # Only the stream uses these generators. If loading or collating a batch advanced them, the rest of a shared
            # stream would differ between ranks and workers.
            with generators:
                items = next(batches, None)
            if items is None:
                return
            if self._load is not None:
                items = [self._load(item) for item in items]
            batch = self._collate(items)
            snapshot = None
            if self._is_stateful:
                if self._stream_kind == "shared" and self.collate is not default_collate:
                    # The items of other ranks, which are read before the snapshot, may overwrite the memory of the
                    # batch.
                    batch = batch._replace(batch=copy_batch(batch.batch))
                with generators:
                    next(batches)
                    snapshot = END_OF_STREAM if self._has_ended else take_snapshot(stream)
            yield _LoadedBatch(batch, self._first_item_fingerprint, worker, snapshot)

    def _collate(self, items: list[Any]) -> CountedBatch:
        if self._batch_size is None:
            batch = self.collate(items[0])
            samples = 0 if batch is None else count_batch_samples(batch)
            return CountedBatch(samples, samples, batch)
        if self.collate is default_collate:
            return CountedBatch(len(items), len(items), self.collate(items))
        return CountingCollate(self.collate)(items)

    def _batches_of_shared_stream(
        self, dataset: Iterable[Any], start: int, worker: int, num_workers: int
    ) -> Iterator[list[Any]]:
        """Yield the items of each batch of this rank and worker, from a shared stream.

        If the dataset is stateful, an empty list is yielded after each batch, when the items of the other ranks have
        been read.
        """
        stream: Iterator[Any] = self._record_end(_iterate_outside_worker(dataset))
        _skip_items(stream, start)
        first = list(islice(stream, 1))
        self._first_item_fingerprint = fingerprint(first)
        stream = islice(chain(first, stream), self._max_items)
        length = self._batch_size or 1
        for micro_step in count():
            # Items of other ranks and workers are discarded.
            if micro_step % num_workers != worker:
                _skip_items(stream, self._size * length)
                continue
            _skip_items(stream, self._rank)
            # Read the next item only after the caller has collated the batch, because a stream may reuse the memory of
            # its items.
            if not (items := list(islice(stream, 0, self._size * (length - 1) + 1, self._size))):
                return
            yield items
            _skip_items(stream, self._size - 1 - self._rank)
            if self._is_stateful:
                yield []

    def _record_end(self, stream: Iterator[Any]) -> Iterator[Any]:
        yield from stream
        self._has_ended = True
        self._finish_iteration()

    def _batches_of_own_stream(self, dataset: Iterable[Any]) -> Iterator[list[Any]]:
        """Yield the items of each batch, from a stream that differs per rank and worker. If the dataset is stateful, an
        empty list is yielded after each batch."""
        stream, length = self._record_end(iter(dataset)), self._batch_size or 1
        while items := list(islice(stream, length)):
            if len(items) == length or not self._drop_last:
                yield items
                if self._is_stateful:
                    yield []


def _skip_items(stream: Iterator[Any], num_items: int) -> None:
    for _ in islice(stream, num_items):
        pass


def _iterate_outside_worker(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items` with torch's worker info hidden, so that the dataset does not shard itself over workers."""
    with hide_worker_info():
        stream = iter(items)
    while True:
        with hide_worker_info():
            try:
                item = next(stream)
            except StopIteration:
                return
        yield item


def _identity(batch: Any) -> Any:
    return batch


def _loader_settings(loader: DataLoader[Any] | None, num_workers: int, pin_memory: bool) -> dict[str, Any]:
    if loader is not None:
        return worker_settings(loader)
    return {"num_workers": num_workers, "pin_memory": pin_memory, "worker_init_fn": WorkerInit(num_workers=num_workers)}
