"""A backward, what can be done at its end while gradients travel, and the backward of a dummy batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable


def backward(loss: Tensor, *beside: Callable[[], None]) -> None:
    """Run the backward from `loss`, and call each of `beside` when it is over on this rank: all gradients are on their
    way, and nobody waits for them yet. They may talk to the other ranks, where all ranks pass alike."""

    def ask(gradient: Tensor) -> None:
        # What waits for the gradients asks the engine later than this, and is called back in that order.
        for call in beside:
            Variable._execution_engine.queue_callback(call)

    if beside and loss.requires_grad:  # where it does not, torch says so
        loss.register_hook(ask)
    torch.autograd.backward(loss)


def without_gradients(loss: Tensor) -> Tensor:
    """Return `loss`, whose backward runs through the whole graph and leaves every gradient as it is.

    A dummy batch with weight 0 would give zeros to parameters that no sample of the step has reached, and an optimizer
    with weight decay or momentum changes a parameter whose gradient is zero, but not one without a gradient.
    """
    stopped: Tensor = _WithoutGradients.apply(loss)
    return stopped


class _WithoutGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None
