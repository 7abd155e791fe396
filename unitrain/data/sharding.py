"""This rank's exact share of a dataset: every sample once, in an order that depends on nothing but seed and epoch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from itertools import chain, islice, pairwise, tee
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.config import StreamKind, TrainConfig, Uneven
from unitrain.data.batch import CountedBatch
from unitrain.data.batch_size import ElasticBatchSize, resolve_batch_sizes
from unitrain.data.dummy_batches import StepAligner, common_prefetch_count
from unitrain.data.iterable import StreamSource, open_stream
from unitrain.data.iterable_training import TrainingStream
from unitrain.data.loading import Data, Source, call_of, check_same_data, is_stream
from unitrain.data.order import MicroBatch, StrideUnit, epoch_order, micro_batches_of_sampler, micro_batches_of_samples
from unitrain.data.samplers import DrawnOrder, draw_order
from unitrain.data.training_data import TrainingData
from unitrain.errors import DataError
from unitrain.randomness import Stream, derive_seed

# How many micro-steps are planned at a time.
_PLANNED = 256


class TrainingShard(TrainingData):
    """This rank's part of training data that has indices. All ranks make it together.

    The order is that of the epoch, or what rank 0 draws from a DataLoader's own sampler. From its own batch_sampler
    each rank takes the next batch of each micro-step, whole; what becomes of a last step with too few of them for all
    ranks is said by `uneven`, as in TrainConfig. Raises, on all ranks, DataError for data that is empty, too small to
    give every rank a sample, not the same size everywhere, or without indices to share out, and where the ranks would
    not cut it up alike; ConfigError for a missing or contradicting batch size.
    """

    def __init__(
        self,
        data: Data,
        communicator: Communicator,
        *,
        batch_size: int | None = None,
        accumulate: int | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        uneven: Uneven = "weight",
        drop_last: bool = False,
        elastic: bool = False,
        kept: ElasticBatchSize | None = None,
        allow_empty_ranks: bool = False,
        owner: str = "TrainConfig",
    ) -> None:
        self._owner = owner
        self._communicator = communicator
        self._rank, self._size = communicator.rank, communicator.size
        batching = resolve_batch_sizes(
            data,
            communicator,
            batch_size=batch_size,
            accumulate=accumulate,
            whole=global_batch_size,
            elastic=elastic,
            kept=kept,
        )
        self._seed, self._accumulate, self._uneven = seed, batching.accumulate, uneven
        self._source = source = _open(
            data,
            communicator,
            batch_size=batching.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=num_workers,
            setting="batch_size",
            owner=owner,
        )
        self.batch_size = source.batch_size
        self._sampler_name = None if source.sampler is None else type(source.sampler).__name__
        # What decides which samples a rank takes: where it differs, ranks would take the same ones, or wait for ever.
        alike: dict[str, Any] = {
            "batch_size": source.batch_size,
            "shuffle": source.shuffle,
            "drop_last": source.drop_last,
        }
        alike |= {"sampler": self._sampler_name, "accumulate": self._accumulate, "seed": seed}
        check_same_data("The training data", communicator, source.length, alike)
        micro_steps = self._size * self._accumulate
        self._whole = batching.whole
        self.global_batch_size = None if source.batch_size is None else self._whole or source.batch_size * micro_steps
        if source.sampler is None:
            if source.length < self._size and not allow_empty_ranks:
                raise DataError(
                    f"The training data has {source.length} samples, fewer than the {self._size} ranks that share "
                    f"them. Start at most {source.length} ranks, or give more data."
                )
            self._end_of(source.length)
        self._end = 0
        self._aligner: StepAligner | None = None
        # On one rank its collate_fn may be torch's, as of a DataLoader of other data.
        if any(communicator.allgather_object(source.counts)):
            self._aligner = StepAligner(
                communicator,
                accumulate=self._accumulate,
                uneven=uneven,
                ahead=common_prefetch_count(source.prepared, communicator),
                full=None,
                copies=source.prepared == 0,
            )

    @property
    def order_settings(self) -> dict[str, Any]:
        """What decides, beside the seed, which sample is at a position of an epoch."""
        order = {"length": self._source.length, "shuffle": self._source.shuffle, "sampler": self._sampler_name}
        # Earlier versions drew another permutation.
        return {**order, "permutation": "of DistributedSampler"} if self._source.shuffle else order

    @property
    def can_prefetch(self) -> bool:
        """Whether a batch may be fetched before it is asked for: nothing else would change."""
        return self._source.can_prefetch

    @property
    def can_overlap_prefetch(self) -> bool:
        """Whether it may be fetched so while gradients travel, and there are any: no rank asks another for it."""
        return self._size > 1 and self._source.can_prefetch and self._aligner is None

    def steps_in_epoch(self, start: int = 0) -> int | None:
        """Return the number of optimizer steps from position `start` to the end of an epoch, 0 past it."""
        length: int | None = self._source.length
        if self._source.sampler is not None:
            length = _length(self._source.sampler)
        if length is None or (self.global_batch_size is None and start):
            return None
        if self.global_batch_size is None:
            per_step = self._size * self._accumulate
            return length // per_step if self._uneven == "drop" else -(-length // per_step)
        return max(0, -(-(self._end_of(length) - start) // self.global_batch_size))

    def samples_in_epoch(self) -> int | None:
        """Return how many samples an epoch has; None with a batch_sampler, or a sampler without a length."""
        source = self._source
        if source.sampler is None:
            return self._end_of(source.length)
        length = None if source.batch_size is None else _length(source.sampler)
        return None if length is None else self._end_of(length)

    def count_batches(self) -> int | None:
        """Return how many micro-batches each rank has in one epoch; None with a sampler without a length."""
        source, size = self._source, self._size
        length = source.length if source.sampler is None else _length(source.sampler)
        if length is None:
            return None
        if source.batch_size is not None:
            return -(-self._end_of(length) // (size * source.batch_size))
        per_step = size * self._accumulate
        return length // per_step * self._accumulate if self._uneven == "drop" else -(-length // size)

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, MicroBatch]]:
        """Yield (batch, its slice) for each of this rank's micro-steps in one epoch, from position `start` on."""
        order, planned = self._plan(epoch, start)
        worker_seed = derive_seed(self._seed, Stream.WORKERS, epoch, self._rank)
        self._source.set_epoch(epoch)
        # A few hundred are planned at a time: one by one, each would take several times as long, because the steps in
        # between fill the caches. Workers fetch batches ahead of the loop, so positions and slices are read apart.
        slices, ahead = tee(chain.from_iterable(iter(lambda: list(islice(planned, _PLANNED)), [])))
        positions = map(itemgetter(0), ahead)
        if self._aligner is not None:
            source = self._source
            return self._aligner.planned(lambda: source.counted(order, positions, worker_seed), slices, begun=start > 0)
        return zip(self._source.batches(order, positions, worker_seed), slices, strict=True)

    def is_epoch_finished(self, position: int) -> bool:
        """Whether no step follows after `position`."""
        return position >= self._end or (self._aligner is not None and self._aligner.ended)

    def end_epoch(self) -> None:
        pass  # the workers end with the iterator, to which nothing here refers

    def _plan(self, epoch: int, start: int) -> tuple[Tensor | list[Any], Iterator[MicroBatch]]:
        """Return the order of an epoch, and this rank's micro-steps over it; note where it ends."""
        source, bounds = self._source, None
        order: Tensor | list[Any]
        if source.sampler is None:
            order = epoch_order(source.length, seed=self._seed, epoch=epoch, shuffle=source.shuffle)
        else:
            order, bounds = draw_order(
                source.sampler, self._communicator, whole=source.batch_size is None, seed=self._seed, epoch=epoch
            )
        place = {"accumulate": self._accumulate, "rank": self._rank, "size": self._size}
        if bounds is not None:
            self._end = self._end_of_batches(bounds, start)
            return order, micro_batches_of_sampler(bounds, start, uneven=self._uneven, **place)
        self._end = self._end_of(len(order))
        assert source.batch_size is not None
        return order, micro_batches_of_samples(
            start, self._end, batch_size=source.batch_size, whole=self._whole, **place
        )

    def _end_of(self, length: int) -> int:
        """Return where an epoch of `length` samples ends."""
        whole = self.global_batch_size
        # drop_last is the user's wish to train on whole batches only, which are the global ones here.
        if not self._source.drop_last or whole is None:
            return length
        if length < whole:
            raise DataError(
                f"The training data has {length} samples, fewer than one global batch of {whole} "
                f"({self._size} ranks x batch_size {self.batch_size} x "
                f"gradient_accumulation_steps {self._accumulate}), "
                "and the DataLoader drops the rest. Use drop_last=False, or a smaller batch_size."
            )
        return length - length % whole

    def _end_of_batches(self, bounds: list[int], start: int) -> int:
        """Return where an epoch ends that goes on from `start`, of batches that are taken whole."""
        if self._uneven != "drop":
            return bounds[-1]
        count, first, per_step = len(bounds) - 1, bisect_left(bounds, start), self._size * self._accumulate
        if count < per_step:
            weight = call_of(self._owner, "uneven='weight'")
            raise DataError(
                f"{self._sampler_name} makes {count} batches, fewer than the {per_step} of a step ({self._size} ranks "
                f"x gradient_accumulation_steps {self._accumulate}), and {self._owner}.uneven 'drop' drops the "
                f"rest. Use {weight}."
            )
        return bounds[first + (count - first) // per_step * per_step]


class EvaluationShard:
    """This rank's part of data that is evaluated, in its own order; empty on some ranks when there are few samples.

    All ranks make it together; iterating communicates nothing. `drop_last` of a DataLoader is not applied: every sample
    counts. What a sampler yields is drawn once, so that each evaluation is of the same samples. Data that comes in turn
    begins anew each time, with the same random numbers; it is dealt out, or on each rank its own, as `stream` says.
    With `limit_batches`, each rank has that many batches at most.
    Raises DataError, on all ranks, for data that is empty, not the same size everywhere, or cannot be shared out.
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
        owner: str = "TrainConfig",
    ) -> None:
        self._limit = limit_batches
        what, rank, size = "The evaluation data", communicator.rank, communicator.size
        setting = "eval_batch_size" if owner == "TrainConfig" else "batch_size"
        self._rank = rank
        self._source: Source | StreamSource
        if is_stream(data):
            self._source = open_stream(
                data,
                communicator,
                batch_size=batch_size,
                num_workers=num_workers,
                kind=stream,
                seed=0,
                setting=setting,
                owner=owner,
                what=what,
                every_item=True,
            )
            return
        self._source = source = _open(
            data,
            communicator,
            batch_size=batch_size,
            shuffle=False,
            drop_last=False,
            num_workers=num_workers,
            setting=setting,
            owner=owner,
        )
        sampler = None if source.sampler is None else type(source.sampler).__name__
        check_same_data(what, communicator, source.length, {"sampler": sampler})
        self._order, bounds = DrawnOrder(torch.arange(source.length), None)
        if source.sampler is not None:
            whole = source.batch_size is None
            self._order, bounds = draw_order(source.sampler, communicator, whole=whole, seed=0, epoch=0)
        if bounds is not None:
            batches = [slice(*ends) for ends in pairwise(bounds)]
            self._parts = batches[rank * len(batches) // size : (rank + 1) * len(batches) // size]
        else:
            first, last = (place * len(self._order) // size for place in (rank, rank + 1))
            step = source.batch_size or 1
            self._parts = [slice(at, min(at + step, last)) for at in range(first, last, step)]

    @property
    def batch_size(self) -> int | None:
        """Samples per batch; None where the data or a batch_sampler makes whole batches."""
        return self._source.batch_size

    def count_batches(self) -> int | None:
        """Return how many batches this rank has; None for a stream."""
        return None if isinstance(self._source, StreamSource) else len(self._parts[: self._limit])

    @property
    def can_prefetch(self) -> bool:
        """Whether a batch may be fetched before it is asked for: nothing else would change."""
        return self._source.can_prefetch

    @property
    def stride_unit(self) -> StrideUnit | None:
        """What each rank in turn has one of; None where each has a part of the order, or all of its own."""
        if not isinstance(self._source, StreamSource) or self._source.kind == "own":
            return None
        return "batches" if self._source.batch_size is None else "samples"

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Yield (batch, number of samples in it), except batches without a sample."""
        with closing(self._counted()) as batches:
            yield from ((batch, samples) for _, samples, batch in batches if samples)

    def complete_batches(self) -> Iterator[tuple[Any, int]]:
        """Yield (batch, number of samples in it), which may be 0. Raises DataError, on this rank alone, where a sample
        is missing."""
        with closing(self._counted()) as batches:
            for items, samples, batch in batches:
                if samples != items:
                    raise DataError(
                        f"predict returns one output per sample, but on rank {self._rank} the DataLoader's collate_fn "
                        f"made a batch of {samples} from {items} samples. Leave such samples out of the dataset, for "
                        "example with torch.utils.data.Subset(dataset, indices), or let collate_fn keep all of them."
                    )
                yield batch, samples

    def _counted(self) -> Generator[CountedBatch]:
        if isinstance(self._source, StreamSource):
            with closing(self._source.batches(epoch=0)) as batches:
                yield from islice(batches, self._limit)
        else:
            yield from self._source.counted(self._order, iter(self._parts[: self._limit]), worker_seed=0)


def open_training_data(
    data: Data,
    communicator: Communicator,
    config: TrainConfig,
    *,
    elastic: bool = False,
    kept: ElasticBatchSize | None = None,
) -> TrainingData:
    """Return this rank's part of `data`, with indices or without, as `config` asks for it. All ranks call it.

    An elastic job keeps its global batch on however many ranks there are: the one `kept` since it began.
    Raises what TrainingShare and TrainingStream raise.
    """
    return create_training_shard(
        data,
        communicator,
        shuffle=config.shuffle,
        stream=config.stream,
        batch_size=config.batch_size,
        accumulate=config.gradient_accumulation_steps,
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        num_workers=config.num_workers,
        uneven=config.uneven,
        elastic=elastic,
        kept=kept,
    )


def create_training_shard(
    data: Data,
    communicator: Communicator,
    *,
    shuffle: bool,
    stream: StreamKind,
    allow_empty_ranks: bool = False,
    **settings: Any,
) -> TrainingData:
    """Return this rank's shard of `data`: a TrainingStream for data without indices, otherwise a TrainingShard.

    All ranks call it. `settings` are the other arguments of both classes.
    """
    # If the ranks do not choose the same class, both classes compare the same values first and raise an error.
    if is_stream(data):
        return TrainingStream(data, communicator, stream=stream, **settings)
    return TrainingShard(data, communicator, shuffle=shuffle, allow_empty_ranks=allow_empty_ranks, **settings)


def _open(data: Data, communicator: Communicator, **settings: Any) -> Source:
    pin_memory = communicator.device.type == "cuda"
    return call_on_all_ranks(communicator, lambda: Source(data, pin_memory=pin_memory, **settings))


def _length(sampler: Any) -> int | None:
    with suppress(TypeError, NotImplementedError, AttributeError):  # it has none, or says so in its own way
        return len(sampler)
    return None
