"""Settings of training data, and its interface to the training loop, for data with indices and for streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unitrain.backends.base import Communicator
from unitrain.config import StreamKind, TrainConfig, Uneven
from unitrain.data.batch_size import BatchSizes, ElasticBatchSize, resolve_batch_sizes
from unitrain.data.loading import Data
from unitrain.data.order import MicroBatch


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Settings of a shard of training data; see TrainConfig for those with the same name.

    Attributes:
        shuffle: Shuffle the samples of each epoch. Does not apply to streams.
        drop_last: Train on full global batches only.
        elastic: The job keeps its global batch size on any number of ranks.
        elastic_batch_size: The batch sizes of the first attempt of an elastic job, if this is a later one.
        allow_empty_ranks: Accept data with fewer samples than ranks. Does not apply to streams.
        owner: The public class that error messages name.
    """

    batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    global_batch_size: int | None = None
    seed: int = 0
    shuffle: bool = True
    num_workers: int = 0
    stream: StreamKind = "shared"
    uneven: Uneven = "weight"
    drop_last: bool = False
    elastic: bool = False
    elastic_batch_size: ElasticBatchSize | None = None
    allow_empty_ranks: bool = False
    owner: str = "TrainConfig"

    @classmethod
    def from_config(
        cls, config: TrainConfig, *, elastic: bool, elastic_batch_size: ElasticBatchSize | None
    ) -> ShardSettings:
        """Return the settings of `config`."""
        return cls(
            batch_size=config.batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            global_batch_size=config.global_batch_size,
            seed=config.seed,
            shuffle=config.shuffle,
            num_workers=config.num_workers,
            stream=config.stream,
            uneven=config.uneven,
            elastic=elastic,
            elastic_batch_size=elastic_batch_size,
        )

    def resolve_batch_sizes(
        self, data: Data, communicator: Communicator, *, full_batches_only: bool = False
    ) -> BatchSizes:
        """Return the batch sizes of training on `data`; see the function with the same name. All ranks call it."""
        return resolve_batch_sizes(
            data,
            communicator,
            batch_size=self.batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            global_batch_size=self.global_batch_size,
            elastic=self.elastic,
            elastic_batch_size=self.elastic_batch_size,
            full_batches_only=full_batches_only,
        )


DEFAULT_SHARD_SETTINGS = ShardSettings()


class TrainingData(ABC):
    """This rank's shard of the training data, for any number of epochs. All ranks make the same calls.

    `batch_size` counts samples per rank and micro-batch, `global_batch_size` samples per step over all ranks; None if
    they are not known in advance.
    """

    batch_size: int | None
    global_batch_size: int | None

    @property
    @abstractmethod
    def order_settings(self) -> dict[str, Any]:
        """The settings that, with the seed, determine which sample is at a position of an epoch."""

    @property
    @abstractmethod
    def can_prefetch(self) -> bool:
        """Whether a batch may be loaded before it is requested, without side effects."""

    @property
    @abstractmethod
    def can_overlap_prefetch(self) -> bool:
        """Whether a batch may be loaded while gradients are reduced: there are other ranks, and loading calls no
        collective."""

    @abstractmethod
    def steps_in_epoch(self, start: int = 0) -> int | None:
        """Return the number of optimizer steps from position `start` to the end of an epoch; None if it is unknown.

        With a sampler, it is based on the sampler's `__len__`. Use it for display only.
        """

    @abstractmethod
    def samples_in_epoch(self) -> int | None:
        """Return the number of samples of all ranks in one epoch; None if it is unknown.

        With a sampler, it is based on the sampler's `__len__`. Use it for display only.
        """

    @abstractmethod
    def count_batches(self) -> int | None:
        """Return the number of micro-batches of each rank in one epoch; None if it is unknown. Use it for display
        only."""

    @abstractmethod
    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, MicroBatch]]:
        """Yield (batch, micro-batch) for each of this rank's micro-batches in one epoch, from position `start`.

        All ranks call it, and yield the same number of micro-batches. Raises DataError, on every rank.
        """

    @abstractmethod
    def is_epoch_finished(self, position: int) -> bool:
        """Whether no step follows `position`, the end of the last micro-batch that was yielded. All ranks call it."""

    @abstractmethod
    def end_epoch(self) -> None:
        """Close the iterator of the last call of `micro_batches`, and its workers; `is_epoch_finished` does so too."""
