"""What the loop asks of training data, whether it has indices or comes in turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from unitrain.data.order import MicroBatch


class TrainingData(ABC):
    """This rank's part of the training data, epoch after epoch. All ranks use it alike.

    `batch_size` counts samples per rank and micro-step, `global_batch_size` those of a step: None where neither is
    known before the batches are.
    """

    batch_size: int | None
    global_batch_size: int | None

    @property
    @abstractmethod
    def order_settings(self) -> dict[str, Any]:
        """What decides, beside the seed, which sample is at a position of an epoch."""

    @property
    @abstractmethod
    def can_prefetch(self) -> bool:
        """Whether a batch may be fetched before it is asked for: nothing else would change."""

    @property
    @abstractmethod
    def can_overlap_prefetch(self) -> bool:
        """Whether it may be fetched so while gradients travel, and there are any: no rank asks another for it."""

    @abstractmethod
    def steps_in_epoch(self, start: int = 0) -> int | None:
        """Return how many optimizer steps there are from position `start` on; None where nobody knows.

        With a sampler it is what that says of itself. It is for showing, not for deciding.
        """

    @abstractmethod
    def samples_in_epoch(self) -> int | None:
        """Return how many samples all ranks take together in one epoch; None where nobody knows.

        With a sampler it is what that says of itself. It is for showing, not for deciding.
        """

    @abstractmethod
    def count_batches(self) -> int | None:
        """Return how many micro-batches each rank has in one epoch; None where nobody knows."""

    @abstractmethod
    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, MicroBatch]]:
        """Yield (batch, its slice) for each of this rank's micro-steps in one epoch, from position `start` on.

        All ranks call it, and take as many. Raises DataError, on every rank.
        """

    @abstractmethod
    def is_epoch_finished(self, position: int) -> bool:
        """Whether no step follows `position`, the end of the last micro-batch that was yielded. All ranks call it."""

    @abstractmethod
    def end_epoch(self) -> None:
        """Close the iterator of the last call of `micro_batches`, and its workers; `is_epoch_finished` does so too."""
