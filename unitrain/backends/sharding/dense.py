"""Views of dense tensors in storage order, in which parameters and gradients are divided among ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` fill a contiguous range of memory without overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in storage order, as a 1-D view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the elements of `tensor` in the storage order of `parameter`: a view, or a copy if the orders differ."""
    if tensor.stride() != parameter.stride():
        ordered = torch.empty_strided(parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor.detach())
    return flat(tensor.detach())
