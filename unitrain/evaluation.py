"""Evaluation of a model on all ranks: exact means of the loss and the metrics, and predictions."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unitrain.backends.base import Communicator
from unitrain.backends.sharding.forward_passes import align_forward_passes, has_aligned_forward_passes
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.data.batch import BatchInfo
from unitrain.data.evaluation_shard import EvaluationShard
from unitrain.data.prefetch import Prefetcher
from unitrain.data.seeded_batches import seed_batches
from unitrain.errors import DataError, add_note
from unitrain.metrics.means import create_means
from unitrain.metrics.user_metrics import Metric, UserMetrics
from unitrain.modules.buffers import broadcast_buffers
from unitrain.optim.forward import Forward
from unitrain.optim.loss_weighting import Loss, LossKind, LossOutput, check_one_loss_kind, read_loss
from unitrain.optim.model_loss import agree_on_shifted_labels
from unitrain.optim.precision import Precision
from unitrain.prediction import Outputs
from unitrain.prediction_writer import PredictionFiles, PredictionWriter
from unitrain.progress.stopping import LoopInterruption
from unitrain.randomness import preserve_generators

LossFunction = Callable[[Any, Any], LossOutput]


class Evaluation:
    """Evaluates the user's `model` in eval mode, with the buffers of rank 0. All ranks must make the same calls.

    The shards of the ranks differ, and may be empty. If a rank raises an error, all ranks raise an error. With `exact`,
    which the Trainer sets for logical ranks, sums are exact, so the results do not depend on the number of processes.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        loss_fn: LossFunction,
        metrics: Mapping[str, Metric] | nn.Module,
        precision: Precision,
        prefetcher: Prefetcher,
        communicator: Communicator,
        *,
        exact: bool = False,
    ) -> None:
        self._model, self._forward, self._loss_fn = model, forward, loss_fn
        self._precision, self._prefetcher, self._communicator = precision, prefetcher, communicator
        self._metrics, self._exact = UserMetrics(metrics, communicator, exact=exact), exact

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the results."""
        return ("loss", *self._metrics.names)

    def evaluate(self, shard: EvaluationShard, interruption: LoopInterruption | None = None) -> dict[str, float]:
        """Return the mean of the loss and of every metric over all samples, the same on every rank. Return an empty
        dictionary on every rank if `interruption` ended the evaluation.

        Raises DataError on every rank if there are no samples.
        """
        shard.refresh()
        device = self._communicator.device
        losses, local_samples = create_means(("loss",), device, exact=self._exact), 0
        loss_kinds: set[LossKind] = set()

        def evaluate_shard() -> None:
            nonlocal losses, local_samples
            losses = create_means(("loss",), device, exact=self._exact)
            local_samples = current_part = 0
            loss_kinds.clear()
            self._metrics.reset()
            for batch, (samples, position) in self._batches(shard, shard, interruption):
                if (part := bisect(shard.part_starts, position)) != current_part:
                    self._metrics.begin_logical_rank()
                    current_part = part
                local_samples += samples
                with self._precision.autocast():
                    output, target = self._forward(self._model, batch)
                    loss = self._compute_loss(output, target)
                losses.add_loss(loss.value, samples, loss.tokens)
                if samples:
                    loss_kinds.add(loss.kind)
                    check_one_loss_kind(loss_kinds)
                self._metrics.update(output, target, samples)
                if interruption is not None and interruption.check():
                    return
            self._metrics.flush()

        def evaluate_interruptibly() -> None:
            if interruption is None:
                evaluate_shard()
            else:
                interruption.run(evaluate_shard, is_aligned=has_aligned_forward_passes(self._model))

        with self._evaluating():
            for _ in range(2):  # twice if the ranks have agreed to shift the labels
                call_on_all_ranks(self._communicator, evaluate_interruptibly)
                if interruption is not None and interruption.is_interrupted:
                    return {}
                if not agree_on_shifted_labels(self._loss_fn, self._communicator):
                    break
        if self._communicator.size > 1:
            on_rank = torch.tensor([kind in loss_kinds for kind in LossKind], dtype=torch.int32, device="cpu")
            on_any_rank = self._communicator.allreduce(on_rank, "max")
            check_one_loss_kind({kind for kind, is_used in zip(LossKind, on_any_rank.tolist(), strict=True) if is_used})
        results = losses.reduce(self._communicator)
        if math.isnan(results["loss"]):  # equal on every rank, so all ranks call allreduce
            samples = self._communicator.allreduce(torch.tensor([local_samples], device="cpu"), "sum")
            if not samples:
                raise DataError(
                    "The data for evaluation contains no samples, so its means are undefined. Pass data with at least "
                    "one sample."
                )
        return {**results, **self._metrics.compute()}

    def predict(self, shard: EvaluationShard, writer: PredictionWriter | None = None) -> Any:
        """Return the model's outputs for all samples, in the order of the dataset, the same on every rank.

        With a `writer`, write the outputs to its folder, and return the path of the folder.
        """
        if writer is None:
            outputs = Outputs()
            self._predict_shard(shard, outputs)
            return outputs.gather(self._communicator, shard.stride_unit)
        with writer.open(self._communicator, shard.first_sample, shard.stride_unit) as files:
            self._predict_shard(shard, files)
            return files.finish()

    def _predict_shard(self, shard: EvaluationShard, outputs: Outputs | PredictionFiles) -> None:
        """Add the outputs of this rank's batches to `outputs`."""

        def predict_shard() -> None:
            for batch, (samples, _) in self._batches(shard, shard.batches_without_drops()):
                if not samples:
                    outputs.add_empty()
                    continue
                with self._precision.autocast():
                    output = self._forward.compute_output(self._model, batch)
                outputs.add(output, samples)

        with self._evaluating():
            call_on_all_ranks(self._communicator, predict_shard)

    def _compute_loss(self, output: Any, target: Any) -> Loss:
        try:
            return read_loss(self._loss_fn(output, target))
        except Exception as error:
            if not isinstance(output, torch.Tensor):
                add_note(
                    error,
                    f"loss_fn got the output of the model in eval mode, of class {type(output).__name__}. Some "
                    "models, such as the detectors of torchvision, return losses in training mode only. Let loss_fn "
                    "accept both kinds of output, or call fit without validation data.",
                )
            raise

    def _batches(
        self,
        shard: EvaluationShard,
        batches: Iterable[tuple[Any, BatchInfo]],
        interruption: LoopInterruption | None = None,
    ) -> Iterable[tuple[Any, BatchInfo]]:
        prefetched = self._prefetcher(batches, ahead=shard.can_prefetch)
        aligned = align_forward_passes(
            self._model, prefetched, self._communicator, lambda: interruption is not None and interruption.is_requested
        )
        return seed_batches(aligned) if shard.needs_batch_seeds else aligned

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        broadcast_buffers(self._model, self._communicator)
        modes_before = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            # Evaluation can run within an epoch, and must not change the RNG state of training.
            with preserve_generators(self._communicator.device), torch.no_grad():
                yield
        finally:
            for module, training in modes_before:  # some modules may be in eval mode during training
                module.training = training
