"""What the loop asks of training data, whether it has indices or comes in turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from unitrain.data.order import Slice


class TrainingData(ABC):
    """This rank's part of the training data, epoch after epoch. All ranks use it alike.

    `batch_size` counts samples per rank and micro-step, `global_batch_size` those of a step: None where neither is
    known before the batches are.
    """

    batch_size: int | None
    global_batch_size: int | None

    @property
    @abstractmethod
    def order(self) -> dict[str, Any]:
        """What decides, beside the seed, which sample is at a position of an epoch."""

    @property
    @abstractmethod
    def fetches_apart(self) -> bool:
        """Whether a batch may be fetched before it is asked for: nothing else would change."""

    @property
    @abstractmethod
    def fetches_beside(self) -> bool:
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
    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Slice]]:
        """Yield (batch, its slice) for each of this rank's micro-steps in one epoch, from position `start` on.

        All ranks call it, and take as many. Raises DataError, on every rank.
        """

    @abstractmethod
    def is_over(self, position: int) -> bool:
        """Whether no step follows after `position`, to which the last call of `epoch` has come. All ranks call it."""

    @abstractmethod
    def end_epoch(self) -> None:
        """End the iteration of the last call of `epoch`, and its workers. `is_over` has done so already."""
