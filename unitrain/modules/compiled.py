"""torch.compile, in place: the model stays the user's own, and so do its names."""

from __future__ import annotations

from torch import nn


def compile_forward(*models: nn.Module | None, mode: bool | str) -> None:
    """Let torch.compile make the forward of `models` faster, in `mode` unless that is True, with their first batches.

    A batch of another size is compiled once more, for any size. A model that the user has compiled stays as it is.
    """
    for model in models:
        if model is not None and not hasattr(model, "_orig_mod") and model._compiled_call_impl is None:
            model.compile(mode=None if mode is True else mode)
