"""Interface of training data to the training loop, for data with indices and for streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from unitrain.data.order import MicroBatch


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
