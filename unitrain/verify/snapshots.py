"""Copies and digests of the state of a recorded run, and conversion of a run to double precision."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unitrain import randomness
from unitrain.backends.tensors import as_real
from unitrain.modules.sync_batch_norm import SyncedForward
from unitrain.torch_compat import BatchNormBase
from unitrain.verify.digests import digest_tensor


def batch_statistics(model: nn.Module) -> Literal["none", "rank", "all"]:
    """Return whether BatchNorm normalizes over the samples of one "rank" or of "all" ranks, or "none" without
    BatchNorm. The result is "rank" if at least one layer is not synchronized."""
    layers = [module for module in model.modules() if isinstance(module, BatchNormBase)]
    if not layers:
        return "none"
    return "all" if all(isinstance(layer, SyncedForward | nn.SyncBatchNorm) for layer in layers) else "rank"


def rng_digests(device: torch.device) -> dict[str, str]:
    """Return a digest of the RNG state per random number generator of this process."""
    states = randomness.get_generator_states(device)
    numpy_state = {**states.numpy, "state": {**states.numpy["state"], "key": states.numpy["state"]["key"].tolist()}}
    return {
        "torch": digest_tensor(states.torch),
        **({} if states.cuda is None else {"cuda": digest_tensor(states.cuda)}),
        "numpy": hashlib.sha256(repr(numpy_state).encode()).hexdigest(),
        "python": hashlib.sha256(repr(states.python).encode()).hexdigest(),
    }


def copy_state(name: str, entry: dict[Any, Any]) -> dict[str, Tensor]:
    """Return copies of the numbers and tensors in `entry`, the optimizer state of the parameter `name`. The keys of the
    result are "state NAME KEY"."""
    copies = {}
    for key, value in entry.items():
        if isinstance(value, Tensor):
            copies[f"state {name} {key}"] = copy_to_cpu(value)
        elif isinstance(value, int | float):
            copies[f"state {name} {key}"] = torch.tensor(value, dtype=torch.float64, device="cpu")
    return copies


def copy_to_cpu(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU. Complex numbers become pairs of real numbers."""
    tensor = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return as_real(tensor)


def largest_difference(left: Tensor, right: Tensor) -> float:
    """Return the largest |left - right| in double precision: 0 for empty tensors, NaN if a value is NaN."""
    return float((left.double() - right.double()).abs().max()) if left.numel() else 0.0


def to_double(tensor: Tensor) -> Tensor:
    """Return a floating-point `tensor` in double precision, and other tensors unchanged."""
    return tensor.double() if tensor.is_floating_point() else tensor
