"""What a model is worth on data: the exact means over all samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Communicator
from unitrain.data.batch import input_and_target, to_device
from unitrain.data.share import EvaluationShare
from unitrain.metrics.means import Means
from unitrain.modules.buffers import share_buffers
from unitrain.step.precision import Precision
from unitrain.step.weighting import LossOutput, read_loss

LossFunction = Callable[[Any, Any], LossOutput]
Metric = Callable[[Any, Any], Tensor | float]


class Evaluation:
    """Evaluates `model`, the user's own, in eval mode and with rank 0's buffers. All ranks use it alike."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        metrics: Mapping[str, Metric],
        precision: Precision,
        communicator: Communicator,
    ) -> None:
        self._model, self._loss_fn, self._metrics = model, loss_fn, dict(metrics)
        self._precision, self._communicator = precision, communicator

    @property
    def names(self) -> tuple[str, ...]:
        """The results that there will be."""
        return ("loss", *self._metrics)

    def evaluate(self, share: EvaluationShare) -> dict[str, float]:
        """Return the mean of the loss and of every metric over all samples, the same on every rank."""
        device = self._communicator.device
        losses, means = Means(("loss",), device), Means(tuple(self._metrics), device)
        with self._evaluating():
            for batch, samples in share:
                inputs, targets = input_and_target(to_device(batch, device))
                with self._precision.autocast():
                    output = self._model(inputs)
                    loss = read_loss(self._loss_fn(output, targets))
                losses.add_loss(loss.value, samples, loss.tokens)
                means.add([metric(output, targets) for metric in self._metrics.values()], samples)
        return {**losses.reduce(self._communicator), **(means.reduce(self._communicator) if self._metrics else {})}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        share_buffers(self._model, self._communicator)
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:  # one by one: the user may keep a part in eval mode while training
                module.training = training
