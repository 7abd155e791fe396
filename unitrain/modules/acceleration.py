"""Acceleration of the user's model by torch.compile and the channels-last memory format. Both change the model in
place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unitrain.torch_compat import has_forward_pre_hook, is_compiled


def compile_forward(*models: nn.Module | None, mode: bool | str) -> None:
    """Compile the forward method of each model with torch.compile in the given `mode`; True selects the default mode.

    The first batch triggers the compilation. A batch of a different size triggers a recompilation with dynamic shapes.
    None and models that are already compiled are skipped.
    """
    for model in models:
        if model is not None and not is_compiled(model):
            model.compile(mode=None if mode is True else mode)


def use_channels_last(model: nn.Module) -> None:
    """Convert the 4-d parameters and buffers of `model`, and its 4-d floating-point inputs in every forward pass, to
    channels last.

    In this memory format, [samples, height, width, channels], convolutions are faster on most devices. Shapes, names
    and values do not change, and the parameters remain the same objects.
    """
    model.to(memory_format=torch.channels_last)
    if not has_forward_pre_hook(model, _convert_inputs):
        model.register_forward_pre_hook(_convert_inputs, with_kwargs=True)


def _convert_inputs(_: nn.Module, inputs: Any, kwargs: Any) -> Any:
    return _to_channels_last(inputs), _to_channels_last(kwargs)


def _to_channels_last(value: Any) -> Any:
    """Return `value` with all 4-d floating-point tensors, including those in lists, tuples and dictionaries, in
    channels last.
    """
    if isinstance(value, Tensor):
        is_image = value.dim() == 4 and value.is_floating_point()
        return value.contiguous(memory_format=torch.channels_last) if is_image else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_to_channels_last, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_to_channels_last, value))
    if isinstance(value, dict):
        return {key: _to_channels_last(part) for key, part in value.items()}
    return value
