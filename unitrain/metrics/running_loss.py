"""The mean training loss over ranks: worked out now and then to be shown and checked, and exactly for an epoch."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.errors import NonFiniteLossError
from unitrain.metrics.means import Means

# How long the loss goes unseen where nobody says: often enough to watch, too rarely to be felt.
_LOOK_SECONDS = 2.0


class RunningLoss:
    """Collects the loss of every micro-step. All ranks use it alike, and all see the same numbers.

    It is looked at every `every` optimizer steps; where that is None, about every two seconds of the slowest rank,
    which the ranks agree on as they look. The result of an epoch does not depend on when that was.
    """

    def __init__(self, communicator: Communicator, every: int | None) -> None:
        self._communicator = communicator
        self._every = every
        self._means = Means(("loss",), communicator.device)
        self._seen: tuple[float, float] = (0.0, 0.0)
        self._interval = every or 1  # one step tells how long a step takes
        self.start(0)

    def start(self, step: int) -> None:
        """Training begins, or goes on after something else, with `step` steps done."""
        self._step, self._since = step, time.perf_counter()
        self._next = step + self._interval

    def add(self, loss: Tensor, samples: int, count: Tensor | float | None = None) -> None:
        """Count the mean `loss` of this rank's `samples` in one micro-step, or the sum of `count` tokens' losses.

        It does not wait for the device.
        """
        self._means.add_loss(loss, samples, count)

    def due(self, step: int) -> bool:
        """Whether it is time to `look`, now that `step` steps are done."""
        return step >= self._next

    def look(self, epoch: int, step: int) -> float:
        """Return the mean since the last look; waits for the device. Raises NonFiniteLossError, on every rank alike."""
        (total,), weight = self._means.totals(self._communicator, reset=False)
        mean = _finite(total - self._seen[0], weight - self._seen[1], epoch, step)
        self._seen = (total, weight)
        if self._every is None:
            self._interval = self._steps_until_next(step)
        self._next = step + self._interval
        return mean

    def finish(self, epoch: int, step: int) -> float:
        """Return the mean over all that was added, and start again. Raises NonFiniteLossError, on every rank alike."""
        (total,), weight = self._means.totals(self._communicator)
        self._seen = (0.0, 0.0)
        return _finite(total, weight, epoch, step)

    def _steps_until_next(self, step: int) -> int:
        now = time.perf_counter()
        here = torch.tensor((now - self._since) / (step - self._step), dtype=torch.float64)
        seconds = self._communicator.allreduce(here.to(self._communicator.device), "max").item()
        self._step, self._since = step, now
        return max(1, round(_LOOK_SECONDS / seconds))


def _finite(total: float, weight: float, epoch: int, step: int) -> float:
    mean = total / weight if weight else 0.0  # no token in all these batches
    if not abs(mean) < float("inf"):
        raise NonFiniteLossError(
            f"The mean loss became {mean} in epoch {epoch}, by step {step}. "
            "Lower the learning rate, or clip the gradients with TrainConfig(clip_norm=1.0)."
        )
    return mean
