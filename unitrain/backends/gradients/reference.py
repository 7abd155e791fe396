"""Reference implementation of gradient synchronization, for readers and as a test oracle.

It communicates one parameter at a time, after the backward pass, and uses no hooks. `ddp_wrapper.py` computes the same
gradients faster: it assigns them to buckets and reduces the buckets during the backward pass.
"""

from __future__ import annotations

import torch
from torch import nn

from unitrain.backends.base import Communicator


@torch.no_grad()
def synchronize_gradients(model: nn.Module, communicator: Communicator) -> None:
    """Replace the `.grad` of each parameter of `model` that requires grad with its mean over ranks. All ranks call this
    function after `loss.backward()`.

    A rank that does not use a parameter contributes a zero gradient. If no rank uses the parameter, its `.grad` remains
    None.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        is_used = parameter.grad is not None
        num_ranks_using_it = communicator.allreduce(torch.tensor(float(is_used), device="cpu"), "sum")
        if not num_ranks_using_it:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = communicator.allreduce(gradient, "mean")
