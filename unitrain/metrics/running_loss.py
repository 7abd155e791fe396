"""The mean training loss over ranks: worked out now and then to be shown and checked, and exactly for an epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.errors import ModelError, NonFiniteLossError
from unitrain.metrics.means import Means, kept


class RunningLoss:
    """Collects the loss of every micro-step of an epoch. All ranks use it alike, and all see the same numbers.

    The mean over an epoch depends neither on how often `mean_since_sync` is called nor on interruptions: the sums are
    part of checkpoints. `steps` is the number of steps since `start_epoch`, including those before an interruption.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._means = Means(("loss",), communicator.device)
        # Of the current step, which an exception may leave unfinished.
        self._micro_steps: list[tuple[Tensor, int, Tensor | float | None]] = []
        self._seen: tuple[float, float] = (0.0, 0.0)
        self._totals: tuple[float, float] = (0.0, 0.0)
        self.steps = 0

    def add(self, loss: Tensor, samples: int, count: Tensor | float | None = None) -> None:
        """Count the mean `loss` of this rank's `samples` in one micro-step, or the sum of `count` tokens' losses.

        It counts from `finish_step` on. It does not wait for the device.
        """
        self._micro_steps.append((kept(loss), samples, count))

    def finish_step(self) -> None:
        """Count the micro-steps since the last step."""
        for loss, samples, count in self._micro_steps:
            self._means.add_loss(loss, samples, count, owned=True)
        self._micro_steps.clear()
        self.steps += 1

    def discard_step(self) -> None:
        """Drop the micro-steps of a step that was not finished."""
        self._micro_steps.clear()

    def local_sums(self) -> list[float]:
        """Return what this rank has collected, for `mean_since_sync` on every rank; waits for the device."""
        return self._means.local_sums().tolist()

    def mean_since_sync(self, ranks: Sequence[Sequence[float]], epoch: int, step: int) -> float:
        """Return the mean since the last look, from what is `local_sums` on each of the `ranks`.

        Raises NonFiniteLossError, on every rank alike.
        """
        total, weight = map(sum, zip(*ranks, strict=True))
        mean = _mean(total - self._seen[0], weight - self._seen[1])
        if not math.isfinite(mean):
            raise _not_finite(mean, epoch, step, ranks)
        self._seen = (total, weight)
        return mean

    def epoch_mean(self, epoch: int, step: int) -> float:
        """Return the mean over the epoch so far. All ranks call it. Raises NonFiniteLossError, on every rank alike."""
        here = self.local_sums()
        (total,), weight = self._means.totals(self._communicator)
        self._totals = (total, weight)
        mean = _mean(total, weight)
        if not math.isfinite(mean):
            raise _not_finite(mean, epoch, step, self._communicator.allgather_object(here))
        return mean

    def start_epoch(self) -> None:
        """Begin an epoch, after `epoch_mean` of the one before."""
        total, weight = self._totals
        # The next look includes the steps of the last epoch that no look has included.
        self._seen, self._totals = (self._seen[0] - total, self._seen[1] - weight), (0.0, 0.0)
        self._means.clear()
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of every rank. All ranks call it."""
        ranks = self._communicator.allgather_object(self._means.state())
        return {"steps": self.steps, "seen": list(self._seen), "ranks": ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint: on as many ranks each from its own sums, else rank 0 from those of all ranks."""
        if not state:  # of an earlier version
            return
        total, weight = state["seen"]
        self.steps, self._seen = state["steps"], (total, weight)
        ranks, rank = state["ranks"], self._communicator.rank
        if len(ranks) == self._communicator.size:
            self._means.load_state(ranks[rank])
        elif rank == 0:
            self._means.load_sum(ranks)


def _mean(total: float, weight: float) -> float:
    if weight < 0 or (weight == 0 and total != 0):
        # Counts in the memory of a device are not checked in each batch.
        raise ModelError(
            f"The losses add up to {total:g}, but the numbers of tokens that loss_fn returned add up to {weight:g}. "
            "Let loss_fn return the mean over the batch, loss.mean(), or a pair (loss.sum(), number of tokens)."
        )
    return total / weight if weight else 0.0  # no token in all these batches


def _not_finite(mean: float, epoch: int, step: int, ranks: Sequence[Sequence[float]]) -> NonFiniteLossError:
    """Return the error that names the ranks whose own sum, the first number of each, is not finite."""
    guilty = [rank for rank, (total, _) in enumerate(ranks) if not math.isfinite(total)]
    where = ""
    if guilty and len(ranks) > 1:  # finite sums may still add up to infinity
        named = f"rank{'s' if len(guilty) > 1 else ''} {', '.join(map(str, guilty))}"
        where = " on every rank" if len(guilty) == len(ranks) else f" on {named}"
    return NonFiniteLossError(
        f"The mean loss became {mean}{where} in epoch {epoch}, by step {step}. "
        "Lower the learning rate, or clip the gradients with TrainConfig(max_grad_norm=1.0)."
    )
