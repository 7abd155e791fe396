"""The module of the blocks of one pipeline stage."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class StageModule(nn.Sequential):
    """The blocks of one stage of a pipeline, with their names in the complete model."""

    def forward(self, inputs: Tensor) -> Tensor:
        first = next(iter(self.children()))
        if inputs.is_leaf and inputs.requires_grad and torch.is_grad_enabled() and getattr(first, "inplace", False):
            inputs = inputs.clone()  # autograd does not allow a write to a leaf
        output: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return output
