"""The module of a pipeline stage, the interface for running its micro-batches, and the implementation for a single
stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unitrain.backends.pipeline.micro_batches import LossFunction, WeightedTargets, weighted_loss


class StageModule(nn.Sequential):
    """The blocks of one stage of a pipeline, with their names in the complete model."""

    def forward(self, inputs: Tensor) -> Tensor:
        first = next(iter(self.children()))
        if inputs.is_leaf and inputs.requires_grad and torch.is_grad_enabled() and getattr(first, "inplace", False):
            inputs = inputs.clone()  # autograd does not allow in-place operations on a leaf that requires grad
        output: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return output


class StageRunner(ABC):
    """Runs the micro-batches of a batch through the stages of one replica."""

    @abstractmethod
    def forward_backward(self, inputs: Sequence[Tensor], targets: Sequence[WeightedTargets]) -> Tensor | None:
        """Add the gradients of the weighted losses of all micro-batches. Return the sum of these losses on the last
        stage, and None on other stages.
        """

    @abstractmethod
    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the outputs of all micro-batches, [samples, ...], on every rank of the replica."""


class SingleStageRunner(StageRunner):
    """Runs the only stage of a pipeline, on any backend."""

    def __init__(self, module: StageModule, loss_fn: LossFunction) -> None:
        self._module, self._loss_fn = module, loss_fn

    def forward_backward(self, inputs: Sequence[Tensor], targets: Sequence[WeightedTargets]) -> Tensor | None:
        losses = []
        for values, target in zip(inputs, targets, strict=True):
            loss = weighted_loss(self._loss_fn, self._module(values), target)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum(dtype=torch.float64)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        return torch.cat([self._module(values) for values in inputs])
