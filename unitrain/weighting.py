"""What a micro-step's loss weighs, so that a step has the gradient of the mean over all its samples, or tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unitrain.backends.base import Communicator
from unitrain.data import Slice
from unitrain.errors import ModelError

Count = Tensor | float
# What a loss function may return: the mean over the batch, or a sum and how many it is the sum of.
LossOutput = Tensor | tuple[Tensor, Count]


class Loss(NamedTuple):
    """The loss of one batch: a mean over its samples where `tokens` is None, otherwise a sum over so many tokens."""

    value: Tensor
    tokens: Count | None


def read_loss(output: LossOutput) -> Loss:
    """Take apart what a loss function returned. Raises ModelError unless the loss is one number."""
    value, tokens = output if isinstance(output, tuple) else (output, None)
    if value.dim() != 0:
        raise ModelError(
            f"The loss must be one number, got shape {list(value.shape)}. "
            "Let loss_fn return the mean over the batch, loss.mean(), or a pair (loss.sum(), number of tokens)."
        )
    return Loss(value, tokens)


class GlobalMean:
    """Weighs the losses of a step's micro-steps on all ranks. All ranks use it alike.

    Backends leave the mean over ranks of the sum over micro-steps in every gradient. How many samples a step has is
    known beforehand, so a loss per sample gets its final weight at once. How many tokens it has is known when all ranks
    have computed its losses, so then the gradients are divided by the number that the ranks agree on.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._tokens: Tensor | None = None

    def weighted(self, loss: Loss, part: Slice) -> Tensor:
        """Return what to run backward from; a rank that only stands in for lack of samples weighs nothing."""
        weight = self._communicator.size / part.step_samples
        if loss.tokens is None:
            weight *= part.samples
            return loss.value if weight == 1.0 else loss.value * weight
        here = torch.as_tensor(loss.tokens, dtype=torch.float64, device=self._communicator.device)
        tokens = here if part.samples else torch.zeros_like(here)
        self._tokens = tokens if self._tokens is None else self._tokens + tokens
        return loss.value * (weight if part.samples else 0.0)

    def finish_step(self, parameters: Iterable[nn.Parameter], part: Slice) -> None:
        """Divide the gradients, which are global now, by the number of tokens, if it is tokens that count."""
        if self._tokens is None:
            return
        tokens, self._tokens = self._communicator.allreduce(self._tokens, "sum"), None
        # A step without a token has no gradient to divide.
        factor = torch.where(tokens > 0, part.step_samples / tokens, 1.0)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
