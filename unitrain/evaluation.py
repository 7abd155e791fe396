"""What a model is worth on data, the exact means over all samples of all ranks; and what it predicts for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.data.prefetch import Prefetcher
from unitrain.data.sharding import EvaluationShard
from unitrain.metrics.means import Means
from unitrain.metrics.user_metrics import Metric, UserMetrics
from unitrain.modules.buffers import share_buffers
from unitrain.optim.loss_weighting import LossOutput, read_loss
from unitrain.optim.precision import Precision
from unitrain.optim.step import Forward
from unitrain.prediction import Outputs
from unitrain.randomness import preserve_generators

LossFunction = Callable[[Any, Any], LossOutput]


class Evaluation:
    """Evaluates `model`, the user's own, in eval mode and with rank 0's buffers. All ranks use it alike.

    Ranks have different shares, even none, so an error that one of them finds is raised on all.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        loss_fn: LossFunction,
        metrics: Mapping[str, Metric] | nn.Module,
        precision: Precision,
        prefetch: Prefetcher,
        communicator: Communicator,
    ) -> None:
        self._model, self._forward, self._loss_fn = model, forward, loss_fn
        self._precision, self._prefetch, self._communicator = precision, prefetch, communicator
        self._metrics = UserMetrics(metrics, communicator)

    @property
    def names(self) -> tuple[str, ...]:
        """The results that there will be."""
        return ("loss", *self._metrics.names)

    def evaluate(self, share: EvaluationShard) -> dict[str, float]:
        """Return the mean of the loss and of every metric over all samples, the same on every rank."""
        device = self._communicator.device
        losses = Means(("loss",), device)

        def evaluate_own() -> None:
            self._metrics.reset()
            for batch, samples in self._batches(share, share):
                with self._precision.autocast():
                    output, target = self._forward(self._model, batch)
                    loss = read_loss(self._loss_fn(output, target))
                losses.add_loss(loss.value, samples, loss.tokens)
                self._metrics.update(output, target, samples)
            self._metrics.flush()

        with self._evaluating():
            call_on_all_ranks(self._communicator, evaluate_own)
        return {**losses.reduce(self._communicator), **self._metrics.compute()}

    def predict(self, share: EvaluationShard) -> Any:
        """Return the model's outputs for all samples, in the dataset's order, the same on every rank."""
        outputs = Outputs()

        def predict_own() -> None:
            for batch, samples in self._batches(share, share.complete_batches()):
                if not samples:
                    outputs.add_empty()
                    continue
                with self._precision.autocast():
                    output = self._forward.output(self._model, batch)
                outputs.add(output, samples)

        with self._evaluating():
            call_on_all_ranks(self._communicator, predict_own)
        return outputs.gather(self._communicator, share.stride_unit)

    def _batches(self, share: EvaluationShard, batches: Iterable[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
        return self._prefetch(batches, ahead=share.can_prefetch)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        share_buffers(self._model, self._communicator)
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            # Also a run that is validated in the middle of an epoch, where it stops, goes on as if it had not been.
            with preserve_generators(self._communicator.device), torch.no_grad():
                yield
        finally:
            for module, training in modes:  # one by one: the user may keep a part in eval mode while training
                module.training = training
