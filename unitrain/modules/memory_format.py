"""Images as [samples, height, width, channels] in memory, which convolutions of most devices are faster with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def use_channels_last(model: nn.Module) -> None:
    """Lay out every 4-d parameter and buffer of `model` channels last, and from now on every 4-d floating input.

    Shapes, names and values stay as they are. Parameters stay the same objects.
    """
    model.to(memory_format=torch.channels_last)
    if _inputs_channels_last not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_inputs_channels_last, with_kwargs=True)


def _inputs_channels_last(_: nn.Module, inputs: Any, named: Any) -> Any:
    return _channels_last(inputs), _channels_last(named)


def _channels_last(value: Any) -> Any:
    """Return `value` with its images channels last, through lists, tuples, named tuples and dictionaries."""
    if isinstance(value, Tensor):
        images = value.dim() == 4 and value.is_floating_point()
        return value.contiguous(memory_format=torch.channels_last) if images else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_channels_last, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_channels_last, value))
    if isinstance(value, dict):
        return {key: _channels_last(part) for key, part in value.items()}
    return value
