"""This rank's shard of map-style data for training, in an order that depends only on seed and epoch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import chain, islice, tee
from operator import itemgetter
from typing import Any, TypeVar

from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.backends.logical_ranks import check_logical_ranks, local_logical_ranks
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.data.batch_size import BatchSizes, accumulation_setting
from unitrain.data.dummy_batches import StepAligner, reduce_prefetch_count
from unitrain.data.iterable_training import TrainingStream
from unitrain.data.loading import Data, check_is_indexed, check_same_data, format_call, is_stream, open_source
from unitrain.data.order import (
    MicroBatch,
    epoch_order,
    interleave_logical_ranks,
    merge_logical_ranks,
    micro_batches_of_batch_sampler,
    micro_batches_of_samples,
)
from unitrain.data.samplers import DrawnOrder, draw_order, has_fixed_length
from unitrain.data.stream_state import StreamState
from unitrain.data.training_data import DEFAULT_SHARD_SETTINGS, ShardSettings, TrainingData
from unitrain.errors import CheckpointError, DataError
from unitrain.randomness import SeedPurpose, derive_seed

# Number of micro-batches planned at a time.
_MICRO_BATCHES_PER_CHUNK = 256

ResultT = TypeVar("ResultT")


class TrainingShard(TrainingData):
    """This rank's shard of map-style (indexed) training data. All ranks create it.

    `epoch_order` determines the order, unless rank 0 draws it from the DataLoader's sampler. With a batch_sampler, the
    ranks receive its batches round-robin, and `uneven` determines how the last step is handled, as in TrainConfig.

    Raises on all ranks: DataError for data that is empty, that differs between ranks, that is not indexed, or that has
    fewer samples than ranks or logical ranks (unless `allow_empty_ranks`) or, with `drop_last`, fewer than a global
    batch; ConfigError for a missing or contradictory batch size.
    """

    def __init__(
        self, data: Data, communicator: Communicator, settings: ShardSettings = DEFAULT_SHARD_SETTINGS
    ) -> None:
        self._class_name, self._seed, self._uneven = settings.class_name, settings.seed, settings.uneven
        self._communicator = communicator
        self._logical_ranks = _local_logical_ranks(settings.logical_ranks, communicator)
        # Number of ranks, or of logical ranks if they are set, among which the data is divided.
        self._num_shards = settings.logical_ranks or communicator.size
        self._ranks_name = "ranks" if settings.logical_ranks is None else "logical ranks"  # for error messages
        self._interleaves_logical_ranks = settings.interleaves_logical_ranks
        self._batch_sizes = settings.resolve_batch_sizes(data, communicator)
        self._source = source = open_source(
            data,
            communicator,
            batch_size=self._batch_sizes[0].batch_size,
            shuffle=settings.shuffle,
            drop_last=settings.drop_last,
            num_workers=settings.num_workers,
            batch_size_name="batch_size",
            class_name=settings.class_name,
            needs_batch_seeds=settings.logical_ranks is not None,
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
            "gradient_accumulation_steps": accumulation_setting(self._batch_sizes),
            "seed": settings.seed,
        }
        check_same_data("The training data", communicator, source.length, compared)
        self._aligner: StepAligner | None = None
        self.begin_epoch(0)
        if source.sampler is None:
            if source.length < self._num_shards and not settings.allow_empty_ranks:
                is_logical = self._logical_ranks is not None
                fix = f"Use logical_ranks={source.length}" if is_logical else f"Start at most {source.length} ranks"
                raise DataError(
                    f"The training data has {source.length} samples, fewer than the {self._num_shards} "
                    f"{self._ranks_name}. {fix}, or use more data."
                )
            self._find_epoch_end(source.length)
        self._epoch_end = 0
        # The epoch in which the sampler drew an order last, and the digest of this order.
        self._drawn: tuple[int, int] | None = None
        # The number of steps in the epochs that a sampler has drawn, by the epoch and the position in it.
        self._drawn_steps: dict[tuple[int, int], int] = {}
        # Ranks may have different collate_fns.
        if any(communicator.allgather_object(source.may_drop_samples)) and self._logical_ranks is None:
            self._aligner = StepAligner(
                communicator,
                gradient_accumulation_steps=self._gradient_accumulation_steps,
                uneven=settings.uneven,
                max_batches_ahead=reduce_prefetch_count(source.prefetch_count, communicator),
                min_step_items=None,
                copies_batches=source.prefetch_count == 0,
            )

    def _use_batch_sizes(self, batch_sizes: BatchSizes) -> None:
        """Use `batch_sizes` for the next steps."""
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

    @property
    def has_equal_epochs(self) -> bool:
        """Whether all epochs have the same length: there is no sampler, or torch's samplers have a fixed length."""
        return self._source.sampler is None or has_fixed_length(self._source.sampler)

    def steps_in_epoch(self, start: int = 0, *, is_exact: bool = False) -> int | None:
        """Return the number of optimizer steps from position `start` to the end of an epoch, 0 after the end.

        Unless `is_exact`, return None if the length of a sampler is unknown, and with a batch_sampler if `start` is not
        0. See TrainingData.
        """
        is_batch_sampler = self._source.sampler is not None and self.global_batch_size is None
        if is_exact and (not self.has_equal_epochs or (is_batch_sampler and start)):
            key = self._epoch, start
            if key not in self._drawn_steps:
                self._drawn_steps[key] = self._draw(self._epoch, lambda drawn: self._count_steps(drawn, start))
            return self._drawn_steps[key]
        length = self._find_length()
        if length is None or (is_batch_sampler and start):
            return None
        if is_batch_sampler:
            return self._steps_of_batches(length)
        return self._steps_of_samples(length, start)

    def _count_steps(self, drawn: DrawnOrder, start: int) -> int:
        """Return the number of steps from position `start` of an epoch with the order `drawn`."""
        if drawn.bounds is None:
            return self._steps_of_samples(len(drawn.order), start)
        return self._steps_of_batches(len(drawn.bounds) - 1 - bisect_left(drawn.bounds, start))

    def _steps_of_samples(self, length: int, start: int) -> int:
        assert self.global_batch_size is not None
        return max(0, -(-(self._find_epoch_end(length) - start) // self.global_batch_size))

    def _steps_of_batches(self, count: int) -> int:
        per_step = self._num_shards * self._gradient_accumulation_steps
        return count // per_step if self._uneven == "drop" else -(-count // per_step)

    def _draw(self, epoch: int, select: Callable[[DrawnOrder], ResultT]) -> ResultT:
        """Return, on every rank, the result of `select` for the order that the sampler draws on rank 0."""
        source = self._source
        assert source.sampler is not None
        is_batch_sampler = source.batch_size is None
        return draw_order(
            source.sampler, self._communicator, select, yields_batches=is_batch_sampler, seed=self._seed, epoch=epoch
        )

    def samples_in_epoch(self) -> int | None:
        """Return the number of samples in an epoch; None with a batch_sampler, or if the length of a sampler is
        unknown."""
        source = self._source
        is_batch_sampler = source.sampler is not None and source.batch_size is None
        length = None if is_batch_sampler else self._find_length()
        return None if length is None else self._find_epoch_end(length)

    def count_batches(self) -> int | None:
        """Return the number of micro-batches of this process in one epoch; None if the length of a sampler is
        unknown."""
        source, size = self._source, self._num_shards
        length = self._find_length()
        if length is None:
            return None
        num_local = 1 if self._logical_ranks is None else len(self._logical_ranks)
        if source.batch_size is not None:
            return -(-self._find_epoch_end(length) // (size * source.batch_size)) * num_local
        per_step = size * self._gradient_accumulation_steps
        if self._uneven == "drop":
            return length // per_step * self._gradient_accumulation_steps * num_local
        return -(-length // size) * num_local

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, MicroBatch]]:
        """Yield (batch, micro-batch) for each of this rank's micro-batches in one epoch, from position `start`."""
        order, micro_batches_of_epoch = self._plan_epoch(epoch, start)
        worker_seed = derive_seed(self._seed, SeedPurpose.WORKERS, epoch, self._communicator.rank)
        self._source.set_epoch(epoch)
        # Plan in chunks: planning single micro-batches takes several times as long, because the training steps evict
        # the CPU caches. The workers prefetch, so `tee` lets them read the positions before the loop reads the
        # micro-batches.
        micro_batches, ahead = tee(
            chain.from_iterable(iter(lambda: list(islice(micro_batches_of_epoch, _MICRO_BATCHES_PER_CHUNK)), []))
        )
        if self._logical_ranks is not None:
            return self._seeded_micro_batches(order, micro_batches, ahead, epoch)
        positions = map(itemgetter(0), ahead)
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
        ahead: Iterator[MicroBatch],
        epoch: int,
    ) -> Iterator[tuple[Any, MicroBatch]]:
        """Yield (batch, micro-batch) with logical ranks. Each batch is loaded with its own random seed."""
        to_load, to_seed = tee(ahead)
        seeds = (
            derive_seed(
                self._seed, SeedPurpose.BATCH, epoch, planned.step_end, planned.logical_rank or 0, planned.index_in_step
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

    @property
    def is_stateful(self) -> bool:
        """Whether a sampler determines the order, whose digest is then saved."""
        return self._source.sampler is not None

    def gather_state(self, state: StreamState | None, epoch: int, position: int) -> dict[str, Any] | None:
        """Return `state_to_save`, which is the same on all ranks."""
        return self.state_to_save(state, epoch, position)

    def state_to_save(self, state: StreamState | None, epoch: int, position: int) -> dict[str, Any] | None:
        """Return the digest of the order that the sampler drew in `epoch`; None without a sampler."""
        if self._drawn is None or self._drawn[0] != epoch or not position:
            return None
        return {"epoch": epoch, "position": position, "order digest": self._drawn[1]}

    def resume_from(self, state: Mapping[str, Any] | None) -> None:
        """Let `micro_batches` raise CheckpointError on every rank if it continues within the epoch of `state`, and the
        sampler draws a different order."""
        if state is not None and "order digest" in state:
            self._drawn = state["epoch"], state["order digest"]

    def ends_epoch(self, position: int) -> bool:
        """Return whether `position` is the end of the epoch."""
        return position >= self._epoch_end or (self._aligner is not None and self._aligner.has_ended)

    def close_and_check_epoch_end(self, position: int) -> bool:
        """Return whether `position` is the end of the epoch."""
        return self.ends_epoch(position)

    def end_epoch(self) -> None:
        pass  # the workers terminate with the iterator, to which this object has no reference

    def _plan_epoch(self, epoch: int, start: int) -> tuple[Tensor | list[Any], Iterator[MicroBatch]]:
        """Return the order of an epoch and this rank's micro-batches in it, and set the end of the epoch."""
        source, bounds = self._source, None
        order: Tensor | list[Any]
        if not start:  # the rest of an epoch has the length with which the epoch began
            source.read_length(self._communicator, "The training data")
        if source.sampler is None:
            order = epoch_order(source.length, seed=self._seed, epoch=epoch, shuffle=source.shuffle)
        else:
            order, bounds = drawn = self._draw(epoch, lambda drawn: drawn)
            self._drawn_steps[epoch, start] = self._count_steps(drawn, start)
            self._check_order(drawn, epoch, start)
        self._epoch_end = (
            self._find_epoch_end(len(order)) if bounds is None else self._find_sampler_epoch_end(bounds, start)
        )
        if self._logical_ranks is None:
            return order, self._plan_rank(self._communicator.rank, bounds, start)
        plans = [self._plan_rank(rank, bounds, start) for rank in self._logical_ranks]
        merge = interleave_logical_ranks if self._interleaves_logical_ranks else merge_logical_ranks
        return order, merge(self._logical_ranks, plans)

    def _check_order(self, drawn: DrawnOrder, epoch: int, start: int) -> None:
        """Store the digest of the order that the sampler has drawn for `epoch`. Raise CheckpointError if the epoch
        began with another order and continues at position `start`, or if no batch of a batch_sampler starts there."""
        digest, problem = drawn.digest(), None
        if start and self._drawn is not None and self._drawn[0] == epoch and self._drawn[1] != digest:
            problem = (
                "yields a different order of this epoch: samples would be repeated or lost. Let the order depend only "
                "on the random generators in attributes of the sampler, which unitrain seeds in each epoch, or on the "
                "argument of a method set_epoch(epoch)."
            )
        elif drawn.bounds is not None and drawn.bounds[bisect_left(drawn.bounds, start) :][:1] != [start]:
            problem = "yields batches of which none starts there: samples would be lost. Use the same batch sizes."
        if problem is not None:
            raise CheckpointError(
                f"The run is {start} samples into epoch {epoch + 1}, but {self._sampler_name} now {problem} Or "
                "continue from a checkpoint at the end of an epoch."
            )
        self._drawn = epoch, digest

    def _plan_rank(self, rank: int, bounds: list[int] | None, start: int) -> Iterator[MicroBatch]:
        """Return the micro-batches of a rank or logical rank from position `start` to the end of the epoch."""
        arguments = {
            "gradient_accumulation_steps": self._gradient_accumulation_steps,
            "rank": rank,
            "size": self._num_shards,
        }
        if bounds is not None:
            return micro_batches_of_batch_sampler(bounds, start, uneven=self._uneven, **arguments)
        assert self._source.batch_size is not None
        return micro_batches_of_samples(
            start,
            self._epoch_end,
            batch_size=self._source.batch_size,
            global_batch_size=self._requested_global_batch_size,
            **arguments,
        )

    def _find_length(self) -> int | None:
        """Return the number of samples, or of batches of a batch_sampler, in an epoch.

        Return None for a sampler without a length and, with `drop_last`, for a sampler that is shorter than a global
        batch. The length of a sampler may differ between ranks, so this method raises no DataError. `micro_batches`
        raises it on every rank, because rank 0 draws the order.
        """
        if self._source.sampler is None:
            return self._source.length
        length, step_samples = _sampler_length(self._source.sampler), self.global_batch_size
        drops_last = self._source.drop_last and step_samples is not None
        is_too_short = drops_last and length is not None and length < (step_samples or 0)
        return None if is_too_short else length

    def _find_epoch_end(self, length: int) -> int:
        """Return the position at which an epoch of `length` samples ends. Raises DataError if `drop_last` would drop
        all samples."""
        step_samples = self.global_batch_size
        # drop_last drops an incomplete last global batch.
        if not self._source.drop_last or step_samples is None:
            return length
        if length < step_samples:
            raise DataError(
                f"The training data has {length} samples, fewer than one global batch of {step_samples} "
                f"({self._num_shards} {self._ranks_name} x batch_size {self.batch_size} x "
                f"gradient_accumulation_steps {self._gradient_accumulation_steps}), "
                "and drop_last=True drops an incomplete global batch. Use drop_last=False, or a smaller batch_size."
            )
        return length - length % step_samples

    def _find_sampler_epoch_end(self, bounds: list[int], start: int) -> int:
        """Return the position at which an epoch over the batches of a batch_sampler ends if it starts at `start`."""
        if self._uneven != "drop":
            return bounds[-1]
        count, first = len(bounds) - 1, bisect_left(bounds, start)
        per_step = self._num_shards * self._gradient_accumulation_steps
        if count < per_step:
            weight = format_call(self._class_name, "uneven='weight'")
            raise DataError(
                f"{self._sampler_name} yields {count} batches, but a step takes {per_step} ({self._num_shards} "
                f"{self._ranks_name} x gradient_accumulation_steps {self._gradient_accumulation_steps}), and "
                f"{self._class_name}.uneven='drop' drops incomplete steps. Use {weight}."
            )
        return bounds[first + (count - first) // per_step * per_step]


def open_training_data(data: Data, communicator: Communicator, settings: ShardSettings) -> TrainingData:
    """Return this rank's shard of `data`: a TrainingStream for an iterable dataset, otherwise a TrainingShard.

    All ranks must call this function. Raises the errors of both classes.
    """
    check_logical_ranks(f"{settings.class_name}(logical_ranks=...)", settings.logical_ranks, communicator)
    if settings.logical_ranks is not None:
        call_on_all_ranks(communicator, lambda: check_is_indexed(data))
    # If the class differs between ranks, both constructors raise DataError, because both first compare the lengths.
    return (TrainingStream if is_stream(data) else TrainingShard)(data, communicator, settings)


def _local_logical_ranks(logical_ranks: int | None, communicator: Communicator) -> range | None:
    """Return the logical ranks of this process, or None without logical ranks."""
    return None if logical_ranks is None else local_logical_ranks(logical_ranks, communicator.rank, communicator.size)


def _sampler_length(sampler: Any) -> int | None:
    with suppress(TypeError, NotImplementedError, AttributeError):  # raised by samplers without a length
        return len(sampler)
    return None
