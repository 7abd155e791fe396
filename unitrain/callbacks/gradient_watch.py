"""Finding out at once which gradient is not a number, and on which rank it came up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from unitrain.callbacks.callback import Callback
from unitrain.errors import ConfigError, NonFiniteGradientError

if TYPE_CHECKING:
    from unitrain.trainer import Trainer

# fp16 begins with a loss scale of 2**16 and halves it at each overflow; after so many it is not the scale's fault.
_OVERFLOWS = 20


class GradientWatch(Callback):
    """Ends the run at the first gradient that holds nan or inf, and names the parameter, before anything is updated.

    It looks at every step, or at one in `every`; that is a pass over the gradients, and on a GPU a wait for them. With
    fp16, where an overflow now and then is how the scale is found, it ends the run only when that goes on. Raises
    NonFiniteGradientError, on every rank alike.
    """

    def __init__(self, *, every: int = 1) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigError(f"GradientWatch.every must be a number of steps from 1 on, got {every!r}. Use 1.")
        self.every = every
        self._overflows = 0

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        """Look at the gradients, which are the same on every rank."""
        if trainer.progress.step % self.every:
            return
        gradients = {
            name: parameter.grad
            for name, parameter in _named_parameters(trainer)
            if parameter.requires_grad and parameter.grad is not None
        }
        norms = torch.stack(torch._foreach_norm(list(gradients.values()), float("inf"))) if gradients else torch.ones(1)
        if bool(norms.isfinite().all()):
            self._overflows = 0
            return
        self._overflows += 1
        if trainer.config.precision == "fp16" and self._overflows < _OVERFLOWS:
            return
        bad = {name: norm for name, norm in zip(gradients, norms.tolist(), strict=True) if not abs(norm) < float("inf")}
        first, value = next(iter(bad.items()))
        raise NonFiniteGradientError(
            f"The gradient of {first!r} became {value} in step {trainer.progress.step + 1}, the first of {len(bad)} "
            f"of {len(gradients)} parameters; {_losses(trainer)}. Look at the data of that step, lower the learning "
            "rate, or find the operation with torch.autograd.set_detect_anomaly(True)."
        )


def _named_parameters(trainer: Trainer) -> list[tuple[str, nn.Parameter]]:
    return list(trainer.backend.unwrap(trainer.model).named_parameters())


def _losses(trainer: Trainer) -> str:
    """Say on which ranks the loss of the last micro-step was no number. All ranks call it: all have the gradients."""
    losses = trainer.backend.allgather(trainer.last_loss.detach().double()).tolist()
    ranks = [str(rank) for rank, loss in enumerate(losses) if not abs(loss) < float("inf")]
    if not ranks:
        return "the loss was a number on every rank"
    return f"the loss was not a number on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
