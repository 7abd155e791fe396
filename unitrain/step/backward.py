"""A backward, and what can be done at its end while gradients travel."""

from __future__ import annotations

from collections.abc import Callable

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
