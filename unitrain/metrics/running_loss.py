"""The mean training loss over ranks: worked out now and then to be shown and checked, and exactly for an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.errors import NonFiniteLossError
from unitrain.metrics.means import Means


class RunningLoss:
    """Collects the loss of every micro-step. All ranks use it alike, and all see the same numbers.

    The result of an epoch does not depend on when it was looked at.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._means = Means(("loss",), communicator.device)
        self._seen: tuple[float, float] = (0.0, 0.0)

    def add(self, loss: Tensor, samples: int, count: Tensor | float | None = None) -> None:
        """Count the mean `loss` of this rank's `samples` in one micro-step, or the sum of `count` tokens' losses.

        It does not wait for the device.
        """
        self._means.add_loss(loss, samples, count)

    def here(self) -> list[float]:
        """Return what this rank has collected, for `look` on every rank; waits for the device."""
        return self._means.here().tolist()

    def look(self, ranks: Iterable[Sequence[float]], epoch: int, step: int) -> float:
        """Return the mean since the last look, from what is `here` on each of the `ranks`.

        Raises NonFiniteLossError, on every rank alike.
        """
        total, weight = map(sum, zip(*ranks, strict=True))
        mean = _finite(total - self._seen[0], weight - self._seen[1], epoch, step)
        self._seen = (total, weight)
        return mean

    def finish(self, epoch: int, step: int) -> float:
        """Return the mean over all that was added, and start again. Raises NonFiniteLossError, on every rank alike."""
        (total,), weight = self._means.totals(self._communicator)
        self._seen = (0.0, 0.0)
        return _finite(total, weight, epoch, step)


def _finite(total: float, weight: float, epoch: int, step: int) -> float:
    mean = total / weight if weight else 0.0  # no token in all these batches
    if not abs(mean) < float("inf"):
        raise NonFiniteLossError(
            f"The mean loss became {mean} in epoch {epoch}, by step {step}. "
            "Lower the learning rate, or clip the gradients with TrainConfig(clip_norm=1.0)."
        )
    return mean
