"""torch.compile, in place: the model stays the user's own, and so do its names."""

from __future__ import annotations

from torch import nn


def compile_forward(model: nn.Module, mode: bool | str) -> None:
    """Let torch.compile make `model`'s forward faster, in `mode` unless that is True; it happens in the first calls.

    A batch of another size is compiled once more, for any size. A model that the user has compiled stays as it is.
    """
    if not hasattr(model, "_orig_mod") and model._compiled_call_impl is None:
        model.compile(mode=None if mode is True else mode)
