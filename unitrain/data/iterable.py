"""Data that comes in turn, item after item: which of it is this rank's and worker's, and how it is fetched."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import chain, count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as worker_module

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.config import StreamKind
from unitrain.data.batch import CountedBatch, CountingCollate, count_batch_samples, fingerprint
from unitrain.data.loading import Data, check_same_data, fetch, per_rank_batch_size, prefetched_batches, worker_settings
from unitrain.data.samplers import custom_sampler, seed_epoch
from unitrain.data.workers import WorkerInit
from unitrain.randomness import IsolatedGenerators, Stream, derive_seed


class StreamSource:
    """This rank's batches of data without indices, epoch after epoch.

    A shared stream is dealt out item by item: item i goes to rank i % size, and each worker gathers the batches that
    the loader fetches from it. So the items of a step are those that one process would take, in any number of ranks
    and workers, and at the end no rank has more than one item more than another. Each of them passes over the whole
    stream; with `batch_size` None its items are whole batches, and those of other ranks are not loaded where the
    dataset has indices after all. With `every_item`, `drop_last` of a DataLoader is not applied.
    Raises DataError and ConfigError as `Source` does.
    """

    def __init__(
        self,
        data: Data,
        *,
        rank: int,
        size: int,
        kind: StreamKind,
        batch_size: int | None,
        num_workers: int,
        pin_memory: bool,
        seed: int,
        setting: str,
        owner: str,
        drop_last: bool,
        every_item: bool,
    ) -> None:
        self.batch_size = per_rank_batch_size(data, batch_size, setting, owner)
        self.drop_last = (data.drop_last if isinstance(data, DataLoader) else drop_last) and not every_item
        dataset: Any = data.dataset if isinstance(data, DataLoader) else data
        self.name = type(dataset).__name__
        items, load = dataset, None
        if isinstance(data, DataLoader) and not isinstance(dataset, IterableDataset):
            # The dataset makes a batch of each index, so the stream is that of the indices.
            items, load, kind = custom_sampler(data), dataset.__getitem__, "shared"
        self.kind: StreamKind = kind
        self._rank, self._seed = rank, seed
        self._generator = torch.Generator()
        collate = data.collate_fn if isinstance(data, DataLoader) else default_collate
        self._batches = _Batches(
            items, load, collate, self.batch_size, self.drop_last, rank=rank, size=size, kind=kind, seed=seed
        )
        self._loader = _loader(data, self._batches, num_workers, pin_memory, self._generator)
        # The fingerprint of the first item that the last batch's worker saw of a shared stream.
        self.first_item: int | None = None
        # How many positions a micro-step of all ranks takes: items of a shared stream, one of the rank's own batches.
        self.stride = size * (self.batch_size or 1) if kind == "shared" else 1

    @property
    def workers(self) -> int:
        """The number of processes that fetch batches."""
        return self._loader.num_workers

    @property
    def can_prefetch(self) -> bool:
        """Whether no code of the user's runs in this process to make a batch, which may then be made early."""
        return self.workers > 0

    @property
    def may_reuse_memory(self) -> bool:
        """Whether the next batch may overwrite the memory of this one, as a stream of batches may do in this process.

        Batches of workers, and those that torch stacks from items, have memory of their own.
        """
        return self.workers == 0 and (self.batch_size is None or self._batches.collate is not default_collate)

    @property
    def prepared(self) -> int:
        """How many batches the workers have ready, or are about to."""
        return prefetched_batches(self._loader)

    def batches(self, epoch: int, start: int = 0) -> Generator[CountedBatch]:
        """Yield each batch, of a shared stream from item `start` on; what is before is passed over by count."""
        self._batches.begin(epoch, start)
        self._generator.manual_seed(derive_seed(self._seed, Stream.WORKERS, epoch, self._rank))
        with closing(fetch(self._loader)) as made:
            for counted, first_item in made:
                self.first_item = first_item
                yield counted


def open_stream(
    data: Data,
    communicator: Communicator,
    *,
    batch_size: int | None,
    num_workers: int,
    kind: StreamKind,
    seed: int,
    setting: str,
    owner: str,
    what: str,
    drop_last: bool = False,
    every_item: bool = False,
) -> StreamSource:
    """Return this rank's `StreamSource`. Raises DataError, on all ranks, where they would not deal `data` out alike.

    `what` it is begins the sentence. All ranks call it.
    """
    source = call_on_all_ranks(
        communicator,
        lambda: StreamSource(
            data,
            rank=communicator.rank,
            size=communicator.size,
            kind=kind,
            batch_size=batch_size,
            num_workers=num_workers,
            pin_memory=communicator.device.type == "cuda",
            seed=seed,
            setting=setting,
            owner=owner,
            drop_last=drop_last,
            every_item=every_item,
        ),
    )
    alike: dict[str, Any] = {"stream": source.kind, "seed": seed}
    if source.kind == "shared":
        # Each rank knows which items are its own from how many the others take.
        alike |= {"batch_size": source.batch_size, "drop_last": source.drop_last}
    check_same_data(what, communicator, None, alike)
    return source


# A batch, and the fingerprint of the first item that was seen.
_Made = tuple[CountedBatch, int | None]


class _Batches(IterableDataset[_Made]):
    """The batches of one rank that are made by the worker, or process, which iterates it."""

    def __init__(
        self,
        items: Iterable[Any],
        load: Callable[[Any], Any] | None,
        collate: Callable[[Any], Any],
        batch_size: int | None,
        drop_last: bool,
        *,
        rank: int,
        size: int,
        kind: StreamKind,
        seed: int,
    ) -> None:
        self._items, self._load, self.collate = items, load, collate
        self._batch_size, self._drop_last = batch_size, drop_last
        self._rank, self._size, self._kind, self._seed = rank, size, kind, seed
        self._first_item: int | None = None
        # Persistent workers keep the copy that they were started with, and see no more than shared memory.
        self._epoch_and_start = torch.zeros(2, dtype=torch.int64).share_memory_()

    def begin(self, epoch: int, start: int) -> None:
        """Say what the next iteration is of."""
        self._epoch_and_start.copy_(torch.tensor([epoch, start]))

    def __iter__(self) -> Iterator[_Made]:
        epoch, start = map(int, self._epoch_and_start.tolist())
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self._kind == "shared":
            seed = derive_seed(self._seed, Stream.SHARED, epoch)
            batches = self._dealt(start, worker, workers)
        else:
            seed = derive_seed(self._seed, Stream.WORKERS, epoch, self._rank, worker)
            batches = self._own()
        generators = IsolatedGenerators(seed)
        with generators:
            seed_epoch(self._items, seed=seed, epoch=epoch)
        while True:
            # Only what the stream draws is drawn from its own generators: what ranks and workers draw for the batches
            # that are theirs must not change what comes next in a stream that is the same for all.
            with generators:
                items = next(batches, None)
            if items is None:
                return
            if self._load is not None:
                items = [self._load(item) for item in items]
            yield self._made(items), self._first_item

    def _made(self, items: list[Any]) -> CountedBatch:
        if self._batch_size is None:
            batch = self.collate(items[0])
            samples = 0 if batch is None else count_batch_samples(batch)
            return CountedBatch(samples, samples, batch)
        if self.collate is default_collate:
            return CountedBatch(len(items), len(items), self.collate(items))
        return CountingCollate(self.collate)(items)

    def _dealt(self, start: int, worker: int, workers: int) -> Iterator[list[Any]]:
        """Yield the items of each batch that is this rank's and worker's, of a stream that is the same everywhere."""
        stream: Iterator[Any] = _alone(self._items)
        _skip(stream, start)
        first = list(islice(stream, 1))
        self._first_item = fingerprint(first)
        stream = chain(first, stream)
        length = self._batch_size or 1
        for micro_step in count():
            # Nothing is kept of the items of other ranks, nor of those of other workers.
            if micro_step % workers != worker:
                _skip(stream, self._size * length)
                continue
            _skip(stream, self._rank)
            # Nothing is read after the last item of the batch before the caller has made the batch: a stream may yield
            # the same memory again with other content.
            if not (items := list(islice(stream, 0, self._size * (length - 1) + 1, self._size))):
                return
            yield items
            _skip(stream, self._size - 1 - self._rank)

    def _own(self) -> Iterator[list[Any]]:
        """Yield the items of each batch of a stream that is this worker's own."""
        stream, length = iter(self._items), self._batch_size or 1
        while items := list(islice(stream, length)):
            if len(items) == length or not self._drop_last:
                yield items


def _skip(stream: Iterator[Any], items: int) -> None:
    for _ in islice(stream, items):
        pass


def _alone(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items` of which nobody takes a part of its own for being in a worker, as datasets learn to do."""
    with _no_worker():
        stream = iter(items)
    while True:
        with _no_worker():
            try:
                item = next(stream)
            except StopIteration:
                return
        yield item


@contextmanager
def _no_worker() -> Iterator[None]:
    info, worker_module._worker_info = worker_module._worker_info, None
    try:
        yield
    finally:
        worker_module._worker_info = info


def _as_it_is(batch: Any) -> Any:
    return batch


def _loader(
    data: Data, batches: _Batches, num_workers: int, pin_memory: bool, generator: torch.Generator
) -> DataLoader[Any]:
    settings = (
        worker_settings(data)
        if isinstance(data, DataLoader)
        else {"num_workers": num_workers, "pin_memory": pin_memory, "worker_init_fn": WorkerInit(workers=num_workers)}
    )
    return DataLoader(batches, batch_size=None, collate_fn=_as_it_is, generator=generator, **settings)
