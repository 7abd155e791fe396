"""Making the buffers of a model (running means and the like) the same on all ranks."""

from __future__ import annotations

import torch
from torch import nn

from unitrain.backends.base import Communicator


def share_buffers(model: nn.Module, communicator: Communicator) -> None:
    """Set every buffer of `model` to rank 0's, in one broadcast. All ranks call it.

    Each rank gathers its own running statistics while it trains, from its own samples, so call it before `model.eval()`
    and before saving: what shows or stores the model must first decide for one of them. `model` may be what
    `distributed_model` returned or what it was given; parameters are left alone.
    """
    buffers = list(model.buffers())
    if not buffers:
        return
    # As bytes, one broadcast serves every dtype, and none is rounded or refused on the way.
    pieces = [buffer.detach().contiguous().reshape(-1).view(torch.uint8).to(communicator.device) for buffer in buffers]
    shared = communicator.broadcast(torch.cat(pieces))
    for buffer, piece in zip(buffers, torch.split(shared, [piece.numel() for piece in pieces]), strict=True):
        # A copy starts at an address that every dtype can be read from.
        buffer.detach().copy_(piece.clone().view(buffer.dtype).reshape(buffer.shape))
