"""This rank's shard of evaluation data."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader

from unitrain.backends.base import Communicator
from unitrain.backends.logical_ranks import check_logical_ranks, local_logical_ranks
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.config import StreamKind, TrainConfig
from unitrain.data.batch import BatchInfo, CountedBatch
from unitrain.data.batch_size import evaluation_batch_sizes
from unitrain.data.iterable import StreamSource, open_stream
from unitrain.data.loading import Data, IndexedSource, check_is_indexed, check_same_data, is_stream, open_source
from unitrain.data.order import StrideUnit
from unitrain.data.samplers import DrawnOrder, draw_order
from unitrain.errors import DataError
from unitrain.randomness import SeedPurpose, derive_seed

_SUBJECT = "The evaluation data"  # of error messages


class EvaluationShard:
    """This rank's shard of evaluation data; the shard may be empty. Each shard of map-style data is contiguous.

    Every sample is evaluated; `drop_last` of a DataLoader is ignored. Indices are drawn from a sampler once, so every
    evaluation uses the same samples. Without a sampler, `refresh` divides the samples again if their number changed. An
    iterable dataset is restarted for every evaluation, with the same random seed. With stream="shared", its items
    are assigned to ranks round-robin; with "own", each rank evaluates all items that its dataset yields.

    With `logical_ranks`, each logical rank has a contiguous part, and each process evaluates the parts of its logical
    ranks.

    With `limit_batches`, only the first `limit_batches` * `items_per_limited_batch` (default: `batch_size`) samples are
    evaluated: the same samples for any number of ranks. With a batch_sampler, only its first `limit_batches` batches
    are evaluated. For an iterable dataset with `stream` "own", `limit_batches` is the number of batches per rank.

    `part_starts` are the positions in the data at which the parts of this process's logical ranks begin, in ascending
    order; empty without logical ranks.

    All ranks create it; iterating does not communicate. Raises DataError, on all ranks, for data that differs between
    ranks or cannot be sharded, and for empty map-style data. Raises ConfigError for a missing or contradictory batch
    size, and for an invalid number of logical ranks.
    """

    def __init__(
        self,
        data: Data,
        communicator: Communicator,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        stream: StreamKind = "shared",
        limit_batches: int | None = None,
        items_per_limited_batch: int | None = None,
        logical_ranks: int | None = None,
        class_name: str = "TrainConfig",
    ) -> None:
        batch_size_name = "eval_batch_size" if class_name == "TrainConfig" else "batch_size"
        self._rank, self._has_logical_ranks = communicator.rank, logical_ranks is not None
        check_logical_ranks(f"{class_name}(logical_ranks=...)", logical_ranks, communicator)
        self._source: IndexedSource | StreamSource
        self.part_starts: tuple[int, ...] = ()
        if logical_ranks is not None:
            call_on_all_ranks(communicator, lambda: check_is_indexed(data))
        if is_stream(data):
            self._source = open_stream(
                data,
                communicator,
                batch_size=batch_size,
                num_workers=num_workers,
                stream_kind=stream,
                seed=0,
                batch_size_name=batch_size_name,
                class_name=class_name,
                subject=_SUBJECT,
                yields_every_item=True,
                limit_batches=limit_batches,
                items_per_limited_batch=items_per_limited_batch,
            )
            return
        self._source = source = open_source(
            data,
            communicator,
            batch_size=batch_size,
            shuffle=False,
            drop_last=False,
            num_workers=num_workers,
            batch_size_name=batch_size_name,
            class_name=class_name,
            needs_batch_seeds=logical_ranks is not None,
        )
        compared: dict[str, Any] = {"sampler": None if source.sampler is None else type(source.sampler).__name__}
        if limit_batches is not None:  # the batch size then determines the evaluated samples
            compared["batch_size"] = source.batch_size
        check_same_data(_SUBJECT, communicator, source.length, compared)
        shards, self._num_shards = [communicator.rank], communicator.size
        if logical_ranks is not None:
            shards = list(local_logical_ranks(logical_ranks, communicator.rank, communicator.size))
            self._num_shards = logical_ranks
        self._communicator, self._shards = communicator, shards
        self._limit_batches, self._items_per_limited_batch = limit_batches, items_per_limited_batch
        drawn = DrawnOrder(torch.arange(source.length, device="cpu"), None)
        if source.sampler is not None:
            is_batch_sampler = source.batch_size is None
            drawn = draw_order(
                source.sampler, communicator, lambda drawn: drawn, yields_batches=is_batch_sampler, seed=0, epoch=0
            )
        self._divide(drawn)

    def _divide(self, drawn: DrawnOrder) -> None:
        """Divide the samples among the ranks."""
        self._order, bounds = drawn
        limit_batches = self._limit_batches

        def divide(count: int) -> list[range]:
            """Return the index ranges, of `count` samples or batches, that belong to the shards of this process."""
            num_shards = self._num_shards
            return [range(shard * count // num_shards, (shard + 1) * count // num_shards) for shard in self._shards]

        if bounds is not None:
            batches = [slice(*ends) for ends in pairwise(bounds)][:limit_batches]
            parts = divide(len(batches))
            self._slices = [batches[batch_index] for part in parts for batch_index in part]
            starts = [batches[part.start].start for part in parts if part.start < len(batches)]
        else:
            length, step = len(self._order), self._source.batch_size or 1
            if limit_batches is not None:
                length = min(length, limit_batches * (self._items_per_limited_batch or step))
            parts = divide(length)
            self._slices = [slice(start, min(start + step, part.stop)) for part in parts for start in part[::step]]
            starts = [part.start for part in parts]
        if self._has_logical_ranks:
            self.part_starts = tuple(starts)

    def refresh(self) -> None:
        """Divide the samples again if their number has changed. All ranks must call this method. Raises the errors of
        the constructor."""
        if isinstance(self._source, IndexedSource) and self._source.sampler is None:
            self._source.read_length(self._communicator, _SUBJECT)
            if self._source.length != len(self._order):
                self._divide(DrawnOrder(torch.arange(self._source.length, device="cpu"), None))

    @classmethod
    def from_config(
        cls,
        data: Data,
        communicator: Communicator,
        config: TrainConfig,
        train_batch_size: int | None,
        limit_batches: int | None = None,
    ) -> EvaluationShard:
        """Return this rank's shard with the settings of `config`. All ranks must call this method.

        `train_batch_size` is the batch size of training, if it is known. A DataLoader keeps its own batch size.
        """
        batch_size = items_per_limited_batch = None
        if not isinstance(data, DataLoader):
            batch_size, items_per_limited_batch = evaluation_batch_sizes(
                config.eval_batch_size or config.batch_size,
                config.global_batch_size,
                config.gradient_accumulation_steps,
                train_batch_size,
                config.logical_ranks or communicator.size,
            )
        return cls(
            data,
            communicator,
            batch_size=batch_size,
            num_workers=config.num_workers,
            stream=config.stream,
            limit_batches=limit_batches,
            items_per_limited_batch=items_per_limited_batch,
            logical_ranks=config.logical_ranks,
        )

    @property
    def batch_size(self) -> int | None:
        """Samples per batch; None if the data or a batch_sampler determines it."""
        return self._source.batch_size

    @property
    def needs_batch_seeds(self) -> bool:
        """Whether the caller must seed the random number generators for each batch with the batch's position. True with
        logical ranks."""
        return self._has_logical_ranks

    @property
    def first_sample(self) -> int | None:
        """The position of this rank's first sample in the data; 0 if its shard is empty, None for an iterable
        dataset."""
        if isinstance(self._source, StreamSource):
            return None
        return self._slices[0].start if self._slices else 0

    def count_batches(self) -> int | None:
        """Return the number of this rank's batches; None for an iterable dataset."""
        return None if isinstance(self._source, StreamSource) else len(self._slices)

    @property
    def can_prefetch(self) -> bool:
        """Whether batches may be prefetched without side effects."""
        return self._source.can_prefetch

    @property
    def stride_unit(self) -> StrideUnit | None:
        """The unit that is assigned to ranks round-robin, for a shared stream; None for any other data."""
        if not isinstance(self._source, StreamSource) or self._source.stream_kind == "own":
            return None
        return "batches" if self._source.batch_size is None else "samples"

    def __iter__(self) -> Iterator[tuple[Any, BatchInfo]]:
        """Yield (batch, info), and skip batches without samples."""
        with closing(self._counted_batches()) as batches:
            position = self.first_sample or 0
            for items, samples, batch, _ in batches:
                if samples:
                    yield batch, BatchInfo(samples, position)
                position += items

    def batches_without_drops(self) -> Iterator[tuple[Any, BatchInfo]]:
        """Yield (batch, info), including batches without samples.

        Raises DataError, on this rank only, if the collate_fn dropped a sample.
        """
        with closing(self._counted_batches()) as batches:
            position = self.first_sample or 0
            for items, samples, batch, _ in batches:
                if samples != items:
                    raise DataError(
                        f"predict returns one output per sample, but on rank {self._rank} the DataLoader's collate_fn "
                        f"made a batch of {samples} from {items} samples. Leave the dropped samples out of the "
                        "dataset, for example with torch.utils.data.Subset(dataset, indices), or let collate_fn keep "
                        "all of them."
                    )
                yield batch, BatchInfo(samples, position)
                position += items

    def _counted_batches(self) -> Generator[CountedBatch]:
        if isinstance(self._source, StreamSource):
            with closing(self._source.batches(epoch=0)) as batches:
                yield from batches
        else:
            if self._source.sampler is None and not self._source.has_current_length():
                raise DataError(
                    f"{_SUBJECT} had {self._source.length} samples when it was divided among the ranks, but now has a "
                    "different number. Create a new ShardedLoader for it."
                )
            seeds = None
            if self._has_logical_ranks:
                seeds = (derive_seed(0, SeedPurpose.EVALUATION, part.start) for part in self._slices)
            yield from self._source.counted_batches(self._order, iter(self._slices), worker_seed=0, seeds=seeds)
