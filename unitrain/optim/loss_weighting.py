"""What a micro-step's loss weighs, so that a step has the gradient of the mean over all its samples, or tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from unitrain.backends.base import Communicator
from unitrain.data.order import MicroBatch
from unitrain.errors import ModelError
from unitrain.optim.step import parameters_of

Count = Tensor | float
# What a loss function may return: the mean over the batch, or a sum and how many it is the sum of.
LossOutput = Tensor | tuple[Tensor, Count]


_RETURN = "Let loss_fn return the mean over the batch, loss.mean(), or a pair (loss.sum(), number of tokens)."


class Loss(NamedTuple):
    """The loss of one batch: a mean over its samples where `tokens` is None, otherwise a sum over so many tokens."""

    value: Tensor
    tokens: Count | None


def read_loss(output: LossOutput) -> Loss:
    """Take apart what a loss function returned. Raises ModelError unless loss and count are one number."""
    value, tokens = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
    if not (isinstance(value, Tensor) and value.dim() == 0):
        found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ModelError(f"The loss must be one number, got {found}. {_RETURN}")
    if not (tokens is None or isinstance(tokens, int | float) or (isinstance(tokens, Tensor) and tokens.dim() == 0)):
        found = f"shape {list(tokens.shape)}" if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}"
        raise ModelError(f"What a summed loss is the sum of must be counted by one number, got {found}. {_RETURN}")
    if not value.is_floating_point():
        kind = str(value.dtype).removeprefix("torch.")
        raise ModelError(f"The loss must be a floating-point number, got one of dtype {kind}. {_RETURN}")
    # Counts on a device are checked when the running loss is worked out: to read one here would wait for the device.
    if tokens is not None and not (isinstance(tokens, Tensor) and tokens.device.type != "cpu"):
        count = float(tokens)
        counts_none = count == 0 and value.device.type == "cpu" and bool(value.detach() != 0)
        if isinstance(tokens, bool) or not 0 <= count < math.inf or counts_none:
            raise ModelError(
                f"What a summed loss is the sum of must be counted by a number from 1 on, or 0 where the sum is 0, got "
                f"{tokens if isinstance(tokens, bool) else f'{count:g}'}. {_RETURN}"
            )
    return Loss(value, tokens)


def read_training_loss(output: LossOutput) -> Loss:
    """Take apart what a loss function returned in training. Raises ModelError also for one without a gradient."""
    loss = read_loss(output)
    if not loss.value.requires_grad:
        raise ModelError(
            "The loss does not depend on a parameter that requires a gradient: it was detached, or computed outside of "
            "autograd. Compute it from the model's output without .detach(), .item(), .numpy() and torch.no_grad()."
        )
    return loss


class GlobalMean:
    """Weighs the losses of a step's micro-steps on all ranks. All ranks use it alike.

    Backends leave the mean over ranks of the sum over micro-steps in every gradient. How many samples a step has is
    known beforehand, so a loss per sample gets its final weight at once. How many tokens it has is known when all ranks
    have computed its losses: then, while the gradients travel, the ranks count them, and divide the gradients by their
    number. Until then they are divided by about as many as the step before had: formats of half precision do not hold
    sums over many tokens.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._tokens: Tensor | None = None  # of the step so far, on this rank
        self._counted: Tensor | None = None  # of a whole step, on all ranks
        self._per_sample: Tensor | None = None

    def weighted(self, loss: Loss, part: MicroBatch) -> Tensor:
        """Return what to run backward from; a rank that only stands in for lack of samples weighs nothing."""
        weight = self._communicator.size / part.step_samples
        if loss.tokens is None:
            weight *= part.samples
            return loss.value if weight == 1.0 else loss.value * weight
        here = torch.as_tensor(loss.tokens, dtype=torch.float64, device=self._communicator.device).detach()
        tokens = here if part.samples else torch.zeros_like(here)
        self._tokens = tokens if self._tokens is None else self._tokens + tokens
        if self._per_sample is None:
            self._per_sample = _power_of_two(self._communicator.allreduce(tokens, "sum") / part.step_samples)
        return loss.value * (weight if part.samples else 0.0) / self._per_sample.to(loss.value.dtype)

    def loss_scale(self) -> Tensor | None:
        """Return what gradients are multiplied by until `finish_step`, so that their size follows the number of tokens;
        None where it is samples that count."""
        return None if self._per_sample is None else 1 / self._per_sample

    def overlapped_work(self) -> tuple[Callable[[], None], ...]:
        """Return what is to be called while the gradients of a step travel, if it is tokens that count."""
        return () if self._tokens is None else (self._count,)

    def finish_step(self, optimizer: Optimizer, part: MicroBatch) -> None:
        """Divide the global gradients of the parameters of `optimizer` by the number of tokens, if tokens count."""
        if self._counted is None or self._per_sample is None:
            return
        tokens, self._counted = self._counted, None
        # A step without a token has no gradient to divide.
        factor = torch.where(tokens > 0, part.step_samples * self._per_sample / tokens, 1.0)
        self._per_sample = torch.where(tokens > 0, _power_of_two(tokens / part.step_samples), self._per_sample)
        gradients: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                gradients.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for dtype, alike in gradients.items():
            # One kernel for many gradients, provided that the factor has their dtype; half precision would round it.
            torch._foreach_mul_(alike, factor.to(dtype) if dtype in (torch.float32, torch.float64) else factor)

    def discard_step(self) -> None:
        """Drop what was counted of a step that was not finished."""
        self._tokens = self._counted = None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of tokens per sample that losses are divided by, for a checkpoint."""
        return {} if self._per_sample is None else {"tokens_per_sample": self._per_sample.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the number of a checkpoint: half precision then rounds as it would have done."""
        if state:
            device = self._communicator.device
            self._per_sample = torch.tensor(state["tokens_per_sample"], dtype=torch.float64, device=device)

    def _count(self) -> None:
        if self._tokens is not None:
            self._counted, self._tokens = self._communicator.allreduce(self._tokens, "sum"), None


def _power_of_two(number: Tensor) -> Tensor:
    """Return one near `number`, 1 for 0: to divide by it and to multiply by it again changes no digit."""
    return torch.where(number > 0, torch.exp2(torch.log2(number).round()), 1.0)
