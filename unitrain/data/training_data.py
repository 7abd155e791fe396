"""Settings of training data, and the interface of map-style and iterable training data to the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unitrain.accumulation import Accumulation, accumulation_by_first_epoch, schedule_key
from unitrain.backends.base import Communicator
from unitrain.config import StreamKind, TrainConfig, Uneven
from unitrain.data.batch_size import BatchSizes, InitialBatchSizes, resolve_batch_sizes
from unitrain.data.loading import Data
from unitrain.data.order import MicroBatch
from unitrain.data.stream_state import StreamState


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Settings of a shard of training data. Settings of the same name in TrainConfig are documented there.

    Attributes:
        shuffle: Shuffle the samples in every epoch. Does not apply to iterable datasets.
        drop_last: Train on full global batches only or, with `stream` "own", on full batches of each worker only.
        is_elastic: The job keeps its global batch size for any number of ranks.
        initial_batch_sizes: In later attempts of an elastic job, the batch sizes of the first attempt.
        allow_empty_ranks: Accept data with fewer samples than ranks. Does not apply to iterable datasets.
        logical_ranks: Number of logical ranks, or None. Each process gets the shards of its logical ranks.
        interleaves_logical_ranks: In each step, yield the first micro-batch of each logical rank of the process, then
            the second micro-batch of each logical rank, and so on. By default, all micro-batches of a logical rank are
            yielded before those of the next logical rank.
        class_name: Name of the public class, TrainConfig or ShardedLoader, for error messages.
    """

    batch_size: int | None = None
    gradient_accumulation_steps: Accumulation | None = None
    global_batch_size: int | None = None
    seed: int = 0
    shuffle: bool = True
    num_workers: int = 0
    stream: StreamKind = "shared"
    uneven: Uneven = "weight"
    drop_last: bool = False
    is_elastic: bool = False
    initial_batch_sizes: InitialBatchSizes | None = None
    allow_empty_ranks: bool = False
    logical_ranks: int | None = None
    interleaves_logical_ranks: bool = False
    class_name: str = "TrainConfig"

    @classmethod
    def from_config(
        cls,
        config: TrainConfig,
        *,
        is_elastic: bool,
        initial_batch_sizes: InitialBatchSizes | None,
        interleaves_logical_ranks: bool = False,
    ) -> ShardSettings:
        """Return the settings of `config`, combined with the other arguments."""
        return cls(
            batch_size=config.batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            global_batch_size=config.global_batch_size,
            seed=config.seed,
            shuffle=config.shuffle,
            num_workers=config.num_workers,
            stream=config.stream,
            uneven=config.uneven,
            logical_ranks=config.logical_ranks,
            interleaves_logical_ranks=interleaves_logical_ranks,
            is_elastic=is_elastic,
            initial_batch_sizes=initial_batch_sizes,
        )

    def resolve_batch_sizes(
        self, data: Data, communicator: Communicator, *, full_batches_only: bool = False
    ) -> dict[int, BatchSizes]:
        """Return the results of `batch_size.resolve_batch_sizes` with these settings, by the first epoch to which they
        apply. All ranks must call this method."""
        resolved = {}
        schedule = accumulation_by_first_epoch(self.gradient_accumulation_steps)
        for epoch, steps in schedule.items():
            initial_batch_sizes = self.initial_batch_sizes
            if initial_batch_sizes is not None and epoch:  # the stored sizes are those of the first epoch
                samples = initial_batch_sizes.global_batch_size // (schedule[0] or 1) * (steps or 1)
                initial_batch_sizes = initial_batch_sizes._replace(global_batch_size=samples)
            resolved[epoch] = resolve_batch_sizes(
                data,
                communicator,
                batch_size=self.batch_size,
                gradient_accumulation_steps=steps,
                global_batch_size=self.global_batch_size,
                is_elastic=self.is_elastic,
                initial_batch_sizes=initial_batch_sizes,
                full_batches_only=full_batches_only,
                logical_ranks=self.logical_ranks,
            )
        return resolved


DEFAULT_SHARD_SETTINGS = ShardSettings()


def describe_order_fix(name: str, value: Any) -> str:
    """Return the instructions of an error message for continuing a run whose order setting `name` was `value`."""
    if name == "ranks":
        return (
            f'A dataset with stream="own" continues on the same number of ranks: unitrain launch -np {value} train.py.'
        )
    if name == "workers":
        return f'A dataset with stream="own" continues with the same number of workers: num_workers={value}.'
    return "Continue with the same data, seed and arguments."


class TrainingData(ABC):
    """This rank's shard of the training data, for any number of epochs. All ranks make the same calls.

    `batch_size` is the number of samples per rank and micro-batch, `global_batch_size` the number per step over all
    ranks in the current epoch, which `begin_epoch` sets. Each is None if it is not known in advance.
    """

    batch_size: int | None
    global_batch_size: int | None
    _batch_sizes: dict[int, BatchSizes]  # by the first epoch to which they apply
    _epoch: int  # that begin_epoch has set

    def begin_epoch(self, epoch: int) -> None:
        """Use the number of micro-batches per step of `epoch`, to which `global_batch_size` and `steps_in_epoch` then
        refer. Does not communicate.
        """
        self._epoch = epoch
        self._use_batch_sizes(self._batch_sizes[schedule_key(self._batch_sizes, epoch)])

    @abstractmethod
    def _use_batch_sizes(self, batch_sizes: BatchSizes) -> None:
        """Use `batch_sizes` for the next steps."""

    @property
    @abstractmethod
    def order_settings(self) -> dict[str, Any]:
        """The settings that, with the seed, determine which sample is at a position of an epoch."""

    @property
    @abstractmethod
    def can_prefetch(self) -> bool:
        """Whether batches may be prefetched without side effects."""

    @property
    @abstractmethod
    def can_overlap_prefetch(self) -> bool:
        """Whether a batch may be loaded while gradients are reduced: the job has several ranks, and loading calls no
        collective.
        """

    @property
    def has_equal_epochs(self) -> bool:
        """Whether all epochs have the same length."""
        return True

    @abstractmethod
    def steps_in_epoch(self, start: int = 0, *, is_exact: bool = False) -> int | None:
        """Return the number of optimizer steps from position `start` to the end of the epoch that `begin_epoch` has
        set; None if it is unknown.

        With a sampler, it is based on the sampler's `__len__`: use it for display only. With `is_exact`, the sampler
        draws the order of the epoch if its `__len__` may be wrong; all ranks must then call this method.
        """

    @abstractmethod
    def samples_in_epoch(self) -> int | None:
        """Return the number of samples per epoch over all ranks; None if it is unknown.

        With a sampler, it is based on the sampler's `__len__`. Use it for display only.
        """

    @abstractmethod
    def count_batches(self) -> int | None:
        """Return the number of micro-batches of this process in one epoch; None if it is unknown. Use it for display
        only."""

    @abstractmethod
    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, MicroBatch]]:
        """Yield (batch, micro-batch) for each of this rank's micro-batches in one epoch, from position `start`.

        Call `begin_epoch` first if the number of micro-batches per step depends on the epoch. All ranks must call this
        method; the number of micro-batches is the same on all of them. Raises DataError on every rank if a sampler
        fails. If a batch cannot be loaded on a rank, every rank raises DataError for iterable data and with a custom
        `collate_fn`; otherwise, and with logical ranks, only that rank raises the error.
        """

    @property
    def is_stateful(self) -> bool:
        """Whether `gather_state` may return a state. The same on all ranks."""
        return False

    def gather_state(self, state: StreamState | None, epoch: int, position: int) -> dict[str, Any] | None:
        """Return the merged results of `state_to_save` of all ranks. All ranks must call this method."""
        return None

    def state_to_save(self, state: StreamState | None, epoch: int, position: int) -> dict[str, Any] | None:
        """Return the part of the data's state that a checkpoint contains: for a stateful dataset, a part of this rank's
        `state`, the state after the step that ends at `position`; for a sampler, a digest of its order.

        Does not communicate. Return None if the data is not stateful, or if its state at this position is unknown.
        """
        return None

    def resume_from(self, state: Mapping[str, Any] | None) -> None:  # noqa: B027
        """Let the next `micro_batches` call start from `state`, a result of `state_to_save` or `gather_state`, if the
        call has the same epoch and position.

        Otherwise, and on a rank whose state is missing, that call reads and skips the items before the position. The
        results are the same if the items depend only on the seed and the epoch.
        """

    def ends_epoch(self, position: int) -> bool:
        """Return whether `position`, the end of the last step, is known to be the end of the epoch. Does not load
        data."""
        return False

    @abstractmethod
    def close_and_check_epoch_end(self, position: int) -> bool:
        """Close the iterator like `end_epoch`, and return whether `position`, the end of the last step, is the end of
        the epoch. All ranks must call this method. For iterable data, it may load the next step, and communicate."""

    @abstractmethod
    def end_epoch(self) -> None:
        """Close the iterator of the last `micro_batches` call, and terminate its workers unless they are persistent."""
