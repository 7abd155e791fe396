"""Loading of the state of an optimizer without rounding it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], *, keeps_dtypes: bool = False
) -> None:
    """Call `optimizer.load_state_dict(state_dict)`, but load zero-dimensional tensors in their saved dtype. If
    `keeps_dtypes` is True, load all tensors in their saved dtype.

    torch converts floating-point state to the dtype of its parameter, except "step". This would round scalars in
    float32, such as `mu_product` of NAdam, or make the ranks compute in different dtypes.
    """
    optimizer.load_state_dict(state_dict)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    for parameter, index in zip(parameters, indices, strict=True):
        entry, saved_entry = optimizer.state.get(parameter), state_dict["state"].get(index)
        if not isinstance(entry, dict) or not isinstance(saved_entry, dict):
            continue
        for key, saved in saved_entry.items():
            loaded = entry.get(key)
            if (
                isinstance(saved, Tensor)
                and isinstance(loaded, Tensor)
                and saved.dtype != loaded.dtype
                and saved.shape == loaded.shape
                and (keeps_dtypes or not saved.dim())
            ):
                entry[key] = saved.detach().to(loaded.device, copy=True)
