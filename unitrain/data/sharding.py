"""This rank's shard of map-style data for training and evaluation, in an order that depends only on seed and epoch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from itertools import chain, islice, pairwise, tee
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from unitrain.backends.base import Communicator
from unitrain.backends.logical_ranks import check_logical_ranks, local_logical_ranks
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.config import StreamKind, TrainConfig
from unitrain.data.batch import CountedBatch
from unitrain.data.batch_size import BatchSizes, describe_accumulation, evaluation_batch_sizes
from unitrain.data.dummy_batches import StepAligner, common_prefetch_count
from unitrain.data.iterable import StreamSource, open_stream
from unitrain.data.iterable_training import TrainingStream
from unitrain.data.loading import Data, IndexedSource, check_same_data, format_call, is_stream
from unitrain.data.order import (
    MicroBatch,
    StrideUnit,
    epoch_order,
    interleave_logical_ranks,
    merge_logical_ranks,
    micro_batches_of_sampler,
    micro_batches_of_samples,
)
from unitrain.data.samplers import DrawnOrder, draw_order
from unitrain.data.training_data import DEFAULT_SHARD_SETTINGS, ShardSettings, TrainingData
from unitrain.errors import DataError
from unitrain.randomness import SeedPurpose, derive_seed

_STREAM_WITH_LOGICAL_RANKS = (
    "An iterable dataset is not supported with logical_ranks. Use a dataset with __getitem__ and __len__, or leave "
    "logical_ranks out."
)
# Number of micro-batches planned at a time.
_MICRO_BATCHES_PER_CHUNK = 256


class TrainingShard(TrainingData):
    """This rank's shard of map-style (indexed) training data. All ranks create it.

    `epoch_order` determines the order, unless rank 0 draws it from the DataLoader's sampler. With a batch_sampler, the
    ranks receive its batches round-robin, and `uneven` determines how the last step is handled, as in TrainConfig.

    Raises on all ranks: DataError for data that is empty, has fewer samples than ranks (unless `allow_empty_ranks`),
    differs between ranks or is not indexed; ConfigError for a missing or contradictory batch size.
    """

    def __init__(
        self, data: Data, communicator: Communicator, settings: ShardSettings = DEFAULT_SHARD_SETTINGS
    ) -> None:
        self._class_name, self._seed, self._uneven = settings.class_name, settings.seed, settings.uneven
        self._communicator = communicator
        self._logical_ranks = _local_logical_ranks(settings.logical_ranks, communicator)
        # Number of ranks or, with logical ranks, of logical ranks, among which the data is divided.
        self._num_shards = settings.logical_ranks or communicator.size
        self._interleaves_logical_ranks = settings.interleaves_logical_ranks
        self._batch_sizes = settings.resolve_batch_sizes(data, communicator)
        self._source = source = _open_source(
            data,
            communicator,
            batch_size=self._batch_sizes[0].batch_size,
            shuffle=settings.shuffle,
            drop_last=settings.drop_last,
            num_workers=settings.num_workers,
            setting="batch_size",
            class_name=settings.class_name,
            seeds_batches=settings.logical_ranks is not None,
        )
        self.batch_size = source.batch_size
        self._sampler_name = None if source.sampler is None else type(source.sampler).__name__
        # If these settings differed, ranks would train on the same samples or take different numbers of steps.
        compared: dict[str, Any] = {
            "batch_size": source.batch_size,
            "shuffle": source.shuffle,
            "drop_last": source.drop_last,
        }
        compared |= {
            "sampler": self._sampler_name,
            "gradient_accumulation_steps": describe_accumulation(self._batch_sizes),
            "seed": settings.seed,
        }
        check_same_data("The training data", communicator, source.length, compared)
        self._aligner: StepAligner | None = None
        self.begin_epoch(0)
        if source.sampler is None:
            if source.length < self._num_shards and not settings.allow_empty_ranks:
                raise DataError(
                    f"The training data has {source.length} samples, fewer than the {self._num_shards} ranks. "
                    f"Start at most {source.length} ranks, or use more data."
                )
            self._find_epoch_end(source.length)
        self._end = 0
        # Ranks may have different collate_fns.
        if any(communicator.allgather_object(source.may_drop_samples)) and self._logical_ranks is None:
            self._aligner = StepAligner(
                communicator,
                gradient_accumulation_steps=self._gradient_accumulation_steps,
                uneven=settings.uneven,
                ahead=common_prefetch_count(source.prefetched_batches, communicator),
                min_step_items=None,
                copies_batches=source.prefetched_batches == 0,
            )

    def _use_batch_sizes(self, batch_sizes: BatchSizes) -> None:
        """Use the `batch_sizes` for the next steps."""
        samples = self._source.batch_size
        steps = self._gradient_accumulation_steps = batch_sizes.gradient_accumulation_steps
        self._requested_global_batch_size = requested = batch_sizes.global_batch_size
        self.global_batch_size = None if samples is None else requested or samples * self._num_shards * steps
        if self._aligner is not None:
            self._aligner.set_accumulation(steps)

    @property
    def order_settings(self) -> dict[str, Any]:
        """The settings that, with the seed, determine which sample is at a position of an epoch."""
        order = {"length": self._source.length, "shuffle": self._source.shuffle, "sampler": self._sampler_name}
        # Earlier versions used a different permutation.
        return {**order, "permutation": "of DistributedSampler"} if self._source.shuffle else order

    @property
    def can_prefetch(self) -> bool:
        """Whether batches may be prefetched without side effects."""
        return self._source.can_prefetch

    @property
    def can_overlap_prefetch(self) -> bool:
        """Whether a batch may be loaded while gradients are reduced: the job has several ranks, and loading calls no
        collective.
        """
        return self._communicator.size > 1 and self._source.can_prefetch and self._aligner is None

    def steps_in_epoch(self, start: int = 0) -> int | None:
        """Return the number of optimizer steps from position `start` to the end of an epoch, 0 after the end."""
        length: int | None = self._source.length
        if self._source.sampler is not None:
            length = _sampler_length(self._source.sampler)
        if length is None or (self.global_batch_size is None and start):
            return None
        if self.global_batch_size is None:
            per_step = self._num_shards * self._gradient_accumulation_steps
            return length // per_step if self._uneven == "drop" else -(-length // per_step)
        return max(0, -(-(self._find_epoch_end(length) - start) // self.global_batch_size))

    def samples_in_epoch(self) -> int | None:
        """Return the number of samples in an epoch; None with a batch_sampler, or a sampler without a length."""
        source = self._source
        if source.sampler is None:
            return self._find_epoch_end(source.length)
        length = None if source.batch_size is None else _sampler_length(source.sampler)
        return None if length is None else self._find_epoch_end(length)

    def count_batches(self) -> int | None:
        """Return the number of micro-batches per rank in one epoch; None with a sampler without a length."""
        source, size = self._source, self._num_shards
        length = source.length if source.sampler is None else _sampler_length(source.sampler)
        if length is None:
            return None
        local = 1 if self._logical_ranks is None else len(self._logical_ranks)
        if source.batch_size is not None:
            return -(-self._find_epoch_end(length) // (size * source.batch_size)) * local
        per_step = size * self._gradient_accumulation_steps
        if self._uneven == "drop":
            return length // per_step * self._gradient_accumulation_steps * local
        return -(-length // size) * local

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, MicroBatch]]:
        """Yield (batch, micro-batch) for each of this rank's micro-batches in one epoch, from position `start`."""
        order, micro_batches_of_epoch = self._plan_epoch(epoch, start)
        worker_seed = derive_seed(self._seed, SeedPurpose.WORKERS, epoch, self._communicator.rank)
        self._source.set_epoch(epoch)
        # Plan in chunks: planning single micro-batches takes several times as long, because the training steps evict
        # the caches. The workers prefetch, so `tee` lets them read the positions before the loop reads the
        # micro-batches.
        micro_batches, unread = tee(
            chain.from_iterable(iter(lambda: list(islice(micro_batches_of_epoch, _MICRO_BATCHES_PER_CHUNK)), []))
        )
        if self._logical_ranks is not None:
            return self._seeded_micro_batches(order, micro_batches, unread, epoch)
        positions = map(itemgetter(0), unread)
        if self._aligner is not None:
            source = self._source
            return self._aligner.align_planned_micro_batches(
                lambda: source.counted_batches(order, positions, worker_seed), micro_batches, has_started=start > 0
            )
        return zip(self._source.batches(order, positions, worker_seed), micro_batches, strict=True)

    def _seeded_micro_batches(
        self,
        order: Tensor | list[Any],
        micro_batches: Iterator[MicroBatch],
        unread: Iterator[MicroBatch],
        epoch: int,
    ) -> Iterator[tuple[Any, MicroBatch]]:
        """Yield (batch, micro-batch) with logical ranks. Each batch is loaded with its own random seed."""
        to_load, to_seed = tee(unread)
        seeds = (
            derive_seed(
                self._seed, SeedPurpose.BATCH, epoch, planned.step_end, planned.logical_rank or 0, planned.number
            )
            for planned in to_seed
        )
        with closing(
            self._source.counted_batches(order, map(itemgetter(0), to_load), worker_seed=0, seeds=seeds)
        ) as batches:
            for (items, samples, batch, _), micro_batch in zip(batches, micro_batches, strict=True):
                if samples != items:
                    raise DataError(
                        f"With logical_ranks, a collate_fn must keep all samples, but it made a batch of {samples} "
                        f"from {items} samples. Leave the dropped samples out of the dataset, for example with "
                        "torch.utils.data.Subset(dataset, indices)."
                    )
                yield batch, micro_batch

    def check_epoch_end(self, position: int) -> bool:
        """Return whether `position` is the end of the epoch."""
        return position >= self._end or (self._aligner is not None and self._aligner.has_ended)

    def end_epoch(self) -> None:
        pass  # the workers terminate with the iterator, to which this object has no reference

    def _plan_epoch(self, epoch: int, start: int) -> tuple[Tensor | list[Any], Iterator[MicroBatch]]:
        """Return the order of an epoch and this rank's micro-batches in it, and set the end of the epoch."""
        source, bounds = self._source, None
        order: Tensor | list[Any]
        if source.sampler is None:
            order = epoch_order(source.length, seed=self._seed, epoch=epoch, shuffle=source.shuffle)
        else:
            order, bounds = draw_order(
                source.sampler,
                self._communicator,
                yields_batches=source.batch_size is None,
                seed=self._seed,
                epoch=epoch,
            )
        self._end = self._find_epoch_end(len(order)) if bounds is None else self._find_sampler_epoch_end(bounds, start)
        if self._logical_ranks is None:
            return order, self._plan_rank(self._communicator.rank, bounds, start)
        plans = [self._plan_rank(rank, bounds, start) for rank in self._logical_ranks]
        merge = interleave_logical_ranks if self._interleaves_logical_ranks else merge_logical_ranks
        return order, merge(self._logical_ranks, plans)

    def _plan_rank(self, rank: int, bounds: list[int] | None, start: int) -> Iterator[MicroBatch]:
        """Return the micro-batches of a rank or logical rank from position `start` to the end of the epoch."""
        place = {
            "gradient_accumulation_steps": self._gradient_accumulation_steps,
            "rank": rank,
            "size": self._num_shards,
        }
        if bounds is not None:
            return micro_batches_of_sampler(bounds, start, uneven=self._uneven, **place)
        assert self._source.batch_size is not None
        return micro_batches_of_samples(
            start,
            self._end,
            batch_size=self._source.batch_size,
            global_batch_size=self._requested_global_batch_size,
            **place,
        )

    def _find_epoch_end(self, length: int) -> int:
        """Return the position at which an epoch of `length` samples ends."""
        step_samples = self.global_batch_size
        # drop_last drops an incomplete last global batch.
        if not self._source.drop_last or step_samples is None:
            return length
        if length < step_samples:
            raise DataError(
                f"The training data has {length} samples, fewer than one global batch of {step_samples} "
                f"({self._num_shards} ranks x batch_size {self.batch_size} x "
                f"gradient_accumulation_steps {self._gradient_accumulation_steps}), "
                "and drop_last=True drops an incomplete global batch. Use drop_last=False, or a smaller batch_size."
            )
        return length - length % step_samples

    def _find_sampler_epoch_end(self, bounds: list[int], start: int) -> int:
        """Return the position at which an epoch over the batches of a batch_sampler ends if it starts at `start`."""
        if self._uneven != "drop":
            return bounds[-1]
        count, first, per_step = (
            len(bounds) - 1,
            bisect_left(bounds, start),
            self._num_shards * self._gradient_accumulation_steps,
        )
        if count < per_step:
            weight = format_call(self._class_name, "uneven='weight'")
            raise DataError(
                f"{self._sampler_name} yields {count} batches, but a step takes {per_step} ({self._num_shards} ranks x "
                f"gradient_accumulation_steps {self._gradient_accumulation_steps}), and "
                f"{self._class_name}.uneven='drop' drops incomplete steps. Use {weight}."
            )
        return bounds[first + (count - first) // per_step * per_step]


class EvaluationShard:
    """This rank's shard of evaluation data: a contiguous part of the data, which may be empty.

    Every sample is evaluated; `drop_last` of a DataLoader is ignored. Indices are drawn from a sampler once, so every
    evaluation uses the same samples. An iterable dataset is restarted for every evaluation, with the same random seed.
    With stream="shared", its items are assigned to ranks round-robin; with "own", the items differ between ranks.

    With `logical_ranks`, each logical rank has a contiguous part, and each process evaluates the parts of its logical
    ranks.

    With `limit_batches`, only the first `limit_batches` * `limit_batch_size` (default: `batch_size`) samples are
    evaluated: the same samples for any number of ranks. With `stream` "own", `limit_batches` is the number of batches
    per rank.

    `part_starts` are the positions in the data at which the parts of this process's logical ranks begin.

    All ranks create it; iterating does not communicate. Raises DataError, on all ranks, for data that is empty, differs
    between ranks or cannot be sharded.
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
        limit_batch_size: int | None = None,
        logical_ranks: int | None = None,
        class_name: str = "TrainConfig",
    ) -> None:
        subject = "The evaluation data"
        setting = "eval_batch_size" if class_name == "TrainConfig" else "batch_size"
        self._rank, self._has_logical_ranks = communicator.rank, logical_ranks is not None
        check_logical_ranks(f"{class_name}(logical_ranks=...)", logical_ranks, communicator)
        self._source: IndexedSource | StreamSource
        self.part_starts: frozenset[int] = frozenset()
        if is_stream(data):
            if logical_ranks is not None:
                raise DataError(_STREAM_WITH_LOGICAL_RANKS)
            self._source = open_stream(
                data,
                communicator,
                batch_size=batch_size,
                num_workers=num_workers,
                stream_kind=stream,
                seed=0,
                setting=setting,
                class_name=class_name,
                subject=subject,
                every_item=True,
                limit_batches=limit_batches,
                limit_batch_size=limit_batch_size,
            )
            return
        self._source = source = _open_source(
            data,
            communicator,
            batch_size=batch_size,
            shuffle=False,
            drop_last=False,
            num_workers=num_workers,
            setting=setting,
            class_name=class_name,
            seeds_batches=logical_ranks is not None,
        )
        sampler = None if source.sampler is None else type(source.sampler).__name__
        check_same_data(subject, communicator, source.length, {"sampler": sampler})
        self._order, bounds = DrawnOrder(torch.arange(source.length), None)
        if source.sampler is not None:
            self._order, bounds = draw_order(
                source.sampler, communicator, yields_batches=source.batch_size is None, seed=0, epoch=0
            )
        shards, num_shards = [communicator.rank], communicator.size
        if logical_ranks is not None:
            shards = list(local_logical_ranks(logical_ranks, communicator.rank, communicator.size))
            num_shards = logical_ranks

        def divide(count: int) -> list[range]:
            """Return the parts of `count` samples or batches that belong to the shards of this process."""
            return [range(shard * count // num_shards, (shard + 1) * count // num_shards) for shard in shards]

        if bounds is not None:
            batches = [slice(*ends) for ends in pairwise(bounds)][:limit_batches]
            parts = divide(len(batches))
            self._slices = [batches[number] for part in parts for number in part]
            starts = [batches[part.start].start for part in parts if part.start < len(batches)]
        else:
            length, step = len(self._order), source.batch_size or 1
            if limit_batches is not None:
                length = min(length, limit_batches * (limit_batch_size or step))
            parts = divide(length)
            self._slices = [slice(start, min(start + step, part.stop)) for part in parts for start in part[::step]]
            starts = [part.start for part in parts]
        if logical_ranks is not None:
            self.part_starts = frozenset(starts)

    @classmethod
    def from_config(
        cls,
        data: Data,
        communicator: Communicator,
        config: TrainConfig,
        train_batch_size: int | None,
        limit_batches: int | None = None,
    ) -> EvaluationShard:
        """Return this rank's shard with the settings of `config`. All ranks call it.

        `train_batch_size` is the batch size of training, if it is known. A DataLoader keeps its own batch size.
        """
        batch_size = limit_batch_size = None
        if not isinstance(data, DataLoader):
            batch_size, limit_batch_size = evaluation_batch_sizes(
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
            limit_batch_size=limit_batch_size,
            logical_ranks=config.logical_ranks,
        )

    @property
    def batch_size(self) -> int | None:
        """Samples per batch; None if the data or a batch_sampler determines it."""
        return self._source.batch_size

    @property
    def first_seeded_sample(self) -> int | None:
        """With logical ranks, `first_sample`: the caller seeds the random number generators for each batch with its
        position in the data. None without logical ranks.
        """
        return self.first_sample if self._has_logical_ranks else None

    @property
    def first_sample(self) -> int | None:
        """The position of this rank's first sample in the data; None for an iterable dataset."""
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
        """Whether samples or batches are assigned to ranks round-robin, as from a shared stream; None if neither
        are."""
        if not isinstance(self._source, StreamSource) or self._source.stream_kind == "own":
            return None
        return "batches" if self._source.batch_size is None else "samples"

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Yield (batch, number of samples), and skip batches without samples."""
        with closing(self._counted_batches()) as batches:
            yield from ((counted.batch, counted.sample_count) for counted in batches if counted.sample_count)

    def batches_without_drops(self) -> Iterator[tuple[Any, int]]:
        """Yield (batch, number of samples), also for batches without samples. Raises DataError, on this rank only, if
        the collate_fn dropped a sample."""
        with closing(self._counted_batches()) as batches:
            for items, samples, batch, _ in batches:
                if samples != items:
                    raise DataError(
                        f"predict returns one output per sample, but on rank {self._rank} the DataLoader's collate_fn "
                        f"made a batch of {samples} from {items} samples. Leave the dropped samples out of the "
                        "dataset, for example with torch.utils.data.Subset(dataset, indices), or let collate_fn keep "
                        "all of them."
                    )
                yield batch, samples

    def _counted_batches(self) -> Generator[CountedBatch]:
        if isinstance(self._source, StreamSource):
            with closing(self._source.batches(epoch=0)) as batches:
                yield from batches
        else:
            seeds = None
            if self._has_logical_ranks:
                seeds = (derive_seed(0, SeedPurpose.EVALUATION, part.start) for part in self._slices)
            yield from self._source.counted_batches(self._order, iter(self._slices), worker_seed=0, seeds=seeds)


def open_training_data(data: Data, communicator: Communicator, settings: ShardSettings) -> TrainingData:
    """Return this rank's shard of `data`: a TrainingStream for an iterable dataset, otherwise a TrainingShard.

    All ranks call it. Raises the errors of both classes.
    """
    check_logical_ranks(f"{settings.class_name}(logical_ranks=...)", settings.logical_ranks, communicator)
    if settings.logical_ranks is not None:
        call_on_all_ranks(communicator, lambda: _check_is_indexed(data))
    # If the class differs between ranks, both constructors raise an error, because they compare the same values first.
    return (TrainingStream if is_stream(data) else TrainingShard)(data, communicator, settings)


def _check_is_indexed(data: Data) -> None:
    if is_stream(data):
        raise DataError(_STREAM_WITH_LOGICAL_RANKS)


def _local_logical_ranks(logical_ranks: int | None, communicator: Communicator) -> range | None:
    """Return the logical ranks of this process, or None without logical ranks."""
    return None if logical_ranks is None else local_logical_ranks(logical_ranks, communicator.rank, communicator.size)


def _open_source(data: Data, communicator: Communicator, **settings: Any) -> IndexedSource:
    pin_memory = communicator.device.type == "cuda"
    return call_on_all_ranks(communicator, lambda: IndexedSource(data, pin_memory=pin_memory, **settings))


def _sampler_length(sampler: Any) -> int | None:
    with suppress(TypeError, NotImplementedError, AttributeError):  # raised by samplers without a length
        return len(sampler)
    return None
